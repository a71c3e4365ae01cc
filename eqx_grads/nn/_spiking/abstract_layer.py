"""What the layers of spiking neurons share: how they are made, converted and run."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Inexact, PyTree

from ..._control_flow.called_cells import cells_are_called
from ..._errors import check_flags, rule_error, type_of
from ..._rules.explicit_sharding import gathered_leaves
from .._argument_checks import as_sizes, check_features, check_option
from .._dtypes import common_dtype
from .._recurrent.cell_scan import scan_cell
from .._recurrent.layer import AbstractRecurrent
from .._recurrent.stack import make_stack
from .dynamics import NeuronState
from .layer_vjp import spiking
from .weighted_cell import WeightedCell


Layer = TypeVar("Layer", bound="AbstractSpiking")


class AbstractSpiking(AbstractRecurrent):
    """A layer of spiking neurons over time."""

    initial_state: eqx.AbstractVar[PyTree[Inexact[Array, "..."]] | None]
    keep: eqx.AbstractVar[str]

    def _run_cell(
        self, cell: Any, xs: Array, state: PyTree, valid: Array | None, reverse: bool
    ) -> tuple[Array, PyTree]:
        name = type(self).__name__
        _check_inputs(name, cell, xs)
        if cells_are_called():
            return scan_cell(cell, xs, state, valid, reverse)
        cell = gathered_leaves(cell)
        w_in = bias = None
        if isinstance(cell, WeightedCell):
            w_in, bias, cell = cell.weight_ih, cell.bias, cell.cell
        w_state = getattr(cell, "weight_hh", None)
        given = NeuronState.of(state)
        xs, w_in, bias, w_state, *_ = common_dtype(xs, w_in, bias, w_state, *given)
        dynamics = _neurons(cell)._dynamics(xs)
        args = (w_in, bias, w_state, dynamics, xs, given, valid)
        ys, last = spiking(*args, reverse=reverse, keep=self.keep)
        return ys, last.like(state)


def _neurons(cell: Any) -> Any:
    """The neurons of a cell, which recurrently connected ones contain."""
    return getattr(cell, "neurons", cell)


def _check_inputs(layer, cell, xs):
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(xs.dtype, kind) for kind in kinds):
        raise rule_error(
            f"`{layer}` was given inputs that are not of real numbers.",
            f"`xs` is {type_of(xs)}",
            do="Pass floats, or counts of spikes.",
        )
    if isinstance(cell, WeightedCell):
        check_features(layer, cell, xs)
    elif xs.shape[-1] != _neurons(cell).hidden_size:
        step = jax.ShapeDtypeStruct(xs.shape[2:], xs.dtype)
        raise rule_error(
            f"`{layer}` was given inputs of the wrong size.",
            f"a step of `xs` is {type_of(step)}, and there are {_neurons(cell).hidden_size} "
            "neurons",
            do="Without input weights, each neuron has an input of its own.",
        )


def spiking_cells(
    layer: str,
    make_cell: Callable[[Any], Any],
    input_size: int,
    hidden_size: int,
    *,
    num_layers: int,
    bidirectional: bool,
    dropout: float,
    keep: str,
    use_input_weight: bool,
    use_bias: bool,
    key: Array | None,
    **flags: bool,
) -> tuple[tuple[Any, ...], ...]:
    """The cells of a layer, each of them `make_cell(key)`, with or without input weights. The
    key may be `None` where cells draw nothing."""
    input_size, hidden_size = as_sizes(layer, input_size=input_size, hidden_size=hidden_size)
    flags |= {"use_input_weight": use_input_weight, "use_bias": use_bias}
    check_flags(layer, **flags)
    check_option(layer, "keep", keep, ("membranes", "spikes"))
    is_wider = bidirectional and num_layers > 1
    if not use_input_weight and (input_size != hidden_size or is_wider):
        inputs = 2 * hidden_size if input_size == hidden_size else input_size
        raise rule_error(
            f"`{layer}` without input weights was given more or fewer inputs than neurons.",
            f"there are {inputs} inputs and {hidden_size} neurons",
            do="Without input weights, each neuron has an input of its own.",
        )

    if key is None and use_input_weight:
        raise rule_error(
            f"`{layer}` was given no random key, and has input weights.",
            "`key` is None, `use_input_weight` is True",
            do="Give it `key=jax.random.key(0)`, or `use_input_weight=False`.",
        )

    def make(input_size, *, key):
        subkeys: Any = (None, None) if key is None else jr.split(key)
        cell = make_cell(subkeys[0])
        if not use_input_weight:
            return cell
        return WeightedCell(input_size, cell, use_bias=use_bias, key=subkeys[1])

    options = {"num_layers": num_layers, "bidirectional": bidirectional, "dropout": dropout}
    return make_stack(layer, make, input_size, hidden_size, key, **options)[0]


def spiking_from_cell(
    make: Callable[..., Layer],
    cell: Any,
    expected: type,
    *,
    learn_initial_state: bool,
    **options: Any,
) -> Layer:
    """The layer that runs one given cell. `make` is given the options of any such layer."""
    inner = cell.cell if isinstance(cell, WeightedCell) else cell
    name = expected.__name__.removesuffix("Cell")
    check_flags(name, learn_initial_state=learn_initial_state)
    if not isinstance(inner, expected):
        raise rule_error(
            f"`{name}.from_cell` was given another cell than it runs.",
            f"it is a `{type(inner).__name__}`, and has to be a `{expected.__name__}`",
            do="`eqx_grads.nn.Recurrent` runs any cell.",
        )
    if isinstance(_neurons(inner).hidden_size, tuple):
        raise rule_error(
            f"`{name}.from_cell` was given neurons that are not a vector.",
            f"their `hidden_size` is {_neurons(inner).hidden_size}",
            do="Use `eqx_grads.filter_scan`.",
        )
    layer = make(use_input_weight=False, key=jr.key(0), **options)
    layer = eqx.tree_at(lambda layer: layer.cells, layer, ((cell,),))
    if not learn_initial_state:
        return layer
    where = lambda layer: layer.initial_state
    return eqx.tree_at(where, layer, cell.initial_state(), is_leaf=lambda x: x is None)


def single_cell(layer: AbstractRecurrent) -> Any:
    """The only cell of a layer."""
    cells = [cell for stage in layer.cells for cell in stage]
    if len(cells) != 1:
        raise rule_error(
            f"`{type(layer).__name__}.to_cell` was asked for one of {len(cells)} cells.",
            do="They are in `cells[layer][direction]`.",
        )
    return cells[0]
