"""A value with the tangents of some leaves beside it, and how an operation moves them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind
from ..._jaxprs.structure import CallWithRule, structure
from ..._jaxprs.versions import equation_context
from ..carried import Place


@dataclasses.dataclass(eq=False)
class Death:
    """An operation whose operands move, and output `k` does not.

    - `values`: its operands. `leaf`: the first one that it was found for. `step`: of each loop
        around it, the last one, outermost first.
    """

    place: Place
    k: int
    values: Sequence["Fact"]
    leaf: int
    step: tuple[int, ...] = ()


# A death, and what the value without a tangent decided since: "" if nothing.
Died = frozenset[tuple[Death, str]]
NONE: Died = frozenset()


@dataclasses.dataclass(eq=False)
class Fact:
    """A value, computed on demand, and what is carried beside it.

    - `made`: the operation that computes it, its operands and all its outputs; or the name of
        an input.
    - `tangents`: for each leaf that it moves with. `died`: for the other leaves.
    - `is_random`: whether random bits decide it.
    """

    x: Any = None
    made: tuple[Place, Sequence["Fact"], Sequence["Fact"]] | str = ""
    tangents: dict[int, Any] = dataclasses.field(default_factory=dict)
    died: dict[int, Died] = dataclasses.field(default_factory=dict)
    is_random: bool = False


def value_of(fact: Fact) -> Any:
    """The value. What it is made of is computed first, without recursion."""
    stack = [fact]
    while stack:
        top = stack[-1]
        if top.x is not None or isinstance(top.made, str):
            stack.pop()
            continue
        place, operands, outs = top.made
        missing = [f for f in operands if f.x is None]
        if missing:
            stack.extend(missing)
            continue
        with equation_context(place.eqn):
            for out, x in zip(outs, bind(place.eqn, [f.x for f in operands]), strict=True):
                out.x = x
    return fact.x


def is_inexact(x: Any) -> bool:
    """Of an array, a variable or a type."""
    dtype = getattr(getattr(x, "aval", x), "dtype", None)
    return jnp.issubdtype(jnp.result_type(x) if dtype is None else dtype, jnp.inexact)


def is_alive(t: Any) -> bool:
    return t is not None and bool(np.any(np.asarray(t)))


def jvp(fn: Callable[..., Sequence[Any]], xs: Sequence[Any], ts: Sequence[Any]):
    """Outputs and tangents of a function. The tangents may be `None`."""
    moving = [i for i, t in enumerate(ts) if t is not None and is_inexact(xs[i])]

    def of_moving(*ys):
        full = list(xs)
        for i, y in zip(moving, ys, strict=True):
            full[i] = y
        return list(fn(*full))

    if not moving:
        return fn(*xs), None
    at = [xs[i] for i in moving]
    along = [jnp.asarray(ts[i], jnp.result_type(xs[i])) for i in moving]
    return jax.jvp(of_moving, at, along)


def push(eqn: Any, xs: Sequence[Any], ts: Sequence[Any]) -> list[Any]:
    """The tangents of the outputs of an equation. `None` where there is none."""
    fn = lambda *xs: bind(eqn, xs)
    try:
        _, out = jvp(fn, xs, ts)
    except Exception:  # JAX has no one type of error for a mode that does not exist
        out = _paired(fn, xs, ts)
    out = [None] * len(eqn.outvars) if out is None else out
    out = [t if is_inexact(v) else None for t, v in zip(out, eqn.outvars, strict=True)]
    if has_backward(eqn) and any(map(is_alive, out)):  # its backward pass may be another one
        pairs = zip(out, _paired(fn, xs, ts), strict=True)
        out = [t if is_alive(size) else None for t, size in pairs]
    return out


def has_backward(eqn: Any) -> bool:
    """Whether an equation calls a function with a backward pass of its own."""
    return isinstance(structure(eqn), CallWithRule) and eqn.primitive.name != "custom_jvp_call"


def _paired(fn, xs, ts) -> list[Any]:
    """Of a rule with a backward pass only: the sizes of its cotangents in the directions."""
    moving = [i for i, t in enumerate(ts) if t is not None and is_inexact(xs[i])]

    def of_moving(*ys):
        full = list(xs)
        for i, y in zip(moving, ys, strict=True):
            full[i] = y
        return list(fn(*full))

    outs, pull = jax.vjp(of_moving, *(xs[i] for i in moving))
    sizes = []
    for k, out in enumerate(outs):
        seeds = [_seed(x, is_one=i == k) for i, x in enumerate(outs)]
        cts = pull(seeds) if is_inexact(out) else []
        pairs = zip(cts, (ts[i] for i in moving), strict=False)
        size = sum(float(np.sum(np.abs(np.asarray(c) * np.asarray(t)))) for c, t in pairs)
        sizes.append(np.full(np.shape(out), size, out.dtype) if is_inexact(out) else None)
    return sizes


def _seed(x, is_one: bool):
    if not is_inexact(x):
        return np.zeros(np.shape(x), jax.dtypes.float0)
    return jnp.ones_like(x) if is_one else jnp.zeros_like(x)
