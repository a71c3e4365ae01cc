"""The gated recurrent unit, the long short-term memory and the vanilla recurrent network, as
layers over time."""

import functools as ft
from typing import Any, Unpack

import equinox as eqx
from jaxtyping import Array, Key

from ..._errors import check_flags, check_option
from .._arguments import as_sizes, check_real
from .cell_scan import run_cell
from .gated_cells import ProjectedLSTMCell, RNNCell
from .layer import AbstractStacked
from .stack import StackOptions


class AbstractGated(AbstractStacked):
    """Cells with the fast path of gated cells, and what that keeps for its backward pass."""

    keep: eqx.AbstractVar[str]

    def _set_gated(self, make, sizes, use_bias, keep, dtype, key, options, output_size=None):
        """Set all fields, in `__init__`."""
        check_flags(type(self).__name__, use_bias=use_bias)
        check_option(type(self).__name__, "keep", keep, ("auto", "gates", "states"))
        make = ft.partial(make, use_bias=bool(use_bias))
        sizes = dict(zip(("input_size", "hidden_size"), sizes, strict=True))
        self._set_cells(make, sizes, dtype, key, options, output_size)
        self.keep = keep

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_real(type(self).__name__, xs)
        return run_cell(cell, xs, state, valid, reverse, self.keep)


class GRU(AbstractGated):
    r"""A gated recurrent unit over time, with a backward pass written by hand.

    It returns the numbers of `equinox.nn.GRUCell` in a `jax.lax.scan`, up to rounding:

    $$r = \sigma(W_r x + V_r h + b_r), \quad z = \sigma(W_z x + V_z h + b_z), \quad
    n = \tanh(W_n x + b_n + r\,(V_n h + c_n)), \quad h' = n + z\,(h - n).$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        gru = eqg.nn.GRU(3, 8, num_layers=2, key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))  # a batch of five sequences

        @eqx.filter_grad
        def gradient(gru):
            ys, state = gru(xs)
            print(ys.shape, state.shape)
            return jnp.sum(ys**2)

        print(gradient(gru).cells[0][0].weight_ih.shape)
        ```

        ```text
        (5, 20, 8) (2, 5, 8)
        (24, 3)
        ```

    **Derivative:**

    Written by hand, over chunks of several steps. With $\bar h'$ the cotangent of a state and
    $a = (1 - z)(1 - n^2)\,\bar h'$, the cotangents of the gates' arguments are
    $\bar n = a$, $\bar r = a\,(V_n h + c_n)\,r\,(1 - r)$ and
    $\bar z = (h - n)\,z\,(1 - z)\,\bar h'$. The gradient of each weight is one matrix product
    per chunk, and is not computed for frozen weights. Both modes (forward mode by plain
    differentiation), all orders; `jax.vmap` of the layer computes one gradient for the batch.
    """

    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        use_bias: bool = True,
        keep: str = "auto",
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: as for `equinox.nn.GRUCell`.
        - `use_bias`: whether the layer has biases.
        - `keep`: the residuals of the recurrence. `"gates"`: the states and all gates.
            `"states"`: the states only, and the backward pass recomputes the gates. This needs
            0.25 to 0.81 of the memory at the measured shapes with at least 128 steps and 50000
            states (time x batch x units). With up to 8192 states, it needs up to 1.4 times as
            much; both then need about half a megabyte. `"auto"` is `"gates"` if JAX's default
            backend is a CPU. Otherwise it is `"states"`, which was faster on a GPU at all
            measured shapes.
        - `dtype`, `key`: as for `equinox.nn.GRUCell`.

        **Options of all recurrent layers:**

        - `num_layers`: the number of layers, one by default; the outputs of one are the inputs
            of the next.
        - `bidirectional`: each layer has a second cell, which runs backward in time. The
            outputs of both cells are concatenated.
        - `dropout`: the probability of dropping an output between two layers, zero by default.
        - `learn_initial_state`: whether the first state is a parameter.
        - `reverse`: run from the last step to the first.
        - `time_major`: whether a batch is `(time, batch, in)`.
        """
        make, sizes = eqx.nn.GRUCell, (input_size, hidden_size)
        self._set_gated(make, sizes, use_bias, keep, dtype, key, options)


class LSTM(AbstractGated):
    r"""A long short-term memory over time, with a backward pass written by hand.

    It returns the numbers of `equinox.nn.LSTMCell` in a `jax.lax.scan`, up to rounding:

    $$i, f, o = \sigma(W x + V h + b), \quad g = \tanh(W x + V h + b), \quad
    c' = f\,c + i\,g, \quad h' = o \tanh(c').$$

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        lstm = eqg.nn.LSTM(3, 8, bidirectional=True, key=jax.random.key(0))
        xs = jnp.ones((20, 3))

        @eqx.filter_grad
        def gradient(lstm):
            ys, (h, c) = lstm(xs)
            print(ys.shape, h.shape, c.shape)
            return jnp.sum(ys**2)

        print(gradient(lstm).cells[0][1].weight_ih.shape)
        ```

        ```text
        (20, 16) (2, 8) (2, 8)
        (32, 3)
        ```

    The state is the pair `(h, c)`.

    With `proj_size`, $h' = P\,(o \tanh(c'))$ with a matrix $P$, so that states and outputs may
    be smaller than the cell ([Sak et al. 2014](https://arxiv.org/abs/1402.1128), as in
    PyTorch). The cells are then not the cells of Equinox; they have one more weight,
    `weight_hr`.

    **Derivative:**

    Written by hand, over chunks of several steps. With $\bar h'$ the cotangent of a hidden
    state and $d = \bar c' + \bar h'\,o\,(1 - \tanh^2 c')$, the cotangents of the gates'
    arguments are $d\,g\,i\,(1 - i)$, $d\,c\,f\,(1 - f)$, $d\,i\,(1 - g^2)$ and
    $\bar h' \tanh(c')\,o\,(1 - o)$, and $\bar c = d\,f$. The gradient of each weight is one
    matrix product per chunk. With `proj_size`, $P^T \bar h'$ replaces $\bar h'$. Both modes
    (forward mode by plain differentiation), all orders; `jax.vmap` of the layer computes one
    gradient for the batch.
    """

    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        proj_size: int | None = None,
        use_bias: bool = True,
        keep: str = "auto",
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        """**Arguments:**

        - `proj_size`: the size of the hidden state and of the output. Then `hidden_size` is the
            size of the cell state only. By default, the layer has no projection.

        All others as for [`eqx_grads.nn.GRU`][]. With `keep="states"`, the residuals need half
        of the memory.
        """
        make, sizes = eqx.nn.LSTMCell, (input_size, hidden_size)
        if proj_size is not None:
            (proj_size,) = as_sizes("LSTM", proj_size=proj_size)
            make = ft.partial(ProjectedLSTMCell, proj_size=proj_size)
        self._set_gated(make, sizes, use_bias, keep, dtype, key, options, proj_size)


class RNN(AbstractGated):
    r"""A vanilla recurrent network over time, $h' = \phi(W x + V h + b)$.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        rnn = eqg.nn.RNN(3, 8, activation="relu", key=jax.random.key(0))
        xs = jnp.ones((5, 20, 3))

        @eqx.filter_grad
        def gradient(rnn):
            ys, _ = rnn(xs, lengths=jnp.array([20, 3, 7, 1, 0]))
            return jnp.sum(ys**2)

        print(gradient(rnn).cells[0][0].weight_ih.shape)
        ```

        ```text
        (8, 3)
        ```

    **Derivative:**

    Written by hand, over chunks of several steps. The slope of $\phi$ is computed from its
    value, $1 - h'^2$ or $h' > 0$ (zero at the kink). So the states are the only residuals of
    the recurrence. The gradient of each weight is one matrix product per chunk. Both modes, all
    orders; `jax.vmap` of the layer computes one gradient for the batch.
    """

    keep: str = eqx.field(static=True)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        activation: str = "tanh",
        use_bias: bool = True,
        dtype: Any = None,
        key: Key[Array, ""],
        **options: Unpack[StackOptions],
    ):
        """**Arguments:**

        - `activation`: $\\phi$, `"tanh"` or `"relu"`.

        All others as for [`eqx_grads.nn.GRU`][].
        """
        make, sizes = ft.partial(RNNCell, activation=activation), (input_size, hidden_size)
        self._set_gated(make, sizes, use_bias, "states", dtype, key, options)
