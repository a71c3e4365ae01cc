"""Any cell, as a layer over time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import PyTree

from ..._control_flow.scan import named_method
from ..._errors import bad_argument, check_flags, check_function
from .._arguments import check_callable, check_features
from .cell_scan import run_cell
from .layer import AbstractStacked
from .stack import Stack
from .states import zero_states


class Recurrent(AbstractStacked):
    r"""Any recurrent cell over time and batch.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        class Leaky(eqx.Module):
            decay: jax.Array

            def __call__(self, x, state):
                return self.decay * state + x

            def initial_state(self):  # of one example, and not trained
                return jnp.zeros(2)

        layer = eqg.nn.Recurrent(Leaky(jnp.array(0.5)))

        @eqx.filter_grad
        def gradient(layer):
            ys, _ = layer(jnp.ones((3, 2)))
            return jnp.sum(ys[-1])

        print(gradient(layer).cells[0][0].decay)  # 2 (1 + 2 decay)
        ```

        ```text
        4.0
        ```

    With `Recurrent(cell, initial_state=jnp.zeros(2))`, the first state is a parameter.

    A stack is a list with a cell for each layer, and two directions are a pair of cells:
    `Recurrent([(forward1, backward1), (forward2, backward2)])`.

    **Derivative:**

    The derivative of the cell, over time by [`eqx_grads.filter_scan`][]. `equinox.nn.GRUCell`,
    `equinox.nn.LSTMCell` and [`eqx_grads.nn.RNNCell`][] have the backward pass of
    [`eqx_grads.nn.GRU`][], [`eqx_grads.nn.LSTM`][] and [`eqx_grads.nn.RNN`][].
    """

    output: Callable[[PyTree], Any] | None
    checkpoint: int | str | None = eqx.field(static=True)

    def __init__(
        self,
        cell: Callable[..., PyTree] | Sequence[Any],
        *,
        initial_state: PyTree = None,
        output: Callable[[PyTree], Any] | None = None,
        checkpoint: int | str | None = "auto",
        learn_initial_state: bool = False,
        dropout: float = 0.0,
        reverse: bool = False,
        time_major: bool = False,
    ):
        """**Arguments:**

        - `cell`: a function of one step of one example, `cell(x, state)`, that returns the
            next state, as the cells of Equinox do; or a list of cells, or of pairs of cells, as
            above. A state is any PyTree of arrays. An input has one axis, or as many as
            `cell.input_size` if that is a tuple. The outputs of two directions are joined along
            their first axis.
        - `initial_state`: the first state of one example. It becomes a parameter of this layer,
            and is trained even if it is a NumPy array, or if you pass
            `jax.lax.stop_gradient` of it. The default is `cell.initial_state()` if the cell has
            this method, as spiking cells do, and zero for `equinox.nn.GRUCell`,
            `equinox.nn.LSTMCell` and [`eqx_grads.nn.RNNCell`][]. For a first state that is not
            trained, return it from this method of your cell, as above. If it is an array of the
            cell, return its `jax.lax.stop_gradient`. If you can't change the cell, pass `state`
            in each call, or freeze this argument with `equinox.partition`.
        - `output`: a function of the state that returns the output of each step. The default
            is the first array of the state.
        - `checkpoint`: as for [`eqx_grads.filter_scan`][]. For a cell with its own backward
            pass, `None` keeps the gates, `"replay"` keeps the states, and `"auto"` chooses by
            platform. With other choices, or an `output`, the cell is called in a scan.
        - `learn_initial_state`: whether the default first state is a parameter.
        - `dropout`: the probability of dropping an output between two layers.
        - `reverse`: run from the last step to the first.
        - `time_major`: whether a batch is `(time, batch, in)`.
        """
        cells = _as_stages(cell)
        if not cells or not all(len(stage) in (1, 2) for stage in cells):
            do = "Give a cell, a list of cells, or a list of pairs of cells for two directions."
            raise bad_argument("Recurrent", "cell", "a cell, or layers of cells", cell, do)
        for one in itertools.chain(*cells):
            check_function(one, "cell", "Recurrent")  # which `None` is not
            check_callable("Recurrent", "cell", one)
        check_callable("Recurrent", "output", output)
        check_flags("Recurrent", learn_initial_state=learn_initial_state)
        self.cells = cells
        if initial_state is None and learn_initial_state:
            initial_state = zero_states("Recurrent", cells)
        self.initial_state = initial_state
        self.stack = Stack("Recurrent", len(cells), dropout, reverse, time_major)
        self.output = output
        named_method(checkpoint, 1)  # checks it
        self.checkpoint = int(checkpoint) if isinstance(checkpoint, np.integer) else checkpoint

    def _run_cell(self, cell, xs, state, valid, reverse):
        check_features("Recurrent", cell, xs)
        keep = {None: "gates", "replay": "states", "auto": "auto"}.get(self.checkpoint)
        options = {"output": self.output, "checkpoint": self.checkpoint}
        return run_cell(cell, xs, state, valid, reverse, keep, **options)


def _as_stages(cell: Any) -> tuple[tuple[Any, ...], ...]:
    """`cells[layer][direction]`."""
    if callable(cell) or not isinstance(cell, tuple | list):
        return ((cell,),)
    is_pair = lambda stage: isinstance(stage, tuple | list) and not callable(stage)
    return tuple(tuple(stage) if is_pair(stage) else (stage,) for stage in cell)
