"""Straight-through uniform quantizers, whose scale or range may be learned."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._errors import check_flags, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import (
    as_axes,
    as_bits,
    as_floats,
    broadcast_parameter,
    check_parameter,
    check_positive,
    is_known,
    widen,
)
from ._rounding import round as round_


def fake_quantize(
    x: ArrayLike,
    scale: ArrayLike,
    *,
    zero_point: ArrayLike = 0.0,
    bits: int = 8,
    signed: bool = True,
    narrow: bool = False,
) -> Array:
    r"""Quantize to integers of a few bits and back, straight through.

    $$q = \operatorname{clip}(\operatorname{round}(x / s) + z,\ q_{\min},\ q_{\max}),
    \qquad y = (q - z)\,s$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([0.3, -0.9, 5.0])
        y = eqg.ste.fake_quantize(x, 0.25, bits=3)
        print(y)

        # A clipped element has no gradient; it adds to the gradient of the scale instead.
        loss = lambda x, scale: eqg.ste.fake_quantize(x, scale, bits=3).sum()
        ct_x, ct_scale = jax.grad(loss, (0, 1))(x, 0.25)
        print(ct_x)
        print(f"{ct_scale:.3f}")
        ```

        ```text
        [ 0.25 -1.    0.75]
        [1. 1. 0.]
        2.400
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `scale`: the step of the grid. Positive; a number, or an array that broadcasts to `x`.
        Along axes that share a scale, this array has size one.
    - `zero_point`: the integer that represents zero, a number or an array that broadcasts to
        `x`. It is rounded. Unless it is traced, it has to be in the range of the integers.
    - `bits`: 2 to 24, or 1 if neither `signed` nor `narrow`.
    - `signed`: whether the integers go from $-2^{b-1}$ to $2^{b-1} - 1$, or from zero to
        $2^b - 1$.
    - `narrow`: whether to leave out the smallest integer, so that a signed range is
        symmetric.

    **Returns:**

    An array like `x` with at most $2^b$ different values for each scale. Half precision is
    computed in single precision.

    **Derivative:**

    With $u = x / s$: where $q$ is not clipped,
    $\dot y = \dot x + (\operatorname{round}(u) - u)\,\dot s$; where it is clipped,
    $\dot y = (q - z)\,\dot s - s\,\dot z$. The reverse rule is the transpose, summed over
    the elements that share a scale. An element that is rounded to the smallest or the
    largest integer is not clipped. Both modes and all orders: straight through,
    $\operatorname{round}(u) - u$ is a constant.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not an array of floats, a parameter does not broadcast
    to it, or the number of bits or the zero point is out of range.
    """
    name = "ste.fake_quantize"
    low, high = _integer_range(name, bits, signed, narrow)
    check_positive(name, "scale", scale)
    check_parameter(name, "zero point", zero_point)
    x = as_floats(name, x)
    wide = widen(x)
    scale = broadcast_parameter(name, "scale", scale, wide)
    zeros = broadcast_parameter(name, "zero point", zero_point, wide)
    _check_zero_point(zero_point, low, high)
    limits = low, high, float(jnp.finfo(x.dtype).max)
    return _fake_quantize(wide, scale, round_(zeros), limits=limits).astype(x.dtype)


def _check_zero_point(zero_point, low, high):
    if not is_known(zero_point):
        return
    rounded = np.round(np.asarray(zero_point, np.float64))
    if not np.all((low <= rounded) & (rounded <= high)):  # NaN is not
        raise rule_error(
            "`ste.fake_quantize` was given a zero point that is not an integer in its range.",
            f"`zero_point` is {zero_point!r:.60}, the integers are from {low} to {high}",
            do="Give it a zero point in the range. Are `signed` and `bits` right?",
        )


# The limits are the smallest and the largest integer, and the largest number of the result: the
# largest element may be rounded up.
@custom_jvp
def _fake_quantize(x, scale, zero_point, *, limits):
    low, high, largest = limits
    q = jnp.clip(jnp.round(x / scale) + zero_point, low, high)
    return jnp.clip((q - zero_point) * scale, -largest, largest)


@_fake_quantize.def_jvp
def _fake_quantize_jvp(primals, tangents, *, limits):
    x, scale, zero_point = primals
    t_x, t_scale, t_zero_point = tangents
    low, high, _ = limits
    q = jnp.round(x / scale) + zero_point
    inside = (low <= q) & (q <= high)
    error = _rounding_error(x / scale, inside)
    t_inside = t_x + error * t_scale
    t_clipped = (jnp.clip(q, low, high) - zero_point) * t_scale - scale * t_zero_point
    t_out = jnp.where(inside, t_inside, t_clipped)
    return _fake_quantize(x, scale, zero_point, limits=limits), t_out


def _rounding_error(u, inside):
    """`round(u) - u`, a constant. Zero outside, where it may be `inf - inf`."""
    return jnp.where(inside, jax.lax.stop_gradient(jnp.round(u) - u), 0)


def absmax_scale(
    x: ArrayLike,
    *,
    bits: int = 8,
    signed: bool = True,
    axis: int | tuple[int, ...] | None = None,
) -> Array:
    r"""Return the scale that maps the largest magnitude in an array to the largest integer.

    $$s = \max |x| / q_{\max}$$

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        weight = jnp.array([[0.5, -1.0, 0.1], [3.0, 2.0, 1.0]])
        scale = eqg.ste.absmax_scale(weight, bits=3, axis=1)  # one for each row
        print(scale.round(3))

        quantize = lambda w: eqg.ste.fake_quantize(w, eqg.ste.absmax_scale(w))
        print([f"{y:.2f}" for y in quantize(weight)[1]])
        print(jax.grad(lambda w: quantize(w).sum())(weight))
        ```

        ```text
        [[0.333]
         [1.   ]]
        ['3.00', '2.01', '0.99']
        [[1. 1. 1.]
         [1. 1. 1.]]
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `bits`, `signed`: as for [`eqx_grads.ste.fake_quantize`][].
    - `axis`: the axes that share a scale, all of them by default.

    **Returns:**

    The scales: an array of the shape of `x`, but with size one along these axes (of shape `()`
    if `axis` is `None`). It broadcasts to `x`. Where all of `x` is zero, the smallest normal
    number.

    **Derivative:**

    Zero: the scale is a constant, as with `jax.lax.stop_gradient`. For a learned scale, see
    [`eqx_grads.ste.lsq`][].

    **Raises:**

    As [`eqx_grads.ste.fake_quantize`][].
    """
    _, high = _integer_range("ste.absmax_scale", bits, signed)
    x = jax.lax.stop_gradient(as_floats("ste.absmax_scale", x))
    axes = as_axes("ste.absmax_scale", axis, x)
    largest = jnp.max(jnp.abs(x), axes, keepdims=axis is not None, initial=0)
    exact = widen(largest) / high
    scale = exact.astype(x.dtype)
    # In half precision, round up: with a smaller scale, the largest element would be clipped.
    scale = jnp.where(
        widen(scale) < exact, jnp.nextafter(scale, jnp.full_like(scale, jnp.inf)), scale
    )
    return jnp.maximum(scale, jnp.finfo(x.dtype).tiny)


def lsq(
    x: ArrayLike,
    step: ArrayLike,
    *,
    bits: int = 8,
    signed: bool = True,
    gradient_scale: float | None = None,
) -> Array:
    r"""Quantize with a learned step size: `fake_quantize` with a rescaled gradient for the
    step.

    [Esser et al. (2020)](https://arxiv.org/abs/1902.08153). The paper initializes the step
    with `2 * mean(|x|) / sqrt(q_max)`. It has to stay positive.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([0.3, -0.9, 5.0])
        print(eqg.ste.lsq(x, 0.25, bits=3))

        loss = lambda x, step: eqg.ste.lsq(x, step, bits=3).sum()
        ct_x, ct_step = jax.grad(loss, (0, 1))(x, 0.25)
        print(ct_x)
        print(f"{ct_step:.3f}")
        ```

        ```text
        [ 0.25 -1.    0.75]
        [1. 1. 0.]
        0.800
        ```

    **Arguments:**

    - `x`: floats of any shape.
    - `step`: positive, a number or an array that broadcasts to `x`.
    - `bits`, `signed`: as for [`eqx_grads.ste.fake_quantize`][]; two bits or more, or one if
        not `signed`.
    - `gradient_scale`: $g$ below. By default $1 / \sqrt{N q_{\max}}$, where $N$ is how many
        elements of `x` share a step. The paper does not count the batch in $N$: if `x` is a
        batch of activations, give `gradient_scale`.

    **Returns:**

    An array like `x` with at most $2^b$ different values for each step.

    **Derivative:**

    With $u = x / s$: where $q_{\min} < u < q_{\max}$,
    $\dot y = \dot x + (\operatorname{round}(u) - u)\,g\,\dot s$; elsewhere
    $\dot y = q\,g\,\dot s$ with $q$ the nearer of $q_{\min}$ and $q_{\max}$. The reverse rule
    is the transpose. As published, $u = q_{\min}$ and $u = q_{\max}$ count as clipped, as does
    any $u$ outside that would be rounded to them. Forward mode has the factor $g$ too. Both
    modes and all orders; higher derivatives are zero.

    **Raises:**

    As [`eqx_grads.ste.fake_quantize`][].
    """
    low, high = _integer_range("ste.lsq", bits, signed)
    check_positive("ste.lsq", "step", step)
    if gradient_scale is not None:
        check_positive("ste.lsq", "gradient scale", gradient_scale)
        if np.shape(gradient_scale) != ():
            raise rule_error(
                "The gradient scale of `ste.lsq` is not one number.",
                f"`gradient_scale` is {type_of(gradient_scale)}",
                do="Give one number for all steps.",
            )
    x, step = as_floats("ste.lsq", x), jnp.asarray(step)
    if gradient_scale is None:
        sharing = max(x.size, 1) / max(step.size, 1)
        gradient_scale = 1 / math.sqrt(sharing * high)
    wide = widen(x)
    step = broadcast_parameter("ste.lsq", "step", step, wide)
    limits = low, high, float(jnp.finfo(x.dtype).max)
    return _lsq(wide, step, limits=limits, gradient_scale=gradient_scale).astype(x.dtype)


@custom_jvp
def _lsq(x, step, *, limits, gradient_scale):
    del gradient_scale
    low, high, largest = limits
    levels = jnp.round(jnp.clip(x / step, low, high))
    levels = jnp.where(levels == 0, 0, levels)  # no minus zero
    return jnp.clip(levels * step, -largest, largest)


@_lsq.def_jvp
def _lsq_jvp(primals, tangents, *, limits, gradient_scale):
    x, step = primals
    t_x, t_step = tangents
    low, high, _ = limits
    u = x / step
    inside = (low < u) & (u < high)
    bound = jnp.clip(jax.lax.stop_gradient(u), low, high)
    d_step = jnp.where(inside, _rounding_error(u, inside), bound) * gradient_scale
    out = _lsq(x, step, limits=limits, gradient_scale=gradient_scale)
    return out, jnp.where(inside, t_x, 0) + d_step * t_step


def _integer_range(name, bits, signed, narrow=False):
    """The smallest and the largest integer of this number of bits."""
    check_flags(name, signed=signed, narrow=narrow)
    bits = as_bits(name, bits, signed, narrow)
    low = -(2 ** (bits - 1)) if signed else 0
    return low + bool(narrow), low + 2**bits - 1
