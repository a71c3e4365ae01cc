"""Eigenvalues and eigenvectors of Hermitian matrices, differentiable at equal eigenvalues."""

import functools as ft
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Inexact

from .._errors import check_flags, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from ._inverse import inverse
from ._reduction_arguments import as_inexact, in_single
from ._spread import adjoint, as_tolerance, default_tolerance, matmul, spread


class EighResult(NamedTuple):
    """What [`eqx_grads.safe.eigh`][] returns: `eigenvalues` and `eigenvectors`."""

    eigenvalues: Float[Array, "... n"]
    eigenvectors: Inexact[Array, "... n n"]


def eigh(
    a: ArrayLike,
    *,
    symmetrize_input: bool = True,
    tolerance: float | None = None,
) -> EighResult:
    r"""Eigenvalues and eigenvectors of a Hermitian matrix, also where eigenvalues are equal.

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

    An eigenvector of equal eigenvalues is arbitrary, and has no derivative. But functions of
    all eigenvalues and eigenvectors that do not depend on the choice, like
    $V f(\Lambda) V^\dagger$, the trace of a function or a projector on a group of eigenvectors,
    have one. This function is for those.

    **Arguments:**

    - `a`: matrices, `(..., n, n)`, real or complex.
    - `symmetrize_input`: whether to take $(a + a^\dagger) / 2$, as JAX does. Otherwise, only
        the lower triangle is read, and the derivative is that of the lower triangle.
    - `tolerance`: how close neighboring eigenvalues may be under differentiation, relative to
        the larger magnitude of both; relative to the norm of the matrix if they differ by less
        than `n` rounding errors of it. By default $\sqrt{\epsilon / n}$, with the machine
        epsilon `2.2e-16` in double and `1.2e-7` in single precision.

    **Returns:**

    `eigenvalues, eigenvectors`: ascending, `(..., n)`, and in columns, `(..., n, n)`. Those of
    `jnp.linalg.eigh` in a call that is not differentiated. Under differentiation, eigenvalues
    that are closer than the tolerance are moved apart, upwards: of `k` of them, the last by
    `k - 1` times the tolerance at most.

    **Derivative:**

    With $P = V^\dagger \dot A V$: $\dot \lambda_i = P_{ii}$ and
    $V^\dagger \dot V = P_{ij} / (\lambda_j - \lambda_i)$ for $i \ne j$; the reverse rule is the
    transpose. Values and derivatives are those at a matrix within the tolerance of `a`, so that
    the derivative of any smooth function of `a` is right to the tolerance and to the machine
    epsilon divided by it. (With zeros in place of the infinite quotients, the
    derivative of $V f(\Lambda) V^\dagger$ would lack the term $f'(\lambda) P_{ij}$ of equal
    eigenvalues.)

    The derivative of a function that does depend on the choice, like a single one of two
    eigenvectors with equal eigenvalues, does not exist. What is returned is finite, of the
    order of the inverse of the tolerance, and has no meaning.

    Both modes and all orders. A derivative of order `m` is right to the machine epsilon divided
    by the `m`-th power of the tolerance: for second derivatives at equal eigenvalues, use
    double precision and a tolerance of `1e-5`.

    **Raises:**

    [`eqx_grads.RuleError`][] if the matrices are not square, or if `tolerance` is not a
    finite number from zero.
    """
    check_flags("safe.eigh", symmetrize_input=symmetrize_input)
    a = as_inexact("eigh", a, "a")
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise rule_error(
            "`safe.eigh` was not given square matrices.",
            f"`a` is {type_of(a)}",
            do="Pass an array `(..., n, n)`. For others, there is `safe.svd`.",
        )
    tolerance = default_tolerance(a) if tolerance is None else as_tolerance("eigh", tolerance)
    return EighResult(*_eigh(a, symmetrize=symmetrize_input, tolerance=tolerance))


@ft.partial(jax.jit, static_argnames=("symmetrize", "tolerance"))
def _eigh(a, *, symmetrize, tolerance):
    x = in_single(a)
    x = (x + adjoint(x)) / 2 if symmetrize else jnp.tril(x) + adjoint(jnp.tril(x, -1))
    rounding = a.shape[-1] * float(jnp.finfo(a.dtype).eps)
    w, v = _of_hermitian(x, tolerance=tolerance, rounding=rounding)
    return w.astype(jnp.finfo(a.dtype).dtype), v.astype(a.dtype)


@custom_jvp
def _of_hermitian(a, *, tolerance, rounding):
    del tolerance, rounding
    return tuple(jnp.linalg.eigh(a, symmetrize_input=False))


@_of_hermitian.def_jvp
def _of_hermitian_jvp(primals, tangents, *, tolerance, rounding):
    (a,) = primals
    (t_a,) = tangents
    w, v = _of_hermitian(a, tolerance=tolerance, rounding=rounding)
    w = spread(w, tolerance, rounding)
    p = matmul(adjoint(v), t_a, v)
    t_w = jnp.real(jnp.diagonal(p, axis1=-2, axis2=-1))
    inverse_gaps = inverse(w[..., None, :] - w[..., :, None]).astype(p.dtype)
    return (w, v), (t_w, matmul(v, p * inverse_gaps))
