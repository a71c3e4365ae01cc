"""A value with the tangents of some leaves beside it, and how an operation moves them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind, restricted
from ..._jaxprs.structure import CallWithRule, holds, structure, While
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
    moving = [i for i, t in enumerate(ts) if _moves(t, xs[i])]
    if not moving:
        return fn(*xs), None
    at = [xs[i] for i in moving]
    along = [jnp.asarray(ts[i], jnp.result_type(xs[i])) for i in moving]
    return jax.jvp(lambda *ys: list(restricted(fn, xs, moving)(*ys)), at, along)


def push(eqn: Any, xs: Sequence[Any], ts: Sequence[Any], wanted: Any = None) -> list[Any]:
    """The tangents of the outputs of an equation. `None` where there is none.

    - `wanted`: the indices of the outputs that are used; by default, all are.
    """
    fn = lambda *xs: bind(eqn, xs)
    wanted = range(len(eqn.outvars)) if wanted is None else wanted
    pair = lambda: _paired(fn, xs, ts, wanted, is_compiled=holds(eqn, While))
    try:
        out = None if has_backward(eqn) and holds(eqn, While) else jvp(fn, xs, ts)[1]
        is_forward = out is not None
    except Exception:  # JAX has no one type of error for a mode that does not exist
        out, is_forward = None, False
    if not is_forward and not any(map(_moves, ts, xs)):
        return [None] * len(eqn.outvars)
    out = pair() if out is None else out
    out = [t if is_inexact(v) else None for t, v in zip(out, eqn.outvars, strict=True)]
    if is_forward and has_backward(eqn) and any(map(is_alive, out)):
        # Its backward pass may be another one.
        out = [t if is_alive(size) else None for t, size in zip(out, pair(), strict=True)]
    return out


def _moves(t: Any, x: Any) -> bool:
    return t is not None and is_inexact(x)


def has_backward(eqn: Any) -> bool:
    """Whether an equation calls a function with a backward pass of its own."""
    return isinstance(structure(eqn), CallWithRule) and eqn.primitive.name != "custom_jvp_call"


def _paired(fn, xs, ts, wanted, *, is_compiled: bool) -> list[Any]:
    """Of a rule with a backward pass only: the sizes of its cotangents in the directions."""
    moving = [i for i, t in enumerate(ts) if _moves(t, xs[i])]

    def sizes(xs, ts):
        outs, pull = jax.vjp(restricted(fn, xs, moving), *(xs[i] for i in moving))
        found: list[Any] = [None] * len(outs)
        for k in wanted:
            if is_inexact(outs[k]):
                cts = pull([_seed(x, is_one=i == k) for i, x in enumerate(outs)])
                pairs = zip(cts, (ts[i] for i in moving), strict=True)
                size = sum(jnp.sum(jnp.abs(c * t)) for c, t in pairs)
                found[k] = jnp.full(jnp.shape(outs[k]), size, outs[k].dtype)
        return found

    return (jax.jit(sizes) if is_compiled else sizes)(xs, ts)


def _seed(x, is_one: bool):
    if not is_inexact(x):
        return np.zeros(np.shape(x), jax.dtypes.float0)
    return jnp.ones_like(x) if is_one else jnp.zeros_like(x)
