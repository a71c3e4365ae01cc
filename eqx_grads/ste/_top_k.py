"""The mask of the largest elements, straight through."""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike

from .._errors import rule_error
from .._rules.custom_jvp import custom_jvp
from .._rules.float_args import (
    as_axis,
    as_floats,
    as_integer,
    broadcast_parameter,
    check_positive,
    widen,
)
from .._rules.replace_gradient import replace_gradient
from ._sign_and_step import nan_along


# Each halves the interval: more than a float64 has bits.
_BISECTIONS = 80


def top_k(x: ArrayLike, k: int, *, axis: int = -1, temperature: ArrayLike = 1.0) -> Array:
    r"""Return the mask of the `k` largest elements along an axis, with the derivative of a soft
    mask.

    The soft mask comes from [Amos et al. (2019)](https://arxiv.org/abs/1906.08707), the layer
    of limited multi-label projection: sigmoids whose sum is $k$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([1.0, 3.0, 2.0, 0.0])
        print(eqg.ste.top_k(x, 2))
        grad = jax.grad(lambda x: eqg.ste.top_k(x, 2)[1])(x)
        print(grad.round(3))
        ```

        ```text
        [0. 1. 1. 0.]
        [-0.046  0.12  -0.046 -0.029]
        ```

    **Arguments:**

    - `x`: floats, of any shape with that axis.
    - `k`: how many elements, an integer from 1 to the size of the axis.
    - `axis`: the axis along which to choose them.
    - `temperature`: of the sigmoids; positive. It may be learned.

    **Returns:**

    An array like `x`: one for the `k` largest elements (at a tie, the first ones), and zero
    elsewhere. NaN along an axis with a NaN. For the values themselves, use `lax.top_k`.

    **Derivative:**

    Let $\tau$ be the temperature and $\sigma$ the sigmoid. The derivative of $\sigma(x / \tau -
    t)$, where $t$ is the number at which the sum along the axis is $k$: $\dot t = \sum_i
    s_i\,(x_i / \tau)^{\cdot} / \sum_i s_i$ with $s = \sigma'(x / \tau - t)$. It is taken with
    respect to `x` and the temperature, and is zero if `k` is the size of the axis. Both modes
    and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` is not an array of floats, if there are not `k` elements,
    or if the temperature is not positive (unless it is traced).
    """
    check_positive("ste.top_k", "temperature", temperature)
    x = as_floats("ste.top_k", x)
    axis = as_axis("ste.top_k", axis, x)
    count = as_integer(k)
    if count is None or not 1 <= count <= x.shape[axis]:
        raise rule_error(
            "`ste.top_k` was not given a number of elements that the array has.",
            f"`k` is {k!r:.60}, and `x` has {x.shape[axis]} along its axis",
            do="Give an integer from 1 to the size of the axis.",
        )
    wide = widen(x)
    scaled = wide / broadcast_parameter("ste.top_k", "temperature", temperature, wide)
    order = jnp.argsort(x, axis, descending=True, stable=True)
    hard = (jnp.argsort(order, axis) < count).astype(x.dtype)
    hard = nan_along(x, axis, hard)
    if count == x.shape[axis] or x.size == 0:
        return hard
    soft = jax.nn.sigmoid(scaled - _threshold(scaled, k=count, axis=axis))
    return replace_gradient(hard, soft)


@custom_jvp
def _threshold(x, *, k, axis):
    """The number `t` at which the sum of `sigmoid(x - t)` is `k`."""
    return _bisect(x, k, axis)


# Eagerly, JAX would compile the loop in each call.
@ft.partial(jax.jit, static_argnames=("k", "axis"), inline=True)
def _bisect(x, k, axis):
    n, limit = x.shape[axis], jnp.finfo(x.dtype).max
    ordered = jnp.clip(jnp.sort(x, axis), -limit, limit)
    # The element that is the first not among the largest, and the last that is. 100 beyond, a
    # sigmoid is zero or one. Other elements may be far away, as those of a mask are.
    low, high = (lax.slice_in_dim(ordered, i, i + 1, axis=axis) for i in (n - k - 1, n - k))

    def halve(state):
        i, low, high = state
        middle = low / 2 + high / 2
        # The share of the elements, since a sum of many is rounded.
        is_low = jnp.mean(jax.nn.sigmoid(x - middle), axis, keepdims=True) > k / n
        return i + 1, jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    # The rule below differentiates it, so it needs no reverse mode of the loop.
    state = 0, low - 100, high + 100
    return lax.while_loop(lambda state: state[0] < _BISECTIONS, halve, state)[1]


@_threshold.def_jvp
def _threshold_jvp(primals, tangents, *, k, axis):
    ((x,), (t_x,)) = primals, tangents
    threshold = _threshold(x, k=k, axis=axis)
    # The logarithm of the derivative of a sigmoid, which does not underflow.
    log_slopes = jax.nn.log_sigmoid(x - threshold) + jax.nn.log_sigmoid(threshold - x)
    weights = jax.nn.softmax(log_slopes, axis)
    return threshold, jnp.sum(weights * t_x, axis, keepdims=True)
