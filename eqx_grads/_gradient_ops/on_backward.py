"""`on_backward`: apply a function to the gradient only."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import check_function, name_of, place_of, rule_error
from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import (
    DoesNotFit,
    fit_leaves,
    is_differentiable,
    is_none,
    is_zero_leaf,
    shape_of,
)


def on_backward(x: PyTree, fn: Callable[[Any], Any]) -> PyTree:
    r"""Apply a function to the gradient, and leave the value alone.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(jax.grad(lambda x: eqg.on_backward(x, jnp.sign) ** 2)(3.0))
        ```

        ```text
        1.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `fn`: called with the gradient: a tree like `x` with arrays for its floating and
        complex leaves and `None` for the others. Returns a tree of the same structure and
        shapes, with `None` for any part that is zero. It may be a Module, and may close
        over anything.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \mathrm{fn}(\bar y)$, cast to the
    dtype of `x`; `fn` is not called if the output does not depend on `x`. Higher orders
    differentiate `fn`. The value does not depend on the values that `fn` closes over. So the
    first derivative with respect to them is zero; higher derivatives need not be zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if `fn` returns another structure or shape, or a complex array
    for a real leaf.
    """
    check_function(fn, "fn", "on_backward")
    leaves, treedef = jax.tree.flatten(x, is_leaf=is_none)
    identity = custom_vjp(_on_backward)
    identity.def_fwd(_on_backward_fwd)
    # `fn` is part of the rule and not an argument, so that it may close over values that are
    # being differentiated.
    identity.def_bwd(ft.partial(_on_backward_bwd, fn, treedef), symbolic_zeros=True)
    return jax.tree.unflatten(treedef, identity(leaves))


def _on_backward(x):
    return x


def _on_backward_fwd(x):
    is_floating = map(is_differentiable, x)
    types = zip(x, is_floating, strict=True)
    return x, [jax.ShapeDtypeStruct(shape_of(y), y.dtype) if f else None for y, f in types]


def _on_backward_bwd(fn, treedef, types, ct):
    cts = [
        jnp.zeros(t.shape, t.dtype) if c is None and t is not None else c
        for c, t in zip(ct, types, strict=True)
    ]
    ct, fail = jax.tree.unflatten(treedef, cts), ft.partial(_not_a_gradient, fn)
    return (fit_leaves(_fit, "result", fn(ct), ct, cts, "gradient", fail, "argument"),)


def _fit(result, ct):
    """Unlike the cotangent of a rule, a result of another shape is not summed."""
    if is_zero_leaf(result):
        return None
    is_alike = is_differentiable(result) and shape_of(result) == shape_of(ct)
    if not is_alike or (jnp.iscomplexobj(result) and not jnp.iscomplexobj(ct)):
        raise DoesNotFit("Return a floating array of the same shape, or `None` for zero.")
    return result


def _not_a_gradient(fn, *where, do):
    return rule_error(
        f"`{name_of(fn)}`, which was given to `on_backward`, did not return a gradient of `x`.",
        *where,
        place_of(fn),
        do=do,
    )
