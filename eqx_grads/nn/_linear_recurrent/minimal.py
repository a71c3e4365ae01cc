"""The minimal gated recurrent unit, as a layer over time."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..._tangent_spaces import promote
from .._recurrent.layer import AbstractRecurrent, check_sizes, make_cells, stacked
from .gates import check_real, gates, LinearGates, states


class MinGRU(AbstractRecurrent):
    r"""A minimal gated recurrent unit over time.

    A gated recurrent unit whose gate and candidate see the input only, so that it is linear
    in its state:

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
            assert ys.shape == (5, 20, 8) and state.shape == (2, 5, 8)
            return jnp.sum(ys**2)

        assert gradient(layer).cells[0][0].weight.shape == (16, 3)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `weight`,
    $(W_z, W_h)$ one above the other, and `bias`, $(b_z, b_h)$.

    This is the plain form of the paper (its section 3.1), run by
    [`eqx_grads.linear_recurrence`][]. Each state is an average of the last one and the
    candidate, and nothing is divided, so there is no need for the logarithms that the paper
    has in its appendix, nor for a candidate that is positive.

    To take one step at a time, call the layer with one step, and with the state that the last
    call returned.

    States are in single precision at least: with parameters and inputs in half precision the
    recurrence is in single, and the outputs are in half.

    **Derivative:**

    That of [`eqx_grads.linear_recurrence`][], the same recurrence in the other direction, and
    plain differentiation around it. Both modes, all orders. Each weight's gradient is one
    matrix product for all steps and the batch.

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

    cells: tuple[tuple[LinearGates, ...], ...]
    initial_state: Float[Array, "..."] | None
    dropout: eqx.nn.Dropout
    method: str = eqx.field(static=True)
    reverse: bool = eqx.field(static=True)
    time_major: bool = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        learn_initial_state: bool = False,
        method: str = "auto",
        reverse: bool = False,
        time_major: bool = False,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: the numbers of features of an input and of the state.
        - `method`: as for [`eqx_grads.linear_recurrence`][].

        All others as for [`eqx_grads.nn.GRU`][]. Weights and biases are at first uniform within
        `1 / sqrt(input_size)`, as in `equinox.nn.Linear`.
        """
        check_sizes(
            "MinGRU", input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        make = lambda size, key: LinearGates(
            2, size, hidden_size, use_bias=use_bias, dtype=dtype, key=key
        )
        self.cells = make_cells(make, input_size, hidden_size, num_layers, bidirectional, key)
        self.dropout = eqx.nn.Dropout(dropout)
        self.method = method
        self.reverse = reverse
        self.time_major = time_major
        self.initial_state = None
        if learn_initial_state:
            n_cells = num_layers * len(self.cells[0])
            self.initial_state = stacked(self._zero_state(), n_cells)

    def _zero_state(self):
        cell = self.cells[0][0]
        return jnp.zeros(cell.hidden_size, cell.weight.dtype)

    def _run(self, cell, xs, state, valid, reverse):
        check_real("MinGRU", cell, xs, state)
        update, candidate = gates(cell, xs)
        a, b = jax.nn.sigmoid(-update), jax.nn.sigmoid(update) * candidate
        hs, last = states(a, b, state, valid, reverse, self.method)
        return hs.astype(promote([xs, cell.weight])), last
