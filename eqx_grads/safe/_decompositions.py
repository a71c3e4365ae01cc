"""Eigenvalues and singular values, differentiable where they are equal or zero.

Values that are too close together to divide by their difference are moved apart.
"""

import functools as ft
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Inexact

from .._errors import rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from ._arguments import Numbers, on_arrays
from ._elementwise import inverse


class EighResult(NamedTuple):
    """What [`eqx_grads.safe.eigh`][] returns: `eigenvalues` and `eigenvectors`."""

    eigenvalues: Float[Array, "... n"]
    eigenvectors: Inexact[Array, "... n n"]


class SVDResult(NamedTuple):
    """What [`eqx_grads.safe.svd`][] returns: `U`, `S` and `Vh`."""

    U: Inexact[Array, "... m k"]
    S: Float[Array, "... k"]
    Vh: Inexact[Array, "... k n"]


@on_arrays("a")
def eigh(
    a: Numbers,
    *,
    symmetrize_input: bool = True,
    tolerance: float | None = None,
) -> EighResult:
    r"""Return eigenvalues and eigenvectors of a Hermitian matrix, with derivatives at equal
    eigenvalues.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def exponential(a):
            w, v = eqg.safe.eigh(a)
            return v @ jnp.diag(jnp.exp(w)) @ v.T

        a = jnp.diag(jnp.array([1.0, 1.0, 2.0]))
        t_a = jnp.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        _, t_out = jax.jvp(exponential, (a,), (t_a,))
        print(f"{t_out[0, 1]:.1f}")  # JAX: NaN
        ```

        ```text
        2.7
        ```

    An eigenvector of equal eigenvalues is arbitrary, and has no derivative. But a function of
    all eigenvalues and eigenvectors that does not depend on the choice has a derivative.
    Examples are $V f(\Lambda) V^\dagger$, the trace of a function, or a projector on a group of
    eigenvectors. `eigh` is for such functions.

    **Arguments:**

    - `a`: matrices, `(..., n, n)`, real or complex.
    - `symmetrize_input`: whether to take $(a + a^\dagger) / 2$, as JAX does. Otherwise, only
        the lower triangle is read, and you get the derivative with respect to the lower
        triangle.
    - `tolerance`: how close neighboring eigenvalues may be under differentiation, relative to
        the larger magnitude. If two eigenvalues differ by less than `n` rounding errors
        of the norm of the matrix, the tolerance is relative to that norm. By default
        $\sqrt{\epsilon / n}$, with the machine epsilon `2.2e-16` in double and `1.2e-7` in
        single precision.

    **Returns:**

    `eigenvalues, eigenvectors`: the eigenvalues ascend, `(..., n)`; the eigenvectors are
    columns, `(..., n, n)`. A call that is not differentiated returns the values of
    `jnp.linalg.eigh`. Under differentiation, eigenvalues that are closer than the tolerance are
    moved apart, upwards. The last of `k` close eigenvalues moves by at most `k - 1` times the
    tolerance.

    **Derivative:**

    With $P = V^\dagger \dot A V$: $\dot \lambda_i = P_{ii}$ and
    $V^\dagger \dot V = P_{ij} / (\lambda_j - \lambda_i)$ for $i \ne j$; the reverse rule is the
    transpose. Values and derivatives belong to a matrix within the tolerance of `a`. So the
    derivative of any smooth function of `a` has an error of the order of the tolerance. Its
    rounding error is of the order of the machine epsilon divided by the tolerance. (With zeros
    instead of the infinite quotients, the derivative of $V f(\Lambda) V^\dagger$ would lack the
    term $f'(\lambda) P_{ij}$ of equal eigenvalues.)

    A function that depends on the choice, like a single one of two eigenvectors with equal
    eigenvalues, has no derivative. The number that you get is finite, of the order of the
    inverse of the tolerance, and has no meaning.

    Both modes and all orders. A derivative of order `m` is right to the machine epsilon divided
    by the `m`-th power of the tolerance: for second derivatives at equal eigenvalues, use
    double precision and a tolerance of `1e-5`.

    **Raises:**

    [`eqx_grads.RuleError`][] if the matrices are not square, or if `tolerance` is negative or
    not a finite number.
    """
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        do = "Pass an array `(..., n, n)`. For others, use `safe.svd`."
        where = f"`a` is {type_of(a)}"
        raise rule_error("`safe.eigh` was not given square matrices.", where, do=do)
    if not symmetrize_input:
        a = jnp.tril(a) + _adjoint(jnp.tril(a, -1))
    a = (a + _adjoint(a)) / 2
    return EighResult(*_of_hermitian(a, tolerance=_tolerance(tolerance, a)))


@on_arrays("a")
def svd(
    a: Numbers, *, full_matrices: bool = False, tolerance: float | None = None
) -> SVDResult:
    r"""Return the thin singular value decomposition, with derivatives at equal or zero singular
    values.

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

    As for [`eqx_grads.safe.eigh`][], use this for functions of the whole result that do not
    depend on the choice of singular vectors: $U f(S) V^\dagger$ with an odd function $f$, $U
    g(S) U^\dagger$ with an even one, the sum of $g(S)$, projectors. The sum of the singular
    values has no derivative where one is zero; here it has the derivative from the right.

    **Arguments:**

    - `a`: matrices, `(..., m, n)`, real or complex.
    - `full_matrices`: as for `jnp.linalg.svd`, but only square matrices may have `True`. The
        additional columns of the others are arbitrary, and have no derivative.
    - `tolerance`: how close neighboring singular values may be to each other and to zero under
        differentiation, as for [`eqx_grads.safe.eigh`][].

    **Returns:**

    `U, S, Vh`, of shapes `(..., m, k)`, `(..., k)` and `(..., k, n)`, with `k = min(m, n)`, and
    descending singular values: the values of `jnp.linalg.svd(a, full_matrices=False)`. Under
    differentiation, singular values that are closer than the tolerance to each other or to zero
    are moved up.

    **Derivative:**

    With $P = U^\dagger \dot A V$, $H = (P + P^\dagger)/2$ and $K = (P - P^\dagger)/2$: $\dot
    s_i = \operatorname{Re} P_{ii}$, and with $X_{ij} = H_{ij} / (s_j - s_i)$ for $i \ne j$ and
    $Y_{ij} = K_{ij} / (s_i + s_j)$, $U^\dagger \dot U = X + Y$ and $V^\dagger \dot V = X - Y$.
    If $m > n$, $\dot U$ has the component $(1 - U U^\dagger) \dot A V S^{-1}$, and likewise
    $\dot V$ if $m < n$. The formula takes no squares, so nothing overflows. Precision, modes
    and orders are as for [`eqx_grads.safe.eigh`][].

    **Raises:**

    [`eqx_grads.RuleError`][] if `a` has fewer than two dimensions, if `full_matrices` is true
    and the matrices are not square, or if `tolerance` is negative or not a finite number.
    """
    if a.ndim < 2:
        where, do = f"`a` is {type_of(a)}", "Pass an array `(..., m, n)`."
        raise rule_error("`safe.svd` was not given matrices.", where, do=do)
    if full_matrices and a.shape[-2] != a.shape[-1]:
        what = "`safe.svd` has no `full_matrices` for matrices that are not square: the "
        what += "additional columns are arbitrary, and have no derivative."
        do = "Leave out `full_matrices`. For values without a derivative, use `jnp.linalg.svd`."
        raise rule_error(what, f"`a` is {type_of(a)}", do=do)
    return SVDResult(*_thin(a, tolerance=_tolerance(tolerance, a)))


# In full precision, also on accelerators.
_matmul = ft.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@custom_jvp
def _of_hermitian(a, *, tolerance):
    del tolerance
    return tuple(jnp.linalg.eigh(a, symmetrize_input=False))


@_of_hermitian.def_jvp
def _of_hermitian_jvp(primals, tangents, *, tolerance):
    (a,), (t_a,) = primals, tangents
    w, v = _of_hermitian(a, tolerance=tolerance)
    w = _spread(w, a, tolerance)
    p = _matmul(_matmul(_adjoint(v), t_a), v)
    t_w = jnp.real(jnp.diagonal(p, axis1=-2, axis2=-1))
    inverse_gaps = inverse(w[..., None, :] - w[..., :, None]).astype(p.dtype)
    return (w, v), (t_w, _matmul(v, p * inverse_gaps))


@custom_jvp
def _thin(a, *, tolerance):
    del tolerance
    return tuple(jnp.linalg.svd(a, full_matrices=False))


@_thin.def_jvp
def _thin_jvp(primals, tangents, *, tolerance):
    (a,), (t_a,) = primals, tangents
    u, s, vh = _thin(a, tolerance=tolerance)
    v = _adjoint(vh)
    # Zero is included: `-s`, and zero if the matrix is not square, are eigenvalues too, those
    # of the Hermitian matrix [[0, a], [a^H, 0]].
    ascending = jnp.concatenate([jnp.zeros_like(s[..., :1]), jnp.flip(s, -1)], -1)
    s = jnp.flip(_spread(ascending, a, tolerance)[..., 1:], -1)
    t_a_v = _matmul(t_a, v)
    p = _matmul(_adjoint(u), t_a_v)
    x = (p + _adjoint(p)) * (inverse(s[..., None, :] - s[..., :, None]) / 2).astype(p.dtype)
    y = (p - _adjoint(p)) * (inverse(s[..., None, :] + s[..., :, None]) / 2).astype(p.dtype)
    t_u, t_v = _matmul(u, x + y), _matmul(v, x - y)
    inverse_s = inverse(s)[..., None, :].astype(p.dtype)
    m, n = a.shape[-2:]
    if m > n:
        t_u = t_u + (t_a_v - _matmul(u, p)) * inverse_s
    if m < n:
        t_v = t_v + (_matmul(_adjoint(t_a), u) - _matmul(v, _adjoint(p))) * inverse_s
    t_s = jnp.real(jnp.diagonal(p, axis1=-2, axis2=-1))
    return (u, s, vh), (t_u, t_s, _adjoint(t_v))


def _tolerance(tolerance, a) -> float:
    """The given one, or the distance at which the largest shift, of `n` equal eigenvalues, is
    as large as the rounding error of a difference of two of them, divided by the distance."""
    eps = float(jnp.finfo(a.dtype).eps)
    return (eps / max(*a.shape[-2:], 1)) ** 0.5 if tolerance is None else tolerance


def _spread(w, a, tolerance):
    r"""Ascending eigenvalues, the closest ones moved up, until all differ enough.

    Neighbors have to differ by `tolerance` times the larger magnitude of the two. If they
    differ by less than the error of the solver, `n` rounding errors of the norm, they have to
    differ by `tolerance` times the norm. The eigenvalues move up and never down, so that a
    matrix that is positive remains positive. To autodiff, the shift is a constant.
    """
    rounding = max(a.shape[-2:]) * float(jnp.finfo(a.dtype).eps)
    w_ = lax.stop_gradient(w)
    size = jnp.abs(w_)
    norm = jnp.max(size, -1, keepdims=True, initial=0.0)
    norm = jnp.where(norm == 0, 1, norm)
    larger = jnp.maximum(size[..., 1:], size[..., :-1])
    needed = tolerance * jnp.where(jnp.diff(w_) > rounding * norm, larger, norm)
    needed = jnp.concatenate([jnp.zeros_like(w_[..., :1]), jnp.cumsum(needed, -1)], -1)
    rest = w_ - needed
    return w + (lax.cummax(rest, axis=w.ndim - 1) - rest)


def _adjoint(x):
    return jnp.conj(jnp.swapaxes(x, -1, -2))
