"""The state of a trajectory at another time, where the two times are equal in value.

`state_at(field, y, t, t_new)` is the state at `t_new` of the trajectory that passes through `y`
at `t`. It is only asked for where `t_new` equals `t`, so its value is `y`, and nothing is
integrated. But it has the derivative of the solution of the differential equation: if `t_new`
moves by `t_t_new`, the state moves by `field(t, y) * t_t_new`. That is all of the first
derivative. Higher ones need to know how tangents (in forward mode) and cotangents (in reverse
mode) change along the trajectory. They have differential equations of their own, so the rules
call `state_at` for them, and are right to all orders.
"""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._errors import bad_argument, check_function, name_of, place_of, rule_error
from .._rules.custom_vjp import custom_vjp
from .._rules.tree_split import ClosedTree
from .._tangent_spaces import (
    fit_leaves,
    is_array,
    is_differentiable,
    is_none,
    shape_of,
    tangent_leaf,
)
from .._trees import filter_jvp, floating_only, mirrored, unmirror


class Closure(eqx.Module):
    """A user's function whose arrays are all leaves, also the traced ones that it closes over,
    so that it can be differentiated with respect to them."""

    parts: PyTree
    tree: ClosedTree | None = eqx.field(static=True)

    def __init__(self, fn: Callable[..., Any]):
        tree, operands = ClosedTree.split(fn, is_array)
        # A tree is kept only if something was captured: each call makes a new one, by which
        # what JAX caches of an earlier call of the same function would not be found.
        captures = len(operands) > sum(map(is_array, jax.tree.leaves(fn)))
        self.parts, self.tree = (operands, tree) if captures else (fn, None)

    @property
    def fn(self) -> Callable[..., Any]:
        return self.parts if self.tree is None else self.tree.tree(self.parts)


class VectorField(eqx.Module):
    """`f(t, y)`, the derivative of `y` with respect to time, checked to be a tangent of `y`.
    Here a state is a mirror.

    `caller` is the name of the public function that was given `f`.
    """

    closure: Closure
    caller: str = eqx.field(static=True)

    def __init__(self, f: Callable[..., Any], caller: str):
        check_function(f, "f", caller)
        self.closure = Closure(f)
        self.caller = caller

    def __call__(self, t: Float[Array, ""], y: PyTree) -> PyTree:
        f = self.closure.fn
        fail = ft.partial(_not_a_rate, f, self.caller)
        leaves, treedef = jax.tree.flatten(y, is_leaf=is_none)
        t_y = mirrored(f(finite(t), unmirror(y)))
        rates = fit_leaves(tangent_leaf, "derivative", t_y, y, leaves, "y", fail)
        return _arrays(jax.tree.unflatten(treedef, rates), y)


def _not_a_rate(f, caller, *where, do):
    what = f"`{name_of(f)}`, the `f` of `{caller}`, did not return the derivative of the state "
    return rule_error(what + "with respect to time.", *where, place_of(f), do=do)


def as_time(t: Any, caller: str) -> Float[Array, ""]:
    if is_differentiable(t) and shape_of(t) == () and not jnp.iscomplexobj(t):
        return jnp.asarray(t)
    do = "Pass a floating scalar. For several events at once, use `jax.vmap`."
    raise bad_argument(caller, "t", "one real number", t, do)


def finite(t: Float[Array, ""]) -> Float[Array, ""]:
    """A time at which functions can be evaluated, even if the event never happens."""
    return jnp.where(jnp.isfinite(t), t, jnp.zeros_like(t))


@custom_vjp
def state_at(field, y, t, t_new):
    del field, t, t_new
    return y


# Both rules take symbolic zeros, and make arrays of the zeros of a state. Otherwise a tangent
# or cotangent that is known to be zero would be dropped from the calls of `state_at` below: its
# value is zero then, but not its derivative with respect to the times.


# The state depends on `t` too: a trajectory that passes through `y` at a later time is another
# one. At a fixed time, the tangent of the state is `t_y - field(t, y) * t_t`.
@state_at.def_jvp(symbolic_zeros=True)
def _state_at_jvp(primals, tangents):
    field, y, t, t_new = primals
    t_field, t_y, t_t, t_t_new = tangents
    t_y = _arrays(t_y, y)
    if t_t is not None:
        t_y = _add(t_y, field(t, y), -t_t)
    y_new, t_y = state_at(_TangentField(field, t_field), (y, t_y), t, t_new)
    if t_t_new is not None:
        t_y = _add(t_y, field(t_new, y_new), t_t_new)
    return y_new, t_y


@state_at.def_fwd
def _state_at_fwd(field, y, t, t_new):
    return state_at(field, y, t, t_new), (field, y, t, t_new)


# The transpose. The cotangent goes from `t_new` back to `t`, and gathers the cotangent of the
# field.
@state_at.def_bwd(symbolic_zeros=True)
def _state_at_bwd(residuals, ct, *, perturbed):
    field, y, t, t_new = residuals
    ct = _arrays(ct, y)
    y_new = state_at(field, y, t, t_new)
    no_ct_field = jax.tree.map(jnp.zeros_like, floating_only(field))
    end = (y_new, ct, no_ct_field)
    _, ct_y, ct_field = state_at(_CotangentField(field), end, t_new, t)
    _, _, is_moved, is_moved_new = perturbed
    ct_t = -_inner(ct_y, field(t, y), t) if is_moved else None
    ct_t_new = _inner(ct, field(t_new, y_new), t) if is_moved_new else None
    return ct_field, ct_y, ct_t, ct_t_new


class _TangentField(eqx.Module):
    """How a state and its tangent change with time."""

    field: Any
    t_field: Any

    def __call__(self, t, state):
        y, t_y = state
        call = lambda field, y: field(t, y)
        y_rate, t_y_rate = filter_jvp(call, (self.field, y), (self.t_field, t_y))
        return y_rate, _arrays(t_y_rate, y)


class _CotangentField(eqx.Module):
    """How a state, its cotangent and the cotangent of the field change with time."""

    field: Any

    def __call__(self, t, state):
        y, ct_y, _ = state

        def call(field_and_y):
            field, y = field_and_y
            y_rate = field(t, y)
            return floating_only(y_rate), y_rate

        _, pull_back, y_rate = eqx.filter_vjp(call, (self.field, y), has_aux=True)
        ((ct_field, ct_y),) = pull_back(jax.tree.map(jnp.negative, ct_y))
        return y_rate, ct_y, ct_field


def _arrays(t: PyTree, y: PyTree) -> PyTree:
    """A tangent or cotangent of a state with arrays of zeros for what is `None`."""
    filled = lambda leaf, t_leaf: jnp.zeros_like(leaf) if t_leaf is None else t_leaf
    return jax.tree.map(filled, floating_only(y), t)


def _add(t_y: PyTree, rate: PyTree, t_t: Float[Array, ""]) -> PyTree:
    """`t_y + rate * t_t`, in the dtypes of `t_y`."""
    return jax.tree.map(lambda a, b: a + b * t_t.astype(b.dtype), t_y, rate)


def _inner(ct: PyTree, rate: PyTree, t: Float[Array, ""]) -> Float[Array, ""]:
    """The transpose of `t_t -> rate * t_t`, in the dtype of the time."""
    products = jax.tree.map(lambda c, b: jnp.real(jnp.sum(c * b)).astype(t.dtype), ct, rate)
    return sum(jax.tree.leaves(products), jnp.zeros_like(t))
