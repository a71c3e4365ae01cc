"""Samples of discrete variables: relaxed, or exact with a straight-through gradient."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .._errors import check_flags, rule_error
from .._rules.float_args import (
    as_axis,
    as_floats,
    broadcast_parameter,
    check_key,
    check_positive,
    constant,
    is_known,
    widen,
)
from .._rules.replace_gradient import replace_gradient
from ._sign_and_step import one_hot_of_largest


def gumbel_softmax(
    logits: ArrayLike,
    *,
    key: PRNGKeyArray,
    temperature: ArrayLike = 1.0,
    hard: bool = False,
    axis: int = -1,
) -> Array:
    r"""Draw a relaxed sample of a category, or (`hard`) a one-hot sample, straight through.

    The relaxed sample is $\operatorname{softmax}((\theta + G) / \tau)$, with Gumbel noise $G$.
    The argmax of $\theta + G$ is distributed as the softmax of the logits $\theta$.
    [Jang et al. (2017)](https://arxiv.org/abs/1611.01144), [Maddison et al.
    (2017)](https://arxiv.org/abs/1611.00712).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        logits, key = jnp.array([0.1, 1.0, -0.5]), jax.random.key(0)
        sample = eqg.ste.gumbel_softmax(logits, key=key, hard=True)
        print(sample)

        worth = jnp.array([1.0, 2.0, 3.0])
        reward = lambda x: worth @ eqg.ste.gumbel_softmax(x, key=key, hard=True)
        print(jax.grad(reward)(logits).round(3))
        ```

        ```text
        [0. 1. 0.]
        [-0.12100001  0.11700001  0.004     ]
        ```

    **Arguments:**

    - `logits`: log-probabilities, normalized or not. Floats of any shape with that axis. A
        category with the logit minus infinity is never sampled.
    - `key`: a random key. The noise is independent for all elements.
    - `temperature`: positive. It may be learned.
    - `hard`: whether the value is one-hot.
    - `axis`: the axis of the categories.

    **Returns:**

    An array like `logits`, NaN along an axis with a NaN. Half precision is sampled in single
    precision.

    **Derivative:**

    The derivative of the relaxed sample, even if `hard`, with respect to the logits and the
    temperature. Both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if the logits are not an array of floats, or if the
    temperature is not positive (unless it is traced).
    """
    check_flags("ste.gumbel_softmax", hard=hard)
    logits, wide, tau = _checked("ste.gumbel_softmax", logits, key, temperature)
    axis = as_axis("ste.gumbel_softmax", axis, logits, "logits")
    noisy = wide + jr.gumbel(key, wide.shape, wide.dtype)
    soft = jax.nn.softmax(noisy / tau, axis).astype(logits.dtype)
    return replace_gradient(one_hot_of_largest(noisy, soft, axis), soft) if hard else soft


def _checked(name, logits, key, temperature):
    """The logits, the same in at least single precision, and a temperature for each."""
    check_positive(name, "temperature", temperature)
    check_key(name, key)
    logits = as_floats(name, logits, "logits")
    wide = widen(logits)
    return logits, wide, broadcast_parameter(name, "temperature", temperature, wide)


def gumbel_sigmoid(
    logits: ArrayLike,
    *,
    key: PRNGKeyArray,
    temperature: ArrayLike = 1.0,
    hard: bool = False,
) -> Array:
    r"""Draw a relaxed sample of a bit, or (`hard`) a zero or a one, straight through.

    The relaxed sample is $\sigma((\theta + L) / \tau)$. The logistic noise $L$ is the
    difference of two samples of Gumbel noise. The probability that $\theta + L$ is positive is
    $\sigma(\theta)$. [Maddison et al. (2017)](https://arxiv.org/abs/1611.00712).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        bit = lambda x: eqg.ste.gumbel_sigmoid(x, key=jax.random.key(0), hard=True)
        x = jnp.float32(0.3)
        print(bit(x), jax.grad(bit)(x).round(3))
        ```

        ```text
        1.0 0.038000003
        ```

    **Arguments:**

    - `logits`: the logits of the probability of a one. Floats of any shape.
    - `key`, `temperature`, `hard`: as for [`eqx_grads.ste.gumbel_softmax`][].

    **Returns:**

    An array like `logits`.

    **Derivative:**

    As for [`eqx_grads.ste.gumbel_softmax`][].

    **Raises:**

    As [`eqx_grads.ste.gumbel_softmax`][].
    """
    check_flags("ste.gumbel_sigmoid", hard=hard)
    logits, wide, tau = _checked("ste.gumbel_sigmoid", logits, key, temperature)
    noisy = wide + jr.logistic(key, wide.shape, wide.dtype)
    soft = jax.nn.sigmoid(noisy / tau).astype(logits.dtype)
    if not hard:
        return soft
    bit = jnp.heaviside(noisy, jnp.zeros((), noisy.dtype))
    return replace_gradient(bit.astype(logits.dtype), soft)


def bernoulli(p: ArrayLike, *, key: PRNGKeyArray) -> Array:
    r"""Draw a random bit, with a straight-through gradient for its probability.

    The gradient is unbiased if the loss is linear in the sample.
    [Bengio et al. (2013)](https://arxiv.org/abs/1308.3432).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        p = jnp.float32([0.0, 0.5, 1.0])
        sample = eqg.ste.bernoulli(p, key=jax.random.key(0))
        print(sample)
        loss = lambda p: 3 * eqg.ste.bernoulli(p, key=jax.random.key(0)).sum()
        print(jax.grad(loss)(p))
        ```

        ```text
        [0. 0. 1.]
        [3. 3. 3.]
        ```

    **Arguments:**

    - `p`: the probabilities of a one. Floats of any shape. For logits, pass their
        `jax.nn.sigmoid`.
    - `key`: a random key. The samples are independent.

    **Returns:**

    An array like `p` of zeros and ones. NaN where `p` is.

    **Derivative:**

    The identity: $\bar p = \bar y$. Linear, so both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `p` is not an array of floats, or is outside of $[0, 1]$ by
    more than rounding (unless it is traced).
    """
    given, p = p, as_floats("ste.bernoulli", p, "p")
    _check_probabilities(given, p.dtype)
    wide = widen(p)
    bit = jr.uniform(key, wide.shape, wide.dtype) < wide
    # Propagate NaN: `uniform < NaN` is false, and the sample would be zero.
    return replace_gradient(jnp.where(jnp.isnan(p), p, bit.astype(p.dtype)), p)


def _check_probabilities(p, dtype):
    if not is_known(p):
        return
    values = np.asarray(p)  # not by JAX, which would trace it in `jit`
    slack = 8 * float(jnp.finfo(dtype).eps)  # a sum of a softmax may exceed one
    if np.any((values < -slack) | (values > 1 + slack)):
        raise rule_error(
            "`ste.bernoulli` was given probabilities `p` that are not from zero to one.",
            f"the smallest is {np.nanmin(values)}, the largest {np.nanmax(values)}",
            do="Give it probabilities: for logits, their `jax.nn.sigmoid`.",
        )


def reinmax(
    logits: ArrayLike,
    *,
    key: PRNGKeyArray,
    temperature: ArrayLike = 1.0,
    axis: int = -1,
) -> Array:
    r"""Draw a one-hot sample of a categorical variable, with a second-order accurate gradient.

    The straight-through gradient is unbiased if the loss is linear in the sample. `reinmax` (at
    a temperature of one) is unbiased even if the loss is quadratic. [Liu et al.
    (2023)](https://arxiv.org/abs/2304.08612).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        logits, key = jnp.array([0.1, 1.0, -0.5]), jax.random.key(0)
        sample = eqg.ste.reinmax(logits, key=key)
        print(sample)

        worth = jnp.array([1.0, 2.0, 3.0])
        reward = lambda x: (worth @ eqg.ste.reinmax(x, key=key)) ** 2
        print(jax.grad(reward)(logits).round(3))
        ```

        ```text
        [0. 1. 0.]
        [-0.499       0.22500001  0.27400002]
        ```

    **Arguments:**

    - `logits`, `key`, `axis`: as for [`eqx_grads.ste.gumbel_softmax`][].
    - `temperature`: positive, a constant. The paper recommends one or more.

    **Returns:**

    An array like `logits`, one-hot along the axis. NaN along an axis with a NaN.

    **Derivative:**

    The derivative of $2 \pi_1 - \frac12 \pi_0$. Here $\pi_0 = \operatorname{softmax}(\theta)$,
    and $\pi_1 = \operatorname{softmax}(\theta + c)$. The constant $c$ makes $\pi_1$ equal to
    $\frac12 (D + \operatorname{softmax}(\theta / \tau))$ with the sample $D$. Both modes and
    all orders.

    **Raises:**

    As [`eqx_grads.ste.gumbel_softmax`][], and if the temperature is differentiated: it is
    part of the constant.
    """
    logits, wide, tau = _checked("ste.reinmax", logits, key, temperature)
    tau = constant("ste.reinmax", "temperature", tau)
    axis = as_axis("ste.reinmax", axis, logits, "logits")
    noisy = wide + jr.gumbel(key, wide.shape, wide.dtype)
    sample = one_hot_of_largest(noisy, wide, axis)
    middle = 0.5 * (sample + jax.nn.softmax(wide / tau, axis))
    # The paper writes `stop_gradient(log(middle) - logits) + logits`, which is
    # `inf - inf` for a logit of minus infinity.
    shifted = replace_gradient(jnp.log(middle), wide)
    soft = 2 * jax.nn.softmax(shifted, axis) - 0.5 * jax.nn.softmax(wide, axis)
    return replace_gradient(sample.astype(logits.dtype), soft)
