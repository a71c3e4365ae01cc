"""The softmax, its logarithm, and the entropy of probabilities."""

import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from .._rules.custom_jvp import custom_jvp
from .._rules.elementwise import elementwise
from ._corner import corner
from ._dtypes import real_arrays
from ._log_weights import log_weights, shift
from ._reduction_arguments import as_mask, axes_of, Axis, in_single


def softmax(
    x: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None
) -> Float[Array, "..."]:
    r"""$e^{x_i} / \sum_j e^{x_j}$, which is zero if all logits are $-\infty$.

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

    `jax.nn.softmax(x, where=mask)` is right too, and zero where all are masked. This function
    is the same for logits that have been masked with $-\infty$ already.

    **Arguments:**

    - `x`: real logits.
    - `axis`: the axis or axes along which the results sum to one; `None` takes all.
    - `where`: booleans that broadcast to `x`: which logits to include. The others have the
        probability zero, and may be infinite or NaN.

    **Returns:**

    Probabilities, which sum to one, or to zero where all logits are $-\infty$. Logits of
    $+\infty$ share the probability.

    **Derivative:**

    $\dot p = p \odot (\dot x - p^\top \dot x)$, which is its own transpose. Of a probability
    near one the difference cancels, so that its derivative is right in units in the last place
    of one, as in JAX. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if a logit is complex.
    """
    (x,) = real_arrays("softmax", x=x)
    mask = None if where is None else as_mask("softmax", where, x)
    return _softmax(x, mask, axes=axes_of("softmax", axis, x))


@ft.partial(jax.jit, static_argnames=("axes",))
def _softmax(x, mask, *, axes):
    out = log_weights(_masked(x, mask), None, axes=axes)[2].astype(x.dtype)
    # What is masked is a constant: its cotangent may be infinite, as that of a logarithm.
    return out if mask is None else jnp.where(mask, out, 0)


def _masked(x, mask):
    x = in_single(x)
    return x if mask is None else jnp.where(mask, x, -jnp.inf)


def log_softmax(
    x: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None
) -> Float[Array, "..."]:
    r"""$x_i - \log \sum_j e^{x_j}$, which is $-\infty$ where the logit is.

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
    that is $-\infty$. Both modes and all orders. In the gradient of one element whose $p$ is
    near one, $1 - p$ cancels.

    **Raises:**

    [`eqx_grads.RuleError`][] if a logit is complex.
    """
    (x,) = real_arrays("log_softmax", x=x)
    mask = None if where is None else as_mask("log_softmax", where, x)
    return _log_softmax(x, mask, axes=axes_of("log_softmax", axis, x))


@ft.partial(jax.jit, static_argnames=("axes",))
def _log_softmax(x, mask, *, axes):
    return _log_probabilities(_masked(x, mask), axes=axes)[0].astype(x.dtype)


@custom_jvp
def _log_probabilities(x, *, axes):
    """The logarithms of the probabilities, and the probabilities, of which the derivative
    consists: it reduces over the axes once, as it would be written by hand."""
    shifted = shift(x, jnp.max(x, axes, keepdims=True, initial=-jnp.inf))
    e = jnp.exp(shifted)
    total = jnp.sum(e, axes, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    return shifted - jnp.log(total), e / total


@_log_probabilities.def_jvp
def _log_probabilities_jvp(primals, tangents, *, axes):
    (x,) = primals
    (t_x,) = tangents
    out, p = _log_probabilities(x, axes=axes)
    t_x = jnp.where(x == -jnp.inf, 0, t_x)
    t_out = t_x - jnp.sum(p * t_x, axes, keepdims=True)
    t_out = jnp.where(out == -jnp.inf, 0, t_out)
    return (out, p), (t_out, p * t_out)


def entropy(
    p: ArrayLike, axis: Axis = -1, *, where: ArrayLike | None = None
) -> Float[Array, "..."]:
    r"""$-\sum_i p_i \log p_i$, in which an event of probability zero contributes nothing.

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

    The entropies, in nats. That of a negative number is $-\infty$, as in
    `jax.scipy.special.entr`.

    **Derivative:**

    $\dot y = -\sum_i (\log p_i + 1)\,\dot p_i$. At $p_i = 0$, where the derivative from the
    right is infinite, it is taken to be zero: such a probability is that of a masked event, or
    of a logit that is far below the others, and the derivative with respect to the logit is
    zero. Below zero, it is zero as well. Both modes and all orders. The second derivative at
    $p_i = 0$ is NaN: leave such an event out, with `where=p > 0`.

    **Raises:**

    [`eqx_grads.RuleError`][] if a probability is complex.
    """
    (p,) = real_arrays("entropy", p=p)
    mask = None if where is None else as_mask("entropy", where, p)
    axes = axes_of("entropy", axis, p, "p")
    return _entropy(p, mask, axes=axes)


@ft.partial(jax.jit, static_argnames=("axes",))
def _entropy(p, mask, *, axes):
    x = in_single(p)
    x = x if mask is None else jnp.where(mask, x, 1)
    return jnp.sum(_entr(x), axes).astype(p.dtype)


def _entr_derivative(out, p):
    del out
    is_possible = ~(p <= 0)
    slope = jnp.where(is_possible, -jnp.log(jnp.where(is_possible, p, 1)) - 1, 0)
    return corner(slope, p == 0, p)


def _entr_value(p):
    # `jax.scipy.special.entr` multiplies zero by minus infinity on the way.
    return jnp.where(p < 0, -jnp.inf, -p * jnp.log(jnp.where(p <= 0, 1, p)))


_entr = elementwise(_entr_value, _entr_derivative)
