"""Straight-through signs, steps, clipping and argmax."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PyTree

from .._errors import rule_error
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import (
    as_axis,
    as_floats,
    broadcast_parameter,
    check_parameter,
    check_positive,
    constant,
    is_known,
    map_floats,
    widen,
)
from .._rules.nan_where import nan_where
from .._rules.replace_gradient import replace_gradient
from ._straight_through import hard_tanh, straight_through


def sign(x: PyTree) -> PyTree:
    r"""Return the sign, straight through: the sign of zero is zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 0.0, 2.0])
        print(eqg.ste.sign(x))
        grad = jax.grad(lambda x: eqg.ste.sign(x).sum())(x)
        print(grad)  # zero where |x| > 1
        ```

        ```text
        [-1.  0.  1.]
        [1. 1. 0.]
        ```

    **Arguments:**

    - `x`: an array of floats, or a PyTree of them. Other leaves are left unchanged.

    **Returns:**

    The signs: -1, 0 or 1, NaN where `x` is.

    **Derivative:**

    The derivative of [`eqx_grads.ste.hard_tanh`][]: one where $|x| \le 1$ and zero elsewhere.
    For another derivative, see [`eqx_grads.with_gradient_of`][].

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return straight_through("ste.sign", jnp.sign, x, hard_tanh)


def binary_sign(x: PyTree) -> PyTree:
    """Return the sign as one bit, straight through: the sign of zero is plus one.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 0.0, 2.0])
        print(eqg.ste.binary_sign(x))
        grad = jax.grad(lambda x: eqg.ste.binary_sign(x).sum())(x)
        print(grad)

        # Weights as in XNOR-Net: scaled to their mean magnitude.
        weight = jnp.array([[0.1, -0.2], [0.3, 0.4]])
        binary = eqg.ste.binary_sign(weight) * jnp.mean(jnp.abs(weight))
        print(binary.round(3))
        ```

        ```text
        [-1.  1.  1.]
        [1. 1. 0.]
        [[ 0.25 -0.25]
         [ 0.25  0.25]]
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.sign`][].

    **Returns:**

    -1 or 1, NaN where `x` is.

    **Derivative:**

    As for [`eqx_grads.ste.sign`][].

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return straight_through("ste.binary_sign", _binary_sign, x, hard_tanh)


def _binary_sign(x):
    return 2 * _heaviside(x, at_zero=1) - 1


def heaviside(x: PyTree, *, at_zero: ArrayLike = 1.0) -> PyTree:
    """Return one above zero and zero below, straight through.

    For a spiking neuron, use [`eqx_grads.surrogates.spike`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.ste.heaviside(-0.5))
        print(jax.grad(eqg.ste.heaviside)(-0.5))
        step = eqg.with_gradient_of(eqg.ste.heaviside, jax.nn.sigmoid)
        print(step(0.0), jax.grad(step)(0.0))
        ```

        ```text
        0.0
        1.0
        1.0 0.25
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.sign`][].
    - `at_zero`: the value at zero. With the default,
        `binary_sign(x) == 2 * heaviside(x) - 1`.

    **Returns:**

    0 or 1 (or `at_zero`), NaN where `x` is.

    **Derivative:**

    The identity: one everywhere. For another derivative, see [`eqx_grads.with_gradient_of`][].

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    check_parameter("ste.heaviside", "`at_zero`", at_zero)
    at_zero = constant("ste.heaviside", "value at zero", at_zero)
    return straight_through("ste.heaviside", ft.partial(_heaviside, at_zero=at_zero), x)


def _heaviside(x, *, at_zero):
    # Not `jnp.heaviside`, which on JAX 0.10.0 does not propagate NaN.
    at_zero = broadcast_parameter("ste.heaviside", "value at zero", at_zero, x)
    step = jnp.where(x == 0, at_zero, (x > 0).astype(x.dtype))
    return jnp.where(jnp.isnan(x), x, step)


def ternary(x: PyTree, *, threshold: ArrayLike | str = 0.05) -> PyTree:
    r"""Quantize to -1, 0 or 1, straight through: to 0 within a threshold.

    [Li et al. (2016)](https://arxiv.org/abs/1605.04711).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 0.02, 2.0])
        print(eqg.ste.ternary(x))
        grad = jax.grad(lambda x: eqg.ste.ternary(x).sum())(x)
        print(grad)
        ```

        ```text
        [-1.  0.  1.]
        [1. 1. 0.]
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.sign`][].
    - `threshold`: a number (0.05 as in Larq), or an array that broadcasts to `x`. Or
        `"mean"`, which is 0.7 times the mean of $|x|$ over a whole leaf, as in ternary weight
        networks.

    **Returns:**

    The sign of `x` where $|x|$ is larger than the threshold, and zero elsewhere. NaN where
    `x` is.

    **Derivative:**

    As for [`eqx_grads.ste.sign`][]; the threshold is a constant.

    **Raises:**

    As [`eqx_grads.ste.round`][], and if the threshold is differentiated.
    """
    if not isinstance(threshold, str):
        check_positive("ste.ternary", "threshold", threshold, or_zero=True)
        threshold = constant("ste.ternary", "threshold", threshold)
    elif threshold != "mean":
        raise rule_error(
            "`ste.ternary` got an unknown `threshold`.",
            f"it is {threshold!r:.80}",
            do='Give it a number, an array or "mean".',
        )
    values = ft.partial(_ternary, threshold=threshold)
    return straight_through("ste.ternary", values, x, hard_tanh)


def _ternary(x, *, threshold):
    size = jnp.abs(x)
    if isinstance(threshold, str):
        mean = jnp.mean(widen(size)).astype(x.dtype)
        limit = jnp.asarray(0.7, x.dtype) * mean
    else:
        limit = broadcast_parameter("ste.ternary", "threshold", threshold, x)
    return jnp.where(size <= limit, 0, jnp.sign(x))


def clip(x: PyTree, min: ArrayLike | None = None, max: ArrayLike | None = None) -> PyTree:
    r"""Clip to bounds, straight through: the gradient passes outside of the bounds too.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax

        print(eqg.ste.clip(3.0, 0.0, 1.0))
        print(jax.grad(eqg.ste.clip)(3.0, 0.0, 1.0))
        print(jax.grad(eqg.ste.clip, argnums=2)(3.0, 0.0, 1.0))
        ```

        ```text
        1.0
        1.0
        1.0
        ```

    **Arguments:**

    - `x`: an array of floats, or a PyTree of them. Other leaves are left unchanged.
    - `min`, `max`: the bounds, numbers or arrays that broadcast to every leaf of `x`. `None`
        leaves that side open.

    **Returns:**

    `x` clipped to the bounds; `max` where `min` exceeds it.

    **Derivative:**

    The identity with respect to `x`: $\bar x = \bar y$. With respect to a bound, one where `x`
    is clipped to it, and zero elsewhere, including where `x` equals the bound. Both modes and
    all orders; higher derivatives are zero.

    **Raises:**

    As [`eqx_grads.ste.round`][]. Also if a bound does not broadcast to `x`, or if both bounds
    are single numbers that are known while tracing, and `min` exceeds `max`.
    """
    for what, bound in (("min", min), ("max", max)):
        if bound is not None:
            check_parameter("ste.clip", what, bound)
    if _is_one_number(min) and _is_one_number(max) and not np.asarray(min) <= np.asarray(max):
        raise rule_error(
            "`ste.clip` was given a `min` that exceeds `max`.",
            f"`min` is {min}, `max` is {max}",
            do="Were the bounds swapped, or is one of them NaN?",
        )
    return map_floats("ste.clip", ft.partial(_clip_leaf, min, max), x)


def _is_one_number(x: Any) -> bool:
    return is_known(x) and np.ndim(x) == 0


def _clip_leaf(min, max, x):
    min = -jnp.inf if min is None else min
    max = jnp.inf if max is None else max
    min = broadcast_parameter("ste.clip", "min", min, x)
    max = broadcast_parameter("ste.clip", "max", max, x)
    return _clip(x, min, max)


@custom_jvp
def _clip(x, min, max):
    return jnp.clip(x, min, max)


@_clip.def_jvp
def _clip_jvp(primals, tangents):
    x, min, max = primals
    t_x, t_min, t_max = tangents
    above = jnp.maximum(x, min) > max
    t_bound = jnp.where(above, t_max, jnp.where(x < min, t_min, 0))
    return _clip(x, min, max), t_x + t_bound


def one_hot_argmax(x: ArrayLike, *, axis: int = -1, temperature: ArrayLike = 1.0) -> Array:
    r"""Return the one-hot argmax along an axis, with the derivative of a softmax.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([1.0, 3.0, 2.0])
        print(eqg.ste.one_hot_argmax(x))
        grad = jax.grad(lambda x: eqg.ste.one_hot_argmax(x)[1])(x)
        print(grad.round(3))  # that of `softmax`
        ```

        ```text
        [0. 1. 0.]
        [-0.06   0.223 -0.163]
        ```

    **Arguments:**

    - `x`: floats, of any shape with that axis.
    - `axis`: the axis along which to take the argmax.
    - `temperature`: of the softmax; positive. It may be learned.

    **Returns:**

    An array like `x`: one for the largest element (at a tie, the first one), and zero
    elsewhere. NaN along an axis with a NaN.

    **Derivative:**

    The derivative of `softmax(x / temperature)`, with respect to both. Both modes and all
    orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not an array of floats, or if the temperature is not
    positive (unless it is traced).
    """
    check_positive("ste.one_hot_argmax", "temperature", temperature)
    x = as_floats("ste.one_hot_argmax", x)
    axis = as_axis("ste.one_hot_argmax", axis, x)
    wide = widen(x)
    tau = broadcast_parameter("ste.one_hot_argmax", "temperature", temperature, wide)
    return replace_gradient(one_hot_of_largest(x, x, axis), jax.nn.softmax(wide / tau, axis))


def one_hot_of_largest(x: Array, like: Array, axis: int) -> Array:
    """One at the first of the largest elements along an axis, which may be empty; NaN along an
    axis with a NaN."""
    if x.size == 0:
        return jnp.zeros_like(like)
    hard = jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=like.dtype, axis=axis)
    return nan_along(x, axis, hard)


def nan_along(x: Array, axis: int, out: Array) -> Array:
    """`out`, and NaN along an axis of `x` with a NaN: an index would hide it."""
    return nan_where(jnp.any(jnp.isnan(x), axis, keepdims=True), out)
