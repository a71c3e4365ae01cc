"""Identities whose backward rule is not linear: clip, normalize, round, make noise.

They return their argument, and act on the gradient that passes them on its way back. In a
tree, they act on the floating and complex leaves.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from .._errors import rule_error
from .._rules.custom_vjp import custom_vjp
from .._rules.replace_gradient import replace_gradient
from .._tangent_spaces import promote
from ..tangents import scale
from .argument_checks import check_axis, check_bounds, check_fits, check_not_negative
from .norms import divide, scaled_norm


def clip_gradient(x: PyTree, min: ArrayLike | None, max: ArrayLike | None) -> PyTree:
    r"""Clip every element of the gradient.

    On the carry of a scan, it clips at every step, where clipping the finished gradient in
    the optimizer would come too late: it may have overflowed on the way.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp
        import optax

        # The gradient of a squared error, clipped, is that of the Huber loss.
        loss = lambda x: 0.5 * eqg.clip_gradient(x, -1.0, 1.0) ** 2
        for x in (-3.0, 0.5, 2.0):
            assert jax.grad(loss)(x) == jax.grad(optax.huber_loss)(x)
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `min`, `max`: the bounds: numbers, or arrays that broadcast to every floating leaf of
        `x`, or `None` for no bound on this side. They may be traced.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \min(\max(\bar y, \mathrm{min}),
    \mathrm{max})$, for the real and the imaginary part each where it is complex. A NaN
    stays: see [`eqx_grads.zero_nonfinite_gradient`][]. Higher orders differentiate that;
    the slope at a bound is the average, one half.

    **Raises:**

    [`eqx_grads.RuleError`][] if `min` exceeds `max` (unless they are traced), is complex, or
    would broadcast a leaf to another shape.
    """
    check_bounds("clip_gradient", min, max, x)
    return _clip_gradient(x, min, max)


@custom_vjp
def _clip_gradient(x, min, max):
    del min, max
    return x


@_clip_gradient.def_fwd
def _clip_gradient_fwd(x, min, max):
    return x, (min, max)


@_clip_gradient.def_bwd
def _clip_gradient_bwd(bounds, ct):
    return jax.tree.map(ft.partial(clip_leaf, *bounds), ct), None, None


def clip_leaf(min: Any, max: Any, x: Array) -> Array:
    if jnp.iscomplexobj(x):
        return jax.lax.complex(
            clip_leaf(min, max, jnp.real(x)), clip_leaf(min, max, jnp.imag(x))
        )
    if min is not None:
        x = jnp.maximum(x, jnp.broadcast_to(jnp.asarray(min).astype(x.dtype), x.shape))
    if max is not None:
        x = jnp.minimum(x, jnp.broadcast_to(jnp.asarray(max).astype(x.dtype), x.shape))
    return x


def clip_gradient_norm(
    x: PyTree, max_norm: ArrayLike, axis: int | tuple[int, ...] | None = None
) -> PyTree:
    r"""Shorten the gradient where it is longer than `max_norm`; its direction stays.

    On the carry of a scan, it acts at every step: the gradient of a recurrent network that
    would explode on the way never gets to. Under `vmap`, it acts on every example where `x`
    is batched, and once, on the sum over the examples, where it is not.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: jnp.sum(eqg.clip_gradient_norm(x, 1.0) ** 2)
        assert jnp.allclose(jax.grad(loss)(jnp.array([3.0, 4.0])), jnp.array([0.6, 0.8]))
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `max_norm`: a number, not negative. It may be traced.
    - `axis`: by default there is one norm, that of all floating leaves together. Otherwise,
        each leaf has norms of its own along this axis or these axes: with `-1`, one for
        every row.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \bar y \cdot \min\left(1,
    \frac{\mathrm{max\_norm}}{\lVert\bar y\rVert}\right)$ with the 2-norm, computed so that
    no square overflows; a gradient that is short enough is passed on to the bit. So is one
    that is not finite, as no direction of it is left: see
    [`eqx_grads.zero_nonfinite_gradient`][]. Higher orders differentiate that; where the
    norm is `max_norm`, the slope is that of the inside.

    **Raises:**

    [`eqx_grads.RuleError`][] if `max_norm` is negative (unless it is traced) or not a
    scalar, or if a leaf has no such axis.

    Source: Pascanu, Mikolov and Bengio, [On the difficulty of training recurrent neural
    networks](https://arxiv.org/abs/1211.5063), 2013.
    """
    check_not_negative("clip_gradient_norm", "max_norm", max_norm)
    check_axis("clip_gradient_norm", axis, x)
    return _clip_gradient_norm(x, max_norm, axis=axis)


@custom_vjp
def _clip_gradient_norm(x, max_norm, *, axis):
    del max_norm, axis
    return x


@_clip_gradient_norm.def_fwd
def _clip_gradient_norm_fwd(x, max_norm, *, axis):
    del axis
    return x, max_norm


@_clip_gradient_norm.def_bwd
def _clip_gradient_norm_bwd(max_norm, ct, *, axis):
    return _by_norm(ft.partial(_clip_norm, max_norm), ct, axis), None


def _by_norm(fn, ct, axis):
    """`fn(x, scale, ratio)` of the leaves, with their common norm or each with its own."""
    if axis is not None:
        return jax.tree.map(lambda x: fn(x, *scaled_norm([x], axis)), ct)
    common = scaled_norm(jax.tree.leaves(ct))
    return jax.tree.map(lambda x: fn(x, *common), ct)


def _clip_norm(max_norm, x, scale, ratio):
    max_norm = jnp.asarray(max_norm).astype(ratio.dtype)
    is_long = scale * ratio > max_norm
    unit = _unit(x, scale, ratio)
    shortened = unit * max_norm.astype(unit.dtype)
    return jnp.where(is_long, shortened.astype(x.dtype), x)


def normalize_gradient(
    x: PyTree, axis: int | tuple[int, ...] | None = None, *, eps: ArrayLike = 0.0
) -> PyTree:
    r"""Bring the gradient to length one; its direction stays.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: 1e-30 * jnp.sum(eqg.normalize_gradient(x) ** 2)
        assert jnp.allclose(jax.grad(loss)(jnp.array([3.0, 4.0])), jnp.array([0.6, 0.8]))
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `axis`: as for [`eqx_grads.clip_gradient_norm`][].
    - `eps`: is added to the norm before it divides, so that a gradient which is not much
        longer than this stays short. It may be traced.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \frac{\bar y}{\lVert\bar y\rVert +
    \mathrm{eps}}$ with the 2-norm, computed so that no square over- or underflows; zero
    where $\bar y$ is zero, and NaN where it is not finite. Higher orders differentiate that.

    **Raises:**

    As [`eqx_grads.clip_gradient_norm`][], with `eps` in place of `max_norm`.
    """
    check_not_negative("normalize_gradient", "eps", eps)
    check_axis("normalize_gradient", axis, x)
    return _normalize_gradient(x, eps, axis=axis)


@custom_vjp
def _normalize_gradient(x, eps, *, axis):
    del eps, axis
    return x


@_normalize_gradient.def_fwd
def _normalize_gradient_fwd(x, eps, *, axis):
    del axis
    return x, eps


@_normalize_gradient.def_bwd
def _normalize_gradient_bwd(eps, ct, *, axis):
    return _by_norm(ft.partial(_normalize, eps), ct, axis), None


def _normalize(eps, x, scale, ratio):
    # With eps zero or not, a gradient of zero is not divided by zero.
    length = ratio + jnp.asarray(eps).astype(ratio.dtype) / scale
    return _unit(x, scale, length).astype(x.dtype)


def _unit(x, scale, length):
    return divide(divide(x, scale), jnp.where(length == 0, 1, length))


def zero_nonfinite_gradient(x: PyTree) -> PyTree:
    r"""Set to zero what is NaN or infinite in the gradient.

    A firewall: one bad example or time step does not spoil the rest. To find out where it
    comes from, use [`eqx_grads.watch_gradient`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: jnp.sum(jnp.sqrt(eqg.zero_nonfinite_gradient(x)))
        assert jnp.array_equal(jax.grad(loss)(jnp.array([0.0, 4.0])), jnp.array([0.0, 0.25]))
        ```

    **Arguments:**

    - `x`: any PyTree.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \bar y$ where that is finite and zero
    elsewhere, for each element. Higher orders differentiate that.
    """
    return _zero_nonfinite_gradient(x)


@custom_vjp
def _zero_nonfinite_gradient(x):
    return x


@_zero_nonfinite_gradient.def_fwd
def _zero_nonfinite_gradient_fwd(x):
    return x, None


@_zero_nonfinite_gradient.def_bwd(symbolic_zeros=True)
def _zero_nonfinite_gradient_bwd(_, ct):
    return (jax.tree.map(lambda c: jnp.where(jnp.isfinite(c), c, 0), ct),)


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
        assert abs(jnp.mean(noisy) - 1.0) < 0.01
        assert abs(jnp.std(noisy) - 0.1) < 0.01
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `key`: a random key. Each leaf has noise of its own. The same key makes the same
        noise: give each training step, each step of a scan and each example a key of its
        own.
    - `stddev`: the standard deviation, a number or an array that broadcasts to every
        floating leaf of `x`. It may be traced. Neelakantan et al. let it fall with the
        training step $t$, as $\sqrt{\eta / (1 + t)^{0.55}}$ with an $\eta$ of 0.01 to 1.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x = \bar y + \sigma\,\varepsilon$, with
    $\sigma$ for `stddev` and $\varepsilon$ from the normal distribution of variance one.
    Higher orders differentiate that: the noise is a constant.

    **Raises:**

    [`eqx_grads.RuleError`][] if `stddev` is negative (unless it is traced) or complex, or
    would broadcast a leaf to another shape.

    Source: Neelakantan et al., [Adding gradient noise improves learning for very deep
    networks](https://arxiv.org/abs/1511.06807), 2015.
    """
    check_not_negative("noise_gradient", "stddev", stddev, scalar=False)
    check_fits("noise_gradient", "stddev", stddev, x)
    return _noise_gradient(x, stddev, key)


@custom_vjp
def _noise_gradient(x, stddev, key):
    del stddev, key
    return x


@_noise_gradient.def_fwd
def _noise_gradient_fwd(x, stddev, key):
    return x, (stddev, key)


@_noise_gradient.def_bwd
def _noise_gradient_bwd(residuals, ct):
    stddev, key = residuals
    cts, treedef = jax.tree.flatten(ct)
    keys = jr.split(key, len(cts)) if cts else []
    noise = [jr.normal(k, c.shape, c.dtype) for k, c in zip(keys, cts, strict=True)]
    noisy = [c + scale(n, stddev) for n, c in zip(noise, cts, strict=True)]
    return jax.tree.unflatten(treedef, noisy), None, None


def cast_gradient(x: PyTree, dtype: Any) -> PyTree:
    r"""Round the gradient to the precision of `dtype`, as if it had been sent in that.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        loss = lambda x: 1.2345678 * eqg.cast_gradient(x, jnp.float16)
        assert jax.grad(loss)(1.0) == float(jnp.float16(1.2345678))
        ```

    **Arguments:**

    - `x`: any PyTree.
    - `dtype`: a floating dtype; those of 8 bits are among them.

    **Returns:**

    `x`, unchanged.

    **Derivative:**

    Forward mode is the identity. Backward, $\bar x$ is $\bar y$ rounded to the nearest
    number of that `dtype` (subnormal numbers included; what is too large is infinite, or
    NaN if `dtype` has no infinity), in the dtype of `x`, which is the one that JAX wants a
    gradient to have. A compiler may drop a cast and the cast back; it does not drop this.
    Higher orders take the rounding as the identity.

    **Raises:**

    [`eqx_grads.RuleError`][] if `dtype` is not a floating one.
    """
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        is_floating = False
    else:
        is_floating = jnp.issubdtype(dtype, jnp.floating)
    if not is_floating:
        raise rule_error(
            "`cast_gradient` was given a dtype that is not a floating one.",
            f"`dtype` is {dtype}",
            do="Use one like `jnp.bfloat16`. Of a complex gradient, it is the dtype of the "
            "real and the imaginary part.",
        )
    return _cast_gradient(x, dtype=dtype)


@custom_vjp
def _cast_gradient(x, *, dtype):
    del dtype
    return x


@_cast_gradient.def_fwd
def _cast_gradient_fwd(x, *, dtype):
    del dtype
    return x, None


@_cast_gradient.def_bwd(symbolic_zeros=True)
def _cast_gradient_bwd(_, ct, *, dtype):
    return (jax.tree.map(ft.partial(_round_to, dtype), ct),)


def _round_to(dtype, x):
    if jnp.iscomplexobj(x):
        return jax.lax.complex(_round_to(dtype, jnp.real(x)), _round_to(dtype, jnp.imag(x)))
    here, there = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if there.nmant >= here.nmant and there.maxexp >= here.maxexp:
        return x
    # In single precision at least, as XLA takes subnormal numbers for zeros in places.
    wide = x.astype(promote([x, jnp.float32]))
    here = jnp.finfo(wide.dtype)
    # XLA removes a pair of casts where it may compute with excess precision, but never this.
    rounded = jax.lax.reduce_precision(wide, here.nexp, min(there.nmant, here.nmant))
    if there.minexp > here.minexp:
        step = float(there.smallest_subnormal)
        subnormal = jnp.abs(wide) < float(there.smallest_normal)
        rounded = jnp.where(subnormal, jnp.round(wide / step) * step, rounded)
    if there.maxexp <= here.maxexp:
        has_infinity = np.isinf(np.asarray(np.inf).astype(dtype))
        beyond = jnp.copysign(jnp.inf, wide) if has_infinity else jnp.nan
        rounded = jnp.where(jnp.abs(rounded) > float(there.max), beyond, rounded)
    rounded = rounded.astype(x.dtype)
    return replace_gradient(rounded, x)
