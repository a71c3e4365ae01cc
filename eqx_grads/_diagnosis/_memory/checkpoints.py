"""Candidates to compute twice in a loss, and the loss with one of them applied.

A candidate is a loop, a group of layers, or a `vmap`. It is applied to the traced program, not
to the user's code: `filter_scan` runs the equations of a loop, and `jax.checkpoint` runs the
equations of each call of a layer. For a `vmap`, the loss is traced once more.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..._control_flow.chunked_scan import near_divisor
from ..._control_flow.scan import named_method
from ..._control_flow.scan_backward import Loop
from ..._jaxprs.dependence import free_variables, variables
from ..._jaxprs.evaluate import bind, enter, evaluate, evaluate_equations, with_fixed_dtypes
from ..._jaxprs.structure import (
    Call,
    Checkpoint,
    Cond,
    equations,
    inner_programs,
    Scan,
    structure,
)
from ..._jaxprs.versions import assigns_shardings
from .._programs.peak_memory import bytes_of
from ..layers import group_of
from ..origins import NumberedLoss
from ..source_lines import SourceLine, UNKNOWN
from ..traced_loss import layer_calls, TracedLoss
from .maps import map_call_of, MapCall
from .residuals import Residual, Source


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A loop, layers, or a `vmap`, to be computed twice.

    - `kind`: `"loop"`, `"layer"` or `"map"`. `cure`: what to write. `path`: of the layer.
    - `is_in_loop`: whether the checkpoint is in a loop, or is one.
    - `covers`: the indices of the residuals that are computed there. `gain`: about the bytes of
        these that are not alive at the same time any more.
    - `loops`: the equations of scans that `filter_scan` is to run with this `checkpoint`.
    - `layers`: indices in `TracedLoss.layers`. Each call of these layers is to be a checkpoint.
    - `map_call`: the calls of `jax.vmap` to run by `filter_map` with this `chunk`.
    """

    kind: str
    cure: str
    path: str
    is_in_loop: bool
    covers: frozenset[int]
    gain: float
    source: SourceLine = UNKNOWN
    primitive: str = ""
    loops: Sequence[Any] = ()
    checkpoint: int | str | None = None
    layers: frozenset[int] = frozenset()
    map_call: MapCall | None = None
    chunk: int | None = None

    def is_run_by_filter_scan(self, eqn: Any) -> bool:
        return any(eqn is loop for loop in self.loops)

    def call_of(self, eqn: Any) -> int | None:
        """The number of the call that an equation is in, if that is to be a checkpoint."""
        calls = (call for layer, call in layer_calls(eqn) if layer in self.layers)
        return next(calls, None)


Pairs = Sequence[tuple[Source, Residual]]


def candidates(
    numbered: NumberedLoss, pairs: Pairs, maps: Sequence[MapCall] = ()
) -> list[Candidate]:
    """The candidates, most promising first."""
    found = [
        *_loop_candidates(numbered, pairs),
        *_layer_candidates(numbered, pairs),
        *_map_candidates(pairs, maps),
    ]
    return sorted(found, key=lambda c: -c.gain)


def _bytes(pairs: Pairs, indices) -> int:
    return sum(pairs[i][1].bytes for i in indices)


# ---------------------------------------------------------------- loops


def _loop_candidates(numbered: NumberedLoss, pairs: Pairs) -> Iterator[Candidate]:
    """For each line with a loop, which may be run several times: of several layers."""
    at_lines: dict[Any, list[tuple[Any, Scan, frozenset[int], int]]] = {}
    for number in sorted({n for s, _ in pairs for n in s.loops if n is not None}):
        origin = numbered.origins[number]
        scan = structure(origin.eqn)
        covers = frozenset(
            i for i, (s, _) in enumerate(pairs) if number in s.loops and s.kept_by_loop
        )
        if isinstance(scan, Scan) and scan.length >= 4 and _bytes(pairs, covers):
            n_runs = _executions(numbered, origin.loops)
            at_line = at_lines.setdefault((origin.source, origin.loops), [])
            at_line.append((origin, scan, covers, n_runs))
    for (source, _), loops in at_lines.items():
        kept_with = lambda every, loops=loops: sum(
            runs * scan.length / every(scan, covers, runs) * _carry(scan)
            + every(scan, covers, runs) / scan.length * _bytes(pairs, covers)
            for _, scan, covers, runs in loops
        )
        sqrt = lambda scan, *_: near_divisor(scan.length, math.sqrt(scan.length))

        def best(scan, covers, runs):
            ideal = scan.length * math.sqrt(_carry(scan) * runs / _bytes(pairs, covers))
            return near_divisor(scan.length, max(1.0, ideal))

        checkpoint, kept = "sqrt", kept_with(sqrt)
        numbers = {best(*loop[1:]) for loop in loops}
        if len(numbers) == 1 and 1.2 * kept_with(best) < kept:
            checkpoint, kept = numbers.pop(), kept_with(best)
        covers = frozenset().union(*(covers for _, _, covers, _ in loops))
        times = f", called {len(loops)} times," if len(loops) > 1 else ""
        returns = any(len(scan.programs[0].out_avals) > scan.n_carry for _, scan, *_ in loops)
        is_batched = returns and numbered.is_batched(loops[0][0])
        paths = {origin.path for origin, *_ in loops}
        yield Candidate(
            "loop",
            f"Run the loop at {source}{times} by `eqg.filter_scan(..., "
            f"checkpoint={checkpoint!r})`, which computes each step twice."
            + _VMAP_IN_THE_STEP
            * is_batched,
            paths.pop() if len(paths) == 1 else "",
            True,
            covers,
            _bytes(pairs, covers) - kept,
            source,
            loops[0][0].primitive,
            loops=[origin.eqn for origin, *_ in loops],
            checkpoint=checkpoint,
        )


# A `vmap` of chunks transposes the outputs of each chunk.
_VMAP_IN_THE_STEP = " Put the `vmap` around it into its step."


def _carry(scan: Scan) -> int:
    return bytes_of(*scan.programs[0].out_avals[: scan.n_carry])


def _executions(numbered: NumberedLoss, loops: Sequence[int]) -> int:
    known = (structure(numbered.origins[i].eqn) for i in loops)
    return math.prod(max(scan.length, 1) for scan in known if isinstance(scan, Scan))


# ---------------------------------------------------------------- layers


def _layer_candidates(numbered: NumberedLoss, pairs: Pairs) -> Iterator[Candidate]:
    """For each group of layers, such as `blocks[*].mlp`: a checkpoint around each call."""
    traced = numbered.traced
    # For each layer that is called, the loops that each of its calls is in.
    called: dict[int, dict[int, tuple[int, ...]]] = {}
    for origin in numbered.origins:
        for layer, call in layer_calls(origin.eqn):
            calls = called.setdefault(layer, {})
            calls[call] = min(calls.get(call, origin.loops), origin.loops, key=len)
    groups: dict[str, list[int]] = {}
    for layer in called:
        groups.setdefault(group_of(traced.layers[layer]), []).append(layer)
    for name, layers in groups.items():
        # The path of a layer that is the model itself is the name of its class.
        is_model = layers == [0] and not any(is_within(p, name) for p in traced.leaves)
        covers: set[int] = set()
        largest = 0.0
        for layer in layers:
            path = traced.layers[layer]
            inside = {
                i
                for i, (_, r) in enumerate(pairs)
                if (r.path if is_model else is_within(r.path, path))
            }
            covers |= inside
            n_calls = sum(_executions(numbered, loops) for loops in called[layer].values())
            largest = max(largest, _bytes(pairs, inside) / n_calls)
        if not covers:
            continue
        each = f"each call of `{name}`" if len(layers) > 1 else f"`{traced.layers[layers[0]]}`"
        each = f"the model, an instance of `{name}`," if is_model else each
        yield Candidate(
            "layer",
            f"Wrap {each} in `eqg.filter_checkpoint`.",
            name,
            all(loops for layer in layers for loops in called[layer].values()),
            frozenset(covers),
            _bytes(pairs, covers) - largest,
            layers=frozenset(layers),
        )


def is_within(path: str, layer: str) -> bool:
    return path == layer or path.startswith((layer + ".", layer + "["))


# ---------------------------------------------------------------- maps


def _map_candidates(pairs: Pairs, maps: Sequence[MapCall]) -> Iterator[Candidate]:
    """For each line that calls a `vmap`: the same function by `filter_map`."""
    inside: dict[MapCall, set[int]] = {}
    for i, (source, _) in enumerate(pairs):
        index = None if source.origin is None else map_call_of(source.origin.eqn)
        if index is not None:
            inside.setdefault(maps[index], set()).add(i)
    for call, covers in inside.items():
        if call.length < 16 or not call.source.file:
            continue
        chunk = near_divisor(call.length, math.sqrt(call.length))
        size = _bytes(pairs, covers)
        yield Candidate(
            "map",
            f"Call `eqg.filter_map(f, xs, chunk={chunk})` instead of the `vmap` at "
            f"{call.source}: it computes each chunk twice.",
            "",
            True,
            frozenset(covers),
            size - size * chunk / call.length,
            call.source,
            "vmap",
            map_call=call,
            chunk=chunk,
        )


# ---------------------------------------------------------------- applying a candidate


def with_candidate(
    traced: TracedLoss, candidate: Candidate, again: Callable[[Candidate], ClosedJaxpr]
) -> Callable[..., Any]:
    """The loss, as a function of the inputs of the traced program, with a candidate applied.

    - `again`: traces the loss with the candidate's `vmap` in chunks.
    """
    if candidate.map_call is not None:
        program = again(candidate)
        return lambda *values: evaluate(program, values)[0]
    return lambda *values: _evaluate(traced, traced.program, list(values), candidate)[0]


def _evaluate(
    traced: TracedLoss, program: ClosedJaxpr, values: Sequence[Any], candidate: Candidate
) -> list[Any]:
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def hook(eqn, values):
        return _evaluate_equation(traced, eqn, values, candidate)

    parts = list(_parts(program, candidate))
    outputs = _used_later(parts, jaxpr.outvars)
    for (is_call, eqns), outs in zip(parts, outputs, strict=True):
        if is_call:
            free = free_variables(eqns, outs)

            def run(xs, eqns=eqns, free=free, outs=outs):
                return evaluate_equations(eqns, dict(zip(free, xs, strict=True)), outs, bind)

            results = jax.checkpoint(run)([env[v] for v in free])
        else:
            results = evaluate_equations(eqns, env, outs, hook)
        env.update(zip(outs, results, strict=True))
    return evaluate_equations((), env, jaxpr.outvars)


def _parts(program: ClosedJaxpr, candidate: Candidate) -> Iterator[tuple[bool, list[Any]]]:
    """The equations in order: whether these are one call of a layer of the candidate, or in
    none, and the equations."""
    part: list[Any] = []
    current = None
    for eqn in program.eqns:
        call = candidate.call_of(eqn)
        if call != current and part:
            yield current is not None, part
            part = []
        current = call
        part.append(eqn)
    if part:
        yield current is not None, part


def _used_later(parts, outputs) -> list[list[Any]]:
    """For each part, the variables that it defines and that a later part, or the program's
    output, uses."""
    used, result = set(variables(outputs)), []
    for _, eqns in reversed(parts):
        result.append([v for eqn in eqns for v in eqn.outvars if v in used])
        for eqn in eqns:
            used.update(variables(eqn.invars))
    return result[::-1]


def _evaluate_equation(traced: TracedLoss, eqn, values, candidate: Candidate) -> Sequence[Any]:
    known = structure(eqn)
    if isinstance(known, Scan) and candidate.is_run_by_filter_scan(eqn):
        return run_loop(known, values, candidate.checkpoint)
    has_program = isinstance(known, Call | Checkpoint | Scan | Cond) or traced.is_plain(eqn)
    is_entered = has_program and any(_concerns(p, candidate) for p in inner_programs(eqn))
    if not is_entered or (isinstance(known, Call) and assigns_shardings(eqn.params)):
        return bind(eqn, values)
    run = lambda program, xs, _: _evaluate(traced, program, xs, candidate)
    return enter(eqn, values, run)


def _concerns(program: ClosedJaxpr, candidate: Candidate) -> bool:
    return any(
        candidate.is_run_by_filter_scan(eqn) or candidate.call_of(eqn) is not None
        for eqn in equations(program)
    )


def run_loop(scan: Scan, values: Sequence[Any], checkpoint: int | str | None) -> list[Any]:
    """The outputs of a scan, run as `filter_scan(..., checkpoint=checkpoint)` would run it."""
    (program,) = scan.programs
    consts, rest = list(values[: scan.n_consts]), values[scan.n_consts :]

    def body(carry, xs):
        outs = evaluate(program, [*consts, *carry, *xs])
        return with_fixed_dtypes(outs[: scan.n_carry]), outs[scan.n_carry :]

    init, xs = with_fixed_dtypes(list(rest[: scan.n_carry])), list(rest[scan.n_carry :])
    loop = Loop(body, init, xs, scan.length, scan.reverse, scan.unroll)
    carry, ys = named_method(checkpoint, scan.length).run(loop)
    return [*carry, *ys]
