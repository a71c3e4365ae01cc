"""Any cell, as a layer over time."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import PyTree

from ..._control_flow.scan import named_method
from ..._errors import check_flags, check_function, rule_error, RuleError
from .._argument_checks import check_callable, check_features
from .cell_scan import scan_cell
from .layer import AbstractRecurrent, zero_hidden
from .stack import Stack


class Recurrent(AbstractRecurrent):
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

    **Derivative:**

    That of the cell, over time by [`eqx_grads.filter_scan`][].
    """

    _cell_types: ClassVar[tuple[type, ...]] = (object,)
    cells: tuple[tuple[Any, ...], ...]
    initial_state: PyTree
    stack: Stack
    output: Callable[[PyTree], Any] | None
    checkpoint: int | str | None = eqx.field(static=True)

    def __init__(
        self,
        cell: Callable[..., PyTree],
        *,
        initial_state: PyTree = None,
        output: Callable[[PyTree], Any] | None = None,
        checkpoint: int | str | None = "auto",
        reverse: bool = False,
        time_major: bool = False,
    ):
        """**Arguments:**

        - `cell`: called as `cell(x, state)` for one step of one example, returns the next
            state, as the cells of Equinox do. Its state is any PyTree of arrays.
        - `initial_state`: the first state of one example, which becomes a parameter of this
            layer: it is trained, also if it is a NumPy array, and `jax.lax.stop_gradient`
            here does not change that. The default is `cell.initial_state()` where the cell
            has this method, as the spiking cells have, and zero for `equinox.nn.GRUCell`,
            `equinox.nn.LSTMCell` and [`eqx_grads.nn.RNNCell`][]. A first state that is not
            trained is what that method of your cell returns, as above, or
            `jax.lax.stop_gradient` of it if it is an array of the cell. Of a cell that you
            can't change, pass `state` in each call, or freeze this argument by
            `equinox.partition`.
        - `output`: a function of the state that returns the output of each step. The default
            is the first array of the state.
        - `checkpoint`: as for [`eqx_grads.filter_scan`][].
        - `reverse`: run from the last step to the first.
        - `time_major`: whether a batch is `(time, batch, in)`.
        """
        check_flags("Recurrent", reverse=reverse, time_major=time_major)
        check_function(cell, "cell", "Recurrent")  # which `None` is not
        check_callable("Recurrent", "cell", cell)
        check_callable("Recurrent", "output", output)
        self.cells = ((cell,),)
        self.initial_state = initial_state
        self.stack = Stack(0.0, reverse, time_major, self.cells)
        self.output = output
        self.checkpoint = _as_checkpoint(checkpoint)

    def _zero_state(self):
        ((cell,),) = self.cells
        if callable(getattr(cell, "initial_state", None)):
            return cell.initial_state()
        if not (hasattr(cell, "hidden_size") and hasattr(cell, "weight_hh")):
            return None  # not known: `state` has to be given
        zero = zero_hidden(cell)
        return (zero, zero) if isinstance(cell, eqx.nn.LSTMCell) else zero

    def _run_cell(self, cell, xs, state, valid, reverse):
        if isinstance(getattr(cell, "input_size", None), int):
            check_features("Recurrent", cell, xs)

        return scan_cell(
            cell, xs, state, valid, reverse, output=self.output, checkpoint=self.checkpoint
        )


def _as_checkpoint(checkpoint: Any) -> int | str | None:
    try:
        named_method(checkpoint, 1)
    except RuleError:
        raise rule_error(
            "`Recurrent` was given a `checkpoint` that it does not know.",
            f"`checkpoint` is {checkpoint!r:.60}",
            do='Give a number of steps, "sqrt", "replay", "auto" or `None`.',
        ) from None
    if checkpoint is None or isinstance(checkpoint, str):
        return checkpoint
    return int(checkpoint)
