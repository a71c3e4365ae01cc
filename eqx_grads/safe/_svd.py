"""The singular value decomposition, differentiable at equal singular values and at zero."""

import functools as ft
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Inexact

from .._errors import rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from ._inverse import inverse
from ._reduction_arguments import as_inexact, in_single
from ._spread import adjoint, as_tolerance, default_tolerance, matmul, spread


class SVDResult(NamedTuple):
    """What [`eqx_grads.safe.svd`][] returns: `U`, `S` and `Vh`."""

    U: Inexact[Array, "... m k"]
    S: Float[Array, "... k"]
    Vh: Inexact[Array, "... k n"]


def svd(a: ArrayLike, *, tolerance: float | None = None) -> SVDResult:
    r"""The thin singular value decomposition, also where singular values are equal or zero.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def cube(a):  # a @ a.T @ a
            u, s, vh = eqg.safe.svd(a)
            return u @ jnp.diag(s**3) @ vh

        t_a = jnp.array([[0.0, 1.0], [1.0, 0.0]])
        _, t_out = jax.jvp(cube, (jnp.eye(2),), (t_a,))
        print(f"{t_out[0, 1]:.1f}")  # JAX: NaN
        ```

        ```text
        3.0
        ```

    As for [`eqx_grads.safe.eigh`][], this is for functions of all of the result that do not
    depend on the choice of singular vectors: $U f(S) V^\dagger$ with an odd function $f$,
    $U g(S) U^\dagger$ with an even one, the sum of $g(S)$, projectors. The sum of the singular
    values has no derivative where one is zero; it is given that from the right.

    **Arguments:**

    - `a`: matrices, `(..., m, n)`, real or complex.
    - `tolerance`: how close neighboring singular values may be to each other and to zero under
        differentiation, as for [`eqx_grads.safe.eigh`][].

    **Returns:**

    `U, S, Vh`, of shapes `(..., m, k)`, `(..., k)` and `(..., k, n)`, with `k = min(m, n)`, and
    descending singular values: those of `jnp.linalg.svd(a, full_matrices=False)`. The other
    columns of the full matrices are arbitrary. Under differentiation, singular values that are
    closer than the tolerance to each other or to zero are moved up.

    **Derivative:**

    With $P = U^\dagger \dot A V$, $H = (P + P^\dagger)/2$ and $K = (P - P^\dagger)/2$:
    $\dot s_i = \operatorname{Re} P_{ii}$, and with $X_{ij} = H_{ij} / (s_j - s_i)$ for
    $i \ne j$ and $Y_{ij} = K_{ij} / (s_i + s_j)$, $U^\dagger \dot U = X + Y$ and
    $V^\dagger \dot V = X - Y$. If $m > n$, $\dot U$ has the component
    $(1 - U U^\dagger) \dot A V S^{-1}$, and likewise $\dot V$ if $m < n$. No square is
    taken, so that nothing overflows. Precision, modes and orders are those of
    [`eqx_grads.safe.eigh`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if `a` has less than two dimensions, or if `tolerance` is not a
    finite number from zero.
    """
    a = as_inexact("svd", a, "a")
    if a.ndim < 2:
        raise rule_error(
            "`safe.svd` was not given matrices.",
            f"`a` is {type_of(a)}",
            do="Pass an array `(..., m, n)`.",
        )
    tolerance = default_tolerance(a) if tolerance is None else as_tolerance("svd", tolerance)
    return SVDResult(*_svd(a, tolerance=tolerance))


@ft.partial(jax.jit, static_argnames=("tolerance",))
def _svd(a, *, tolerance):
    rounding = max(a.shape[-2:]) * float(jnp.finfo(a.dtype).eps)
    u, s, vh = _thin(in_single(a), tolerance=tolerance, rounding=rounding)
    return u.astype(a.dtype), s.astype(jnp.finfo(a.dtype).dtype), vh.astype(a.dtype)


@custom_jvp
def _thin(a, *, tolerance, rounding):
    del tolerance, rounding
    return tuple(jnp.linalg.svd(a, full_matrices=False))


@_thin.def_jvp
def _thin_jvp(primals, tangents, *, tolerance, rounding):
    (a,) = primals
    (t_a,) = tangents
    u, s, vh = _thin(a, tolerance=tolerance, rounding=rounding)
    v = adjoint(vh)
    # Zero is included: `-s`, and zero if the matrix is not square, are eigenvalues too, those
    # of the Hermitian matrix [[0, a], [a^H, 0]].
    ascending = jnp.concatenate([jnp.zeros_like(s[..., :1]), jnp.flip(s, -1)], -1)
    s = jnp.flip(spread(ascending, tolerance, rounding)[..., 1:], -1)
    t_a_v = matmul(t_a, v)
    p = matmul(adjoint(u), t_a_v)
    x = (p + adjoint(p)) * (inverse(s[..., None, :] - s[..., :, None]) / 2).astype(p.dtype)
    y = (p - adjoint(p)) * (inverse(s[..., None, :] + s[..., :, None]) / 2).astype(p.dtype)
    t_u, t_v = matmul(u, x + y), matmul(v, x - y)
    inverse_s = inverse(s)[..., None, :].astype(p.dtype)
    m, n = a.shape[-2:]
    if m > n:
        t_u = t_u + (t_a_v - matmul(u, p)) * inverse_s
    if m < n:
        adjoint_t = matmul(adjoint(t_a), u)
        t_v = t_v + (adjoint_t - matmul(v, adjoint(p))) * inverse_s
    t_s = jnp.real(jnp.diagonal(p, axis1=-2, axis2=-1))
    return (u, s, vh), (t_u, t_s, adjoint(t_v))
