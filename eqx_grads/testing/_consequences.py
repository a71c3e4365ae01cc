"""What a failure says of the failures after it: their likely causes may be its consequences."""

import dataclasses
from collections.abc import Iterable, Sequence

from ._likely_cause import PRECISION
from ._report import FAILED, Finding


_LIKELY = "  likely cause: "
_HEADINGS = ("  at `", "  expected: ")  # of a comparison, above the numbers
# Of a second derivative, and of a transformation, if what it is made of is wrong.
_OF_FIRST = "the first derivative is wrong already, see `{}`"
_OF_ROUNDING = PRECISION + " in the first derivative already, see `{}`"
_LARGEST_OF_ROUNDING = 0.1
_OF_VALUE = "the value is another one with its derivative, see `primal`"


def with_consequences(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, without likely causes that contradict an earlier one. Differences of a
    wrong gradient are no reference for the second derivative; and where the rule returns
    another value, what is called without a derivative returns that of the function."""
    first = _failed(findings, ("forward", "reverse", "primal"))
    is_of_value = any(f.check == "primal" and not f.raised for f in first)
    causes: dict[str, str] = {}
    named = [f.check for f in first if f.check != "primal" or f.raised]
    if named:
        causes["order"] = _OF_FIRST.format(named[0])
    if is_of_value:
        causes["transforms"] = _OF_VALUE
    # The sum of two rounded results is not the rounded result of the sum.
    rounded = [f.check for f in first if PRECISION in f.text]
    linear = _failed(findings, ("linear",))
    is_small = [f.error is not None and f.error <= _LARGEST_OF_ROUNDING for f in linear]
    if rounded and all(is_small):
        causes["linear"] = _OF_ROUNDING.format(rounded[0])
    return [_with_cause(f, causes[f.check]) if f.check in causes else f for f in findings]


def _failed(findings: Iterable[Finding], checks: Sequence[str]) -> list[Finding]:
    found = [f for f in findings if f.verdict == FAILED and f.check in checks]
    return sorted(found, key=lambda f: checks.index(f.check))


def _with_cause(finding: Finding, cause: str) -> Finding:
    if finding.verdict != FAILED or (finding.check == "transforms" and finding.raised):
        return finding
    lines = finding.text.splitlines()
    if any(line.startswith(_LIKELY) for line in lines):
        lines = [_LIKELY + cause if line.startswith(_LIKELY) else line for line in lines]
    elif not finding.raised:
        headings = [i for i, line in enumerate(lines) if line.startswith(_HEADINGS)]
        lines.insert(headings[-1] + 1 if headings else 0, _LIKELY + cause)
    return dataclasses.replace(finding, text="\n".join(lines))
