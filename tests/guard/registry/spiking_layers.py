"""Spiking cells and layers, against the equations in a plain scan.

The spike is a step with the derivative of a smooth step.
"""

import dataclasses
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
        return {"membrane": u}, u
    if reset == "subtract":
        u = u - c["threshold"] * resetting
    threshold = c["threshold"]
    if "adaptation" in state:
        new["adaptation"] = decay("rho") * state["adaptation"] + spikes
        threshold = threshold + c["strength"] * new["adaptation"]
    s = fire(u - threshold, c["slope"])
    return {**new, "membrane": u, "spikes": s}, s


# A line has as many arguments as there is room for.
# fmt: off
FIELDS = {
    "LI": ("membrane",), "LIF": ("membrane", "spikes"),
    "ALIF": ("adaptation", "membrane", "spikes"), "CuBaLIF": ("current", "membrane", "spikes"),
}
DECAYS = {
    "LI": ("beta",), "LIF": ("beta",), "ALIF": ("beta", "rho"), "CuBaLIF": ("alpha", "beta"),
}
DEFAULTS = {"threshold": 1.0, "strength": 1.8, "slope": 2.0}


def base(kind):
    return kind.removeprefix("R")


def zero(kind, c):
    hidden = next(c[name] for name in ("weight_ih", "weight_hh", "beta") if name in c)
    return {name: jnp.zeros(len(hidden), hidden.dtype) for name in FIELDS[base(kind)]}


def reference(kind, reset="subtract", detach_reset=True, constants=None, **options):
    of_step = ft.partial(step, reset, detach_reset, DEFAULTS | (constants or {}))
    return plain(of_step, ft.partial(zero, kind), **options)


# ---------------------------------------------------------------- the layers


def to_state(kind, state):
    return None if state is None else getattr(nn, base(kind) + "State")(**state)


def fields_of(state):
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def make_cell(kind, c, hidden, neurons, dtype):
    """A cell in which all constants that are in `c` are learned, and those of `neurons` not."""
    names = ("alpha", "beta", "rho", "threshold")
    given = {name: c[name] for name in names if name in c}
    given |= {f"learn_{name}": True for name in given} | neurons
    if "slope" in c:
        given["surrogate"] = eqg.surrogates.atan(c["slope"])
    if kind.startswith("R"):
        given["key"] = jr.key(0)
    cell = getattr(nn, f"{kind}Cell")(hidden, dtype=dtype, **given)
    if "weight_hh" in c:
        cell = eqx.tree_at(lambda cell: cell.weight_hh, cell, c["weight_hh"])
    if "weight_ih" not in c:
        return cell
    size = c["weight_ih"].shape[1]
    cell = nn.WeightedCell(size, cell, use_bias="bias" in c, key=jr.key(0))
    for name in {"weight_ih", "bias"} & set(c):
        cell = eqx.tree_at(lambda cell, name=name: getattr(cell, name), cell, c[name])
    return cell


def spiking(kind, hidden, neurons, options):
    def fn(xs, cells, state=None, lengths=None, first=None):
        make = ft.partial(make_cell, kind, hidden=hidden, neurons=neurons, dtype=xs.dtype)
        made_cells = tuple(tuple(make(c) for c in directions) for directions in cells)
        sizes = {"num_layers": len(cells), "bidirectional": len(cells[0]) == 2}
        if sizes == {"num_layers": 1, "bidirectional": False}:
            made = getattr(nn, kind).from_cell(made_cells[0][0], **options)
        else:
            decays = dict.fromkeys(DECAYS[base(kind)], 0.5)
            given = {**sizes, **decays, **options, "dtype": xs.dtype, "key": jr.key(0)}
            made = getattr(nn, kind)(xs.shape[-1], hidden, **given)
            made = eqx.tree_at(lambda made: made.cells, made, made_cells)
        if first is not None:
            made = eqx.tree_at(lambda made: made.initial_state, made, to_state(kind, first))
        ys, last = made(xs, to_state(kind, state), lengths=lengths)
        return ys, fields_of(last)

    return fn


def cell_arrays(kind, size, hidden, learned, bias=True):
    """`size` is that of the inputs, zero without input weights."""
    c = {}
    if size:
        c["weight_ih"] = normal(hidden, size, scale=1.5 * size**-0.5)
        if bias:
            c["bias"] = 0.3 + normal(hidden, scale=0.5)
    if kind.startswith("R"):
        c["weight_hh"] = normal(hidden, hidden, scale=hidden**-0.5)
    ranges = {
        "alpha": (0.3, 0.8),
        "beta": (0.5, 0.95),
        "rho": (0.4, 0.9),
        "threshold": (0.5, 1.1),
    }
    for name in learned:
        c[name] = rng.uniform(*ranges[name], size=hidden) if name in ranges else np.array(2.6)
    return c


def state_arrays(kind, *shape):
    return {name: normal(*shape, scale=0.7) for name in FIELDS[base(kind)]}


NEURONS = ("constants", "reset", "detach_reset")


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
    fn = spiking(kind, hidden, neurons.get("constants", {}) | without(neurons), of_layer)
    run = reference(kind, **neurons, **time)
    options = {**options, "time_major": time.get("time_major", False), "plain": run}
    enter(name, fn, xs, cells, state, lengths, first, **options)


def without(neurons):
    return {name: value for name, value in neurons.items() if name != "constants"}


SOME = {"orders": ("value", "jvp", "vjp", "RR"), "transforms": False, "costs": False}
layer("nn.LIF", "LIF", normal(7, 2), 3, ["beta"], state=(), options={"costs": False})
layer(
    "nn.RALIF", "RALIF", normal(7, 2), 3, ["beta", "rho", "threshold"], detach_reset=False,
    state=(), options=SOME,
)
layer(
    "nn.CuBaLIF", "CuBaLIF", normal(7, 2), 3, ["alpha", "beta", "threshold"], reset="zero",
    detach_reset=False, state=(), options=SOME,
)

LENGTHS = {"lengths": np.array([7, 3, 0])}
layer(
    "nn.LIF: zero", "LIF", normal(3, 7, 2), 3, ["beta", "threshold"], reset="zero",
    keep="spikes", reverse=True, learn_initial_state=True, **LENGTHS,
)
layer(
    "nn.LIF: stacked", "LIF", normal(7, 3, 2), 3, ["beta"], num_layers=2, bidirectional=True,
    use_bias=False, time_major=True, state=(4, 3), detach_reset=False, **LENGTHS,
)
layer(
    "nn.LIF: own inputs", "LIF", normal(7, 3), 3, ["beta", "slope"], inputs=False,
    constants={"threshold": 0.7},
)
layer(
    "nn.ALIF", "ALIF", normal(3, 7, 2), 3, ["rho", "threshold"], reset="none",
    constants={"beta": 0.85, "strength": 0.6}, reverse=True, state=(3,), **LENGTHS,
)
layer(
    "nn.ALIF: defaults", "ALIF", normal(3, 7, 2), 3, ["rho", "beta"], keep="spikes",
    learn_initial_state=True,
)
layer(
    "nn.CuBaLIF: subtract", "CuBaLIF", normal(7, 3, 2), 3, ["alpha", "threshold"],
    keep="spikes", constants={"beta": 0.85}, time_major=True, reverse=True, state=(3,),
    **LENGTHS,
)
layer(
    "nn.LI", "LI", normal(3, 7, 2), 3, ["beta"], reverse=True, learn_initial_state=True,
    **LENGTHS,
)
layer(
    "nn.RLIF", "RLIF", normal(3, 7, 2), 3, ["beta", "slope"], reset="none", state=(3,),
    **LENGTHS,
)
layer(
    "nn.RLIF: zero", "RLIF", normal(3, 7, 2), 3, ["beta", "threshold"], reset="zero",
    detach_reset=False, keep="spikes", state=(3,), reverse=True, **LENGTHS,
)
layer(
    "nn.RCuBaLIF", "RCuBaLIF", normal(7, 3, 2), 3, ["alpha", "beta"], time_major=True,
    keep="spikes", state=(3,), **LENGTHS,
)

# Eight chunks, of five steps, and two steps in the last one.
MANY = {"lengths": np.resize([37, 0, 1, 4, 5, 6, 34, 35, 36], 64)}
layer(
    "nn.RALIF: chunks", "RALIF", normal(64, 37, 2), 59, ["beta", "rho", "threshold"],
    reverse=True, state=(64,), **MANY,
)
layer(
    "nn.CuBaLIF: chunks", "CuBaLIF", normal(64, 37, 2), 59, ["alpha", "beta", "threshold"],
    keep="spikes", state=(64,), **MANY,
)
layer(
    "nn.LIF: chunks", "LIF", normal(64, 37, 2), 59, ["beta", "slope"], time_major=False,
    state=(64,),
)


# ---------------------------------------------------------------- cells


def cell(name, kind, learned, *, inputs=0, constants=None, shape=3, bias=True, **neurons):
    c = cell_arrays(kind, inputs, shape, learned, bias)

    def fn(x, state, c):
        given = {**(constants or {}), **neurons}
        made = make_cell(kind, c, shape, given, x.dtype)
        return fields_of(made(x, to_state(kind, state)))

    of_step = ft.partial(
        step, neurons.get("reset", "subtract"), neurons.get("detach_reset", True)
    )
    of_step = ft.partial(of_step, DEFAULTS | (constants or {}))
    sizes = shape if isinstance(shape, tuple) else (shape,)
    x = normal(inputs) if inputs else 0.8 + normal(*sizes)
    options = {**CHEAP, "orders": ("value", "jvp", "vjp", "RR")}
    options["plain"] = lambda x, state, c: of_step(c, x, state)[0]
    entry(name, fn, x, state_arrays(kind, *sizes), c, **options)


cell("nn.LIFCell", "LIF", ["beta"], detach_reset=False)
cell("nn.LIFCell: zero", "LIF", ["threshold"], reset="zero", constants={"beta": 0.85})
cell("nn.LIFCell: a grid", "LIF", [], shape=(2, 3), reset="none", constants={"beta": 0.85})
cell("nn.ALIFCell", "ALIF", ["beta", "rho", "threshold"], reset="zero", detach_reset=False)
cell("nn.ALIFCell: strength", "ALIF", ["rho"], constants={"beta": 0.85, "strength": 0.6})
cell("nn.CuBaLIFCell", "CuBaLIF", ["alpha", "beta", "threshold"], detach_reset=False)
cell("nn.LICell", "LI", ["beta"])
cell("nn.RLIFCell", "RLIF", ["beta", "threshold"])
cell("nn.RALIFCell", "RALIF", ["beta", "rho", "slope"], detach_reset=False)
cell("nn.RCuBaLIFCell", "RCuBaLIF", ["alpha", "beta"], reset="zero")
cell("nn.WeightedCell", "ALIF", ["beta", "rho"], inputs=2)
cell("nn.WeightedCell: without a bias", "RLIF", ["beta"], inputs=2, bias=False)

# Decays that training has moved out of [0, 1], each with the straight-through gradient.
entry(
    "nn.LI: decays out of range",
    lambda xs, beta: nn.LI.from_cell(nn.LICell(3, beta, learn_beta=True))(xs)[0], normal(5, 3),
    np.array([1.2, -0.3, 0.7]),
    plain=lambda xs, beta: reference("LI")(xs, (({"beta": beta},),))[0], **CHEAP,
)
own = lambda v: 0.3 * jnp.exp(-jnp.abs(v))  # the integral of it is below


def fire_by_own(v):
    smooth = 0.3 * jnp.sign(v) * (1 - jnp.exp(-jnp.abs(v)))
    return smooth + jax.lax.stop_gradient((v > 0).astype(v.dtype) - smooth)


def own_plain(xs, u):
    for x in xs:
        u = 0.85 * u + x
    return fire_by_own(u - 0.7)


entry(
    "nn.LIF: a density of one's own",
    lambda xs, u: nn.LIF.from_cell(
        nn.LIFCell(3, 0.85, threshold=0.7, reset="none", surrogate=own)
    )(xs, nn.LIFState(jnp.zeros_like(u), u))[0][-1],
    normal(5, 3),
    normal(3),
    plain=own_plain,
    **CHEAP,
)
