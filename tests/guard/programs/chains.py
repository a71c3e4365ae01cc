"""Transformations of a function of leaves, which can follow each other in any order.

Each takes a function `fn(leaves) -> outs` of lists of arrays, and returns such a function of
the same leaves. It sums the outputs over the axes that it adds, so that arrays stay small.
`step.chosen` are the leaves that are differentiated, batched or carried. With `ours`, the
functions of the library replace JAX's functions.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as Spec

from .formulas import add, mul, total, wide
from .functions import AXIS
from .ops import OPS


Fn = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Step:
    """A transformation, the leaves that it acts on, and its options, of `OPTIONS`. The default
    of an option is the first of its values."""

    name: str
    chosen: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, option: str) -> Any:
        return dict(self.options).get(option, OPTIONS[self.name][option][0])

    @property
    def is_derivative(self) -> bool:
        return self.name in ("grad", "vjp", "jvp", "linearize", "transpose", "jacobian")

    @property
    def is_reverse(self) -> bool:
        """Whether its derivative is pulled back only: forward mode does not work below it."""
        return self.name in ("grad", "vjp") or (
            self.name == "jacobian" and self["mode"] == "jacrev"
        )


BOOLS = (False, True)
API = ("jax", "equinox")
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "jit": {"api": API}, "closure": {},
    "checkpoint": {"api": ("jax", "equinox", "ours", "saves all")}, "first": {}, "stop": {},
    "cond": {"api": ("jax", "ours"), "takes": (1, 0), "swapped": BOOLS},
    "while": {"api": ("jax", "ours")}, "scan": {
        "method": (None, 2, 3, "sqrt", "auto", "replay"), "steps": (3, 7, 7, 1),
        "reverse": BOOLS, "truncate": (None, None, 2),
    }, "recurrence": {
        "method": ("scan", "associative"), "steps": (7, 5, 1), "reverse": BOOLS, "h0": BOOLS,
        "factors": ("varying", "constant", "complex"),
    }, "op": {"op": tuple(OPS)}, "vmap": {"api": API, "out_axis": (0, -1)},
    "named": {"sum": (None, "psum", "pmean")}, "shard_map": {}, "grad": {"api": API},
    "jvp": {"api": API}, "linearize": {}, "transpose": {}, "vjp": {"api": API},
    "jacobian": {"mode": ("jacfwd", "jacrev")},
}  # fmt: skip


def transformed(fn: Fn, chain: Sequence[Step], ours: bool) -> Fn:
    """`fn` in the chain, whose first step is the innermost."""
    for step in chain:
        fn = ft.partial(TRANSFORMATIONS[step.name], fn, step, ours)
    return fn


def _split(leaves: Sequence[Any], step: Step, keeps_numbers: bool = False):
    """The chosen leaves, and a function that replaces them."""

    def with_chosen(chosen):
        new = dict(zip(step.chosen, chosen, strict=True))
        return [new.get(i, x) for i, x in enumerate(leaves)]

    chosen = [leaves[i] for i in step.chosen]
    # Equinox does not differentiate Python numbers, and a loop has arrays in its carry.
    return chosen if keeps_numbers else list(map(_as_array, chosen)), with_chosen


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, int | float) else x


def _amount(leaves: Sequence[Any]) -> Any:
    """A number that depends on all leaves."""
    return total([x for x in leaves if _is_inexact(x)])


def _is_inexact(x: Any) -> bool:
    """`eqx.is_inexact_array_like` fails for tracers of keys (Equinox 0.13.8)."""
    if isinstance(x, int | float):
        return isinstance(x, float)
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _contract(outs: Sequence[Any]) -> list[Any]:
    """Sums over the leading axis, with a weight for each slice."""

    def contract(x):
        weights = 1 / (1 + np.arange(x.shape[0])).reshape(-1, *[1] * (x.ndim - 1))
        weights = np.broadcast_to(weights, x.shape).astype(x.dtype)
        return jax.lax.reduce_sum(mul(x, weights), (0,))

    return [contract(x) for x in outs]


def _moved(x: Any, amount: Any) -> Any:
    """A leaf that depends on a number, small enough for its loops to stay finite."""
    amount = jax.lax.tanh(mul(amount, jax.lax.full_like(amount, 0.125)))
    amount = jax.lax.convert_element_type(amount, x.dtype)
    half = jax.lax.full_like(x, 0.5)
    return mul(half, add(x, jnp.broadcast_to(amount, x.shape)))


# ---------------------------------------------------------------- staging


def _jit(fn, step, ours, leaves):
    return {"jax": jax.jit, "equinox": eqx.filter_jit}[step["api"]](fn)(leaves)


def _closure(fn, step, ours, leaves):
    """A `jit` of the chosen leaves, which closes over all others."""
    chosen, with_chosen = _split(leaves, step, True)
    return jax.jit(lambda chosen: fn(with_chosen(chosen)))(chosen)


def _checkpoint(fn, step, ours, leaves):
    if step["api"] == "equinox":
        return eqx.filter_checkpoint(fn)(leaves)
    if step["api"] == "ours" and ours:
        return eqg.filter_checkpoint(fn)(leaves)
    saves_all = jax.checkpoint_policies.everything_saveable
    return jax.checkpoint(fn, policy=saves_all if step["api"] == "saves all" else None)(leaves)


def _first(fn, step, ours, leaves):
    """Only the first output is used: the cotangents of the others are zero."""
    return fn(leaves)[:1]


def _stop(fn, step, ours, leaves):
    """The chosen leaves are not differentiated."""
    chosen, with_chosen = _split(leaves, step)
    return fn(with_chosen([jax.lax.stop_gradient(x) for x in chosen]))


def _op(fn, step, ours, leaves):
    """The chosen leaves are given to an op first."""
    chosen, with_chosen = _split(leaves, step)
    op = OPS[step["op"]]
    apply = op.ours if ours else op.plain
    return fn(with_chosen([apply(x) for x in chosen]))


# ---------------------------------------------------------------- control flow


def _cond(fn, step, ours, leaves):
    pred = _amount(leaves) > (-100.0 if step["takes"] else 100.0)
    one, other = lambda leaves: total(fn(leaves)), _amount
    if step["swapped"]:
        one, other = other, one
    cond = eqg.filter_cond if ours and step["api"] == "ours" else jax.lax.cond
    return [cond(pred, one, other, leaves)]


def _while(fn, step, ours, leaves):
    chosen, with_chosen = _split(leaves, step)

    def body(state):
        i, chosen = state
        amount = total(fn(with_chosen(chosen)))
        return i + 1, [_moved(x, amount) for x in chosen]

    loop = eqg.filter_while_loop if ours and step["api"] == "ours" else jax.lax.while_loop
    init = (jnp.zeros((), jnp.int32), chosen)
    return loop(lambda state: state[0] < 2, body, init)[1]


def _scan(fn, step, ours, leaves):
    init, with_chosen = _split(leaves, step)
    steps, reverse, window = step["steps"], step["reverse"], step["truncate"]
    if window is not None and window >= steps:
        window = None

    def body(carry, t):
        outs = fn(with_chosen(carry))
        amount = total(outs) + t
        return [_moved(x, amount) for x in carry], outs

    def cut(carry, inputs):
        index, t = inputs
        is_cut = (index % window == 0) & (index > 0)
        stopped = map(jax.lax.stop_gradient, carry)
        carry = [jnp.where(is_cut, s, x) for s, x in zip(stopped, carry, strict=True)]
        return body(carry, t)

    times = jnp.linspace(0.0, 1.0, steps, dtype=wide())
    if ours:
        carry, outs = eqg.filter_scan(
            body, init, times, checkpoint=step["method"], reverse=reverse, truncate=window
        )
    elif window is None:
        carry, outs = jax.lax.scan(body, init, times, reverse=reverse)
    else:
        index = jnp.arange(steps)
        index = index[::-1] if reverse else index
        carry, outs = jax.lax.scan(cut, init, (index, times), reverse=reverse)
    return [*_contract(outs), total(carry)]


def _recurrence(fn, step, ours, leaves):
    """The outputs are the terms, factors and first states of a linear recurrence."""
    outs, steps = fn(leaves), step["steps"]
    amount = jnp.tanh(total(outs))
    weights = 1 / (1 + np.arange(steps * 2).reshape(steps, 2))
    b = amount * weights.astype(amount.dtype)
    a = jnp.sin(b[::-1] + amount)
    if step["factors"] == "constant":
        a = a[:1]
    elif step["factors"] == "complex":
        a = jax.lax.complex(a, b)
    h0 = jnp.cos(amount + b[0]) if step["h0"] else None
    if ours:
        h = eqg.linear_recurrence(a, b, h0, reverse=step["reverse"], method=step["method"])
    else:
        a = jnp.broadcast_to(a, b.shape)
        h0 = jnp.zeros_like(b[0]) if h0 is None else h0

        def body(h, inputs):
            a, b = inputs
            h = a * h + b.astype(a.dtype)
            return h, h

        h = jax.lax.scan(body, h0.astype(a.dtype), (a, b), reverse=step["reverse"])[1]
    return [*_contract([h]), *outs]


# ---------------------------------------------------------------- batching


def _stacked(x: Any) -> Any:
    x = _as_array(x)
    other = (0.7 * x).astype(x.dtype) if _is_inexact(x) else x
    return jnp.stack([x, other])


def _in_axes(leaves, step):
    in_axes = [0 if i in step.chosen else None for i in range(len(leaves))]
    return in_axes, [_stacked(x) if i in step.chosen else x for i, x in enumerate(leaves)]


def _vmap(fn, step, ours, leaves):
    in_axes, leaves = _in_axes(leaves, step)
    transform = {"jax": jax.vmap, "equinox": eqx.filter_vmap}[step["api"]]
    outs = transform(fn, in_axes=(in_axes,), out_axes=step["out_axis"])(leaves)
    return _contract([jnp.moveaxis(x, step["out_axis"], 0) for x in outs])


def _named(fn, step, ours, leaves):
    """Inside, functions and outputs are summed over the named axis."""
    in_axes, leaves = _in_axes(leaves, step)
    reduce = {
        None: lambda x, name: x, "psum": jax.lax.psum, "pmean": jax.lax.pmean,
    }[step["sum"]]  # fmt: skip
    summed = lambda leaves: [reduce(x, AXIS) for x in fn(leaves)]
    return _contract(jax.vmap(summed, in_axes=(in_axes,), axis_name=AXIS)(leaves))


def _shard_map(fn, step, ours, leaves):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    is_chosen = [i in step.chosen for i in range(len(leaves))]
    leaves = [
        _stacked(x) if c else _as_array(x) for x, c in zip(leaves, is_chosen, strict=True)
    ]

    def local(leaves):
        own = [x[0] if c else x for x, c in zip(leaves, is_chosen, strict=True)]
        return [x[None] for x in fn(own)]

    specs = [Spec("i") if c else Spec() for c in is_chosen]
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=Spec("i"))
    return _contract(sharded(leaves))


# ---------------------------------------------------------------- differentiation


def _grad(fn, step, ours, leaves):
    chosen, with_chosen = _split(leaves, step, step["api"] == "jax")
    loss = lambda chosen: total(fn(with_chosen(chosen)))
    transform = {"jax": jax.value_and_grad, "equinox": eqx.filter_value_and_grad}[step["api"]]
    value, grads = transform(loss)(chosen)
    return [*map(jnp.asarray, grads), value]


def _tangents_of(chosen: Sequence[Any]) -> list[Any]:
    return [
        0.5 + 0.25 * k if isinstance(x, float) else jnp.full_like(x, 0.5 + 0.25 * k)
        for k, x in enumerate(chosen)
    ]


def _jvp(fn, step, ours, leaves):
    chosen, with_chosen = _split(leaves, step, step["api"] == "jax")
    of_chosen = lambda chosen: fn(with_chosen(chosen))
    transform = {"jax": jax.jvp, "equinox": eqx.filter_jvp}[step["api"]]
    outs, tangents = transform(of_chosen, (chosen,), (_tangents_of(chosen),))
    return _both(outs, tangents)


def _both(outs: Any, tangents: Any) -> list[Any]:
    def both(x, t):
        t = jnp.zeros_like(x) if t is None else t  # `filter_jvp` has `None` for a zero
        return add(x, mul(t, jax.lax.full_like(t, 0.25)))

    return [both(x, t) for x, t in zip(outs, tangents, strict=True)]


def _linearize(fn, step, ours, leaves):
    chosen, with_chosen = _split(leaves, step, True)
    outs, linear = jax.linearize(lambda chosen: fn(with_chosen(chosen)), chosen)
    return _both(outs, linear(_tangents_of(chosen)))


def _transpose(fn, step, ours, leaves):
    """`jax.linear_transpose` of the linear function of `jax.linearize`."""
    chosen, with_chosen = _split(leaves, step)
    outs, linear = jax.linearize(lambda chosen: fn(with_chosen(chosen)), chosen)
    cts = [mul(x, jax.lax.full_like(x, 0.75)) for x in outs]
    return [*jax.linear_transpose(linear, chosen)(cts)[0], *outs]


def _vjp(fn, step, ours, leaves):
    chosen, with_chosen = _split(leaves, step, step["api"] == "jax")
    of_chosen = lambda chosen: fn(with_chosen(chosen))
    transform = {"jax": jax.vjp, "equinox": eqx.filter_vjp}[step["api"]]
    outs, pull_back, *_ = transform(of_chosen, chosen)
    (cts,) = pull_back([mul(x, jax.lax.full_like(x, 1.5)) for x in outs])
    return [jnp.asarray(ct) for ct in cts]


def _jacobian(fn, step, ours, leaves):
    """`jacfwd` or `jacrev` of all outputs, in one leaf: Jacobians have one dtype."""
    (x, *others), with_chosen = _split(leaves, step)
    sums = lambda x: [total([out]) for out in fn(with_chosen([x, *others]))]
    rows = getattr(jax, step["mode"])(sums)(x)
    return [total([row]) for row in rows]


TRANSFORMATIONS: dict[str, Callable[..., list[Any]]] = {
    "jit": _jit, "closure": _closure, "checkpoint": _checkpoint, "first": _first, "stop": _stop,
    "cond": _cond, "while": _while, "scan": _scan, "recurrence": _recurrence, "op": _op,
    "vmap": _vmap, "named": _named, "shard_map": _shard_map, "grad": _grad, "jvp": _jvp,
    "linearize": _linearize, "transpose": _transpose, "vjp": _vjp, "jacobian": _jacobian,
}  # fmt: skip
