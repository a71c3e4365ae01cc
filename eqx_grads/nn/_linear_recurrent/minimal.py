"""The minimal gated recurrent unit and long short-term memory, as layers over time."""

import abc
import functools as ft
from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Key

from ..._control_flow.linear_recurrence import METHODS
from ..._errors import check_flags, check_option
from ..._tangent_spaces import promote
from .._arguments import check_real, common_dtype
from .._recurrent.layer import AbstractStacked
from .._recurrent.stack import StackOptions
from .recurrence import matmul_f32, run_recurrence


class LinearGates(eqx.Module):
    """The parameters of gates that are functions of the input, and not of the state."""

    weight: Float[Array, "gates in"]
    bias: Float[Array, " gates"] | None
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)

    def __init__(self, input_size, *, hidden_size, n_gates, use_bias, dtype, key):
        limit, size = input_size**-0.5, n_gates * hidden_size
        keys = iter(jr.split(key))
        uniform = lambda *shape: jr.uniform(next(keys), shape, dtype, -limit, limit)
        self.weight = uniform(size, input_size)
        self.bias = uniform(size) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size

    def initial_state(self) -> Array:
        return jnp.zeros(self.hidden_size, self.weight.dtype)


def gate_inputs(cell: LinearGates, xs: Array) -> list[Array]:
    """The arguments of each gate for all steps, in single precision at least."""
    xs, weight, bias = common_dtype(xs, cell.weight, cell.bias)
    out = matmul_f32(xs, weight)
    out = out if bias is None else out + bias.astype(out.dtype)[None, None]
    return jnp.split(out, weight.shape[0] // cell.hidden_size, -1)


class AbstractMinimal(AbstractStacked):
    """A layer over the recurrence $h' = a\\,h + b$, with $a$ and $b$ functions of the input."""

    _n_gates: eqx.AbstractClassVar[int]
    method: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        use_bias: bool = True,
        method: str = "auto",
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: the numbers of features of an input and of the state.
        - `method`: as for [`eqx_grads.linear_recurrence`][].

        All others as for [`eqx_grads.nn.GRU`][]. Weights and biases are at first uniform within
        `1 / sqrt(input_size)`, as in `equinox.nn.Linear`.
        """
        name = type(self).__name__
        check_flags(name, use_bias=use_bias)
        check_option(name, "method", method, METHODS)
        make = ft.partial(LinearGates, n_gates=self._n_gates, use_bias=use_bias)
        sizes = {"input_size": input_size, "hidden_size": hidden_size}
        self._set_cells(make, sizes, dtype, key, options)
        self.method = method

    @abc.abstractmethod
    def _coefficients(self, gates: list[Array]) -> tuple[Array, Array]:
        """`a` and `b`, given the arguments of the gates."""

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real(type(self).__name__, xs)
        a, b = self._coefficients(gate_inputs(cell, xs))
        hs, last = run_recurrence(a, b, state, valid, reverse, self.method)
        return hs.astype(promote([xs, cell.weight])), last


class MinGRU(AbstractMinimal):
    r"""A minimal gated recurrent unit over time.

    A gated recurrent unit whose gate and candidate are functions of the input only, so that
    the recurrence is linear in the state:

    $$z = \sigma(W_z x + b_z), \quad \tilde h = W_h x + b_h, \quad
    h' = (1 - z)\,h + z\,\tilde h.$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.MinGRU(3, 8, num_layers=2, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(layer):
            ys, state = layer(xs)
            print(ys.shape, state.shape)
            return jnp.sum(ys**2)

        print(gradient(layer).cells[0][0].weight.shape)
        ```

        ```text
        (5, 20, 8) (2, 5, 8)
        (16, 3)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `weight`,
    $(W_z, W_h)$ one above the other, and `bias`, $(b_z, b_h)$.

    This is the plain form of the paper (its section 3.1), run by
    [`eqx_grads.linear_recurrence`][]. Each state is an average of the last state and the
    candidate, and nothing is divided. So the logarithms of the paper's appendix are not
    needed, and the candidate may be negative.

    For single steps, call `layer.step(x, state)` with the state that the last call returned.

    States have single precision at least. With parameters and inputs of half precision, the
    recurrence runs in single precision, and the outputs have half precision.

    **Derivative:**

    The derivative of [`eqx_grads.linear_recurrence`][], which is the same recurrence in the
    other direction, and plain differentiation around it. Both modes, all orders. The gradient
    of each weight is one matrix product for all steps and the batch.

    ??? cite

        [Were RNNs All We Needed?](https://arxiv.org/abs/2410.01201)

        ```bibtex
        @article{feng2024were,
            author={Feng, Leo and Tung, Frederick and Ahmed, Mohamed Osama and Bengio, Yoshua
                    and Hajimirsadeghi, Hossein},
            title={Were RNNs All We Needed?},
            journal={arXiv:2410.01201},
            year={2024},
        }
        ```
    """

    _n_gates: ClassVar[int] = 2
    __init__ = AbstractMinimal.__init__  # a type checker sees no inherited one

    def _coefficients(self, gates):
        update, candidate = gates
        return jax.nn.sigmoid(-update), jax.nn.sigmoid(update) * candidate


class MinLSTM(AbstractMinimal):
    r"""A minimal long short-term memory over time.

    A long short-term memory whose gates and candidate are functions of the input only, so that
    the recurrence is linear in the state. The gates are divided by their sum, so that the state
    keeps its scale:

    $$f, i = \sigma(W x + b), \quad \tilde h = W_h x + b_h, \quad
    h' = \frac{f}{f + i}\,h + \frac{i}{f + i}\,\tilde h.$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        layer = eqg.nn.MinLSTM(3, 8, num_layers=2, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(layer):
            ys, state = layer(xs)
            print(ys.shape, state.shape)
            return jnp.sum(ys**2)

        print(gradient(layer).cells[0][0].weight.shape)
        ```

        ```text
        (5, 20, 8) (2, 5, 8)
        (24, 3)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `weight`,
    $(W_f, W_i, W_h)$ one above the other, and `bias`, $(b_f, b_i, b_h)$.

    This is the plain form of the paper (its section 3.2), run by
    [`eqx_grads.linear_recurrence`][]; the candidate may be negative. Both gates may underflow,
    so the quotients are computed from logarithms: $f / (f + i) = \sigma(\log f - \log i)$.

    For single steps, precision and the paper, see [`eqx_grads.nn.MinGRU`][].

    **Derivative:**

    As for [`eqx_grads.nn.MinGRU`][].
    """

    _n_gates: ClassVar[int] = 3
    __init__ = AbstractMinimal.__init__  # a type checker sees no inherited one

    def _coefficients(self, gates):
        forget, write, candidate = gates
        log_ratio = jax.nn.log_sigmoid(forget) - jax.nn.log_sigmoid(write)
        return jax.nn.sigmoid(log_ratio), jax.nn.sigmoid(-log_ratio) * candidate
