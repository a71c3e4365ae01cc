"""Sums in the semiring of logarithms, in which minus infinity is zero; probabilities."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._rules.custom_jvp import custom_jvp
from .._rules.nan_where import nan_where
from ._arguments import Axis, Numbers, on_arrays
from ._elementwise import corner, sigmoid
from ._powers_and_logs import xlogy


@on_arrays("a", "b", real=True)
def logsumexp(
    a: Numbers,
    axis: Axis = None,
    b: Numbers | None = None,
    *,
    keepdims: bool = False,
    return_sign: bool = False,
    where: Numbers | None = None,
) -> Any:
    r"""Return $\log \sum_i b_i e^{a_i}$. Without terms, it is $-\infty$ with a zero derivative.

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

    `jax.nn.logsumexp` is right where at least one term is finite and none is $+\infty$, and
    where `where` masks all terms.

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
    $\dot y = \sum_i q_i (b_i \dot a_i + \dot b_i)$, and the reverse rule is the transpose. The
    derivative is zero where the sum is zero, and with respect to a term that is $-\infty$.
    Terms that are $+\infty$ share the weight. Both modes and all orders. Where terms cancel to
    a sum of zero, second derivatives are NaN. Second derivatives with respect to
    $a$ are $q_i (\delta_{ij} - q_j)$ and right in units in the last place of $q_i$. If a term
    outweighs the others by a factor of $1 / \epsilon$, its second derivative on the diagonal is
    rounded to zero, as in JAX. [`eqx_grads.safe.logaddexp`][] does not round it to zero.
    """
    b = b if b is None or where is None else jnp.where(where, b, 0)
    out, sign, *_ = _log_weights(_masked(a, where), b, axes=axis)
    return (out, sign) if return_sign else nan_where(sign < 0, out)


def _masked(x, where):
    return x if where is None else jnp.where(where, x, -jnp.inf)


@on_arrays("x", "y", real=True)
def logaddexp(x: Numbers, y: Numbers) -> Float[Array, "..."]:
    r"""Return $\log(e^x + e^y)$, with a zero derivative where both are $-\infty$.

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
    product of both weights, which keeps its digits in the tails, where $\sigma (1 - \sigma)$ is
    zero. The derivative is zero with respect to a number that is $-\infty$, and one half each
    where both are $+\infty$. Both modes and all orders.
    """
    return _logaddexp(x, y)


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


@on_arrays("x", real=True)
def cumlogsumexp(x: Numbers, axis: int = 0, *, reverse: bool = False) -> Float[Array, "..."]:
    r"""Return $y_i = \log \sum_{j \le i} e^{x_j}$, even where the first terms are $-\infty$.

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

    As for [`eqx_grads.safe.logaddexp`][]: this is its associative scan, as
    `jax.lax.cumlogsumexp` is. Both modes and all orders.
    """
    # The first sum is the first term itself, which has no derivative if it is minus infinity.
    terms = jnp.where(x == -jnp.inf, -jnp.inf, x)
    return lax.associative_scan(_logaddexp, terms, reverse=reverse, axis=axis)


@on_arrays("x", real=True)
def softmax(
    x: Numbers, axis: Axis = -1, *, where: Numbers | None = None
) -> Float[Array, "..."]:
    r"""Return $e^{x_i} / \sum_j e^{x_j}$, which is zero if all logits are $-\infty$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        masked = jnp.full(3, -jnp.inf)  # attention to nothing
        print(eqg.safe.softmax(masked))  # JAX: NaN
        print(jax.jacobian(eqg.safe.softmax)(masked))
        ```

        ```text
        [0. 0. 0.]
        [[0. 0. 0.]
         [0. 0. 0.]
         [0. 0. 0.]]
        ```

    `jax.nn.softmax(x, where=mask)` is right too, and zero where all logits are masked. This
    function gives the same for logits that are already masked with $-\infty$.

    **Arguments:**

    - `x`: real logits.
    - `axis`: the axis or axes along which the results sum to one; `None` takes all.
    - `where`: booleans that broadcast to `x`: which logits to include. The others have the
        probability zero, and may be infinite or NaN.

    **Returns:**

    Probabilities, which sum to one, or to zero where all logits are $-\infty$. Logits of
    $+\infty$ share the probability.

    **Derivative:**

    $\dot p = p \odot (\dot x - p^\top \dot x)$, which is its own transpose. For a probability
    near one the difference cancels. Its derivative then has an error of a few units in the last
    place of one, as in JAX. Both modes and all orders.
    """
    out = _log_weights(_masked(x, where), None, axes=axis)[2]
    # A masked term is a constant: its cotangent may be infinite, as for a logarithm.
    return out if where is None else jnp.where(where, out, 0)


@on_arrays("x", real=True)
def log_softmax(
    x: Numbers, axis: Axis = -1, *, where: Numbers | None = None
) -> Float[Array, "..."]:
    r"""Return $x_i - \log \sum_j e^{x_j}$, which is $-\infty$ where the logit is.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        masked = jnp.full(3, -jnp.inf)
        print(eqg.safe.log_softmax(masked))  # JAX: NaN
        print(jax.jacobian(eqg.safe.log_softmax)(masked))
        ```

        ```text
        [-inf -inf -inf]
        [[0. 0. 0.]
         [0. 0. 0.]
         [0. 0. 0.]]
        ```

    **Arguments:**

    - `x`, `axis`, `where`: as for [`eqx_grads.safe.softmax`][].

    **Returns:**

    The logarithms of the probabilities.

    **Derivative:**

    With $p$ for the softmax: $\dot y_i = \dot x_i - p^\top \dot x$, and zero for an element
    that is $-\infty$. Both modes and all orders. In the gradient of an element whose $p$ is
    near one, $1 - p$ loses digits.
    """
    return _log_weights(_masked(x, where), None, axes=axis)[3]


@on_arrays("p", real=True)
def entropy(
    p: Numbers, axis: Axis = -1, *, where: Numbers | None = None
) -> Float[Array, "..."]:
    r"""Return $-\sum_i p_i \log p_i$, in which an event of probability zero contributes
    nothing.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        def of_logits(x):
            return eqg.safe.entropy(eqg.safe.softmax(x))

        grad = jax.grad(of_logits)(jnp.float32([0.0, 1.0, -jnp.inf]))
        print(grad.round(3))
        ```

        ```text
        [ 0.19700001 -0.19700001  0.        ]
        ```

    **Arguments:**

    - `p`: probabilities. They are not normalized.
    - `axis`: the axis or axes to reduce; `None` takes all.
    - `where`: booleans that broadcast to `p`: which events to include.

    **Returns:**

    The entropies, in nats. A negative number has the entropy $-\infty$, as in
    `jax.scipy.special.entr`.

    **Derivative:**

    $\dot y = -\sum_i (\log p_i + 1)\,\dot p_i$. At $p_i = 0$, the derivative from the right is
    infinite; here, it is zero. A masked event has this probability, and so has an event with a
    logit far below the others. The derivative with respect to this logit is zero. For a
    negative $p_i$, the derivative is zero as well. Both modes and all orders. The second
    derivative at $p_i = 0$ is NaN: leave such an event out, with `where=p > 0`.
    """
    p = p if where is None else jnp.where(where, p, 1)
    # `jax.scipy.special.entr` multiplies zero by minus infinity on the way.
    return jnp.sum(jnp.where(p < 0, -jnp.inf, -xlogy(p, p)), axis)


# ---------------------------------------------------------------- the rule of all sums


@custom_jvp
def _log_weights(a, b, *, axes):
    r"""$y = \log |\sum b\, e^a|$, the sign of the sum, $q = e^a / \sum b\, e^a$ and $\log |q|$.

    The axes are kept. Without `b`, which is `None` for one, $q$ is the softmax of `a`. A term
    with $b = 0$ is masked, whatever $a$ is. Several infinite terms have equal weights, and a
    sum that is zero has no weights.

    **Derivative:**

    $\dot y = \sum q (b\, \dot a + \dot b)$ and $\dot q = q (\dot a - \dot y)$, made of the
    outputs of the function, so that they hold at all orders. The tangent of a term that is
    $-\infty$ is dropped: like the tangent of a logarithm of zero, it may be infinite itself.
    """
    present = a if b is None else jnp.where(b == 0, -jnp.inf, a)
    largest = jnp.max(present, axes, keepdims=True, initial=-jnp.inf)
    shifted = _shift(a, largest)
    e = jnp.exp(shifted)
    if b is None:
        total = jnp.sum(e, axes, keepdims=True)
    else:
        total = jnp.sum(jnp.where(b == 0, 0, b * e), axes, keepdims=True)
        e = jnp.where((total == 0) | ((b == 0) & jnp.isinf(e)), 0, e)
    # By infinity, not by zero: no element has to be looked at again.
    q = e / jnp.where(total == 0, jnp.inf, total)
    log_total = jnp.log(jnp.abs(total))
    log_q = shifted - jnp.where(total == 0, 0, log_total)
    return largest + log_total, jnp.sign(total), q, log_q


@_log_weights.def_jvp
def _log_weights_jvp(primals, tangents, *, axes):
    a, b = primals
    t_a, t_b = tangents
    y, sign, q, log_q = _log_weights(a, b, axes=axes)
    t_a = jnp.where(a == -jnp.inf, 0, t_a)
    if b is None:
        t_terms = q * t_a
    else:
        # The weights have no derivative where the terms of a sum cancel, or the factors of all
        # are zero. A tangent of minus infinity may be infinite, too.
        is_term = a != -jnp.inf
        is_pole = lambda terms: (sign == 0) & jnp.any(terms, axes, keepdims=True)
        weights = corner(q, is_pole(is_term & (b != 0)), jnp.where(is_term, a, 0), axes=axes)
        weights = corner(weights, is_pole(is_term), b, axes=axes)
        t_terms = jnp.where(b == 0, 0, b * weights) * t_a + weights * t_b
    t_y = jnp.sum(t_terms, axes, keepdims=True)
    t_log_q = t_a - t_y
    out = y, sign, q, log_q
    return out, (t_y, None, q * t_log_q, jnp.where(log_q == -jnp.inf, 0, t_log_q))


def _shift(a, largest):
    """`a - largest`, where infinity minus itself is zero, and `-inf` remains what it is.

    Most of the work is done on `largest`, which is smaller than `a`.
    """
    finite = float(jnp.finfo(a.dtype).max)
    top = jnp.where(largest == -jnp.inf, 0, jnp.minimum(largest, finite))
    # A finite term is zero, relative to infinity: its logarithm is minus infinity.
    return (jnp.minimum(a, finite) - top) * jnp.where(largest == jnp.inf, finite, 1)
