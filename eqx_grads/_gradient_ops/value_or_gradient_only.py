"""A function on the way forward or on the way back, and the identity on the other."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike, PyTree

from .._errors import name_of, place_of, rule_error, show_tree, type_of
from .._rules.custom_jvp import custom_jvp
from .._rules.custom_vjp import custom_vjp
from .._rules.nondifferentiable import nondifferentiable
from .._tangent_spaces import is_differentiable, is_none, is_zero_leaf, match_leaves, shape_of
from .argument_checks import check_bounds
from .nonlinear import clip_leaf


def on_backward(x: PyTree, fn: Callable[[Any], Any]) -> PyTree:
    r"""Apply a function to the gradient.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        assert jax.grad(lambda x: eqg.on_backward(x, jnp.sign) ** 2)(3.0) == 1.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `fn`: is called with the gradient: a tree like `x` with arrays for its floating and
        complex leaves and `None` for the others. Returns a tree of the same structure and
        shapes, with `None` for any part that is zero. It may be a Module, and may close
        over anything.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \mathrm{fn}(\bar y)$, cast to the
    dtype of `x`; `fn` is not called if nothing depends on `x`. Higher orders differentiate
    `fn`. The value does not depend on what `fn` closes over, so the derivative with respect
    to that is zero, but for higher orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `fn` returns another structure or shape, or something
    complex for a real leaf.
    """
    identity = custom_vjp(_on_backward)
    identity.def_fwd(_on_backward_fwd)
    # Held by the rule and not an argument: then it may close over what is differentiated.
    identity.def_bwd(ft.partial(_on_backward_bwd, fn), symbolic_zeros=True)
    return identity(x)


def _on_backward(x):
    return x


def _on_backward_fwd(x):
    return x, _types_of(x)


def _on_backward_bwd(fn, types, ct):
    ct = _dense(types, ct)
    result = fn(ct)
    leaves = jax.tree_util.tree_leaves_with_path(ct, is_leaf=is_none)
    results = match_leaves(result, ct, "gradient", ft.partial(_does_not_fit, fn))
    for (path, c), r in zip(leaves, results, strict=True):
        if is_zero_leaf(r):
            continue
        fits = is_differentiable(r) and shape_of(r) == shape_of(c)
        if not fits or (jnp.iscomplexobj(r) and not jnp.iscomplexobj(c)):
            raise _does_not_fit(
                fn,
                f"at gradient{jax.tree_util.keystr(path)}: it was given {type_of(c)}, "
                f"and returned {type_of(r)}",
                do="Return an array of floats of the same shape, or `None` for zero.",
            )
    return (result,)


def _does_not_fit(fn, *where, do):
    return rule_error(
        f"The function `{name_of(fn)}` that was given to `on_backward` returned something "
        "that is no gradient of `x`.",
        *where,
        place_of(fn),
        do=do,
    )


def _types_of(x: PyTree) -> PyTree:
    """A tree like `x`, with types for the leaves that have a gradient, `None` for others."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(shape_of(leaf), leaf.dtype)
            if is_differentiable(leaf)
            else None
        ),
        x,
    )


def _dense(types: PyTree, ct: PyTree) -> PyTree:
    """A cotangent with arrays of zeros for the parts that nothing depends on."""
    filled = match_leaves(ct, types, "ct", rule_error)
    leaves, treedef = jax.tree.flatten(types, is_leaf=is_none)
    zeros = [None if t is None else jnp.zeros(t.shape, t.dtype) for t in leaves]
    pairs = zip(filled, zeros, strict=True)
    return jax.tree.unflatten(treedef, [zero if c is None else c for c, zero in pairs])


def on_forward(x: PyTree, fn: Callable[[Any], Any]) -> PyTree:
    r"""Apply a function to the value and not to the gradient, which passes straight through.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        assert eqg.on_forward(jnp.array(0.7), jnp.round) == 1.0
        assert jax.grad(lambda x: eqg.on_forward(x, jnp.round) ** 2)(0.7) == 2.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `fn`: is called with `x`. Returns a tree of the same structure and shapes. It is never
        differentiated, so it may be a host callback.

    **Returns:**

    `fn(x)`.

    **Derivative:**

    $\dot y = \dot x$ and $\bar x = \bar y$, cast to the dtype of each. Linear, so both modes
    and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `fn` returns another structure or shape, or if a value that
    `fn` holds or closes over is differentiated: there is no rule for that.
    """
    return _apply_forward(x, fn, "on_forward", "fn")


def project(x: PyTree, projection: Callable[[Any], Any]) -> PyTree:
    r"""Project the value onto a set, such as the simplex, and let the gradient pass as if
    nothing had been done.

    Then a parameter whose projection is at the border of the set goes on learning.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        import optax

        nonnegative = optax.projections.projection_non_negative
        x = jnp.array([-1.0, 2.0])
        assert jnp.array_equal(eqg.project(x, nonnegative), jnp.array([0.0, 2.0]))

        loss = lambda x: jnp.sum((eqg.project(x, nonnegative) - 1) ** 2)
        assert jnp.array_equal(jax.grad(loss)(x), jnp.array([-2.0, 2.0]))
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `projection`: a function of `x`, such as those in `optax.projections`; for one with
        options, use `functools.partial`. Returns a tree of the same structure and shapes.

    **Returns:**

    `projection(x)`.

    **Derivative:**

    $\dot y = \dot x$ and $\bar x = \bar y$, as for [`eqx_grads.on_forward`][]. The
    derivative of the projection itself is zero across the border, so that what is outside
    would stay there.

    **Raises:**

    As [`eqx_grads.on_forward`][].
    """
    return _apply_forward(x, projection, "project", "projection")


def clip_preserve_gradient(x: PyTree, min: ArrayLike | None, max: ArrayLike | None) -> PyTree:
    r"""Clip the value, and let the gradient pass as if it were not clipped.

    The gradient of `jnp.clip` is zero outside of the bounds: a parameter that gets there
    stays there.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        assert eqg.clip_preserve_gradient(3.0, 0.0, 1.0) == 1.0
        assert jax.grad(lambda x: eqg.clip_preserve_gradient(x, 0.0, 1.0) ** 2)(3.0) == 2.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `min`, `max`: the bounds: numbers, or arrays that broadcast to every floating leaf of
        `x`, or `None` for no bound on this side. They may be traced.

    **Returns:**

    `x` with its floating leaves clipped (of complex ones, the real and the imaginary part).

    **Derivative:**

    $\dot y = \dot x$ and $\bar x = \bar y$. Linear, so both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] as for [`eqx_grads.clip_gradient`][], and if a bound is
    differentiated: there is no rule for that.
    """
    check_bounds("clip_preserve_gradient", min, max, x)
    bounds = nondifferentiable((min, max), "A bound of `clip_preserve_gradient`")
    return _on_forward(x, ft.partial(_clip_tree, *bounds))


def _clip_tree(min, max, x):
    return jax.tree.map(lambda v: clip_leaf(min, max, v) if is_differentiable(v) else v, x)


def _apply_forward(x, fn, op, argument):
    fn = nondifferentiable(fn, f"A part of `{argument}`, which was given to `{op}`,")
    return _on_forward(x, ft.partial(_call_checked, fn, op, argument))


@custom_jvp
def _on_forward(x, fn):
    return fn(x)


@_on_forward.def_jvp(symbolic_zeros=True)
def _on_forward_jvp(primals, tangents):
    out = _on_forward(*primals)
    ts, treedef = jax.tree.flatten(tangents[0], is_leaf=is_none)
    outs = jax.tree.leaves(out, is_leaf=is_none)
    pairs = zip(ts, outs, strict=True)
    ts = [None if t is None else t.astype(y.dtype) for t, y in pairs]
    return out, jax.tree.unflatten(treedef, ts)


@_on_forward.def_vmap
def _on_forward_vmap(*_):
    # Nothing to gain, but a call with a batching rule is a primitive. In the forward pass of
    # a scan, JAX before 0.12 forgets the rule of a `jax.custom_jvp`, and second derivatives
    # are silently those of the function itself; it does not forget that of a primitive.
    return NotImplemented


def _call_checked(fn, op, argument, x):
    out = fn(x)
    if jax.tree.structure(out) != jax.tree.structure(x):
        raise rule_error(
            f"The `{argument}` that was given to `{op}` returned another structure.",
            f"it was given {show_tree(x)}",
            f"it returned {show_tree(out)}",
            place_of(fn),
            do="Return a tree like the one that is passed.",
        )
    leaves = jax.tree_util.tree_leaves_with_path(x)
    for (path, leaf), y in zip(leaves, jax.tree.leaves(out), strict=True):
        if not is_differentiable(leaf) and not is_differentiable(y):
            continue
        alike = is_differentiable(leaf) and is_differentiable(y)
        if (
            not alike
            or shape_of(y) != shape_of(leaf)
            or (jnp.iscomplexobj(y) != jnp.iscomplexobj(leaf))
        ):
            raise rule_error(
                f"The `{argument}` that was given to `{op}` returned something that the "
                "gradient can't pass.",
                f"at x{jax.tree_util.keystr(path)}: it was given {type_of(leaf)}, "
                f"and returned {type_of(y)}",
                place_of(fn),
                do="Return an array of the same shape; of floats where it was of floats.",
            )
    return out
