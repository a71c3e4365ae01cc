"""Candidates to compute twice in a loss: a loop, a group of layers, or a `vmap`.

A candidate is applied without the user's code. `filter_scan` runs the equations of a loop. For
layers and a `vmap`, the loss is traced once more, with what the advice says to write.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._control_flow.chunked_scan import near_divisor
from ..._control_flow.scan import named_method
from ..._control_flow.scan_backward import Loop
from ..._jaxprs.evaluate import evaluate, with_fixed_dtypes
from ..._jaxprs.structure import Scan, structure
from ..layers import group_of
from ..origins import NumberedLoss
from ..traced_loss import layer_calls
from .maps import map_call_of, MapCall
from .report import MemoryAdvice
from .residuals import bytes_of, Source


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A loop, layers, or a `vmap`, to be computed twice.

    - `covers`: the indices of the residuals that are computed there. `again`: about how many of
        their bytes are computed again at one time.
    - `apply()`: the loss, as a function of the inputs of the traced program, with the candidate
        applied.
    """

    advice: MemoryAdvice
    covers: frozenset[int]
    again: float
    apply: Callable[[], Callable[..., Any]]


Sources = Sequence[Source]
# Traces the loss with checkpoints around these layers, and with these calls in chunks, and
# returns a function of the inputs of the program.
Again = Callable[[frozenset[int], dict[MapCall, int]], Callable[..., Any]]


def candidates(
    numbered: NumberedLoss, sources: Sources, maps: Sequence[MapCall], again: Again
) -> Iterator[Candidate]:
    yield from _loop_candidates(numbered, sources)
    yield from _layer_candidates(numbered, sources, again)
    yield from _map_candidates(sources, maps, again)


# ---------------------------------------------------------------- loops


def _loop_candidates(numbered: NumberedLoss, sources: Sources) -> Iterator[Candidate]:
    """For each line with a loop, which may be run several times: of several layers."""
    at_lines: dict[Any, list[tuple[Any, list[int], Any, float]]] = {}
    for number in sorted({n for s in sources for n in s.loops if n is not None}):
        origin = numbered.origins[number]
        scan = structure(origin.eqn)
        inside = [i for i, s in enumerate(sources) if number in s.loops and s.kept_by_loop]
        # A loop that keeps its carries only has checkpoints already.
        keeps_more = any(sources[i].bytes for i in inside if sources[i].made.kind != "carry")
        if isinstance(scan, Scan) and scan.length >= 4 and keeps_more:
            size = sum(sources[i].bytes for i in inside)
            steps = _executions(numbered, origin.loops) * scan.length
            # A checkpoint every `k` steps leaves `carries / k + size / steps * k`.
            carries = steps * sum(map(bytes_of, scan.programs[0].out_avals[: scan.n_carry]))
            every = near_divisor(scan.length, max(1.0, math.sqrt(carries * steps / size)))
            one = origin, inside, every, size / steps * every
            at_lines.setdefault((origin.source, origin.loops), []).append(one)
    for (source, _), loops in at_lines.items():
        origins, covers, everys, again = zip(*loops, strict=True)
        checkpoint = everys[0] if len(set(everys)) == 1 else "sqrt"
        times = f", called {len(loops)} times," if len(loops) > 1 else ""
        cure = (
            f"Run the loop at {source}{times} by `eqg.filter_scan(..., "
            f"checkpoint={checkpoint!r})`, which computes each step twice."
        )
        paths = {origin.path for origin in origins}
        path = paths.pop() if len(paths) == 1 else ""
        run = lambda origin, at=checkpoint: ft.partial(run_loop, origin.eqn, at)
        name, instead = origins[0].primitive, {origin.number: run(origin) for origin in origins}
        yield Candidate(
            MemoryAdvice(**source.fields(), kind="loop", cure=cure, path=path, primitive=name),
            frozenset().union(*covers),
            max(again),
            ft.partial(numbered.replaced, instead),
        )


def _executions(numbered: NumberedLoss, loops: Sequence[int]) -> int:
    known = (structure(numbered.origins[i].eqn) for i in loops)
    return math.prod(max(scan.length, 1) for scan in known if isinstance(scan, Scan))


def run_loop(eqn: Any, checkpoint: int | str | None, values: Sequence[Any]) -> list[Any]:
    """The outputs of a scan, run as `filter_scan(..., checkpoint=checkpoint)` would run it."""
    scan = structure(eqn)
    assert isinstance(scan, Scan)
    (program,) = scan.programs
    consts, rest = list(values[: scan.n_consts]), values[scan.n_consts :]

    def body(carry, xs):
        outs = evaluate(program, [*consts, *carry, *xs])
        return with_fixed_dtypes(outs[: scan.n_carry]), outs[scan.n_carry :]

    init, xs = with_fixed_dtypes(list(rest[: scan.n_carry])), list(rest[scan.n_carry :])
    loop = Loop(body, init, xs, scan.length, scan.reverse, scan.unroll)
    carry, ys = named_method(checkpoint, scan.length).run(loop)
    return [*carry, *ys]


# ---------------------------------------------------------------- layers and maps


def _layer_candidates(
    numbered: NumberedLoss, sources: Sources, again: Again
) -> Iterator[Candidate]:
    """For each group of layers, such as `blocks[*].mlp`: a checkpoint around each call."""
    paths = numbered.traced.layers
    # By the layer and the call: the residuals in it, and the loops around the call.
    groups: dict[str, dict[tuple[int, int], dict[int, tuple[int, ...]]]] = {}
    for i, source in enumerate(sources):
        origin = source.made.origin
        around = [] if origin is None else numbered.around(origin)
        for call, loops in {c: o.loops for o in around for c in layer_calls(o.eqn)}.items():
            group = groups.setdefault(group_of(paths[call[0]]), {})
            group.setdefault(call, {})[i] = loops
    for name, calls in groups.items():
        layers = frozenset(layer for layer, _ in calls)
        covers = frozenset().union(*calls.values())
        each = f"each call of `{name}`" if len(layers) > 1 else f"`{paths[min(layers)]}`"
        # A single call has to be computed again as a whole.
        largest = max(
            sum(sources[i].bytes / _executions(numbered, loops) for i, loops in inside.items())
            for inside in calls.values()
        )
        cure = f"Wrap {each} in `eqg.filter_checkpoint`."
        yield Candidate(
            MemoryAdvice(kind="layer", cure=cure, path=name),
            covers,
            largest,
            ft.partial(again, layers, {}),
        )


def _map_candidates(
    sources: Sources, maps: Sequence[MapCall], again: Again
) -> Iterator[Candidate]:
    """For each line that calls a large `vmap`: the same function by `filter_map`."""
    inside: dict[MapCall, set[int]] = {}
    for i, source in enumerate(sources):
        origin = source.made.origin
        index = None if origin is None else map_call_of(origin.eqn)
        if index is not None and maps[index].length >= 16 and maps[index].source.file:
            inside.setdefault(maps[index], set()).add(i)
    for call, covers in inside.items():
        chunk = near_divisor(call.length, math.sqrt(call.length))
        cure = (
            f"Call `eqg.filter_map(f, xs, chunk={chunk})` instead of the `vmap` at "
            f"{call.source}: it computes each chunk twice."
        )
        yield Candidate(
            MemoryAdvice(**call.source.fields(), kind="map", cure=cure, primitive="vmap"),
            frozenset(covers),
            sum(sources[i].bytes for i in covers) * chunk / call.length,
            ft.partial(again, frozenset(), {call: chunk}),
        )
