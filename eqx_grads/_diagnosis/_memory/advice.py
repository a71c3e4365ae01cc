"""What to checkpoint in a traced loss: candidates, and the loss with one of them applied.

A candidate is applied to the traced program, not to the user's code: the equations of a scan
are run by a method of `filter_scan`, and those of each call of a layer under `jax.checkpoint`.
A cross-entropy is replaced by `losses.linear_cross_entropy`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..._control_flow.chunked_scan import near_divisor
from ..._jaxprs.dependence import free_variables, variables
from ..._jaxprs.evaluate import (
    bind,
    enter,
    evaluate_equations,
)
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
from ..origins import NumberedLoss, Origin
from ..traced_loss import layer_calls, TracedLoss
from .logits import Logits, logits_of, without_logits
from .loop_with_checkpoints import run_loop
from .residuals import Residual, Source


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A loop or layers to checkpoint, or logits to do without.

    - `kind`: `"loop"`, `"layer"` or `"logits"`. `cure`: what to write. `path`: the path of the
        layer.
    - `is_in_loop`: whether the checkpoint is in a loop, or is one.
    - `covers`: the indices of the residuals that are computed there.
    - `gain`: about the bytes of these that are not alive at the same time any more.
    - `origin`: an operation of which the line is shown. `loops`: the equations of scans that
        are to be run by `filter_scan` with this `checkpoint`.
    - `vmap_is_outside`: whether the loop stays in a `vmap`. `moves_vmap`: whether that is to be
        moved into its step. `outputs`: the bytes of the outputs of a loop of which the `vmap`
        is moved. They are copied if the loss swaps their axes back.
    - `layers`: the indices of layers in `TracedLoss.layers`, of which each call is to be a
      checkpoint.
    - `logits`: those that a cross-entropy is computed from.
    """

    kind: str
    cure: str
    path: str
    is_in_loop: bool
    covers: frozenset[int]
    gain: float
    origin: Origin | None = None
    loops: Sequence[Any] = ()
    checkpoint: int | str | None = None
    vmap_is_outside: bool = False
    moves_vmap: bool = False
    outputs: int = 0
    layers: frozenset[int] = frozenset()
    logits: Logits | None = None

    def is_run_by_filter_scan(self, eqn: Any) -> bool:
        return any(eqn is loop for loop in self.loops)

    def call_of(self, eqn: Any) -> int | None:
        """The number of the call that an equation is in, if that is to be a checkpoint."""
        calls = (call for layer, call in layer_calls(eqn) if layer in self.layers)
        return next(calls, None)


Pairs = Sequence[tuple[Source, Residual]]


def candidates(numbered: NumberedLoss, pairs: Pairs) -> list[Candidate]:
    """What can be checkpointed, most promising first."""
    found = [
        *_loop_candidates(numbered, pairs),
        *_layer_candidates(numbered, pairs),
        *_logits_candidates(numbered, pairs),
    ]
    return sorted(found, key=lambda c: -c.gain)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan of the loss.

    - `covers`: the indices of the residuals in it. `residuals`: their bytes, in one run.
    - `n_runs`: how often it is run, in loops around it.
    """

    origin: Origin
    scan: Scan
    covers: frozenset[int]
    residuals: float
    n_runs: int

    @property
    def carry(self) -> int:
        """The bytes of the carry."""
        return bytes_of(*self.scan.programs[0].out_avals[: self.scan.n_carry])

    def kept(self, every: int) -> float:
        """The bytes that are kept with a checkpoint every so many steps, in all runs."""
        steps = self.scan.length
        return self.n_runs * (steps / every * self.carry + every / steps * self.residuals)

    @property
    def sqrt(self) -> int:
        """The number of steps between checkpoints of `checkpoint="sqrt"`."""
        return near_divisor(self.scan.length, math.sqrt(self.scan.length))

    @property
    def best(self) -> int:
        """That with which least is kept."""
        ideal = self.scan.length * math.sqrt(self.carry / self.residuals)
        return near_divisor(self.scan.length, max(1.0, ideal))


def _loops(numbered: NumberedLoss, pairs: Pairs) -> Iterator[_Loop]:
    in_loops = {number for source, _ in pairs for number in source.loops if number is not None}
    for number in sorted(in_loops):
        origin = numbered.origins[number]
        scan = structure(origin.eqn)
        covers = frozenset(
            i for i, (s, _) in enumerate(pairs) if number in s.loops and s.kept_by_loop
        )
        covered = sum(pairs[i][1].bytes for i in covers)
        if isinstance(scan, Scan) and scan.length >= 4 and covered:
            n_runs = _executions(numbered, origin.loops)
            yield _Loop(origin, scan, covers, covered / n_runs, n_runs)


def _loop_candidates(numbered: NumberedLoss, pairs: Pairs) -> Iterator[Candidate]:
    """For each line with a loop, which may be run several times: of several layers."""
    at_lines: dict[Any, list[_Loop]] = {}
    for loop in _loops(numbered, pairs):
        is_batched = numbered.is_batched(loop.origin)
        # A loop may be on the line of the one that it is in.
        key = (loop.origin.source, loop.origin.loops, is_batched)
        at_lines.setdefault(key, []).append(loop)
    for (source, _, is_batched), loops in at_lines.items():
        checkpoint, kept = _best_checkpoint(loops)
        covers = frozenset().union(*(loop.covers for loop in loops))
        run = f"`eqg.filter_scan(..., checkpoint={checkpoint!r})`"
        place = f"{source}, called {len(loops)} times," if len(loops) > 1 else f"{source}"
        paths = {loop.origin.path for loop in loops}
        candidate = Candidate(
            "loop",
            f"Run the loop at {place} by {run}, which computes each step twice.",
            paths.pop() if len(paths) == 1 else "",
            True,
            covers,
            sum(pairs[i][1].bytes for i in covers) - kept,
            loops[0].origin,
            [loop.origin.eqn for loop in loops],
            checkpoint,
        )
        if not is_batched:
            yield candidate
            continue
        scans = [loop.scan for loop in loops]
        outputs = sum(s.length * bytes_of(*s.programs[0].out_avals[s.n_carry :]) for s in scans)
        cure = candidate.cure + _OUTPUTS_ARE_COPIED * (outputs > 0)
        yield dataclasses.replace(candidate, cure=cure, vmap_is_outside=True)
        cure = _VMAP_INSIDE.format(source=place, run=run) + _OUTPUTS_STAY * (outputs > 0)
        yield dataclasses.replace(candidate, cure=cure, moves_vmap=True, outputs=outputs)


_OUTPUTS_ARE_COPIED = (
    " The `vmap` around it transposes its outputs, which XLA may copy more often than is "
    "estimated: `report.verify()` measures it."
)
_VMAP_INSIDE = (
    "Put the `vmap` that is around the loop at {source} into its step, pass `xs` with the time "
    "axis first (and their batch axis, if they have one, second), and run the loop by {run}, "
    "which computes each step twice."
)
_OUTPUTS_STAY = (
    " The estimate is for a loss that uses the outputs with the time axis first as well; "
    "`report.verify()` measures one that swaps their axes back."
)


def _best_checkpoint(loops: Sequence[_Loop]) -> tuple[int | str, float]:
    """The `checkpoint` of `filter_scan` with which least is kept of some loops, and how many
    bytes that is."""
    sqrt = sum(loop.kept(loop.sqrt) for loop in loops)
    best, *others = {loop.best for loop in loops}
    kept = sum(loop.kept(best) for loop in loops)
    return (best, kept) if not others and 1.2 * kept < sqrt else ("sqrt", sqrt)


def _layer_candidates(numbered: NumberedLoss, pairs: Pairs) -> Iterator[Candidate]:
    """For each group of layers, such as `blocks[*].mlp`: a checkpoint around each call."""
    paths = numbered.traced.layers
    loops = _calls_of_layers(numbered)
    groups: dict[str, list[int]] = {}
    for layer in loops:
        groups.setdefault(group_of(paths[layer]), []).append(layer)
    for name, layers in groups.items():
        covers: set[int] = set()
        largest = 0.0
        for layer in layers:
            inside = {i for i, (_, r) in enumerate(pairs) if is_within(r.path, paths[layer])}
            if layer == 0 and _is_whole_model(numbered.traced):
                inside = {i for i, (_, r) in enumerate(pairs) if r.path}
            covers |= inside
            n_calls = sum(_executions(numbered, l) for l in loops[layer].values())
            largest = max(largest, sum(pairs[i][1].bytes for i in inside) / n_calls)
        if not covers:
            continue
        each = f"each call of `{name}`" if len(layers) > 1 else f"`{paths[layers[0]]}`"
        if layers == [0] and _is_whole_model(numbered.traced):
            each = f"the model, an instance of `{name}`,"  # and not the class
        yield Candidate(
            "layer",
            f"Wrap {each} in `eqg.filter_checkpoint`.",
            name,
            all(l for layer in layers for l in loops[layer].values()),
            frozenset(covers),
            sum(pairs[i][1].bytes for i in covers) - largest,
            layers=frozenset(layers),
        )


def _logits_candidates(numbered: NumberedLoss, pairs: Pairs) -> Iterator[Candidate]:
    traced = numbered.traced
    origin_of = {id(origin.eqn): origin for origin in numbered.origins}
    names = dict(zip(traced.program.jaxpr.invars, traced.inputs, strict=True))
    for logits in logits_of(traced.program, names):
        covers = frozenset(
            i
            for i, (source, _) in enumerate(pairs)
            if source.var.aval.size == logits.tokens * logits.vocabulary
        )
        product, loss = (origin_of[id(e)] for e in (logits.product, logits.users[-1]))
        lines = " and ".join(dict.fromkeys([str(product.source), str(loss.source)]))
        yield Candidate(
            "logits",
            f"Replace the logits and their cross-entropy, at {lines}, by {logits.cure}",
            loss.path,
            True,  # in the loop over these parts
            covers,
            float(max(logits.bytes, sum(pairs[i][1].bytes for i in covers))),
            loss,
            logits=logits,
        )


def _calls_of_layers(numbered: NumberedLoss) -> dict[int, dict[int, tuple[int, ...]]]:
    """For each layer that is called, the loops that each of its calls is in."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for origin in numbered.origins:
        for layer, call in layer_calls(origin.eqn):
            calls = found.setdefault(layer, {})
            # The call may itself contain loops.
            calls[call] = min(calls.get(call, origin.loops), origin.loops, key=len)
    return found


def _executions(numbered: NumberedLoss, loops: Sequence[int]) -> int:
    known = (structure(numbered.origins[i].eqn) for i in loops)
    return math.prod(max(scan.length, 1) for scan in known if isinstance(scan, Scan))


def is_within(path: str, layer: str) -> bool:
    return path == layer or path.startswith((layer + ".", layer + "["))


def _is_whole_model(traced: TracedLoss) -> bool:
    """Whether the first layer is the model itself. Its path is then the name of its class."""
    return not any(is_within(leaf, traced.layers[0]) for leaf in traced.leaves)


# ---------------------------------------------------------------- applying a candidate


def with_checkpoints(traced: TracedLoss, candidate: Candidate) -> Callable[..., Any]:
    """The loss, as a function of the inputs of the traced program, with a candidate applied."""
    if candidate.logits is not None:
        return without_logits(traced, candidate.logits)
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
        return run_loop(known, values, candidate.checkpoint, candidate.vmap_is_outside)
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
