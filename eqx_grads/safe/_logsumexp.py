"""Sums in the semiring of logarithms, in which minus infinity is zero."""

import functools as ft
from collections.abc import Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from .._errors import check_flags, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from .._rules.nan_where import nan_where
from .._tangent_spaces import broadcasts_to
from ._dtypes import apply, real_arrays
from ._log_weights import log_weights
from ._logistic import sigmoid
from ._reduction_arguments import (
    as_mask,
    axes_of,
    Axis,
    in_single,
    squeeze,
)


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    *,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
) -> Float[Array, "..."]: ...


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    *,
    keepdims: bool = False,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]: ...


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    *,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
) -> Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]:
    r"""$\log \sum_i b_i e^{a_i}$, which is $-\infty$ with the derivative zero for no terms.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        impossible = jnp.full(2, -jnp.inf)
        print(eqg.safe.logsumexp(impossible))
        print(jax.grad(eqg.safe.logsumexp)(impossible))  # JAX: NaN
        ```

        ```text
        -inf
        [0. 0.]
        ```

    `jax.nn.logsumexp` is right where one term at least is finite and none is $+\infty$, and
    where all are masked by `where`.

    **Arguments:**

    - `a`: real numbers.
    - `axis`: the axis or axes to reduce; `None` takes all.
    - `b`: factors of the exponentials, which broadcast to `a`. A term whose factor is zero is
        left out, and may be infinite.
    - `keepdims`: whether the axes that were reduced are kept, with length one.
    - `return_sign`: whether to return the sign of the sum as well, and the logarithm of its
        absolute value. Otherwise, the logarithm of a negative sum is NaN.
    - `where`: booleans that broadcast to `a`: which terms to include. The others may be
        infinite or NaN.

    **Returns:**

    The logarithms, or `(logarithms, signs)`.

    **Derivative:**

    With the weights $q_i = e^{a_i} / \sum_j b_j e^{a_j}$:
    $\dot y = \sum_i q_i (b_i \dot a_i + \dot b_i)$, the reverse rule being the transpose. Zero
    where the sum is zero, and with respect to a term that is $-\infty$. Terms that are
    $+\infty$ share the weight. Both modes and all orders. Where terms cancel to a sum of zero,
    second derivatives are NaN. Second derivatives with respect to
    $a$ are $q_i (\delta_{ij} - q_j)$ and right in units in the last place of $q_i$: that of a
    term that outweighs the others, on the diagonal, is rounded to zero from a factor of
    $1 / \epsilon$ on, as in JAX. Those of [`eqx_grads.safe.logaddexp`][] are not.

    **Raises:**

    [`eqx_grads.RuleError`][] if a number is complex.
    """
    check_flags("safe.logsumexp", keepdims=keepdims, return_sign=return_sign)
    if b is None:
        (x,) = real_arrays("logsumexp", a=a)
    else:
        x, b = real_arrays("logsumexp", a=a, b=b)
        if not broadcasts_to(b.shape, x.shape):
            raise rule_error(
                "The `b` of `safe.logsumexp` does not broadcast to `a`.",
                f"`a` is {type_of(x)}, `b` is {type_of(b)}",
                do="Give it the shape of `a`, with ones for the axes that share it.",
            )
        b = jnp.broadcast_to(b, x.shape)
    mask = None if where is None else as_mask("logsumexp", where, x)
    axes = axes_of("logsumexp", axis, x, "a")
    out, sign = _logsumexp(x, b, mask, axes=axes, keepdims=keepdims, signed=return_sign)
    return (out, sign) if return_sign else out


@ft.partial(jax.jit, static_argnames=("axes", "keepdims", "signed"))
def _logsumexp(a, b, mask, *, axes, keepdims, signed):
    x = in_single(a)
    b = None if b is None else in_single(b)
    if mask is not None:
        x = jnp.where(mask, x, -jnp.inf)
        b = None if b is None else jnp.where(mask, b, 0)
    out, sign, _ = log_weights(x, b, axes=axes)
    if not signed:
        out = nan_where(sign < 0, out)
    return tuple(squeeze(y, axes, keepdims).astype(a.dtype) for y in (out, sign))


def logaddexp(x: ArrayLike, y: ArrayLike) -> Float[Array, "..."]:
    r"""$\log(e^x + e^y)$, with the derivative zero where both are $-\infty$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(eqg.safe.logaddexp(-jnp.inf, -jnp.inf))
        print(jax.grad(eqg.safe.logaddexp)(-jnp.inf, -jnp.inf))  # JAX: NaN
        print(jax.grad(eqg.safe.logaddexp)(1.0, 1.0))
        ```

        ```text
        -inf
        0.0
        0.5
        ```

    **Arguments:**

    - `x`, `y`: real numbers that broadcast together.

    **Returns:**

    The values of `jnp.logaddexp`.

    **Derivative:**

    $\dot z = \sigma(x - y)\,\dot x + \sigma(y - x)\,\dot y$. The derivative of a weight is the
    product of both, which keeps its digits in the tails, where $\sigma (1 - \sigma)$ is zero.
    Zero with respect to a number that is $-\infty$; a half each where both are $+\infty$. Both
    modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if a number is complex.
    """
    return _add(*real_arrays("logaddexp", x=x, y=y))


@jax.jit
def _add(x, y):
    return apply("logaddexp", _logaddexp, x=x, y=y)


@custom_jvp
def _logaddexp(x, y):
    return jnp.logaddexp(x, y)


@_logaddexp.def_jvp
def _logaddexp_jvp(primals, tangents):
    x, y = primals
    t_x, t_y = (jnp.where(z == -jnp.inf, 0, t) for z, t in zip(primals, tangents, strict=True))
    # Infinity minus itself is NaN; and both weights are zero where there is nothing to weigh.
    equal = (x == y) & jnp.isinf(x)
    difference = jnp.where(equal, 0, x) - jnp.where(equal, 0, y)
    return _logaddexp(x, y), sigmoid(difference) * t_x + sigmoid(-difference) * t_y


def cumlogsumexp(x: ArrayLike, axis: int = 0, *, reverse: bool = False) -> Float[Array, "..."]:
    r"""$y_i = \log \sum_{j \le i} e^{x_j}$, also where the first terms are $-\infty$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-jnp.inf, -jnp.inf, 0.0, 0.0])
        grad = jax.grad(lambda x: eqg.safe.cumlogsumexp(x)[-1])(x)
        print(grad.round(3))  # JAX: NaN
        ```

        ```text
        [0.  0.  0.5 0.5]
        ```

    **Arguments:**

    - `x`: real numbers.
    - `axis`: the axis along which they are summed.
    - `reverse`: whether the sums begin at the end.

    **Returns:**

    An array of the shape of `x`.

    **Derivative:**

    That of [`eqx_grads.safe.logaddexp`][], of which it is an associative scan, as
    `jax.lax.cumlogsumexp` is. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if a number is complex.
    """
    check_flags("safe.cumlogsumexp", reverse=reverse)
    (x,) = real_arrays("cumlogsumexp", x=x)
    if isinstance(axis, Sequence) or axis is None:
        raise rule_error(
            "`safe.cumlogsumexp` was not given one axis.",
            f"`axis` is {axis!r:.60}",
            do="Give one integer: a cumulative sum runs along one axis.",
        )
    (axis,) = axes_of("cumlogsumexp", axis, x)
    return _cumlogsumexp(x, axis=axis, reverse=reverse)


@ft.partial(jax.jit, static_argnames=("axis", "reverse"))
def _cumlogsumexp(x, *, axis, reverse):
    # The first sum is the first term itself, which has no derivative if it is minus infinity.
    terms = jnp.where(x == -jnp.inf, -jnp.inf, in_single(x))
    y = jax.lax.associative_scan(_logaddexp, terms, reverse=reverse, axis=axis)
    return y.astype(x.dtype)
