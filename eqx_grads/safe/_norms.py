"""Norms of vectors, and vectors of unit norm."""

import functools as ft
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Inexact

from .._errors import check_flags, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from .._rules.elementwise import elementwise
from ._corner import corner
from ._polar import as_pairs, polar
from ._reduction_arguments import as_inexact, axes_of, Axis, in_single, squeeze


def norm(
    x: ArrayLike,
    ord: float | int | None = None,
    *,
    axis: Axis = None,
    keepdims: bool = False,
) -> Inexact[Array, "..."]:
    r"""The norm of a vector, with the derivative zero at zero, and right at every scale.

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
    - `ord`: 2, which is the default, 1 or `jnp.inf`.
    - `axis`: the axis of the vectors. Several axes together have the 2-norm of all their
        elements, the Frobenius norm; `None` takes all axes.
    - `keepdims`: whether the axes that were reduced are kept, with length one.

    **Returns:**

    The norms, real. That of an empty vector is zero.

    **Derivative:**

    With $y = \lVert x \rVert_2$: $\dot y = x^\top \dot x / y$ and $\bar x = x \bar y / y$. For
    `ord=1`, $\dot y = \sum_i \operatorname{sign}(x_i) \dot x_i$. For `ord=jnp.inf`, the mean of
    this over the elements of the largest magnitude. At zero, which is the minimum, the
    derivative is zero, and so is that of each $|x_i|$ at $x_i = 0$. An infinite element
    outweighs all finite ones. Both modes and all orders.

    Second derivatives do not exist at zero, and are NaN there, also where a mask on the result
    drops them: mask the argument, with [`eqx_grads.safe.where`][] under `jax.vmap`. So are
    those of `norm(x)**2`, which is smooth: write `jnp.sum(x**2)`. For kernels of a distance,
    there is a [recipe](../recipes/nan-and-zero.md#how-do-i-write-a-kernel-of-a-distance).
    With `ord=1`, they are NaN by an element that is zero, and with `ord=jnp.inf`, where several
    elements are the largest.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` does not hold numbers, for an axis that `x` does not have,
    if `ord` is another one, or if it is given together with several axes: in NumPy, this is the
    norm of a matrix.
    """
    check_flags("safe.norm", keepdims=keepdims)
    x = as_inexact("norm", x)
    axes = axes_of("norm", axis, x)
    check_order("norm", ord)
    if ord is not None and len(axes) > 1:
        raise rule_error(
            "`safe.norm` was given an `ord` and several axes, which is the norm of a matrix "
            "in NumPy.",
            f"`x` is {type_of(x)}, `ord` is {ord!r}, the axes are {axes}",
            do="For the norm of all the elements, leave out `ord`, or reshape `x` to a vector. "
            "For norms of rows, pass `axis=-1`.",
        )
    ord = 2 if ord is None else ord
    return norm_of(x, None, ord=ord, axes=axes, keepdims=keepdims)


def check_order(name: str, ord: Any) -> None:
    is_number = isinstance(ord, numbers.Real) and not isinstance(ord, bool)
    if ord is not None and not (is_number and ord in (1, 2, math.inf)):
        raise rule_error(
            f"`safe.{name}` was given an `ord` that it does not have.",
            f"`ord` is {ord!r:.60}",
            do="Pass 1, 2 or `jnp.inf`.",
        )


@ft.partial(jax.jit, static_argnames=("ord", "axes", "keepdims"))
def norm_of(x, mask, *, ord, axes, keepdims):
    """The norm. The elements that a `mask` leaves out are zero, and constant."""
    y = in_single(x)
    if ord == 2:
        y, pair = (as_pairs(y), (y.ndim,)) if jnp.iscomplexobj(y) else (y, ())
        mask = mask[..., None] if pair and mask is not None else mask
        out = jnp.squeeze(polar(y, mask, 1.0, axes=axes + pair, center=None)[0], pair)
    elif ord == 1:
        out = jnp.sum(_magnitude(y, mask), axes, keepdims=True)
    else:
        out = _largest(_magnitude(y, mask), mask, axes=axes)
    dtype = jnp.finfo(x.dtype).dtype
    return squeeze(out, axes, keepdims).astype(dtype)


def _magnitude(x, mask):
    """The absolute value, with the derivative zero at zero."""
    if jnp.iscomplexobj(x):
        return norm_of(x[..., None], mask, ord=2, axes=(x.ndim,), keepdims=False)
    return _abs(x, True if mask is None else mask)


def _abs_slope(out, x, mask):
    del out
    return corner(jnp.sign(x), (x == 0) & mask, x)


_abs = elementwise(lambda x, mask: jnp.abs(x), (_abs_slope, None))


@custom_jvp
def _largest(x, mask, *, axes):
    """The largest of magnitudes, with the mean of the derivatives of equal ones."""
    del mask
    return jnp.max(x, axes, keepdims=True, initial=0.0)


@_largest.def_jvp
def _largest_jvp(primals, tangents, *, axes):
    x, mask = primals
    out = _largest(x, mask, axes=axes)
    # Not `x == out`: XLA may compute `x` once more for the comparison, and round it otherwise.
    is_largest = x >= out * (1 - 4 * float(jnp.finfo(x.dtype).eps))
    count = jnp.sum(is_largest, axes, keepdims=True)
    share = is_largest.astype(x.dtype) / count.astype(x.dtype)
    is_tie = is_largest & (count > 1) & (True if mask is None else mask)
    share = corner(share, is_tie, x, axes=axes)
    return out, jnp.sum(share * tangents[0], axes, keepdims=True)


def normalize(x: ArrayLike, *, axis: Axis = -1) -> Inexact[Array, "..."]:
    r"""`x / norm(x)`: vectors of norm one; the zero vector remains zero.

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
    is its own transpose. Zero at the zero vector, where the function jumps. Both modes and all
    orders; second derivatives are NaN at the zero vector.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` does not hold numbers, or for an axis that `x` does not
    have.
    """
    x = as_inexact("normalize", x)
    return _normalize(x, axes=axes_of("normalize", axis, x))


@ft.partial(jax.jit, static_argnames=("axes",))
def _normalize(x, *, axes):
    if jnp.iscomplexobj(x):
        _, u = polar(as_pairs(x), None, 1.0, axes=(*axes, x.ndim), center=None)
        return lax.complex(u[..., 0], u[..., 1])
    return polar(in_single(x), None, 1.0, axes=axes, center=None)[1].astype(x.dtype)
