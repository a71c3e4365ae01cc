"""Gradient ops that are not linear in the gradient: clip, normalize, round, add noise.

Each op returns its argument unchanged, and acts on the gradient in the backward pass. In a
PyTree, it acts on the floating and complex leaves.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from .._errors import rule_error
from .._rules.float_args import as_dtype, check_key, check_nonnegative_number, check_positive
from .._rules.identity_op import backward_op
from .._rules.nan_where import nan_where
from .._rules.replace_gradient import replace_gradient
from .._tangent_spaces import promote
from .._trees import on_leaves
from ..tangents import scale
from .argument_checks import check_axis, check_bounds, check_broadcasts
from .norms import divide, scaled_norm


def clip_gradient(x: PyTree, min: ArrayLike | None, max: ArrayLike | None) -> PyTree:
    r"""Clip every element of the gradient.

    On the carry of a scan, it clips at every step. Clipping in the optimizer is too late
    where the gradient overflows on its way through the steps.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        import optax

        # The clipped gradient of a squared error is the gradient of the Huber loss.
        loss = lambda x: 0.5 * eqg.clip_gradient(x, -1.0, 1.0) ** 2
        for x in (-3.0, 0.5, 2.0):
            print(jax.grad(loss)(x), jax.grad(optax.huber_loss)(x))
        ```

        ```text
        -1.0 -1.0
        0.5 0.5
        1.0 1.0
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `min`, `max`: the bounds: numbers, or arrays that broadcast to every floating leaf of
        `x`, or `None` for no bound on this side. They may be traced.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \min(\max(\bar y, \mathrm{min}),
    \mathrm{max})$; the real and the imaginary part of a complex gradient are clipped
    separately. A NaN is kept: see [`eqx_grads.zero_nonfinite_gradient`][]. Higher orders
    differentiate the clipping; its slope at a bound is the average, one half.

    **Raises:**

    [`eqx_grads.RuleError`][] if `min` exceeds `max` (unless they are traced). Also if a bound
    is complex, or would broadcast a leaf to another shape.
    """
    check_bounds("clip_gradient", min, max, x)
    return _clip_gradient(x, min, max)


@backward_op
def _clip_gradient(x, min, max):
    return jax.tree.map(ft.partial(_clip, min, max), x)


def _clip(min, max, x):
    if jnp.iscomplexobj(x):
        return jax.lax.complex(_clip(min, max, jnp.real(x)), _clip(min, max, jnp.imag(x)))
    if min is not None:
        x = jnp.maximum(x, jnp.broadcast_to(jnp.asarray(min).astype(x.dtype), x.shape))
    if max is not None:
        x = jnp.minimum(x, jnp.broadcast_to(jnp.asarray(max).astype(x.dtype), x.shape))
    return x


def clip_gradient_norm(
    x: PyTree, max_norm: ArrayLike, axis: int | tuple[int, ...] | None = None
) -> PyTree:
    r"""Scale the gradient down to `max_norm` where its norm is larger; the direction is kept.

    On the carry of a scan, it clips at every step, so that the gradient of a recurrent
    network can't explode. Under `vmap`, a batched `x` is clipped per example; for an
    unbatched `x`, the sum over the examples is clipped once.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: jnp.sum(eqg.clip_gradient_norm(x, 1.0) ** 2)
        print(jax.grad(loss)(jnp.array([3.0, 4.0])).round(3))
        ```

        ```text
        [0.6 0.8]
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `max_norm`: a number, not negative. It may be traced.
    - `axis`: by default one norm, of all floating leaves together. Otherwise,
        each leaf has its own norms along this axis or these axes: with `-1`, one for
        every row.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \bar y \cdot \min\left(1,
    \frac{\mathrm{max\_norm}}{\lVert\bar y\rVert}\right)$ with the 2-norm, computed so that
    no square overflows. A gradient whose norm is at most `max_norm` passes bitwise unchanged.
    So does a gradient that is not finite, as it has no direction: see
    [`eqx_grads.zero_nonfinite_gradient`][]. Higher orders differentiate the formula; where the
    norm is `max_norm`, they differentiate the identity.

    **Raises:**

    [`eqx_grads.RuleError`][] if `max_norm` is negative (unless it is traced) or not a
    scalar, or if a leaf has no such axis.

    Source: Pascanu, Mikolov and Bengio, [On the difficulty of training recurrent neural
    networks](https://arxiv.org/abs/1211.5063), 2013.
    """
    check_nonnegative_number("clip_gradient_norm", max_norm=max_norm)
    axis = check_axis("clip_gradient_norm", axis, x)
    return _clip_gradient_norm(x, max_norm, axis=axis)


@backward_op
def _clip_gradient_norm(x, max_norm, *, axis):
    return _map_with_norm(ft.partial(_clip_norm, max_norm), x, axis)


def _map_with_norm(fn, ct, axis):
    """`fn(x, scale, ratio)` of every leaf, with `scale, ratio` from `scaled_norm`."""
    if axis is not None:
        return jax.tree.map(lambda x: fn(x, *scaled_norm([x], axis)), ct)
    common = scaled_norm(jax.tree.leaves(ct))
    return jax.tree.map(lambda x: fn(x, *common), ct)


def _clip_norm(max_norm, x, scale, ratio):
    max_norm = jnp.asarray(max_norm).astype(ratio.dtype)
    exceeds = scale * ratio > max_norm
    unit = _divide_by_norm(x, scale, ratio)
    clipped = unit * max_norm.astype(unit.dtype)
    return jnp.where(exceeds, clipped.astype(x.dtype), x)


def normalize_gradient(
    x: PyTree, axis: int | tuple[int, ...] | None = None, *, eps: ArrayLike = 0.0
) -> PyTree:
    r"""Scale the gradient to norm one; the direction is kept.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: 1e-30 * jnp.sum(eqg.normalize_gradient(x) ** 2)
        print(jax.grad(loss)(jnp.array([3.0, 4.0])).round(3))
        ```

        ```text
        [0.6 0.8]
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `axis`: as for [`eqx_grads.clip_gradient_norm`][].
    - `eps`: a number that is added to the norm in the denominator. A gradient whose norm is
        small compared with `eps` thus remains small. It may be traced.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \frac{\bar y}{\lVert\bar y\rVert +
    \mathrm{eps}}$ with the 2-norm, computed so that no square over- or underflows. It is zero
    where $\bar y$ is zero, and NaN where $\bar y$ is not finite. Higher orders differentiate
    the formula.

    **Raises:**

    As [`eqx_grads.clip_gradient_norm`][], with `eps` instead of `max_norm`.
    """
    check_nonnegative_number("normalize_gradient", eps=eps)
    axis = check_axis("normalize_gradient", axis, x)
    return _normalize_gradient(x, eps, axis=axis)


@backward_op
def _normalize_gradient(x, eps, *, axis):
    return _map_with_norm(ft.partial(_normalize, eps), x, axis)


def _normalize(eps, x, scale, ratio):
    # The norm plus `eps` is `scale * (ratio + eps / scale)`.
    ratio = ratio + jnp.asarray(eps).astype(ratio.dtype) / scale
    return _divide_by_norm(x, scale, ratio)


def _divide_by_norm(x, scale, ratio):
    # Where all of `x` is zero, `ratio` is zero too; then divide by one.
    return divide(divide(x, scale), jnp.where(ratio == 0, 1, ratio))


def zero_nonfinite_gradient(x: PyTree) -> PyTree:
    r"""Replace NaN and infinity in the gradient by zero.

    Then the NaN of one example or time step does not reach the others. To find where it
    arises, use [`eqx_grads.watch_gradient`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: jnp.sum(jnp.sqrt(eqg.zero_nonfinite_gradient(x)))
        print(jax.grad(loss)(jnp.array([0.0, 4.0])))
        ```

        ```text
        [0.   0.25]
        ```

    **Arguments:**

    - `x`: any PyTree.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, elementwise, $\bar x = \bar y$ where $\bar y$ is
    finite and zero elsewhere. Higher orders differentiate this rule.
    """
    return on_leaves(_zero_nonfinite_gradient, x)


@backward_op(symbolic_zeros=True)
def _zero_nonfinite_gradient(x):
    return jax.tree.map(lambda c: jnp.where(jnp.isfinite(c), c, 0), x)


def noise_gradient(x: PyTree, *, key: PRNGKeyArray, stddev: ArrayLike) -> PyTree:
    r"""Add Gaussian noise to the gradient.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def loss(x, key):
            return jnp.sum(eqg.noise_gradient(x, key=key, stddev=0.1))

        noisy = jax.grad(loss)(jnp.zeros(10_000), jax.random.key(0))
        print(f"mean {jnp.mean(noisy):.2f}, standard deviation {jnp.std(noisy):.2f}")
        ```

        ```text
        mean 1.00, standard deviation 0.10
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `key`: a random key. The noise of different leaves is independent. The same key makes
        the same noise: use a new key for each training step, each step of a scan and each
        example.
    - `stddev`: the standard deviation, a number or an array that broadcasts to every
        floating leaf of `x`. It may be traced. Neelakantan et al. decrease it with the
        training step $t$, as $\sqrt{\eta / (1 + t)^{0.55}}$ with an $\eta$ of 0.01 to 1.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \bar y + \sigma\,\varepsilon$, with
    $\sigma$ for `stddev` and $\varepsilon$ from the standard normal distribution.
    In higher orders, the noise is a constant.

    **Raises:**

    [`eqx_grads.RuleError`][] if `stddev` is negative (unless it is traced) or complex, or
    would broadcast a leaf to another shape.

    Source: Neelakantan et al., [Adding gradient noise improves learning for very deep
    networks](https://arxiv.org/abs/1511.06807), 2015.
    """
    check_key("noise_gradient", key)
    check_positive("noise_gradient", "`stddev`", stddev, or_zero=True)
    check_broadcasts("noise_gradient", "stddev", stddev, x)
    return _noise_gradient(x, stddev, key)


@backward_op
def _noise_gradient(x, stddev, key):
    cts, treedef = jax.tree.flatten(x)
    keys = jr.split(key, len(cts)) if cts else []
    noise = [jr.normal(k, c.shape, c.dtype) for k, c in zip(keys, cts, strict=True)]
    noisy = [c + scale(n, stddev) for n, c in zip(noise, cts, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def cast_gradient(x: PyTree, dtype: Any) -> PyTree:
    r"""Round the gradient to the precision of `dtype`; its own dtype is kept.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: 1.2345678 * eqg.cast_gradient(x, jnp.float16)
        print(jax.grad(loss)(1.0))
        ```

        ```text
        1.234375
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `dtype`: a floating dtype, for example `jnp.bfloat16` or one of the 8-bit dtypes.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x$ is $\bar y$ rounded to the nearest number
    of `dtype`, and cast to the dtype of `x`, as JAX requires. Subnormal numbers are kept. An
    overflow is infinite, or NaN if `dtype` has no infinity. XLA may remove a cast to `dtype`
    and back; it does not remove this rounding. Higher orders treat the rounding as the
    identity.

    **Raises:**

    [`eqx_grads.RuleError`][] if `dtype` is not a floating dtype.
    """
    known = as_dtype(dtype)
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise rule_error(
            "`cast_gradient` was given a dtype that is not floating.",
            f"`dtype` is {dtype if known is None else known!s:.60}",
            do="Use a floating dtype, such as `jnp.bfloat16`. For a complex gradient, give the "
            "dtype of its real and imaginary part.",
        )
    return on_leaves(ft.partial(_cast_gradient, dtype=known), x)


@backward_op(symbolic_zeros=True)
def _cast_gradient(x, *, dtype):
    return jax.tree.map(ft.partial(_round_to, dtype), x)


def _round_to(dtype, x):
    if jnp.iscomplexobj(x):
        return jax.lax.complex(_round_to(dtype, jnp.real(x)), _round_to(dtype, jnp.imag(x)))
    source, target = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if target.nmant >= source.nmant and target.maxexp >= source.maxexp:
        return x
    # In single precision at least: XLA:CPU flushes subnormal numbers to zero, and those of
    # half precision are normal numbers there. https://github.com/jax-ml/jax/issues/16200
    wide = x.astype(promote([x, jnp.float32]))
    source = jnp.finfo(wide.dtype)
    # Not `wide.astype(dtype).astype(wide.dtype)`: XLA removes a pair of casts where it may
    # compute with excess precision. It never removes `reduce_precision`.
    # https://github.com/jax-ml/jax/issues/6283
    rounded = jax.lax.reduce_precision(wide, source.nexp, target.nmant)
    if target.minexp > source.minexp:
        step = float(target.smallest_subnormal)
        subnormal = jnp.abs(wide) < float(target.smallest_normal)
        rounded = jnp.where(subnormal, jnp.round(wide / step) * step, rounded)
    overflows = jnp.abs(rounded) > float(target.max)
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        rounded = jnp.where(overflows, jnp.copysign(jnp.inf, wide), rounded)
    else:
        rounded = nan_where(overflows, rounded)
    return replace_gradient(rounded, x)
