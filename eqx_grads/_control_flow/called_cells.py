"""Layers that run cells over time, and whether they call each cell once for each step."""

import contextlib
import contextvars
from typing import Any

import equinox as eqx


class AbstractCellLayer(eqx.Module):
    """A layer that runs the cells in `cells[layer][direction]` over time.

    Where `cells_are_called()`, it calls a cell once for each step, in a scan, so that what is
    wrapped around the cell is seen. Elsewhere it may do without, as `nn.GRU` does.
    """

    cells: eqx.AbstractVar[tuple[tuple[Any, ...], ...]]


@contextlib.contextmanager
def called_cells():
    """In this context, recurrent layers call their cells, one step after another."""
    token = _CELLS_ARE_CALLED.set(True)
    try:
        yield
    finally:
        _CELLS_ARE_CALLED.reset(token)


def cells_are_called() -> bool:
    return _CELLS_ARE_CALLED.get()


_CELLS_ARE_CALLED = contextvars.ContextVar("eqx_grads_called_cells", default=False)
