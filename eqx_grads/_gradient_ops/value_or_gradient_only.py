"""Apply a function to the value only (`on_forward`) or to the gradient only (`on_backward`)."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import (
    check_function,
    name_of,
    place_of,
    rule_error,
    show_path,
    show_tree,
    type_of,
)
from .._rules.custom_jvp import custom_jvp
from .._rules.custom_vjp import custom_vjp
from .._rules.nondifferentiable import nondifferentiable
from .._tangent_spaces import (
    is_differentiable,
    is_none,
    is_zero_leaf,
    match_leaves,
    shape_of,
    tangents_match,
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
    differentiate `fn`. The value does not depend on what `fn` closes over, so the first
    derivative with respect to that is zero; higher derivatives need not be.

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
    ct = jax.tree.unflatten(treedef, cts)
    result = fn(ct)
    results = match_leaves(result, ct, "gradient", ft.partial(_not_a_gradient, fn))
    leaves = jax.tree_util.tree_leaves_with_path(ct, is_leaf=is_none)
    for (path, c), r in zip(leaves, results, strict=True):
        if is_zero_leaf(r):
            continue
        fits = is_differentiable(r) and shape_of(r) == shape_of(c)
        if not fits or (jnp.iscomplexobj(r) and not jnp.iscomplexobj(c)):
            raise _not_a_gradient(
                fn,
                f"at gradient{show_path(path)}: it was called with {type_of(c)}, "
                f"and returned {type_of(r)}",
                do="Return a floating array of the same shape, or `None` for zero.",
            )
    return (results,)


def _not_a_gradient(fn, *where, do):
    return rule_error(
        f"`{name_of(fn)}`, which was given to `on_backward`, did not return a gradient of `x`.",
        *where,
        place_of(fn),
        do=do,
    )


def on_forward(x: PyTree, fn: Callable[[Any], Any]) -> PyTree:
    r"""Apply a function to the value; the gradient passes straight through.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(eqg.on_forward(jnp.array(0.7), jnp.round))
        print(jax.grad(lambda x: eqg.on_forward(x, jnp.round) ** 2)(0.7))
        ```

        ```text
        1.0
        2.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `fn`: called with `x`. Returns a tree of the same structure and shapes. It is never
        differentiated, so it may be a host callback.

    **Returns:**

    `fn(x)`.

    **Derivative:**

    $\dot y = \dot x$ and $\bar x = \bar y$, cast to the dtype of each. Linear, so both modes
    and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `fn` returns another structure or shape, or if an array
    that `fn` holds or closes over is differentiated: there is no rule for that.
    """
    check_function(fn, "fn", "on_forward")
    return _on_forward(x, nondifferentiable(fn, "An array in the `fn` of `on_forward`"))


@custom_jvp
def _on_forward(x, fn):
    out = fn(x)
    _check_tangents_fit(fn, x, out)
    return out


@_on_forward.def_jvp(symbolic_zeros=True)
def _on_forward_jvp(primals, tangents):
    out = _on_forward(*primals)
    ts, treedef = jax.tree.flatten(tangents[0], is_leaf=is_none)
    outs = jax.tree.leaves(out, is_leaf=is_none)
    pairs = zip(ts, outs, strict=True)
    ts = [None if t is None else t.astype(y.dtype) for t, y in pairs]
    return out, jax.tree.unflatten(treedef, ts)


def _check_tangents_fit(fn, x, out):
    """Raise unless the tangent of `x`, up to its precision, is a tangent of `out`."""
    if jax.tree.structure(out) != jax.tree.structure(x):
        raise rule_error(
            "The `fn` of `on_forward` returned another structure than that of `x`.",
            f"it was called with {show_tree(x)}",
            f"it returned {show_tree(out)}",
            place_of(fn),
            do="Return a tree of the same structure.",
        )
    leaves = jax.tree_util.tree_leaves_with_path(x)
    for (path, leaf), y in zip(leaves, jax.tree.leaves(out), strict=True):
        same_kind = jnp.iscomplexobj(leaf) == jnp.iscomplexobj(y)
        if not tangents_match(leaf, y) or (is_differentiable(leaf) and not same_kind):
            raise rule_error(
                "The `fn` of `on_forward` returned an array of another shape or kind.",
                f"at x{show_path(path)}: it was called with {type_of(leaf)}, "
                f"and returned {type_of(y)}",
                place_of(fn),
                do="The gradient passes unchanged: return an array of the same shape, floating "
                "where `x` is floating and complex where it is complex.",
            )
