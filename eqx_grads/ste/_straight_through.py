"""The values of a function with the derivative of another, and functions for the derivative."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._rules.float_args import map_floats
from .._rules.replace_gradient import replace_gradient


def straight_through(
    name: str,
    fn: Callable[[Any], Any],
    x: PyTree,
    derivative_of: Callable[[Any], Any] = lambda leaf: leaf,
) -> PyTree:
    """The values of `fn` at the floating leaves of `x`, with the derivative of another function
    of a leaf."""

    def of_leaf(leaf):
        return replace_gradient(fn(jax.lax.stop_gradient(leaf)), derivative_of(leaf))

    return map_floats(name, of_leaf, x)


def hard_tanh(x: PyTree) -> PyTree:
    r"""Clip to $[-1, 1]$, with a derivative of one at the ends too.

    [Courbariaux et al. (2016)](https://arxiv.org/abs/1602.02830); Larq's `ste_sign`. Use it for
    the derivative of a sign: `eqg.with_gradient_of(jnp.sign, eqg.ste.hard_tanh)`.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        x = jnp.array([-0.3, 1.0, 2.0])
        print(eqg.ste.hard_tanh(x))
        print(jax.grad(lambda x: eqg.ste.hard_tanh(x).sum())(x))
        ```

        ```text
        [-0.3  1.   1. ]
        [1. 1. 0.]
        ```

    **Arguments:**

    - `x`: an array of floats, or a PyTree of them. Other leaves are left unchanged.

    **Returns:**

    The clipped numbers.

    **Derivative:**

    One where $|x| \le 1$, zero elsewhere. At $|x| = 1$, the derivative of
    `jax.nn.hard_tanh` and `jnp.clip(x, -1, 1)` is zero or one half. If it is zero, a weight
    that was clipped to one can't return. Both modes and all orders.

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return map_floats("ste.hard_tanh", _hard_tanh, x)


def _hard_tanh(x):
    # With the `stop_gradient`, the residual is one bool per element.
    constant = jax.lax.stop_gradient(x)
    return jax.lax.select(jnp.abs(constant) <= 1, x, jnp.sign(constant))


def approx_sign(x: PyTree) -> PyTree:
    r"""Return a piecewise quadratic sign: $x\,(2 - |x|)$ where $|x| \le 1$, and the sign
    elsewhere.

    [Liu et al. (2018)](https://arxiv.org/abs/1808.00278), Bi-Real Net. Use it for the
    derivative of a sign, as [`eqx_grads.ste.hard_tanh`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        sign = eqg.with_gradient_of(jnp.sign, eqg.ste.approx_sign)
        print(sign(-0.25), jax.grad(sign)(-0.25))
        ```

        ```text
        -1.0 1.5
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.hard_tanh`][].

    **Returns:**

    Numbers from -1 to 1.

    **Derivative:**

    $2 - 2|x|$ where $|x| \le 1$, zero elsewhere. Both modes and all orders.

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return map_floats("ste.approx_sign", _approx_sign, x)


def _approx_sign(x):
    x = jnp.clip(x, -1, 1)
    return x * (2 - jnp.abs(x))


def swish_sign(x: PyTree) -> PyTree:
    r"""Return a smooth sign: $2\,\sigma(u)\,(1 + u\,\sigma(-u)) - 1$ with $u = 5x$.

    [Darabi et al. (2018)](https://arxiv.org/abs/1812.11800), BNN+. Use it for the derivative of
    a sign, as [`eqx_grads.ste.hard_tanh`][].

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        sign = eqg.with_gradient_of(jnp.sign, eqg.ste.swish_sign)
        print(sign(0.0), jax.grad(sign)(0.0))
        ```

        ```text
        0.0 5.0
        ```

    **Arguments:**

    - `x`: as for [`eqx_grads.ste.hard_tanh`][].

    **Returns:**

    Numbers from about -1.19 to 1.19: the paper's function overshoots.

    **Derivative:**

    $\beta\,(2 - \beta x \tanh(\beta x / 2)) / (1 + \cosh \beta x)$ with $\beta = 5$. Both modes
    and all orders.

    **Raises:**

    As [`eqx_grads.ste.round`][].
    """
    return map_floats("ste.swish_sign", _swish_sign, x)


def _swish_sign(x):
    u = 5 * jnp.clip(x, -1e3, 1e3)  # so that no infinity meets a zero
    return 2 * jax.nn.sigmoid(u) * (1 + u * jax.nn.sigmoid(-u)) - 1
