"""A layer whose parameters JAX holds, and whose computation runs on the host."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import PRNGKeyArray, PyTree

from .._errors import check_function


class HostLayer(eqx.Module):
    r"""A layer that is computed by a host function of its parameters.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import numpy as np

        @eqg.host_function(out=lambda weight, x: x, finite_difference="central")
        def convolve(weight, x):
            return np.convolve(x, weight, mode="same")

        layer = eqg.nn.HostLayer(convolve, jnp.array([0.5, 1.0, -0.5]))
        model = eqx.nn.Sequential([layer, eqx.nn.Lambda(jax.nn.softplus)])
        grads = eqx.filter_grad(lambda model: jnp.sum(model(jnp.arange(4.0))))(model)
        print(grads.layers[0].parameters.round(2))
        ```

        ```text
        [5.24 5.43 2.71]
        ```

    **Arguments:**

    - `function`: an [`eqx_grads.host_function`][] of `parameters` and the input.
    - `parameters`: any PyTree. Its arrays are leaves of the layer, and can be trained.

    **Derivative:**

    That of `function`, with respect to the parameters and the input.
    """

    function: Callable[..., Any]
    parameters: PyTree

    def __check_init__(self):
        check_function(self.function, "function", "HostLayer")

    def __call__(self, *args: Any, key: PRNGKeyArray | None = None) -> Any:
        """**Arguments:**

        - `args`: what `function` takes after the parameters.
        - `key`: ignored.

        **Returns:**

        `function(parameters, *args)`.
        """
        del key
        return self.function(self.parameters, *args)
