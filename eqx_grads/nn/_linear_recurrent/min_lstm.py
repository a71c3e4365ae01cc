"""The minimal long short-term memory, as a layer over time."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..._tangent_spaces import promote
from .._recurrent.layer import AbstractRecurrent, check_sizes, make_cells, stacked
from .gates import check_real, gates, LinearGates, states


class MinLSTM(AbstractRecurrent):
    r"""A minimal long short-term memory over time.

    A long short-term memory whose gates and candidate see the input only, so that it is linear
    in its state, and with gates that sum to one, so that the state keeps its scale:

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
            assert ys.shape == (5, 20, 8) and state.shape == (2, 5, 8)
            return jnp.sum(ys**2)

        assert gradient(layer).cells[0][0].weight.shape == (24, 3)
        ```

    The parameters of one layer and direction, `cells[layer][direction]`, are `weight`,
    $(W_f, W_i, W_h)$ one above the other, and `bias`, $(b_f, b_i, b_h)$.

    This is the plain form of the paper (its section 3.2), run by
    [`eqx_grads.linear_recurrence`][]; the candidate may be negative. Only the quotients are
    formed from logarithms, $f / (f + i) = \sigma(\log f - \log i)$, as both gates may be too
    small for a float.

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
            "MinLSTM", input_size=input_size, hidden_size=hidden_size, num_layers=num_layers
        )
        make = lambda size, key: LinearGates(
            3, size, hidden_size, use_bias=use_bias, dtype=dtype, key=key
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
        check_real("MinLSTM", cell, xs, state)
        forget, write, candidate = gates(cell, xs)
        log_ratio = jax.nn.log_sigmoid(forget) - jax.nn.log_sigmoid(write)
        a, b = jax.nn.sigmoid(log_ratio), jax.nn.sigmoid(-log_ratio) * candidate
        hs, last = states(a, b, state, valid, reverse, self.method)
        return hs.astype(promote([xs, cell.weight])), last
