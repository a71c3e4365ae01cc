"""Angles and distances between vectors."""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Inexact

from .._errors import rule_error, type_of
from .._tangent_spaces import promote
from ._dtypes import broadcast, real_arrays
from ._norms import check_order, norm_of, normalize
from ._reduction_arguments import as_inexact, axes_of, Axis, in_single


def cosine_similarity(x: ArrayLike, y: ArrayLike, *, axis: Axis = -1) -> Float[Array, "..."]:
    r"""The cosine of the angle between vectors; zero if one of them is zero.

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

    That of [`eqx_grads.safe.normalize`][] of both: zero with respect to a vector that is zero,
    where the function has no limit, and with respect to the other one. Both modes and all
    orders; second derivatives with respect to a vector that is zero are NaN.

    **Raises:**

    [`eqx_grads.RuleError`][] if a number is complex, if the shapes do not broadcast together,
    or for an axis that the arrays do not have.
    """
    given = {"x": x, "y": y}
    x, y = broadcast("cosine_similarity", given, real_arrays("cosine_similarity", **given))
    return _cosine(x, y, axes=axes_of("cosine_similarity", axis, x))


@ft.partial(jax.jit, static_argnames=("axes",))
def _cosine(x, y, *, axes):
    u, v = normalize(in_single(x), axis=axes), normalize(in_single(y), axis=axes)
    return jnp.sum(u * v, axes).astype(x.dtype)


def pairwise_distance(
    x: ArrayLike, y: ArrayLike | None = None, *, ord: float | int = 2
) -> Inexact[Array, "..."]:
    r"""The distances of all pairs of points, with the derivative zero where points coincide.

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

    The differences are formed, as inner products lose all digits of a small distance. Outside
    of `jit`, and in the derivative, this takes memory for `n * m * d` differences.

    **Arguments:**

    - `x`: points, `(..., n, d)`, real or complex.
    - `y`: points, `(..., m, d)`; `x` if left out.
    - `ord`: that of [`eqx_grads.safe.norm`][]: 2, 1 or `jnp.inf`.

    **Returns:**

    The distances, `(..., n, m)`.

    **Derivative:**

    That of [`eqx_grads.safe.norm`][] of the differences. Both modes and all orders. Second
    derivatives by points that coincide are NaN, also where the kernel that is computed from
    their distance is smooth: see the
    [recipe](../recipes/nan-and-zero.md#how-do-i-write-a-kernel-of-a-distance).
    If `y` is left out, or is `x` itself, the distance of a point to itself is a constant, and
    all its derivatives are zero.

    **Raises:**

    [`eqx_grads.RuleError`][] if the points have different dimensions, or for another `ord`.
    """
    is_self = y is None or y is x
    x = as_inexact("pairwise_distance", x)
    y = x if is_self else as_inexact("pairwise_distance", y, "y")
    if min(x.ndim, y.ndim) < 2 or x.shape[-1] != y.shape[-1]:
        raise rule_error(
            "`safe.pairwise_distance` was not given points of one dimension.",
            f"`x` is {type_of(x)}, `y` is {type_of(y)}",
            do="Pass arrays `(..., n, d)` and `(..., m, d)`.",
        )
    check_order("pairwise_distance", ord)
    dtype = promote([x, y])
    pairs = [x.astype(dtype)[..., :, None, :], y.astype(dtype)[..., None, :, :]]
    pairs = broadcast("pairwise_distance", {"x": x, "y": y}, pairs)
    return _distance(*pairs, ord=ord, is_self=is_self)


@ft.partial(jax.jit, static_argnames=("ord", "is_self"))
def _distance(x, y, *, ord, is_self):
    differences = in_single(x) - in_single(y)
    # A point does not move away from itself.
    others = None
    if is_self:
        others = ~jnp.eye(x.shape[-2], dtype=bool)[..., None]
        others = jnp.broadcast_to(others, (*x.shape[:-1], 1))
    norms = norm_of(differences, others, ord=ord, axes=(x.ndim - 1,), keepdims=False)
    return norms.astype(jnp.finfo(x.dtype).dtype)
