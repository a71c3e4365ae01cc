"""Gated DeltaNet, as a layer over time."""

from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Key

from ..._control_flow.delta_rule import gated_delta_rule
from ..._tangent_spaces import promote
from .._arguments import as_sizes, check_real
from .._recurrent.layer import AbstractStacked
from .._recurrent.stack import StackOptions
from .recurrence import matmul_f32
from .short_convolution import convolve, make_convolution, time_order


class GatedDeltaCell(eqx.Module):
    """The parameters of a Gated DeltaNet."""

    weight_in: Float[Array, "projections in"]
    convolution: Float[Array, "steps channels"]
    log_rate: Float[Array, " heads"]
    bias_step: Float[Array, " heads"]
    gain: Float[Array, " value"]
    weight_out: Float[Array, "out values"]
    input_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)

    def __init__(
        self, input_size, *, output_size, heads, key_size, value_size, conv_size, dtype, key
    ):
        keys = iter(jr.split(key, 5))
        channels, values = heads * (2 * key_size + value_size), heads * value_size
        shape = channels + values + 2 * heads, input_size
        self.weight_in = jr.normal(next(keys), shape, dtype) * input_size**-0.5
        self.convolution = make_convolution(next(keys), conv_size, channels, dtype)
        self.log_rate = jnp.log(jr.uniform(next(keys), (heads,), dtype, 1, 16))
        self.bias_step = bias_of_steps(next(keys), heads, dtype)
        self.gain = jnp.ones(value_size, dtype)
        self.weight_out = jr.normal(next(keys), (output_size, values), dtype) * values**-0.5
        self.input_size = input_size
        self.key_size = key_size

    def initial_state(self) -> tuple[Array, Array]:
        dtype = promote([self.weight_in, jnp.float32])
        heads, size = self.log_rate.shape[0], self.convolution.shape
        matrix = jnp.zeros((heads, self.key_size, self.gain.shape[0]), dtype)
        return matrix, jnp.zeros((size[0] - 1, size[1]), dtype)

    def run(self, xs, state, valid, layer):
        """All outputs and the last state, from the first step to the last."""
        matrix, window = state
        steps, batch, heads = *xs.shape[:2], self.log_rate.shape[0]
        wide = promote([xs, self.weight_in, jnp.float32, *state])
        of = {name: getattr(self, name).astype(wide) for name in ("convolution", "gain")}
        projected = matmul_f32(xs, self.weight_in.astype(xs.dtype)).astype(wide)
        of_heads = lambda x: x.reshape(steps, batch, heads, -1)
        channels, values = self.convolution.shape[1], heads * self.gain.shape[0]
        x, gate, beta, step = jnp.split(
            projected, np.cumsum([channels, values, heads]).tolist(), -1
        )
        x, window = convolve(of["convolution"], x, window.astype(wide), valid)
        keys = heads * self.key_size
        q, k, v = map(of_heads, jnp.split(jax.nn.silu(x), [keys, 2 * keys], -1))
        rate, bias = (p.astype(wide)[None, None] for p in (self.log_rate, self.bias_step))
        out, matrix = gated_delta_rule(
            _unit(q),
            _unit(k),
            v,
            jax.nn.sigmoid(beta),
            -jnp.exp(rate) * jax.nn.softplus(step + bias),
            state=matrix.astype(wide),
            lengths=None if valid is None else jnp.sum(valid, 0),
            chunk=layer.chunk,
            scale=self.key_size**-0.5,
        )
        norm = jax.lax.rsqrt(jnp.mean(out**2, -1, keepdims=True) + 1e-5)
        out = out * norm * of["gain"][None, None, None] * jax.nn.silu(of_heads(gate))
        out = out.reshape(steps, batch, values)
        return matmul_f32(out, self.weight_out.astype(wide)), (matrix, window)


def _unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)


def bias_of_steps(key, size, dtype):
    """The inverse of the softplus of steps whose logarithm is uniform, as in Mamba."""
    wide = promote([jnp.zeros((), dtype), jnp.float32])
    step = jnp.exp(jr.uniform(key, (size,), wide, np.log(0.001), np.log(0.1)))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


class AbstractConvolved(AbstractStacked):
    """A layer of cells that see the last inputs through a short convolution. A cell runs
    forward, and reversing its inputs runs it backward."""

    _cell: eqx.AbstractClassVar[Any]

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real(type(self).__name__, xs)
        order, dtype = time_order(reverse, valid), promote([xs, cell.weight_in])
        if xs.shape[0] == 0:
            return jnp.zeros((0, xs.shape[1], cell.weight_out.shape[0]), dtype), state
        ys, state = cell.run(order(xs.astype(dtype)), state, valid, self)
        return order(ys).astype(dtype), state


class GatedDeltaNet(AbstractConvolved):
    r"""A Gated DeltaNet over time.

    Each head has a matrix as its state, in which it stores values under keys by
    [`eqx_grads.gated_delta_rule`][]. Queries, keys and values are projections of the input that
    pass a short causal convolution and a SiLU; queries and keys are then scaled to norm one:

    $$\beta_t = \sigma(W_\beta x_t), \quad
    g_t = -e^{\alpha}\,\mathrm{softplus}(W_g x_t + b_g), \quad
    y_t = W_o\,(\mathrm{norm}(o_t) \odot \mathrm{silu}(W_z x_t)).$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.GatedDeltaNet(3, 8, heads=2, key_size=4, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(layer):
            ys, (matrix, window) = layer(xs)
            print(ys.shape, matrix.shape, window.shape)
            return jnp.sum(ys**2)

        print(gradient(layer).cells[0][0].weight_in.shape)
        y, state = layer.step(xs[:, 0])  # for generation, one step at a time
        print(y.shape)
        ```

        ```text
        (5, 20, 8) (5, 2, 4, 4) (5, 3, 24)
        (36, 3)
        (5, 8)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `weight_in`,
    `convolution` (a filter for each channel), `log_rate` ($\alpha$), `bias_step` ($b_g$),
    `gain` (of the norm) and `weight_out` ($W_o$). `weight_in` stacks the projections of
    queries, keys, values, gates, $\beta$ and $g$.

    The state is the matrix of each head, and the last inputs of the convolution. It is in
    single precision at least, and so are all sums.

    **Derivative:**

    The derivative of [`eqx_grads.gated_delta_rule`][], which keeps one matrix for each chunk of
    steps, and plain differentiation around it. Both modes, all orders.

    ??? cite

        [Gated Delta Networks: Improving Mamba2 with Delta
        Rule](https://arxiv.org/abs/2412.06464)

        ```bibtex
        @inproceedings{yang2025gated,
            author={Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali},
            title={Gated Delta Networks: Improving {Mamba2} with Delta Rule},
            booktitle={International Conference on Learning Representations},
            year={2025},
        }
        ```
    """

    _cell: ClassVar[Any] = GatedDeltaCell
    chunk: int | None = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        heads: int = 4,
        key_size: int = 32,
        value_size: int | None = None,
        conv_size: int = 4,
        chunk: int | None = None,
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        """**Arguments:**

        - `input_size`, `output_size`: the numbers of features.
        - `heads`: the number of matrices.
        - `key_size`, `value_size`: the numbers of rows and columns of a matrix. The default of
            `value_size` is `key_size`.
        - `conv_size`: how many inputs the convolution sees, the last one included. With one,
            the convolution is a factor for each channel.
        - `chunk`: as for [`eqx_grads.gated_delta_rule`][].

        All others as for [`eqx_grads.nn.GRU`][].
        """
        value_size = key_size if value_size is None else value_size
        sizes = {"input_size": input_size, "output_size": output_size, "heads": heads}
        sizes |= {"key_size": key_size, "value_size": value_size, "conv_size": conv_size}
        if chunk is not None:
            (chunk,) = as_sizes("GatedDeltaNet", chunk=chunk)
        self._set_cells(self._cell, sizes, dtype, key, options)
        self.chunk = chunk
