"""The linear recurrent unit, as a layer over time."""

import functools as ft
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from ..._errors import rule_error
from ..._rules.float_args import is_number
from ..._tangent_spaces import promote
from .._recurrent.stack import StackOptions
from .diagonal import AbstractDiagonal, AbstractDiagonalCell, make_skip


class LRUCell(AbstractDiagonalCell):
    """The parameters of a linear recurrent unit."""

    log_decay: Float[Array, " state"]
    log_phase: Float[Array, " state"]
    log_gamma: Float[Array, " state"]
    weight_in: Float[Array, "2 state in"]
    weight_out: Float[Array, "2 out state"]
    skip: Float[Array, "..."]
    input_size: int = eqx.field(static=True)

    def __init__(self, input_size, *, output_size, state_size, ring, max_phase, dtype, key):
        keys = iter(jr.split(key, 5))
        wide = promote([jnp.zeros((), dtype), jnp.float32])
        low, high = ring
        uniform = lambda: jr.uniform(next(keys), (state_size,), wide, jnp.finfo(wide).tiny)
        # Uniform on the ring is uniform in the squared radius. The radius is kept a few
        # roundings below one, where gamma would be zero and a state would never decay, and
        # above zero, whose logarithm is infinite.
        squared = low**2 + (high**2 - low**2) * uniform()
        below_one = (1 - 4 * jnp.finfo(wide).eps) ** 2
        log_radius = 0.5 * jnp.log(jnp.clip(squared, jnp.finfo(wide).tiny, below_one))
        in_, out = (2, state_size, input_size), (2, output_size, state_size)
        # In single precision at least. Over many steps, a phase that was rounded to half
        # precision is another phase: the outputs would be wrong by 12 to 26 %.
        self.log_decay = jnp.log(-log_radius)
        phase = jnp.maximum(max_phase * uniform(), jnp.finfo(wide).tiny)
        self.log_phase = jnp.log(phase)
        self.log_gamma = 0.5 * jnp.log(-jnp.expm1(2 * log_radius))
        self.weight_in = jr.normal(next(keys), in_, dtype) * (2 * input_size) ** -0.5
        self.weight_out = jr.normal(next(keys), out, dtype) * state_size**-0.5
        self.skip = make_skip(next(keys), input_size, output_size, dtype)
        self.input_size = input_size

    def factors(self, dtype):
        decay, phase, gamma = (
            jnp.exp(p.astype(dtype)) for p in (self.log_decay, self.log_phase, self.log_gamma)
        )
        factor = jnp.exp(jax.lax.complex(-decay, phase))
        return factor, gamma.astype(factor.dtype), 1.0


class LRU(AbstractDiagonal):
    r"""A linear recurrent unit over time.

    The state is complex, and the recurrence is elementwise:

    $$h_t = \lambda\,h_{t-1} + \gamma\,B x_t, \qquad y_t = \phi(\mathrm{Re}(C h_t) + D x_t),
    \qquad \lambda = \exp(-e^{\nu} + i\,e^{\theta}).$$

    So $|\lambda| < 1$ for all parameters. $\gamma$ is a parameter too. Its initial value is
    $\sqrt{1 - |\lambda|^2}$: with white noise as input, the states have the variance of $B x$.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        lru = eqg.nn.LRU(3, 8, 16, r_min=0.9, r_max=0.99, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(lru):
            ys, state = lru(xs)
            print(ys.shape, state.shape)
            return jnp.sum(ys**2)

        print(gradient(lru).cells[0][0].log_decay.shape)
        ```

        ```text
        (5, 20, 8) (5, 16)
        (16,)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `log_decay`
    ($\nu$), `log_phase` ($\theta$), `log_gamma` ($\log\gamma$), `weight_in` ($B$), `weight_out`
    ($C$) and `skip` ($D$). All are real: $B$ and $C$ have first the real and then the imaginary
    parts. `skip` is a vector if there are as many outputs as inputs, and otherwise a matrix.

    For single steps, call `layer.step(x, state)` with the state that the last call returned.

    States are complex. They have single precision at least, and so do `log_decay`,
    `log_phase` and `log_gamma`. With a `dtype` and inputs of half precision, the recurrence
    runs in single precision, and the outputs have half precision. Do not cast these three
    parameters to half precision: the phases would lose digits, and the layer would be another
    filter.

    **Derivative:**

    The derivative of [`eqx_grads.linear_recurrence`][], which is the same recurrence in the
    other direction, and plain differentiation around it. Both modes, all orders. The gradient
    of each weight is one matrix product for all steps and the batch.

    ??? cite

        [Resurrecting Recurrent Neural Networks for Long
        Sequences](https://arxiv.org/abs/2303.06349)

        ```bibtex
        @inproceedings{orvieto2023resurrecting,
            author={Orvieto, Antonio and Smith, Samuel L. and Gu, Albert and Fernando, Anushan
                    and Gulcehre, Caglar and Pascanu, Razvan and De, Soham},
            title={Resurrecting Recurrent Neural Networks for Long Sequences},
            booktitle={International Conference on Machine Learning},
            year={2023},
        }
        ```
    """

    method: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        output_size: int,
        state_size: int,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * np.pi,
        activation: Callable[[Array], Array] | None = None,
        method: str = "auto",
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        r"""**Arguments:**

        - `input_size`, `output_size`: the numbers of features.
        - `state_size`: the number of complex numbers of a state.
        - `r_min`, `r_max`, `max_phase`: the initial $\lambda$ is uniform on the part of the
            ring between the two radii with a phase from zero to `max_phase`. For long
            sequences, use an `r_min` close to one and a small `max_phase`. Each $|\lambda|$ is
            less than one by a few roundings at least, even with `r_max=1`.
        - `activation`: $\phi$, applied to all outputs. By default it is the identity, and a
            stack of several layers is linear.
        - `method`: as for [`eqx_grads.linear_recurrence`][].

        All others as for [`eqx_grads.nn.GRU`][]. A learned initial state is `initial_parts`,
        its real and its imaginary part.
        """
        are_numbers = all(map(is_number, (r_min, r_max, max_phase)))
        if not (are_numbers and 0 <= r_min < r_max <= 1 and 0 < max_phase < np.inf):
            raise rule_error(
                "`LRU` needs `0 <= r_min < r_max <= 1` and `max_phase > 0`.",
                f"`r_min` is {r_min}, `r_max` is {r_max}, `max_phase` is {max_phase}",
                do="Choose two radii in this order, and a positive phase.",
            )
        make = ft.partial(LRUCell, ring=(r_min, r_max), max_phase=float(max_phase))
        sizes = {"input_size": input_size, "output_size": output_size, "state_size": state_size}
        self._set(make, sizes, activation, method, dtype, key, options)
