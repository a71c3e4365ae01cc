"""The cells that Equinox does not have, and the fast path of cells with gates."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact, Key

from ..._control_flow.accelerators import kept_of_cells
from ..._errors import check_flags, check_option
from .._arguments import as_sizes, check_step, common_dtype, layer_dtype
from .cell_scan import FAST_PATHS
from .formulas import ACTIVATIONS, GRU, LSTM, RNN
from .split_scan import split_scan, Weights


class RNNCell(eqx.Module):
    r"""One step of a vanilla recurrent network, $h' = \phi(W x + V h + b)$.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        cell = eqg.nn.RNNCell(2, 3, activation="relu", key=jax.random.key(0))
        print(cell(jnp.ones(2), cell.initial_state()).shape)

        ys, last = eqg.nn.Recurrent(cell)(jnp.ones((10, 2)))
        print(ys.shape, last.shape)
        ```

        ```text
        (3,)
        (10, 3) (3,)
        ```

    **Derivative:**

    One step has the derivative of its formula. In [`eqx_grads.nn.Recurrent`][], the backward
    pass is written by hand: the slope of $\phi$ is computed from $h'$, so that the states are
    the only residuals of the recurrence.

    **Raises:**

    [`eqx_grads.RuleError`][] if a size is not a positive integer, or if the `activation` is
    unknown. In a call, also if `x` is not of shape `(input_size,)` or `h` not of shape
    `(hidden_size,)`.
    """

    weight_ih: Inexact[Array, "hidden in"]
    weight_hh: Inexact[Array, "hidden hidden"]
    bias: Inexact[Array, " hidden"] | None
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        activation: str = "tanh",
        use_bias: bool = True,
        dtype: Any = None,
        key: Key[Array, ""],
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`, `use_bias`, `dtype`, `key`: as for
            `equinox.nn.GRUCell`.
        - `activation`: $\\phi$, `"tanh"` or `"relu"`.
        """
        input_size, hidden_size = as_sizes(
            "RNNCell", input_size=input_size, hidden_size=hidden_size
        )
        check_flags("RNNCell", use_bias=use_bias)
        check_option("RNNCell", "activation", activation, ACTIVATIONS)
        limit = hidden_size**-0.5
        dtype = layer_dtype("RNNCell", dtype)
        keys = iter(jr.split(key, 3))
        make = lambda *shape: jr.uniform(next(keys), shape, dtype, -limit, limit)
        self.weight_ih = make(hidden_size, input_size)
        self.weight_hh = make(hidden_size, hidden_size)
        self.bias = make(hidden_size) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.activation = activation

    def initial_state(self) -> Inexact[Array, " hidden"]:
        """Zeros, in the dtype of the weights."""
        return jnp.zeros(self.hidden_size, self.weight_hh.dtype)

    def __call__(
        self, x: Inexact[Array, " in"], h: Inexact[Array, " hidden"]
    ) -> Inexact[Array, " hidden"]:
        """**Arguments:**

        - `x`: the input of this step.
        - `h`: the state.

        **Returns:**

        The next state.
        """
        shapes = {"x": (x, (self.input_size,)), "h": (h, (self.hidden_size,))}
        check_step("RNNCell", "numbers", shapes)
        h = self.weight_ih @ x + self.weight_hh @ h
        return ACTIVATIONS[self.activation](h if self.bias is None else h + self.bias)


class ProjectedLSTMCell(eqx.Module):
    """One step of a long short-term memory whose hidden state is $h' = P\\,(o \\tanh(c'))$.

    The gates are in the order in, forget, cell, out, as in `equinox.nn.LSTMCell`.
    """

    weight_ih: Inexact[Array, "gates in"]
    weight_hh: Inexact[Array, "gates proj"]
    bias: Inexact[Array, " gates"] | None
    weight_hr: Inexact[Array, "proj hidden"]
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        proj_size: int,
        use_bias: bool,
        dtype: Any,
        key: Key[Array, ""],
    ):
        limit = hidden_size**-0.5
        keys = iter(jr.split(key, 4))
        make = lambda *shape: jr.uniform(next(keys), shape, dtype, -limit, limit)
        self.weight_ih = make(4 * hidden_size, input_size)
        self.weight_hh = make(4 * hidden_size, proj_size)
        bias = make(4 * hidden_size)
        self.bias = bias if use_bias else None
        self.weight_hr = make(proj_size, hidden_size)
        self.input_size = input_size
        self.hidden_size = hidden_size

    def initial_state(self) -> tuple[Array, Array]:
        shape, dtype = self.weight_hr.shape, self.weight_hr.dtype
        return jnp.zeros(shape[0], dtype), jnp.zeros(shape[1], dtype)

    def __call__(self, x: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        h, c = state
        arguments = self.weight_ih @ x + self.weight_hh @ h
        arguments = arguments if self.bias is None else arguments + self.bias
        i, f, g, o = jnp.split(arguments, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return self.weight_hr @ (jax.nn.sigmoid(o) * jnp.tanh(c)), c


def run_gated_cell(cell, xs, state, valid, reverse, keep):
    is_lstm = isinstance(cell, eqx.nn.LSTMCell | ProjectedLSTMCell)
    formulas = LSTM if is_lstm else GRU
    if isinstance(cell, RNNCell):
        formulas = RNN[cell.activation]
    names = ("weight_ih", "weight_hh", "bias", "bias_n", "weight_hr")
    weights = Weights(*(getattr(cell, name, None) for name in names))
    args: Any = (*common_dtype(weights, xs, tuple(state) if is_lstm else (state,)), valid)
    keep = kept_of_cells() if keep == "auto" else keep
    ys, last = split_scan(*args, formulas=formulas, reverse=reverse, keep=keep)
    return ys, last if is_lstm else last[0]


CELLS = (eqx.nn.GRUCell, eqx.nn.LSTMCell, RNNCell, ProjectedLSTMCell)
FAST_PATHS.update(dict.fromkeys(CELLS, run_gated_cell))
