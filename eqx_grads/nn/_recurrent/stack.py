"""How the cells of a layer are made and run: layers, directions, dropout, layout of a batch."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PyTree

from ..._errors import bad_argument, check_flags
from ..._rules.float_args import is_number
from .._arguments import as_sizes, layer_dtype
from .padding import zero_padding
from .states import zero_states


class StackOptions(TypedDict, total=False):
    """The options of all recurrent layers (see [`eqx_grads.nn.GRU`][])."""

    num_layers: int
    bidirectional: bool
    dropout: float
    learn_initial_state: bool
    reverse: bool
    time_major: bool


class Stack(eqx.Module):
    """Runs the cells of a layer, whatever they are: one for each layer and direction.

    - `dropout`: between two layers.
    - `reverse`: whether the first direction runs from the last step to the first.
    - `time_major`: whether a batch is `(time, batch, in)`.
    """

    dropout: eqx.nn.Dropout
    reverse: bool = eqx.field(static=True)
    time_major: bool = eqx.field(static=True)

    def __init__(
        self, layer: str, num_layers: int, dropout: float, reverse: bool, time_major: bool
    ):
        check_flags(layer, reverse=reverse, time_major=time_major)
        if not (is_number(dropout) and 0 <= dropout <= 1):
            do = "Give a number from zero to one."
            raise bad_argument(layer, "dropout", "a probability", dropout, do)
        if dropout > 0 and num_layers == 1:
            do = "Dropout is applied between two layers: put an `equinox.nn.Dropout` before or "
            do += "after this layer, or leave `dropout` out."
            raise bad_argument(layer, "dropout", "zero, and there is one layer", dropout, do)
        # Equinox draws with `1 - dropout`, and JAX refuses an integer there.
        self.dropout = eqx.nn.Dropout(float(dropout))
        self.reverse = bool(reverse)
        self.time_major = bool(time_major)

    def drops(self, inference: bool | None) -> bool:
        """Whether there is dropout in a call with this `inference`."""
        is_off = self.dropout.inference if inference is None else inference
        return not is_off and self.dropout.p != 0

    def time_first(self, xs: Array, is_batch: bool) -> Array:
        """One sequence or a batch of sequences as `(time, batch, ...)`."""
        if not is_batch:
            return xs[:, None]
        return xs if self.time_major else jnp.swapaxes(xs, 0, 1)

    def as_given(self, ys: PyTree, is_batch: bool) -> PyTree:
        """The inverse of `time_first`."""
        if not is_batch:
            return jax.tree.map(lambda y: y[:, 0], ys)
        return ys if self.time_major else jax.tree.map(lambda y: jnp.swapaxes(y, 0, 1), ys)

    def run(
        self,
        run_cell: Callable[..., tuple[PyTree, PyTree]],
        cells: Sequence[Sequence[Any]],
        xs: Array,
        states: Sequence[PyTree],
        valid: Array | None,
        *,
        key: Array | None,
        inference: bool | None,
    ) -> tuple[PyTree, list[PyTree]]:
        """The outputs of the last layer, and the last states of all cells.

        `run_cell(cell, xs, state, valid, reverse)` returns all outputs and the last state.
        """
        remaining, last = iter(states), []
        join = lambda *ys: jax.tree.map(lambda *y: jnp.concatenate(y, CHANNELS), *ys)
        for i, directions in enumerate(cells):
            if i > 0:
                key, subkey = (None, None) if key is None else jr.split(key)
                xs = self.dropout(xs, key=subkey, inference=inference)
            outputs = []
            for cell, reverse in zip(
                directions, (self.reverse, not self.reverse), strict=False
            ):
                ys, end = run_cell(cell, xs, next(remaining), valid, reverse)
                outputs.append(zero_padding(ys, valid))
                last.append(end)
            xs = outputs[0] if len(outputs) == 1 else join(*outputs)
        return xs, last


# Both directions are joined along the first axis of an output, which are the channels of an
# image. The two axes in front are time and batch.
CHANNELS = 2


def make_stack(
    layer: str,
    make: Callable[..., Any],
    input_size: Any,
    output_size: Any,
    key: Array | None,
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    dropout: float = 0.0,
    learn_initial_state: bool = False,
    reverse: bool = False,
    time_major: bool = False,
) -> tuple[tuple[tuple[Any, ...], ...], PyTree, Stack]:
    """The cells, each of them `make(input_size, key=key)`, the initial state if it is learned,
    and the stack. Without a key, `make` gets `None`."""
    (num_layers,) = as_sizes(layer, num_layers=num_layers)
    check_flags(layer, bidirectional=bidirectional, learn_initial_state=learn_initial_state)
    stack = Stack(layer, num_layers, dropout, reverse, time_major)
    directions = 2 if bidirectional else 1
    n = num_layers * directions
    keys = iter(n * (None,) if key is None else jr.split(key, n))
    cells = tuple(
        tuple(
            make(input_size if i == 0 else directions * output_size, key=next(keys))
            for _ in range(directions)
        )
        for i in range(num_layers)
    )
    first = zero_states(layer, cells) if learn_initial_state else None
    return cells, first, stack


def make_cells(
    layer: str,
    make: Callable[..., Any],
    sizes: dict[str, Any],
    dtype: Any,
    key: Array | None,
    output_size: int | None = None,
    **options: Unpack[StackOptions],
) -> tuple[tuple[tuple[Any, ...], ...], PyTree, Stack]:
    """`make_stack` of cells `make(input_size, dtype=, key=)` with the other sizes by name. The
    second size is the size of the outputs, if that is not given."""
    first, *others = as_sizes(layer, **sizes)
    by_name = dict(zip(list(sizes)[1:], others, strict=True))
    make = ft.partial(make, **by_name, dtype=layer_dtype(layer, dtype))
    return make_stack(layer, make, first, output_size or others[0], key, **options)
