"""Norms and directions of vectors, angles and distances between them, and deviations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact

from .._errors import rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from .._rules.nan_where import nan_where
from ._arguments import Axis, Numbers, on_arrays
from ._elementwise import corner, inverse, quotient, with_slopes


@on_arrays("x")
def norm(
    x: Numbers,
    ord: float | int | None = None,
    *,
    axis: Axis = None,
    keepdims: bool = False,
) -> Inexact[Array, "..."]:
    r"""Return the norm of a vector, with a derivative that is zero at zero, and right at every
    scale.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(jax.grad(eqg.safe.norm)(jnp.zeros(2)))  # JAX: NaN

        large = jnp.array([3e30, 4e30])  # the squares overflow
        print(f"{eqg.safe.norm(large):.1e}")
        print(jax.grad(eqg.safe.norm)(large).round(3))
        ```

        ```text
        [0. 0.]
        5.0e+30
        [0.6 0.8]
        ```

    **Arguments:**

    - `x`: an array of numbers, real or complex. Half precision is summed in single precision.
    - `ord`: the order $p$ of the norm, any number, as for vectors in NumPy; 2 by default. It
        is $(\sum_i |x_i|^p)^{1/p}$, the largest magnitude for `jnp.inf`, the smallest for
        `-jnp.inf`, and for 0 the number of elements that are not zero.
    - `axis`: the axis of the vectors. Several axes together have the 2-norm of all their
        elements, the Frobenius norm; `None` takes all axes.
    - `keepdims`: whether the axes that were reduced are kept, with length one.

    **Returns:**

    The norms, real. The norm of an empty vector is zero for a positive `ord`.

    **Derivative:**

    With $u = x / y$ for the norm $y$, $\dot y = \sum_i u_i |u_i|^{p-2} \dot x_i$. For `jnp.inf`
    and `-jnp.inf`, the mean of $\operatorname{sign}(x_i) \dot x_i$ over the elements of that
    magnitude; for 0, zero. At the zero vector, which is the minimum, the derivative is zero,
    and so is the derivative by an element that is zero. An infinite element outweighs all
    finite ones if $p > 1$. Both modes and all orders.

    Second derivatives do not exist at zero, and are NaN there, even where a mask on the result
    drops them. Mask the argument, with [`eqx_grads.safe.where`][] under `jax.vmap`. The second
    derivatives of `norm(x)**2`, which is smooth, are NaN too: write `jnp.sum(x**2)`. For
    kernels of a distance, see
    [NaN](../guides/my-gradient-is/nan.md#how-do-i-write-a-kernel-of-a-distance). With respect
    to an element that is zero, second derivatives are NaN unless $2 \le p < \infty$. For
    `jnp.inf` and `-jnp.inf`, they are NaN where several elements are the largest, or the
    smallest.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` does not hold numbers, for an axis that `x` does not have,
    or if `ord` is not a number. Also if `ord` is given together with several axes: in NumPy,
    this is the norm of a matrix.
    """
    if ord is not None and len(axis) > 1:
        raise rule_error(
            "`safe.norm` was given an `ord` and several axes, which is the norm of a matrix "
            "in NumPy.",
            f"`x` is {type_of(x)}, `ord` is {ord!r}, the axes are {axis}",
            do="For the norm of all the elements, leave out `ord`, or reshape `x` to a vector. "
            "For norms of rows, pass `axis=-1`.",
        )
    return _norm(x, ord, axis)


def _norm(x, ord, axes):
    """The norm. The axes are kept."""
    if jnp.iscomplexobj(x):
        own = axes if ord in (None, 2) else ()
        x = _polar(_as_pairs(x), axes=(*own, x.ndim))[0][..., 0]
        axes = tuple(i for i in axes if i not in own)
    if ord in (None, 2):
        return _polar(x, axes=axes)[0]
    if ord == 0:
        return jnp.sum((x != 0).astype(x.dtype), axes, keepdims=True)
    if ord == 1:
        return jnp.sum(_abs(x), axes, keepdims=True)
    return _p_norm(x, p=ord, axes=axes)


_abs = with_slopes(jnp.abs, lambda _, x: corner(jnp.sign(x), x == 0, x))


# With u for the elements divided by the norm, the slopes are sign(u) |u|^(p - 1). Where p is
# infinite, the elements as large as the norm share the derivative.
@custom_jvp
def _p_norm(x, *, p, axes):
    """The norm of another order, not zero. Neither overflows nor underflows on the way."""
    size = jnp.abs(x)
    if p > 0:
        end = jnp.max(size, axes, keepdims=True, initial=0.0)
    else:
        end = jnp.min(size, axes, keepdims=True, initial=jnp.inf)
    if math.isinf(p):
        return end
    scale = _power_of_two(end)
    n = scale * jnp.sum((size / scale) ** p, axes, keepdims=True) ** (1 / p)
    return jnp.where(end == jnp.inf, end, n)


@_p_norm.def_jvp
def _p_norm_jvp(primals, tangents, *, p, axes):
    (x,), (t_x,) = primals, tangents
    out = _p_norm(x, p=p, axes=axes)
    if math.isinf(p):
        size, rounding = jnp.abs(x), 4 * float(jnp.finfo(x.dtype).eps)
        # Not `==`: XLA may compute `x` once more for the comparison, and round it otherwise.
        is_equal = size >= out * (1 - rounding) if p > 0 else size <= out * (1 + rounding)
        count = jnp.sum(is_equal, axes, keepdims=True)
        slopes = jnp.sign(x) * (is_equal.astype(x.dtype) / count.astype(x.dtype))
        slopes = corner(slopes, is_equal & (count > 1), x, axes=axes)
    else:
        if p > 0:
            x = _finite(x, jnp.any(jnp.isinf(x), axes, keepdims=True))
        n = jnp.broadcast_to(_p_norm(x, p=p, axes=axes), x.shape)
        # Not a quotient of quotients, which the compiler would make one of products.
        scale = _power_of_two(n)
        u = quotient(x, scale) * inverse(n / scale)
        size = jnp.abs(u) if p > 1 else jnp.where(u == 0, 1, jnp.abs(u))
        slopes = corner(jnp.sign(u) * size ** (p - 1), n == 0, x, axes=axes)
    slopes = slopes if 2 < p < math.inf else corner(slopes, x == 0, x)
    return out, jnp.sum(slopes * t_x, axes, keepdims=True)


@on_arrays("x")
def normalize(x: Numbers, *, axis: Axis = -1) -> Inexact[Array, "..."]:
    r"""Return `x / norm(x)`: vectors of norm one; the zero vector remains zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([[3e-30, 4e-30], [0.0, 0.0]])
        unit = eqg.safe.normalize(x)
        print(unit.round(3))
        print(jnp.isfinite(jax.jacobian(eqg.safe.normalize)(x)).all())
        ```

        ```text
        [[0.6 0.8]
         [0.  0. ]]
        True
        ```

    **Arguments:**

    - `x`: an array of numbers, real or complex.
    - `axis`: the axis of the vectors; several axes together are one vector, and `None` takes
        all axes.

    **Returns:**

    An array of the shape of `x`.

    **Derivative:**

    With $u$ for the result: $\dot u = (\dot x - u\, u^\top \dot x) / \lVert x \rVert$. The map
    is its own transpose. The derivative is zero at the zero vector, where the function jumps.
    Both modes and all orders; second derivatives are NaN at the zero vector, and may be NaN
    where $1 / \lVert x \rVert^2$ overflows.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` does not hold numbers, or for an axis that `x` does not
    have.
    """
    if jnp.iscomplexobj(x):
        u = _polar(_as_pairs(x), axes=(*axis, x.ndim))[1]
        return lax.complex(u[..., 0], u[..., 1])
    return _polar(x, axes=axis)[1]


@on_arrays("x", "y", real=True)
def cosine_similarity(x: Numbers, y: Numbers, *, axis: Axis = -1) -> Float[Array, "..."]:
    r"""Return the cosine of the angle between vectors; zero if one of them is zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x, y = jnp.array([1e30, 0.0]), jnp.array([1e-30, 1e-30])
        print(f"{eqg.safe.cosine_similarity(x, y):.3f}")
        print(jax.grad(eqg.safe.cosine_similarity)(jnp.zeros(2), y))
        ```

        ```text
        0.707
        [0. 0.]
        ```

    **Arguments:**

    - `x`, `y`: real arrays that broadcast together.
    - `axis`: the axis of the vectors, or several; `None` takes all.

    **Returns:**

    Numbers from -1 to 1, up to rounding: clip them before you take the angle.

    **Derivative:**

    As for [`eqx_grads.safe.normalize`][] of both vectors. If one vector is zero, where the
    function has no limit, the derivative is zero with respect to both. Both modes and all
    orders; second derivatives with respect to a vector that is zero are NaN.

    **Raises:**

    [`eqx_grads.RuleError`][] if the shapes do not broadcast together, or for an axis that the
    arrays do not have.
    """
    return jnp.sum(_polar(x, axes=axis)[1] * _polar(y, axes=axis)[1], axis)


def pairwise_distance(
    x: Numbers, y: Numbers | None = None, *, ord: float | int = 2
) -> Inexact[Array, "..."]:
    r"""Return the distances of all pairs of points, with a zero derivative where points
    coincide.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        points = jnp.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
        distances = eqg.safe.pairwise_distance(points)
        print(distances[0].round(3))
        grad = jax.grad(lambda x: eqg.safe.pairwise_distance(x).sum())(points)
        print(grad[0].round(3))  # JAX: NaN
        ```

        ```text
        [0. 5. 0.]
        [-1.2 -1.6]
        ```

    It forms the differences, as inner products lose all digits of a small distance. Outside of
    `jit`, and in the derivative, this takes memory for `n * m * d` differences.

    **Arguments:**

    - `x`: points, `(..., n, d)`, real or complex.
    - `y`: points, `(..., m, d)`; `x` if left out.
    - `ord`: as for [`eqx_grads.safe.norm`][].

    **Returns:**

    The distances, `(..., n, m)`.

    **Derivative:**

    The derivative of [`eqx_grads.safe.norm`][] of the differences. Both modes and all orders.
    Second derivatives by points that coincide are NaN, even where the kernel that is computed
    from their distance is smooth: see the [NaN
    page](../guides/my-gradient-is/nan.md#how-do-i-write-a-kernel-of-a-distance). If `y` is left
    out, or is `x` itself, the distance of a point to itself is a constant, and all its
    derivatives are zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if the points have different dimensions, or if `ord` is not a
    number.
    """
    return _pairwise_distance(x, None if y is x else y, ord=ord)


@on_arrays("x", "y", broadcast=False)
def _pairwise_distance(x, y=None, *, ord=None):
    others = x if y is None else y
    sizes = zip(reversed(x.shape[:-2]), reversed(others.shape[:-2]), strict=False)
    fit = x.shape[-1:] == others.shape[-1:] and all(1 in (m, n) or m == n for m, n in sizes)
    if min(x.ndim, others.ndim) < 2 or not fit:
        raise rule_error(
            "`safe.pairwise_distance` was given points that do not fit together.",
            f"`x` is {type_of(x)}, `y` is {type_of(y)}",
            do="Pass arrays `(..., n, d)` and `(..., m, d)` whose batches broadcast together.",
        )
    n_axes = max(x.ndim, others.ndim)
    first, second = (jnp.expand_dims(z, range(n_axes - z.ndim)) for z in (x, others))
    gaps = first[..., :, None, :] - second[..., None, :, :]
    if y is not None:
        return _norm(gaps, ord, (n_axes,))[..., 0]
    # A point does not move away from itself: the distance is a constant, zero or NaN.
    is_self = jnp.eye(x.shape[-2], dtype=bool)[(None,) * (n_axes - 2)]
    of_self = lax.stop_gradient(jnp.real(jnp.sum(gaps, -1)))
    gaps = jnp.where(is_self[..., None], 1, gaps)
    return jnp.where(is_self, of_self, _norm(gaps, ord, (n_axes,))[..., 0])


@on_arrays("x")
def std(
    x: Numbers,
    axis: Axis = None,
    *,
    ddof: float | int = 0,
    keepdims: bool = False,
    where: Numbers | None = None,
) -> Float[Array, "..."]:
    r"""Return the standard deviation, with a zero derivative where all numbers are equal.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(jax.grad(eqg.safe.std)(jnp.full(3, 0.1)))  # JAX: NaN or noise
        print(f"{eqg.safe.std(jnp.array([-1e30, 1e30])):.1e}")  # JAX: inf
        ```

        ```text
        [0. 0. 0.]
        1.0e+30
        ```

    The variance needs no such function: the derivative of `jnp.var` is right.

    **Arguments:**

    - `x`: an array of numbers, real or complex.
    - `axis`: the axis or axes to reduce; `None` takes all.
    - `ddof`: the divisor is the number of elements minus `ddof`.
    - `keepdims`: whether the axes that were reduced are kept, with length one.
    - `where`: booleans that broadcast to `x`: which elements to include. The others may
        be infinite or NaN.

    **Returns:**

    The standard deviations, real. NaN where the divisor is not positive, as in NumPy, with a
    zero derivative.

    **Derivative:**

    With $c = x - \operatorname{mean}(x)$ and $m$ for the divisor: $\dot y = c^\top \dot x /
    (\lVert c \rVert \sqrt m)$, and the reverse rule is its transpose. The derivative is zero
    where $c$ is zero, at the minimum. Both modes and all orders. Second derivatives are NaN
    there, except for a single number, whose deviation is a constant.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` does not hold numbers, for an axis that `x` does not have,
    a `where` that does not fit, or a `ddof` that is not a Python number.
    """
    mask = jnp.ones(x.shape, bool) if where is None else where
    divisor = jnp.sum(mask, axis, keepdims=True).astype(jnp.finfo(x.dtype).dtype) - ddof
    pair: tuple[int, ...] = ()
    if jnp.iscomplexobj(x):
        x, pair, divisor = _as_pairs(x), (x.ndim,), divisor[..., None]
        mask = jnp.broadcast_to(mask[..., None], x.shape)
    factor = lax.rsqrt(jnp.where(divisor > 0, divisor, 1))
    out, *_ = _polar(jnp.where(mask, x, 0), mask, factor, axes=axis + pair, center=axis)
    return jnp.squeeze(nan_where(divisor <= 0, out), pair)


# ---------------------------------------------------------------- the rule of the 2-norm


@custom_jvp
def _polar(x, mask: Any = None, factor: Any = 1.0, *, axes, center=None):
    r"""$f \lVert x \rVert$, $x / \lVert x \rVert$, and the first again, from the direction. For
    a real $x$. The axes are kept.

    If the axes `center` are given, the mean over them is subtracted before, of the elements for
    which the mask is true. The others have to be zero. The factor $f$ and `mask` are constants.

    **Derivative:**

    With $u$ for the direction, $n$ for the norm and $P$ for the subtraction of the mean,
    $\dot n = u^\top \dot x$ and $\dot u = (P \dot x - u \dot n) / n$. Both formulas are made of
    the outputs of the function, so that they hold at all orders. Both are zero at zero, where
    they have no derivative.
    """
    # Not `max(abs(x))`: on a CPU, XLA writes the absolute values to memory.
    ends = (of(x, axes, keepdims=True, initial=0.0) for of in (jnp.max, jnp.min))
    largest = jnp.maximum(*map(jnp.abs, ends))
    is_infinite = largest == jnp.inf
    scale = _power_of_two(jnp.where(is_infinite, 1, largest))
    if center is None:
        y = _finite(x, is_infinite) / scale
    else:
        y = x / scale
        # Minus the maximum first: the mean of equal numbers can be rounded.
        top = jnp.max(y, center, keepdims=True, initial=-jnp.inf, where=mask)
        y = _minus_mean(jnp.where(mask, y - top, 0), mask, center)
    length = lambda y: jnp.sqrt(jnp.sum(y * y, axes, keepdims=True))
    ratio = length(y)
    n = alone = scale * (ratio * factor)
    if center is None:
        # Infinite elements are not looked at again: XLA then stores no array.
        alone = jnp.where(is_infinite, largest, scale * (length(x / scale) * factor))
        n = jnp.where(is_infinite, largest, n)
    return alone, y / jnp.where(ratio == 0, 1, ratio), n


@_polar.def_jvp
def _polar_jvp(primals, tangents, *, axes, center):
    (x, mask, factor), t_x = primals, tangents[0]
    _, u, n = _polar(*primals, axes=axes, center=center)
    is_corner = n == 0
    if center is not None:  # one number is equal to its mean, whatever it is
        can_change = jnp.sum(mask, center, keepdims=True) > 1
        is_corner = is_corner & jnp.any(can_change, axes, keepdims=True)
    at_zero = lambda slope: corner(slope, is_corner, x, axes=axes)
    # The mean need not be subtracted here: the sum of the directions is zero.
    t_n = jnp.sum(at_zero(u) * t_x, axes, keepdims=True)
    if center is not None:
        t_x = _minus_mean(t_x, mask, center)
    # Not as a quotient, whose derivative has the square of the norm: that may be out of range.
    t_u = (t_x - u * t_n) * at_zero(inverse(n / factor))
    return (n, u, n), (factor * t_n, t_u, factor * t_n)


def _minus_mean(x, mask, axes):
    count = jnp.sum(mask, axes, keepdims=True).astype(x.dtype)
    mean = jnp.sum(x, axes, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(mask, x - mean, 0)


def _power_of_two(x):
    """A power of two near `x`, one for zero.

    Division by it is exact: equal elements remain equal, and differences are not rounded. Its
    inverse, by which the compiler may multiply instead, is not subnormal.
    """
    info = jnp.finfo(x.dtype)
    integer = jnp.uint32 if info.bits == 32 else jnp.uint64
    exponent = ((1 << info.nexp) - 1) << info.nmant
    bits = lax.bitcast_convert_type(x, integer) & integer(exponent)
    power = lax.bitcast_convert_type(bits, x.dtype)
    return jnp.where(power == 0, 1, jnp.minimum(power, 1 / info.tiny))


def _finite(x, is_infinite):
    """The vector. Where its norm is infinite, the signs of the elements that are infinite: they
    outweigh the others."""
    return jnp.where(is_infinite, jnp.where(jnp.isinf(x), jnp.sign(x), 0), x)


def _as_pairs(x: jax.Array) -> jax.Array:
    """Complex numbers as vectors of their real and imaginary parts, along a new last axis."""
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)
