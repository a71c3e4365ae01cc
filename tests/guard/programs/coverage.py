"""The productions of the grammar, and a few cases that have them all.

Most productions are pairs. A style or an op has a mode of derivative, and a way to scan has
another option of the scan. A kind of transformation is inside another one.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from .cases import Batch, Case
from .chains import Step
from .draw import LONG, one_case
from .functions import Function, Node
from .rules import only_in_reverse
from .scans import Scan


KINDS = {
    **dict.fromkeys(("jit", "closure"), "jit"), **dict.fromkeys(("scan", "while"), "loop"),
    **dict.fromkeys(("vmap", "named"), "batch"), "checkpoint": "checkpoint", "cond": "branch",
}  # fmt: skip
# A loop without a bound has no reverse derivative.
FORWARD_ONLY = ("while",)
# The ways to scan that replay steps, or have a loop of their own.
REPLAYS = ("replay", "auto", "sqrt", "online")


def productions(case: Case, batch: Batch) -> set[Any]:
    return set(_of_case(case, batch))


def _of_case(case: Case, batch: Batch) -> Iterator[Any]:
    program, chain = case.program, case.chain
    function = program.function
    yield from (flag for flag in ("x64", "eager", "leaks") if getattr(batch, flag))
    for leaf in function.leaves:
        yield "leaf", leaf.dtype
        if 0 in leaf.shape:
            yield "no elements"
    for formula in function.formulas:
        yield from (("function", name) for term in formula.terms for _, name in term.factors)
    for node in (*function.args, function.out):
        yield from _of_node(node)
    outside = _modes(chain)
    for mode in outside:
        if mode == "reverse" or not only_in_reverse(function.style):
            yield "style", function.style, mode
    if function.nested and outside:
        yield "nested"
    if function.by_keyword:
        yield "by keyword"
    if function.axis:
        yield "named axis", type(program).__name__
    for step in chain:
        used = [i for i in function.closed if any(f.depends_on(i) for f in function.formulas)]
        if step.name == "vmap" and outside and set(step.chosen) & set(used):
            yield "closes over a batched array"
    if isinstance(program, Scan):
        yield from _of_scan(program, outside, _is_pulled_back(chain))
    orders = [step for step in chain if step.is_derivative]
    for inner, outer in itertools.pairwise(orders):
        yield "second order", _mode(outer), "of", _mode(inner)
    kinds = [KINDS.get(step.name, "derivative" * step.is_derivative) for step in chain]
    kinds = ["loop"] * isinstance(program, Scan) + [kind for kind in kinds if kind]
    yield from ((inner, "in", outer) for inner, outer in itertools.combinations(kinds, 2))
    for k, step in enumerate(chain):
        yield from _of_step(step, chain[k + 1 :], chain[:k], function)


def _of_node(node: Node) -> Iterator[Any]:
    kind, *rest = node
    if kind != "leaf":
        yield "tree", kind
        yield from (
            found for part in rest if isinstance(part, tuple) for found in _of_node(part)
        )


def _of_scan(scan: Scan, modes: Sequence[str], is_pulled_back: bool) -> Iterator[Any]:
    method = "online" if scan.online else scan.checkpoint
    yield "steps", scan.steps
    if scan.steps < 2:
        return
    for mode in modes:
        yield "scan", method, mode
    if not is_pulled_back:
        return
    truncates = scan.truncate is not None and scan.truncate < scan.steps
    if scan.reverse:
        yield "scan", method, "from the last step"
    if scan.emits and method in REPLAYS:
        yield "scan", method, "emits its carry"
    if scan.steps == LONG and not truncates and method in REPLAYS:
        yield "scan", method, "long"
        yield from [("scan", method, scan.emits, scan.reverse)] * (method == "replay")
    if truncates:
        yield "scan", method, "truncated"
        yield "truncated", scan.truncate, "from the last" if scan.reverse else "from the first"
        if scan.steps % scan.truncate:
            yield "truncated", scan.truncate, "with a remainder"
    elif isinstance(method, int) and scan.steps > method and scan.steps % method:
        yield "scan", method, "with a remainder"
    if scan.unroll > 1:
        yield "unrolled"
    if scan.halves_carry_gradient:
        yield "carry_gradient"


def _of_step(
    step: Step, outside: Sequence[Step], inside: Sequence[Step], function: Function
) -> Iterator[Any]:
    modes = _modes(outside)
    if step.is_derivative:
        yield from ((step.name, name, value) for name, value in step.options)
        yield step.name
        return
    if step.name == "shard_map":  # it needs several devices: the slow tests have it
        return
    for mode in modes:
        yield step.name, mode
    if step.name == "op":
        (chosen,) = step.chosen
        through = [f.dtype for f in function.formulas if f.depends_on(chosen)]
        found = _modes([later for later in outside if through and chosen in later.chosen])
        yield from ((step["op"], mode) for mode in found)
        if "reverse" in found and {function.leaves[chosen].dtype, *through} == {"complex64"}:
            yield step["op"], "complex"
    if _is_pulled_back(outside) or (step.name in FORWARD_ONLY and modes):
        yield from ((step.name, name, value) for name, value in step.options)
        if step.name == "recurrence" and step["steps"] > 1:
            yield "recurrence", step["method"], step["reverse"], step["h0"]
        if step.name == "scan" and step["steps"] > 3 and step["truncate"] is None:
            yield "a scan around", step["method"], step["reverse"]
    if step.name in ("vmap", "named"):
        shared = [
            later
            for later in outside
            if later.is_derivative and set(later.chosen) - set(step.chosen)
        ]
        yield from (("batch that shares what is differentiated", m) for m in _modes(shared))
        if "reverse" in _modes(shared):
            yield "batch that shares, of a rule", _kind(function.style)
        yield from (("derivative in a batch", m) for m in _modes(inside))


def _kind(style: str) -> str:
    return "elementwise" if style.startswith("elementwise") else style


def _mode(step: Step) -> str:
    return "reverse" if step.is_reverse or step.name == "transpose" else "forward"


def _is_pulled_back(chain: Sequence[Step]) -> bool:
    """Whether what is inside of the chain is differentiated in reverse mode first."""
    return next((_mode(step) == "reverse" for step in chain if step.is_derivative), False)


def _modes(chain: Sequence[Step]) -> tuple[str, ...]:
    found = {_mode(step) for step in chain if step.is_derivative}
    return tuple(sorted(found))


def choose(pool: int) -> list[int]:
    """Seeds, of so many, whose cases have all productions: rare ones first."""
    found = {seed: one_case(seed) for seed in range(pool)}
    have = {seed: productions(batch.cases[0], batch) for seed, batch in found.items()}
    counts, chosen = Counter[Any](p for ps in have.values() for p in ps), list[int]()
    while counts:
        worth = lambda seed: sum(counts[p] ** -0.5 for p in have[seed] if p in counts)
        chosen.append(max(have, key=worth))
        for production in have[chosen[-1]]:
            counts.pop(production, None)
    return sorted(chosen)


def chosen_batches(seeds: Sequence[int]) -> list[Batch]:
    """The cases of some seeds, in few programs."""
    groups: dict[Batch, list[Case]] = {}
    for batch in map(one_case, seeds):
        groups.setdefault(dataclasses.replace(batch, cases=()), []).extend(batch.cases)
    return [
        dataclasses.replace(batch, cases=tuple(cases[k : k + 15]))
        for batch, cases in groups.items()
        for k in range(0, len(cases), 15)
    ]


def missing(found: Sequence[Batch], pool: int) -> set[Any]:
    """The productions that some of so many random cases have, and no case of the batches."""
    of = lambda batches: set[Any]().union(
        *(productions(c, b) for b in batches for c in b.cases)
    )
    return of(map(one_case, range(pool))) - of(found)
