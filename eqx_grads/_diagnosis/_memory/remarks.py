"""What else saves memory in a loop, beside a checkpoint. It is not measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jax.extend.core import Literal

from ..._control_flow.replay import replayed_scan
from ..._jaxprs.dependence import variables
from ..._jaxprs.structure import inner_programs, Scan, structure
from ..origins import NumberedLoss, Origin
from ..source_lines import is_made_in
from ..traced_loss import layer_calls
from .advice import Pairs
from .loop_of_cell import loop_of_cell
from .residuals import Residual
from .show_bytes import show_bytes


# With fewer numbers in all states, such a layer saves little or nothing.
_LEAST_STATES = 2**15
# What is smaller is not worth a remark.
_LEAST_SHARE = 0.1
# An LSTM that keeps its states only keeps two arrays for each step.
_MOST_STATES = 2
# The layers that have `keep`, and their files. A diagnosis does not import them, and a model
# may make one in its call, as `from_cell` is for: it is then not among the model's layers.
_WITH_KEEP = {"GRU": "nn/_recurrent/gru.py", "LSTM": "nn/_recurrent/lstm.py"}
# The figures are those of `benchmarks/recurrent.py`.
_LAYERS = {
    eqx.nn.GRUCell: "GRU",
    eqx.nn.LSTMCell: "LSTM",
}
_N_STATES = {eqx.nn.GRUCell: 1, eqx.nn.LSTMCell: 2}
# What `jnp.zeros` of a first state becomes under `jax.vmap`.
_COPIES_ZEROS = ("broadcast_in_dim", "convert_element_type", "copy")
_CALL = '`eqg.nn.{layer}.from_cell({path}, keep="states"{reverse})(xs{state}{lengths})`'
_USE_LAYER = (
    "The loop at {places} runs an `eqx.nn.{cell}`: {calls} runs the same cell over a sequence, "
    "or a batch of them. "
)
_USE_LAYERS = (
    "The loops at {places} run an `eqx.nn.{cell}` each: {calls} run the same cells over a "
    "sequence, or a batch of them. One layer with `num_layers` or `bidirectional` runs several "
    "cells, those in `layer.cells`. "
)
_FIGURES = (
    "In ten benchmarks of a layer alone, on a CPU, its gradient needs 0.13 to 0.37 of the "
    "memory of such a loop without checkpoints, at 1.00 to 2.08 times the speed. What the rest "
    "of the model keeps stays."
)
_FIRST_STATE = " `state` is the first state of the loop; zeros may be left out."
_HAS_MASK = (
    " A step keeps the old state where a mask says so. If these are the steps after the end of "
    "a sequence, `lengths` are the numbers of the steps before: the last state is the same, "
    "and outputs after the end are zero. With any other mask, the layer computes something "
    "else."
)
_DOES_MORE = (
    " The step does more than call the cell: compute what is done with its input and its "
    "output for all steps at once, before and after the layer."
)
_IS_PLAIN = (
    'The loop at {place} has `checkpoint="auto"`, which chose plain scan here. A number of '
    'steps, or `"sqrt"`, keeps less, and computes each step twice.'
)
# The figures are those of `benchmarks/scans.py`.
_CAN_REPLAY = (
    'The loop at {place} can be replayed: with `checkpoint="replay"`, it keeps the carry of '
    "each step, and recomputes many steps at once. By the estimate, {left} are left. In 25 "
    "benchmarks of a cell, on a CPU, the gradient has 0.74 to 2.42 times the speed of a loop "
    'without checkpoints; with `"sqrt"`, 0.66 to 1.07 times. `"auto"` replays where that is '
    "estimated to be faster."
)
_ANY_CELL = (
    " `eqg.nn.Recurrent` runs any cell over a sequence, or a batch of them, and has the same "
    "option: a cell is called as `cell(x, state)`, and returns the next state."
)
_LIBRARIES = ("equinox", "eqx_grads")
_RECURRENT = "eqx_grads.nn._recurrent.any_cell"
_IS_REPLAYED = (
    "The loop at {place} is replayed, and keeps the carry of each step. With a number of steps "
    'as its `checkpoint`, or `"sqrt"`, it keeps fewer, and computes the steps of a chunk again '
    "one after another."
)
_KEEPS_GATES = (
    '{layer} keeps the gates of each step. With `keep="states"` it keeps the states only, and '
    "computes the gates once more."
)
_TRANSPOSED = (
    "The loop at {place} keeps `{name}` a second time, transposed ({size}), as a scan has the "
    "time axis first. Pass it with the time axis first, with `in_axes=1` of the `vmap`. Of a "
    "loop with a `checkpoint`, put the `vmap` into the step as well."
)


def remarks_on_loops(
    numbered: NumberedLoss, pairs: Pairs, left: int | float, replayed: Mapping[int, int]
) -> list[str]:
    """Sentences for a report.

    - `left`: the temporary bytes that are left with the best advice.
    - `replayed`: those that are left if a loop is replayed, by the number of its equation.
    """
    least = left * _LEAST_SHARE
    layers = list(_cells(numbered, pairs, least))
    return [
        *layers,
        *_loops_to_replay(numbered, replayed, layers),
        *_scans_with_rules(numbered, pairs, least),
        *_layers_that_keep_gates(numbered, pairs, least),
        *_transposed(numbered, pairs, least),
    ]


def _cells(numbered: NumberedLoss, pairs: Pairs, least: int | float) -> Iterator[str]:
    """One remark on all loops over cells of one type of which the same is to be said."""
    traced = numbered.traced
    found: dict[tuple[type, str], list[tuple[str, str]]] = {}
    for origin in numbered.origins:
        scan = structure(origin.eqn)
        if not isinstance(scan, Scan) or scan.n_carry == 0:
            continue
        cell = _cell_in(numbered, origin)
        kept = sum(r.bytes for s, r in pairs if origin.number in s.loops and s.kept_by_loop)
        if cell is None or kept < least:
            continue
        loop = loop_of_cell(scan, cell, _N_STATES[traced.types[cell]])
        if loop is None or scan.length * loop.state_size <= _LEAST_STATES:
            continue
        first = [origin.eqn.invars[scan.n_consts + i] for i in loop.states]
        has_state = not _are_zeros(numbered, first)
        text = _FIGURES + _FIRST_STATE * has_state + _HAS_MASK * loop.has_mask
        text += _DOES_MORE * loop.does_more
        call = _CALL.format(
            layer=_LAYERS[traced.types[cell]],
            path=_shown(traced.layers[cell]),
            reverse=", reverse=True" * scan.reverse,
            state=", state" * has_state,
            lengths=", lengths=lengths" * loop.has_mask,
        )
        same = found.setdefault((traced.types[cell], text), [])
        same.append((str(origin.source), call))
    for (cell, text), loops in found.items():
        places, calls = ([*dict.fromkeys(words)] for words in zip(*loops, strict=True))
        use = _USE_LAYERS if len(calls) > 1 else _USE_LAYER
        names = {"places": _listed(places), "calls": _listed(calls), "cell": cell.__name__}
        yield use.format(**names) + text


def _cell_in(numbered: NumberedLoss, loop: Origin) -> int | None:
    """The index of the only layer in a loop for which there is one over time."""
    inside = [o for o in numbered.origins if o.loops[-1:] == (loop.number,)]
    called = {call[0] for o in inside for call in layer_calls(o.eqn)}
    cells = [i for i in called if numbered.traced.types[i] in _LAYERS]
    return cells[0] if len(cells) == 1 else None


def _listed(words: Sequence[str]) -> str:
    *words, last = words
    return f"{', '.join(words)} and {last}" if words else last


def _are_zeros(numbered: NumberedLoss, arrays: Iterable[Any]) -> bool:
    """Whether arrays of the loss are known to be zero."""
    made_by = {v: origin.eqn for origin in numbered.origins for v in origin.eqn.outvars}
    passed = _passed(numbered)

    def is_zero(x):
        if isinstance(x, Literal):
            return np.ndim(x.val) == 0 and x.val == 0
        eqn = made_by.get(passed.get(x, x))
        if eqn is None or eqn.primitive.name not in _COPIES_ZEROS:
            return False
        return is_zero(eqn.invars[0])

    return all(map(is_zero, arrays))


def _passed(numbered: NumberedLoss) -> dict[Any, Any]:
    """For each input of a loop that is a plain call: the variable that it is called with."""
    found = {}
    for call in numbered.traced.plain:
        (program,) = inner_programs(call)
        found.update(zip(program.jaxpr.invars, call.invars, strict=True))
    return found


def _loops_to_replay(
    numbered: NumberedLoss, replayed: Mapping[int, int], layers: Iterable[str]
) -> Iterator[str]:
    """Of those at lines that are not named in the remarks on `layers`."""
    for number, left in replayed.items():
        loop = numbered.origins[number]
        if any(str(loop.source) in text for text in layers):
            continue
        text = _CAN_REPLAY.format(place=loop.source, left=show_bytes(left))
        types = numbered.traced.types
        around = [layer for layer, _ in layer_calls(loop.eqn)]
        called = set()
        for origin in numbered.origins:
            inside = [layer for layer, _ in layer_calls(origin.eqn) if layer not in around]
            if number in origin.loops and inside:
                called.add(types[inside[0]])
        is_users = [cell.__module__.split(".")[0] not in _LIBRARIES for cell in called]
        is_run_by_layer = any(types[layer].__module__ == _RECURRENT for layer in around)
        yield text + _ANY_CELL * (is_users == [True] and not is_run_by_layer)


def _shown(path: str) -> str:
    """The path of a layer, or `cell` for the name of a class: the cell is the model itself."""
    return "cell" if path in ("GRUCell", "LSTMCell") else path


def _scans_with_rules(
    numbered: NumberedLoss, pairs: Pairs, least: int | float
) -> Iterator[str]:
    """Of a `filter_scan` with `checkpoint="replay"` or `"auto"`."""
    for origin in numbered.origins:
        if origin.primitive != replayed_scan.__name__:
            continue
        is_plain = numbered.traced.is_plain(origin.eqn)
        kept = [r for s, r in pairs if s.origin is not None and _is_of(s.origin, origin)]
        if kept and sum(r.bytes for r in kept) >= least:
            text = _IS_PLAIN if is_plain else _IS_REPLAYED
            yield text.format(place=origin.source)


def _is_of(inner: Origin, call: Origin) -> bool:
    return inner is call or call.number in inner.enclosing


def _layers_that_keep_gates(
    numbered: NumberedLoss, pairs: Pairs, least: int | float
) -> Iterator[str]:
    for origin in numbered.origins:
        kept = [r for s, r in pairs if s.origin is origin and r.n_steps > 1]
        is_large = sum(r.bytes for r in kept) >= least
        names = [n for n, file in _WITH_KEEP.items() if is_made_in(origin.eqn, file)]
        if not names or not is_large or len(kept) <= _MOST_STATES:
            continue
        types = [numbered.traced.types[layer] for layer, _ in layer_calls(origin.eqn)]
        is_in_model = bool(types) and types[-1].__name__ in names
        layer = f"`{origin.path}`" if is_in_model else f"The `{names[0]}` at {origin.source}"
        yield _KEEPS_GATES.format(layer=layer)


def _transposed(numbered: NumberedLoss, pairs: Pairs, least: int | float) -> Iterator[str]:
    program = numbered.traced.program
    names = dict(zip(program.jaxpr.invars, numbered.traced.inputs, strict=True))
    made: dict[Any, tuple[Residual, str]] = {}
    for source, residual in pairs:
        origin = source.origin
        if origin is not None and origin.primitive == "transpose" and not origin.enclosing:
            for v in variables(origin.eqn.invars):
                if v in names and residual.bytes >= least:
                    made[origin.eqn.outvars[0]] = residual, names[v]
    passed = _passed(numbered)
    for loop in numbered.origins:
        known = structure(loop.eqn)
        around = [numbered.origins[i].eqn for i in loop.enclosing]
        if isinstance(known, Scan) and all(map(numbered.traced.is_plain, around)):
            for v in variables(loop.eqn.invars[known.n_consts + known.n_carry :]):
                v = passed.get(v, v)
                if v in made:
                    residual, name = made[v]
                    size = show_bytes(residual.bytes)
                    yield _TRANSPOSED.format(place=loop.source, name=name, size=size)
