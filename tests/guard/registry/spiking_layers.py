"""Spiking cells and layers, against the equations in a plain scan.

The spike is a step with the derivative of a smooth step.
"""

import functools as ft
import math

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .entry import entry
from .over_time import CHEAP, draws, enter, plain


# A line has as many arguments as there is room for.
# fmt: off
nn = eqg.nn
normal, rng = draws(2), np.random.default_rng(5)


# ---------------------------------------------------------------- the equations


def fire(v, slope):
    """A step whose derivative is slope / 2 / (1 + (pi / 2 slope v)**2): Fang et al. (2021).

    Not a raw `jax.custom_jvp`: where a function of the outputs of a `scan` is not linear, JAX's
    forward over reverse mode forgets its rule.
    """
    smooth = jnp.arctan(math.pi / 2 * slope * v) / math.pi
    return smooth + jax.lax.stop_gradient((v > 0).astype(v.dtype) - smooth)


def step(reset, detach_reset, constants, c, x, state):
    """The input weights, the current, the adaptation, the potential, the spike."""
    c = {name: jnp.asarray(value, x.dtype) for name, value in (constants | c).items()}
    spikes, new = state.get("spikes"), {}
    if "weight_ih" in c:
        x = c["weight_ih"] @ x + c.get("bias", 0)
    if "weight_hh" in c:
        x = x + c["weight_hh"] @ spikes
    decay = lambda name: c[name] + jax.lax.stop_gradient(jnp.clip(c[name], 0, 1) - c[name])
    if "current" in state:
        new["current"] = x = decay("alpha") * state["current"] + x
    resetting = jax.lax.stop_gradient(spikes) if detach_reset else spikes
    u = decay("beta") * state["membrane"] * (1 - resetting if reset == "zero" else 1) + x
    if spikes is None:
        return {**new, "membrane": u}, u
    if reset == "subtract":
        u = u - c["threshold"] * resetting
    threshold = c["threshold"]
    if "adaptation" in state:
        new["adaptation"] = decay("rho") * state["adaptation"] + spikes
        threshold = threshold + c["strength"] * new["adaptation"]
    s = fire(u - threshold, c["slope"])
    return {**new, "membrane": u, "spikes": s}, s


DEFAULTS = {"threshold": 1.0, "strength": 1.8, "slope": 2.0}


def parts(kind):
    """The arrays of a state. A kind has letters: `i` for neurons with currents, `a` with
    adaptation, `r` with recurrent weights, and `u` for neurons that do not spike."""
    names = {"s": "spikes", "i": "current", "a": "adaptation"}
    of_kind = kind.replace("u", "") if "u" in kind else kind + "s"
    return ("membrane", *(names[letter] for letter in of_kind if letter in names))


def zero(kind, c):
    hidden = next(c[name] for name in ("weight_ih", "weight_hh", "beta") if name in c)
    return {name: jnp.zeros(len(hidden), hidden.dtype) for name in parts(kind)}


def reference(kind, reset="subtract", detach_reset=True, constants=None, **options):
    of_step = ft.partial(step, reset, detach_reset, DEFAULTS | (constants or {}))
    return plain(of_step, ft.partial(zero, kind), **options)


# ---------------------------------------------------------------- the layers


to_state = lambda state: None if state is None else nn.LIFState(**{"spikes": None, **state})
fields_of = lambda state: {name: x for name, x in vars(state).items() if x is not None}


def options_of(kind, c, neurons):
    """All constants in `c` are learned, and the constants of `neurons` are not."""
    names = {"beta", "alpha", "rho", "threshold", "strength"} & set(c)
    given = {"learn": tuple(names), **{name: c[name] for name in names}, **neurons}
    given |= {"recurrent": True} if "r" in kind else {}
    given |= {"threshold": None} if "u" in kind else {}
    given |= {"surrogate": eqg.surrogates.atan(c["slope"])} if "slope" in c else {}
    return given | ({"use_bias": False} if "bias" not in c else {})


def with_weights(cell, c):
    for name in {"weight_ih", "weight_hh", "bias"} & set(c):
        cell = eqx.tree_at(lambda cell, name=name: getattr(cell, name), cell, c[name])
    return cell


def make_cell(kind, c, hidden, neurons, dtype):
    size = c["weight_ih"].shape[1] if "weight_ih" in c else None
    given = {"input_size": size, "dtype": dtype, "key": jr.key(0)}
    return with_weights(nn.LIFCell(hidden, **given, **options_of(kind, c, neurons)), c)


def spiking(kind, hidden, neurons, options):
    def fn(xs, cells, state=None, lengths=None, first=None):
        given = options_of(kind, cells[0][0], neurons) | options
        given |= {"num_layers": len(cells), "bidirectional": len(cells[0]) == 2}
        size = xs.shape[-1] if "weight_ih" in cells[0][0] else None
        make = nn.LI if "u" in kind else nn.LIF
        made = make(size, hidden, dtype=xs.dtype, key=jr.key(0), **given)
        made_cells = [
            [make_cell(kind, c, hidden, neurons, xs.dtype) for c in directions]
            for directions in cells
        ]
        made = eqx.tree_at(lambda made: made.cells, made, tuple(map(tuple, made_cells)))
        if first is not None:
            made = eqx.tree_at(lambda made: made.initial_state, made, to_state(first))
        ys, last = made(xs, to_state(state), lengths=lengths)
        return ys, fields_of(last)

    return fn


def cell_arrays(kind, size, hidden, learned, bias=True):
    """`size` is the size of the inputs, zero without input weights."""
    c = {}
    if size:
        c["weight_ih"] = normal(hidden, size, scale=1.5 * size**-0.5)
        if bias:
            c["bias"] = 0.3 + normal(hidden, scale=0.5)
    if "r" in kind:
        c["weight_hh"] = normal(hidden, hidden, scale=hidden**-0.5)
    ranges = {
        "alpha": (0.3, 0.8), "beta": (0.5, 0.95), "rho": (0.4, 0.9), "threshold": (0.5, 1.1),
        "strength": (0.5, 2.0),
    }
    for name in learned:
        c[name] = rng.uniform(*ranges[name], size=hidden) if name in ranges else np.array(2.6)
    return c


state_arrays = lambda kind, *shape: {name: normal(*shape, scale=0.7) for name in parts(kind)}
NEURONS = ("constants", "reset", "detach_reset")


def without_constants(neurons):
    return neurons.get("constants", {}) | {n: x for n, x in neurons.items() if n != "constants"}


def layer(name, kind, xs, hidden, learned, *, inputs=True, state=None, lengths=None, **given):
    options, bias = given.pop("options", CHEAP), given.get("use_bias", True)
    neurons = {name: given.pop(name) for name in NEURONS if name in given}
    layers, directions = given.pop("num_layers", 1), 1 + given.pop("bidirectional", False)
    sizes = [xs.shape[-1], *(layers - 1) * [directions * hidden]]
    of = lambda size: cell_arrays(kind, size if inputs else 0, hidden, learned, bias)
    cells = tuple(tuple(of(size) for _ in range(directions)) for size in sizes)
    state = None if state is None else state_arrays(kind, *state, hidden)
    first = state_arrays(kind, hidden) if given.get("learn_initial_state") else None
    time = {name: given[name] for name in ("reverse", "time_major") if name in given}
    of_layer = {name: value for name, value in given.items() if name != "use_bias"}
    fn = spiking(kind, hidden, without_constants(neurons), of_layer)
    run = reference(kind, **neurons, **time)
    options = {**options, "time_major": time.get("time_major", False), "plain": run}
    enter(name, fn, xs, cells, state, lengths, first, **options)


SOME = {"orders": ("value", "jvp", "vjp", "RR"), "transforms": False, "costs": False}
ALL = ["beta", "alpha", "rho", "threshold", "strength"]
layer("nn.LIF", "", normal(7, 2), 3, ["beta"], state=(), options={"costs": False})
layer("nn.LIF: all", "iar", normal(7, 2), 3, ALL, detach_reset=False, state=(), options=SOME)

LENGTHS = {"lengths": np.array([7, 3, 0])}
layer("nn.LIF: zero", "r", normal(3, 7, 2), 3, ["beta", "threshold"], reset="zero",
    detach_reset=False, reverse=True, learn_initial_state=True, **LENGTHS)
layer("nn.LIF: stacked", "", normal(7, 3, 2), 3, ["beta"], num_layers=2, bidirectional=True,
    use_bias=False, time_major=True, state=(4, 3), detach_reset=False, **LENGTHS)
layer("nn.LIF: own inputs", "", normal(7, 3), 3, ["beta", "slope"], inputs=False,
    constants={"threshold": 0.7})
layer("nn.LIF: adaptive", "a", normal(3, 7, 2), 3, ["rho", "threshold"], reset="none",
    constants={"beta": 0.85, "strength": 0.6}, reverse=True, state=(3,), **LENGTHS)
layer("nn.LIF: currents", "i", normal(7, 3, 2), 3, ["alpha", "threshold"], reset="zero",
    constants={"beta": 0.85}, time_major=True, reverse=True, state=(3,), **LENGTHS)
layer("nn.LI", "iu", normal(3, 7, 2), 3, ["beta", "alpha"], reverse=True,
    learn_initial_state=True, **LENGTHS)

# Eight chunks, of five steps, and two steps in the last one.
MANY = {"lengths": np.resize([37, 0, 1, 4, 5, 6, 34, 35, 36], 64), "state": (64,)}
layer("nn.LIF: all in chunks", "iar", normal(64, 37, 2), 59, ALL, reverse=True, **MANY)
layer("nn.LIF: chunks", "", normal(64, 37, 2), 59, ["beta", "slope"], state=(64,))


# ---------------------------------------------------------------- cells


def cell(name, kind, learned, *, inputs=0, constants=None, shape=3, bias=True, **neurons):
    c = cell_arrays(kind, inputs, shape, learned, bias)

    def fn(x, state, c):
        given = {**(constants or {}), **neurons}
        made = make_cell(kind, c, shape, given, x.dtype)
        return fields_of(made(x, to_state(state)))

    of_step = ft.partial(
        step, neurons.get("reset", "subtract"), neurons.get("detach_reset", True)
    )
    of_step = ft.partial(of_step, DEFAULTS | (constants or {}))
    sizes = shape if isinstance(shape, tuple) else (shape,)
    x = normal(inputs) if inputs else 0.8 + normal(*sizes)
    options = {**CHEAP, "orders": ("value", "jvp", "vjp", "RR")}
    options["plain"] = lambda x, state, c: of_step(c, x, state)[0]
    entry(name, fn, x, state_arrays(kind, *sizes), c, **options)


cell("nn.LIFCell", "iar", [*ALL, "slope"], detach_reset=False)
cell("nn.LIFCell: zero", "", ["threshold"], reset="zero", constants={"beta": 0.85})
cell("nn.LIFCell: a grid", "", [], shape=(2, 3), reset="none", constants={"beta": 0.85})
cell("nn.LIFCell: strength", "a", ["rho"], constants={"beta": 0.85, "strength": 0.6})
cell("nn.LIFCell: inputs", "ia", ["beta", "alpha"], constants={"rho": 0.7}, inputs=2)
cell("nn.LIFCell: no bias", "r", ["beta"], reset="zero", inputs=2, bias=False)
cell("nn.LIFCell: does not fire", "u", ["beta"])

# Decays that training has moved out of [0, 1], each with the straight-through gradient.
entry("nn.LI: decays out of range",
    lambda xs, beta: nn.LI(None, 3, beta, learn="beta", dtype=xs.dtype)(xs)[0], normal(5, 3),
    np.array([1.2, -0.3, 0.7]),
    plain=lambda xs, beta: reference("u")(xs, (({"beta": beta},),))[0], **CHEAP)
own = lambda v: 0.3 * jnp.exp(-jnp.abs(v))  # the integral of it is below


def fire_by_own(v):
    smooth = 0.3 * jnp.sign(v) * (1 - jnp.exp(-jnp.abs(v)))
    return smooth + jax.lax.stop_gradient((v > 0).astype(v.dtype) - smooth)


def own_plain(xs, u):
    for x in xs:
        u = 0.85 * u + x
    return fire_by_own(u - 0.7)


entry("nn.LIF: a density of one's own",
    lambda xs, u: nn.LIF(None, 3, 0.85, threshold=0.7, reset="none", surrogate=own)(
        xs, nn.LIFState(jnp.zeros_like(u), u)
    )[0][-1], normal(5, 3), normal(3), plain=own_plain, **CHEAP)
