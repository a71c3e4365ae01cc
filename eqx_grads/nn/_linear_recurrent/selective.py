"""A selective state space model (S6, Mamba), as a layer over time."""

from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key

from ..._control_flow.linear_recurrence import METHODS
from ..._control_flow.selective_scan import selective_scan
from ..._errors import check_option
from ..._tangent_spaces import promote
from .._recurrent.stack import StackOptions
from .delta_net import AbstractConvolved, bias_of_steps
from .recurrence import matmul_f32
from .short_convolution import convolve, make_convolution


class SelectiveCell(eqx.Module):
    """The parameters of a selective state space model."""

    weight_in: Float[Array, "twice_channels in"]
    convolution: Float[Array, "steps channels"]
    weight_select: Float[Array, "selected channels"]
    weight_step: Float[Array, "channels rank"]
    bias_step: Float[Array, " channels"]
    log_rate: Float[Array, "channels state"]
    skip: Float[Array, " channels"]
    weight_out: Float[Array, "out channels"]
    input_size: int = eqx.field(static=True)

    def __init__(self, input_size, *, output_size, channels, state_size, conv_size, dtype, key):
        keys, rank = iter(jr.split(key, 6)), -(-input_size // 16)
        normal = lambda *shape: jr.normal(next(keys), shape, dtype) * shape[-1] ** -0.5
        self.weight_in = normal(2 * channels, input_size)
        self.convolution = make_convolution(next(keys), conv_size, channels, dtype)
        self.weight_select = normal(rank + 2 * state_size, channels)
        self.weight_step = normal(channels, rank)
        self.bias_step = bias_of_steps(next(keys), channels, dtype)
        rates = jnp.log(jnp.arange(1, state_size + 1, dtype=dtype))
        self.log_rate = jnp.tile(rates, (channels, 1))
        self.skip = jnp.ones(channels, dtype)
        self.weight_out = normal(output_size, channels)
        self.input_size = input_size

    def initial_state(self) -> tuple[Array, Array]:
        dtype, (size, channels) = promote([self.log_rate, jnp.float32]), self.convolution.shape
        return jnp.zeros(self.log_rate.shape, dtype), jnp.zeros((size - 1, channels), dtype)

    def run(self, xs, state, valid, layer):
        """All outputs and the last state, from the first step to the last."""
        h, window = state
        wide = promote([xs, self.weight_in, jnp.float32, *state])
        cast = lambda p: p.astype(wide)
        x, gate = jnp.split(cast(matmul_f32(xs, self.weight_in.astype(xs.dtype))), 2, -1)
        x, window = convolve(cast(self.convolution), x, cast(window), valid)
        x, rank = jax.nn.silu(x), self.weight_step.shape[1]
        selected = matmul_f32(x, cast(self.weight_select))
        low, b, c = jnp.split(selected, [rank, rank + self.log_rate.shape[1]], -1)
        step = matmul_f32(low, cast(self.weight_step)) + cast(self.bias_step)[None, None]
        lengths = None if valid is None else jnp.sum(valid, 0)
        rates, step = -jnp.exp(cast(self.log_rate)), jax.nn.softplus(step)
        y, h = selective_scan(
            x, step, rates, b, c, state=cast(h), lengths=lengths, method=layer.method
        )
        y = (y + cast(self.skip)[None, None] * x) * jax.nn.silu(gate)
        return matmul_f32(y, cast(self.weight_out)), (h, window)


class SelectiveSSM(AbstractConvolved):
    r"""A selective state space model over time: S6, the block of Mamba.

    The input decides what is written to the states, what is read, and how long a step is, by
    [`eqx_grads.selective_scan`][]. With $u$ as the input after a projection, a short causal
    convolution and a SiLU,

    $$\delta_t = \mathrm{softplus}(W_\delta W_r u_t + b_\delta), \quad b_t = W_b u_t, \quad
    c_t = W_c u_t, \quad
    y_t = W_o\,((s_t + D u_t) \odot \mathrm{silu}(W_z x_t)),$$

    where $s$ are the outputs of the scan with the rates $-e^{\alpha}$.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.SelectiveSSM(3, 8, 6, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(layer):
            ys, (h, window) = layer(xs)
            print(ys.shape, h.shape, window.shape)
            return jnp.sum(ys**2)

        print(gradient(layer).cells[0][0].weight_in.shape)
        ```

        ```text
        (5, 20, 8) (5, 6, 16) (5, 3, 6)
        (12, 3)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `weight_in`,
    `convolution` (a filter for each channel), `weight_select`, `weight_step` ($W_\delta$),
    `bias_step` ($b_\delta$), `log_rate` ($\alpha$), `skip` ($D$) and `weight_out` ($W_o$).
    `weight_in` stacks the weights of the input and $W_z$; `weight_select` stacks $(W_r, W_b,
    W_c)$.

    The state is the state of the scan, and the last inputs of the convolution. It is in single
    precision at least. For single steps, see [`eqx_grads.nn.GatedDeltaNet`][].

    **Derivative:**

    The derivative of [`eqx_grads.selective_scan`][]. Both modes, all orders.

    ??? cite

        [Mamba: Linear-Time Sequence Modeling with Selective State
        Spaces](https://arxiv.org/abs/2312.00752)

        ```bibtex
        @inproceedings{gu2024mamba,
            author={Gu, Albert and Dao, Tri},
            title={{Mamba}: Linear-Time Sequence Modeling with Selective State Spaces},
            booktitle={Conference on Language Modeling},
            year={2024},
        }
        ```
    """

    _cell: ClassVar[Any] = SelectiveCell
    method: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        output_size: int,
        channels: int,
        *,
        state_size: int = 16,
        conv_size: int = 4,
        method: str = "auto",
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        """**Arguments:**

        - `input_size`, `output_size`: the numbers of features.
        - `channels`: the number of channels of the scan, in Mamba twice the `input_size`.
        - `state_size`: the number of states of each channel.
        - `conv_size`: as for [`eqx_grads.nn.GatedDeltaNet`][].
        - `method`: as for [`eqx_grads.linear_recurrence`][].

        All others as for [`eqx_grads.nn.GRU`][].
        """
        sizes = {"input_size": input_size, "output_size": output_size, "channels": channels}
        sizes |= {"state_size": state_size, "conv_size": conv_size}
        check_option("SelectiveSSM", "method", method, METHODS)
        self._set_cells(self._cell, sizes, dtype, key, options)
        self.method = method
