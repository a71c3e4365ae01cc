"""What to checkpoint in a traced loss: candidates, and the loss with one of them applied.

A candidate is applied to the traced program, not to the user's code: the equations of a scan
are run by a method of `filter_scan`, and those of each call of a layer under `jax.checkpoint`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._control_flow.chunked_scan import near_divisor
from .._control_flow.scan import named_method
from .._control_flow.scan_backward import Loop
from .._jaxprs.dependence import free_variables, variables
from .._jaxprs.evaluate import (
    bind,
    enter,
    evaluate,
    evaluate_equations,
    without_weak_types,
)
from .._jaxprs.structure import (
    Call,
    Checkpoint,
    Cond,
    equations,
    inner_programs,
    Scan,
    structure,
)
from .._jaxprs.versions import assigns_shardings
from .origins import NumberedLoss, Origin
from .residuals import bytes_of, Residual, Source
from .traced_loss import layer_calls, TracedLoss


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A loop or a layer to checkpoint.

    - `eqn`: the `scan` of the traced program, and `checkpoint` for `filter_scan`.
    - `layers`: the indices of layers in `TracedLoss.layers`, of which each call is a
      checkpoint.
    - `covered`: the bytes of all residuals that are computed there.
    - `recomputed`: of these, those that exist at one time in the backward pass.
    """

    name: str
    covered: int
    recomputed: int
    origin: Origin | None = None
    checkpoint: int | str | None = None
    layers: frozenset[int] = frozenset()

    def selects(self, eqn: Any) -> int | None:
        """The number of the call that an equation is in, if that is to be a checkpoint."""
        calls = (call for layer, call in layer_calls(eqn) if layer in self.layers)
        return next(calls, None)


Pairs = Sequence[tuple[Source, Residual]]


def candidates(numbered: NumberedLoss, pairs: Pairs, most: int) -> list[Candidate]:
    """What can be checkpointed: those that cover most residuals, and no more than `most`."""
    kept = [(s, r) for s, r in pairs if r.is_kept_by_compiler]
    found = [*_loop_candidates(numbered, kept), *_layer_candidates(numbered.traced, kept)]
    return sorted(found, key=lambda c: c.recomputed - c.covered)[:most]


def _loop_candidates(numbered: NumberedLoss, kept: Pairs) -> Iterator[Candidate]:
    in_loops = {number for source, _ in kept for number in source.loops if number is not None}
    for number in sorted(in_loops):
        origin = numbered.origins[number]
        scan = structure(origin.eqn)
        inside = [r for s, r in kept if number in s.loops and s.kept_by_loop]
        if not isinstance(scan, Scan) or scan.length < 4 or not inside:
            continue
        (body,) = scan.programs
        covered = sum(r.bytes for r in inside)
        times = math.prod(structure(numbered.origins[i].eqn).length for i in origin.loops)
        per_step = covered / scan.length
        carry = times * bytes_of(body.out_avals[: scan.n_carry])
        # Of `T c / k + k r` the least, with `T` steps, a carry of `c` and residuals of `r`.
        best = math.sqrt(scan.length * carry / per_step)
        sqrt = near_divisor(scan.length, math.sqrt(scan.length))
        cost = lambda k: scan.length / k * carry + k * per_step / times
        checkpoint = near_divisor(scan.length, max(best, 1))
        if cost(sqrt) <= 1.2 * cost(checkpoint):
            checkpoint, every = "sqrt", sqrt
        else:
            every = checkpoint
        yield Candidate(
            f"the loop at {origin.source}",
            covered,
            round(every * per_step / times),
            origin,
            checkpoint,
        )


def _layer_candidates(traced: TracedLoss, kept: Pairs) -> Iterator[Candidate]:
    """For each group of layers, such as `blocks[*].mlp`: a checkpoint around each call."""
    groups: dict[str, set[int]] = {}
    for i, path in enumerate(traced.layers):
        groups.setdefault(re.sub(r"\[\d+\]", "[*]", path), set()).add(i)
    for name, layers in groups.items():
        covered, largest = 0, 0
        for layer in layers:
            path = traced.layers[layer]
            inside = [r for _, r in kept if _is_within(r.path, path, layer == 0)]
            covered += sum(r.bytes for r in inside)
            largest = max(largest, sum(r.bytes_per_step for r in inside))
        if covered:
            shown = traced.layers[min(layers)] if len(layers) == 1 else name
            yield Candidate(f"`{shown}`", covered, largest, layers=frozenset(layers))


def _is_within(path: str, layer: str, is_root: bool) -> bool:
    return path == layer or (is_root and path != "") or path.startswith((layer + ".", layer + "["))


# ---------------------------------------------------------------- applying a candidate


def with_checkpoints(traced: TracedLoss, candidate: Candidate) -> Callable[..., Any]:
    """The loss, as a function of the inputs of the traced program, with a candidate applied."""
    return lambda *values: _evaluate(traced.program, list(values), candidate)[0]


def _evaluate(program: ClosedJaxpr, values: Sequence[Any], candidate: Candidate) -> list[Any]:
    jaxpr = program.jaxpr
    env = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))

    def hook(eqn, values):
        return _evaluate_equation(eqn, values, candidate)

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
        call = candidate.selects(eqn)
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


def _evaluate_equation(eqn, values, candidate: Candidate) -> Sequence[Any]:
    if candidate.origin is not None and eqn is candidate.origin.eqn:
        return _run_scan(eqn, values, candidate.checkpoint)
    known = structure(eqn)
    is_entered = isinstance(known, Call | Checkpoint | Scan | Cond) and any(
        _concerns(inner, candidate) for inner in inner_programs(eqn)
    )
    if not is_entered or (isinstance(known, Call) and assigns_shardings(eqn.params)):
        return bind(eqn, values)
    return enter(eqn, values, lambda program, xs, _: _evaluate(program, xs, candidate))


def _concerns(program: ClosedJaxpr, candidate: Candidate) -> bool:
    wanted = candidate.origin.eqn if candidate.origin is not None else None
    return any(
        eqn is wanted or candidate.selects(eqn) is not None for eqn in equations(program)
    )


def _run_scan(eqn, values, checkpoint) -> list[Any]:
    scan = structure(eqn)
    (program,) = scan.programs
    consts, rest = values[: scan.n_consts], values[scan.n_consts :]

    def body(carry, xs):
        outs = evaluate(program, [*consts, *carry, *xs])
        return without_weak_types(outs[: scan.n_carry]), outs[scan.n_carry :]

    init = without_weak_types(rest[: scan.n_carry])
    loop = Loop(body, init, rest[scan.n_carry :], scan.length, scan.reverse, scan.unroll)
    carry, ys = named_method(checkpoint, scan.length).run(loop)
    return [*carry, *ys]
