"""Gradient ops that are linear in the gradient: scale, reverse, mask, sum over devices.

Each op returns its argument unchanged, and acts on the gradient in the backward pass. In a
PyTree, it acts on the floating and complex leaves.

The rules return `x` itself and do not call the op again. Then a second derivative is the
derivative of the gradient that the op makes, as finite differences of that gradient are.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from .._errors import rule_error, show_path, show_tree, type_of
from .._jaxprs.varying import varying_axes
from .._rules.float_args import check_parameter, is_known
from .._rules.identity_op import backward_op, tangent_op
from .._tangent_spaces import dtype_of_array, is_differentiable, is_none, promote
from .._trees import prefix_leaves
from ..tangents import neg, scale, where
from .argument_checks import check_broadcasts, check_broadcasts_to_leaf


def scale_gradient(x: PyTree, s: ArrayLike) -> PyTree:
    r"""Multiply the gradient by a number.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(jax.grad(lambda x: eqg.scale_gradient(x, 0.5) ** 2)(3.0))
        ```

        ```text
        3.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `s`: a number, or an array that broadcasts to every floating leaf of `x`. It may be
        traced.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    $\dot y = s\,\dot x$ and $\bar x = s\,\bar y$. Linear, so in both modes. Higher orders are
    the derivatives of this gradient, including with respect to `s`. The value does not depend
    on `s`, so the first derivative with respect to `s` is zero. Zero times an infinite gradient
    is NaN: to stop a gradient, use [`eqx_grads.mask_gradient`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if `s` would broadcast a leaf to another shape, or is complex
    where a leaf is real.

    Source: the gradient scaling of [MuZero](https://arxiv.org/abs/1911.08265), appendix G.
    """
    check_broadcasts("scale_gradient", "s", s, x)
    return _scale_gradient(x, s)


@tangent_op
def _scale_gradient(x, s):
    return scale(x, s)


def reverse_gradient(x: PyTree, strength: ArrayLike = 1.0) -> PyTree:
    r"""Reverse the sign of the gradient: layers before `x` learn to increase the loss that
    the layers after it learn to decrease.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(jax.grad(lambda x: eqg.reverse_gradient(x) ** 2)(3.0))
        print(jax.grad(lambda x: eqg.reverse_gradient(x, 0.5) ** 2)(3.0))
        ```

        ```text
        -6.0
        -3.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `strength`: a number, or an array that broadcasts to every floating leaf of `x`. It
        may be traced: see [`eqx_grads.reversal_schedule`][].

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    With $\lambda$ for `strength`, $\dot y = -\lambda\,\dot x$ and
    $\bar x = -\lambda\,\bar y$. Otherwise as [`eqx_grads.scale_gradient`][]: two reversals
    of strength one are the identity.

    **Raises:**

    As [`eqx_grads.scale_gradient`][].

    Source: Ganin et al., [Domain-adversarial training of neural
    networks](https://arxiv.org/abs/1505.07818), 2016.
    """
    check_broadcasts("reverse_gradient", "strength", strength, x)
    return _reverse_gradient(x, strength)


@tangent_op
def _reverse_gradient(x, strength):
    return neg(scale(x, strength))


def reversal_schedule(
    progress: ArrayLike, *, low: ArrayLike = 0.0, high: ArrayLike = 1.0, gamma: ArrayLike = 10.0
) -> Array:
    r"""Return a schedule for the strength of a gradient reversal.

    An untrained domain classifier has an uninformative gradient, so the reversal begins
    weak: its strength rises from `low` to `high`.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.reversal_schedule(0.0))
        print(f"{eqg.reversal_schedule(0.1):.3f}")

        def loss(x, step):
            return eqg.reverse_gradient(x, eqg.reversal_schedule(step / 1000)) ** 2

        print(f"{jax.grad(loss)(1.0, 100):.3f}")
        ```

        ```text
        0.0
        0.462
        -0.924
        ```

    **Arguments:**

    - `progress`: the fraction of the training that is done, from 0 to 1.
    - `low`, `high`: the strength at the beginning, and its limit.
    - `gamma`: how fast the strength rises. The rise is 99 % complete when `progress` is
        `5.3 / gamma`.

    All may be traced.

    **Returns:**

    With $p$ for `progress`, $\mathrm{low} + (\mathrm{high} - \mathrm{low})
    \left(\frac{2}{1 + e^{-\gamma p}} - 1\right)$.

    **Derivative:**

    The derivative of the formula.

    **Raises:**

    [`eqx_grads.RuleError`][] if `progress` is negative (unless it is traced): the formula would
    be negative too.

    Source: Ganin et al., [Domain-adversarial training of neural
    networks](https://arxiv.org/abs/1505.07818), 2016, section 5.2.2, where `low` is 0 and
    `high` is 1.
    """
    given = {"progress": progress, "low": low, "high": high, "gamma": gamma}
    for what, value in given.items():
        check_parameter("reversal_schedule", what, value)
    if is_known(progress) and np.any(np.asarray(progress) < 0):
        raise rule_error(
            "`reversal_schedule` was given a negative progress.",
            f"`progress` is {progress!r:.60}",
            do="Give it the fraction of the training that is done: the step divided by the "
            "number of steps.",
        )
    values = list(map(jnp.asarray, given.values()))
    dtype = promote([float, *values])
    progress, low, high, gamma = (v.astype(dtype) for v in values)
    # This is 2 / (1 + exp(-z)) - 1, without its cancellation near zero.
    return low + (high - low) * jnp.tanh(gamma * progress / 2)


def mask_gradient(x: PyTree, mask: PyTree) -> PyTree:
    r"""Pass the gradient where `mask` is true, and stop it elsewhere.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        mask = jnp.array([True, False])
        loss = lambda x: jnp.sum(eqg.mask_gradient(x, mask) ** 2)
        print(jax.grad(loss)(jnp.array([3.0, 4.0])))

        # A tree of bools freezes parts of a model.
        loss = lambda x: sum(eqg.mask_gradient(x, {"a": True, "b": False}).values()) ** 2
        grad = jax.grad(loss)({"a": 1.0, "b": 2.0})
        print(grad["a"], grad["b"])
        ```

        ```text
        [6. 0.]
        6.0 0.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `mask`: a bool, or a boolean array that broadcasts to every floating leaf of `x`; or a
        tree of bools and arrays, with the structure of `x` or a prefix. Arrays may be traced.
        The mask may depend on `x`, as in `mask_gradient(x, x < 3)`.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    $\dot y = \dot x$ and $\bar x = \bar y$ where `mask` is true, and zero elsewhere, even where
    the gradient is NaN. Linear, so in both modes. Higher orders are the derivatives of this
    gradient.

    **Raises:**

    [`eqx_grads.RuleError`][] if `mask` is not boolean, is of another structure, or would
    broadcast a leaf to another shape.
    """
    leaves, treedef = jax.tree.flatten(x)
    return jax.tree.unflatten(treedef, _mask_gradient(leaves, _mask_of_each_leaf(mask, x)))


@tangent_op
def _mask_gradient(x, masks):
    ts, treedef = jax.tree.flatten(x, is_leaf=is_none)
    return jax.tree.unflatten(treedef, map(_mask_leaf, masks, ts))


def _mask_leaf(mask, t):
    if t is None or mask is True:
        return t
    return None if mask is False else where(mask, t, None)


def _mask_of_each_leaf(mask, x) -> list[Any]:
    """One mask, a Python bool or an array, for each leaf of `x`."""
    try:
        masks = prefix_leaves(mask, x)
    except (ValueError, TypeError):
        masks = []
    leaves = jax.tree_util.tree_leaves_with_path(x)
    if len(masks) != len(leaves):
        raise rule_error(
            "`mask_gradient` was given a `mask` with a different structure than `x`.",
            f"`x` is {show_tree(x)}",
            f"`mask` is {show_tree(mask)}",
            do="Give it one bool or array for all leaves, or a tree with the structure of `x` "
            "or a prefix.",
        )
    for m, (path, leaf) in zip(masks, leaves, strict=True):
        if dtype_of_array(m) != jnp.bool_:
            raise rule_error(
                "`mask_gradient` was given a `mask` that is not boolean.",
                f"for x{show_path(path)}: `mask` is {type_of(m)}",
                do="Give it a comparison, such as `weights > 0`. "
                "To multiply a gradient by numbers, use `eqx_grads.scale_gradient`.",
            )
        check_broadcasts_to_leaf("mask_gradient", "mask", m, path, leaf)
    is_bool = lambda m: not isinstance(m, jax.Array) and np.ndim(m) == 0
    return [bool(m) if is_bool(m) else jnp.asarray(m) for m in masks]


def psum_gradient(x: PyTree, axis_name: Any) -> PyTree:
    r"""Sum the gradient over the devices, for weights that are replicated.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def gradient(weight, x):
            loss = lambda weight: eqg.psum_gradient(weight, "batch") * x
            return jax.grad(loss)(weight)

        # On four devices, this would be a `jax.shard_map`.
        xs = jnp.array([1.0, 2.0, 3.0, 4.0])
        grads = jax.vmap(gradient, in_axes=(None, 0), axis_name="batch")(2.0, xs)
        print(grads)
        ```

        ```text
        [10. 10. 10. 10.]
        ```

    **Arguments:**

    - `x`: any PyTree, the same on all devices.
    - `axis_name`: the name of a mesh axis of the enclosing `jax.shard_map` (or of the axis
        of a `vmap`), or a tuple of names.

    **Returns:**

    `x`, unchanged. Where `shard_map` tracks which values vary over the mesh (`check_vma`),
    the result is varying.

    **Derivative:**

    Forward mode is the identity: each device has the tangent of its copy. Backward,
    $\bar x = \sum_\mathrm{devices} \bar y$. Use it where the gradient is taken inside
    the `shard_map` or `vmap`. If the gradient is taken outside, JAX itself sums over the
    devices, and with `check_vma=False` the sum would be taken twice.

    **Raises:**

    [`eqx_grads.RuleError`][] if `axis_name` is not a named axis here.
    """
    try:
        hash(axis_name)  # of a list, JAX raises an error of its own later
        index = jax.lax.axis_index(axis_name)
    except (NameError, TypeError, ValueError) as error:
        raise rule_error(
            "`psum_gradient` was given the name of an axis that does not exist here.",
            f"`axis_name` is {axis_name!r:.60}",
            do="Call it inside a `jax.shard_map` over a mesh with this axis, or inside a "
            "`jax.vmap` with this `axis_name`.",
        ) from error
    # The axes over which `shard_map` tracks what varies; none with `check_vma=False`.
    tracked = varying_axes(index)
    return jax.tree.map(ft.partial(_psum_leaf, axis_name, tracked), x)


def _psum_leaf(axis_name, tracked, x):
    if dtype_of_array(x) is None or not is_differentiable(x):
        return x
    x = jnp.asarray(x)
    replicated = tracked - varying_axes(x)
    if replicated:
        # The transpose of this cast is the sum over these axes; the rule sums over the rest.
        x = jax.lax.pcast(x, tuple(sorted(replicated)), to="varying")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    rest = tuple(name for name in names if name not in replicated)
    return _psum_gradient(x, axis_name=rest) if rest else x


@backward_op
def _psum_gradient(x, *, axis_name):
    return jax.lax.psum(x, axis_name)
