"""Makes the steps of a loop visible to code that looks for something in them.

`gradient_flow` looks for the outputs of layers, for example.
"""

import contextlib
import contextvars
from typing import Any

import equinox as eqx

from .._jaxprs.current_trace import setting


def visible_steps() -> contextlib.AbstractContextManager[None]:
    """Trace every `filter_scan` in this context so that its steps are equations of the program.

    No scan is then a call with a rule: JAX itself differentiates `"replay"`, `"auto"` and
    `truncate`, and the derivative is the same.
    """
    return setting(_STEPS_ARE_VISIBLE, True)


def steps_are_visible() -> bool:
    return _STEPS_ARE_VISIBLE.get()


def called_cells() -> contextlib.AbstractContextManager[None]:
    """In this context, recurrent layers call their cells, one step after another."""
    return setting(_CELLS_ARE_CALLED, True)


def cells_are_called() -> bool:
    return _CELLS_ARE_CALLED.get()


class AbstractCellLayer(eqx.Module):
    """A layer that runs the cells in `cells[layer][direction]` over time.

    Where `cells_are_called()`, it calls a cell once for each step, in a scan, so that what is
    wrapped around the cell is seen. Elsewhere it may do without, as `nn.GRU` does.
    """

    cells: eqx.AbstractVar[tuple[tuple[Any, ...], ...]]


_STEPS_ARE_VISIBLE = contextvars.ContextVar("eqx_grads_visible_steps", default=False)
_CELLS_ARE_CALLED = contextvars.ContextVar("eqx_grads_called_cells", default=False)
