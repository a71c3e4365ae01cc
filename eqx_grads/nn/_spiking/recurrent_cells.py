"""Recurrently connected spiking neurons."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key, Num

from .._dtypes import common_dtype
from .cells import ALIFCell, CuBaLIFCell, LIFCell
from .parameters import ALIFState, check_inputs, check_number, CuBaLIFState, LIFState, Parameter


class RLIFCell(eqx.Module):
    r"""Recurrently connected leaky integrate-and-fire neurons.

    $$u' = \beta u + x + V s - \theta s, \qquad s' = \Theta(u' - \theta)$$

    An [`eqx_grads.nn.LIFCell`][] whose input is $x + V s$: `RLeaky` in snnTorch, without its
    bias.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.RLIFCell(3, beta=0.9, key=jax.random.key(0))

        @eqx.filter_grad
        def gradient(cell, xs):
            spikes, _ = eqg.nn.Recurrent(cell)(xs)
            return jnp.sum(spikes)

        grads = gradient(cell, jnp.ones((5, 3)))
        print(grads.weight_hh.shape, jnp.any(grads.weight_hh != 0))
        ```

        ```text
        (3, 3) True
        ```

    **Derivative:**

    As for [`eqx_grads.nn.LIFCell`][]. `detach_reset` is about the reset only: the gradient
    does pass through $V s$.
    """

    neurons: LIFCell
    weight_hh: Float[Array, "hidden hidden"]

    def __init__(
        self,
        hidden_size: int,
        beta: Parameter,
        *,
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """**Arguments:**

        - `hidden_size`: how many neurons.
        - `dtype`: also of $V$.
        - `key`: for $V$, which is uniform within $\\pm 1/\\sqrt{\\mathrm{hidden\\_size}}$.

        All others as for [`eqx_grads.nn.LIFCell`][].
        """
        check_number("RLIFCell", hidden_size)
        self.neurons = LIFCell(hidden_size, beta, dtype=dtype, **options)
        self.weight_hh = _recurrent_weight(self.neurons, key)

    def initial_state(self) -> LIFState:
        """The neurons at rest: all is zero."""
        return _at_rest(self.neurons, self.weight_hh)

    def __call__(self, x: Num[Array, " hidden"], state: LIFState) -> LIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("RLIFCell", self.neurons.hidden_size, x, state, LIFState)
        return self.neurons(_with_recurrent(x, self.weight_hh, state), state)


class RALIFCell(eqx.Module):
    r"""Recurrently connected leaky integrate-and-fire neurons whose threshold rises as they
    fire.

    An [`eqx_grads.nn.ALIFCell`][] whose input is $x + V s$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.RALIFCell(3, beta=0.9, rho=0.99, key=jax.random.key(0))
        spikes, state = eqg.nn.Recurrent(cell)(jnp.ones((5, 3)))
        print(spikes.shape, jnp.all(state.adaptation > 0))
        ```

        ```text
        (5, 3) True
        ```

    **Derivative:**

    As for [`eqx_grads.nn.RLIFCell`][].
    """

    neurons: ALIFCell
    weight_hh: Float[Array, "hidden hidden"]

    def __init__(
        self,
        hidden_size: int,
        beta: Parameter,
        rho: Parameter,
        *,
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """**Arguments:**

        - `hidden_size`, `dtype`, `key`: as for [`eqx_grads.nn.RLIFCell`][].

        All others as for [`eqx_grads.nn.ALIFCell`][].
        """
        check_number("RALIFCell", hidden_size)
        self.neurons = ALIFCell(hidden_size, beta, rho, dtype=dtype, **options)
        self.weight_hh = _recurrent_weight(self.neurons, key)

    def initial_state(self) -> ALIFState:
        """The neurons at rest: all is zero."""
        return _at_rest(self.neurons, self.weight_hh)

    def __call__(self, x: Num[Array, " hidden"], state: ALIFState) -> ALIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("RALIFCell", self.neurons.hidden_size, x, state, ALIFState)
        return self.neurons(_with_recurrent(x, self.weight_hh, state), state)


class RCuBaLIFCell(eqx.Module):
    r"""Recurrently connected current-based leaky integrate-and-fire neurons.

    An [`eqx_grads.nn.CuBaLIFCell`][] whose input is $x + V s$: `RSynaptic` in snnTorch, without
    its bias.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.RCuBaLIFCell(3, alpha=0.8, beta=0.9, key=jax.random.key(0))
        spikes, state = eqg.nn.Recurrent(cell)(jnp.ones((5, 3)))
        print(spikes.shape, state.membrane.shape)
        ```

        ```text
        (5, 3) (3,)
        ```

    **Derivative:**

    As for [`eqx_grads.nn.RLIFCell`][].
    """

    neurons: CuBaLIFCell
    weight_hh: Float[Array, "hidden hidden"]

    def __init__(
        self,
        hidden_size: int,
        alpha: Parameter,
        beta: Parameter,
        *,
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """**Arguments:**

        - `hidden_size`, `dtype`, `key`: as for [`eqx_grads.nn.RLIFCell`][].

        All others as for [`eqx_grads.nn.CuBaLIFCell`][].
        """
        check_number("RCuBaLIFCell", hidden_size)
        self.neurons = CuBaLIFCell(hidden_size, alpha, beta, dtype=dtype, **options)
        self.weight_hh = _recurrent_weight(self.neurons, key)

    def initial_state(self) -> CuBaLIFState:
        """The neurons at rest: all is zero."""
        return _at_rest(self.neurons, self.weight_hh)

    def __call__(self, x: Num[Array, " hidden"], state: CuBaLIFState) -> CuBaLIFState:
        """As for [`eqx_grads.nn.LIFCell`][]."""
        check_inputs("RCuBaLIFCell", self.neurons.hidden_size, x, state, CuBaLIFState)
        return self.neurons(_with_recurrent(x, self.weight_hh, state), state)


def _recurrent_weight(neurons: Any, key: Array) -> Array:
    n = neurons.hidden_size
    return jr.uniform(key, (n, n), neurons.dtype, -(n**-0.5), n**-0.5)


def _at_rest(neurons: Any, weight: Array) -> Any:
    """All is zero, in the dtype of the weight: the model may have been cast."""
    return jax.tree.map(lambda s: s.astype(weight.dtype), neurons.initial_state())


def _with_recurrent(x: Array, weight: Array, state: Any) -> Array:
    x, spikes = common_dtype(x, state.spikes)
    return x + jnp.matmul(weight.astype(x.dtype), spikes)
