"""The result of `check_rule`: a list of findings, and how they are printed."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .._diagnosis.report import wrap
from ._compare import differences, side_by_side
from ._mistakes import likely_cause, Mistake
from ._outcome import outcome, raised


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
NO_REFERENCE = "no reference for the derivative"
_WIDTH = 100
_MOST_PLACES = 4


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison.

    - `check`: the name of the check, which `check_rule` fills in.
    - `verdict`: `"passed"`, `"FAILED"` or `"skipped"`.
    - `where`: the leaf, mode or transformation, in the names of the user's parameters.
    - `error`, `tolerance`: the relative error and the largest one that passes; `None` where
        the check measures no error.
    - `cause`: the likely cause of a failure, if one is known.
    - `facts`, `details`: what else is printed of a failure, before and after its cause. The
        reason why a check was skipped is a fact.
    - `raised`: the type and the first line of an exception, if the failure is one.
    - `text`: all that is printed.
    """

    check: str
    verdict: str
    where: str = ""
    error: float | None = None
    tolerance: float | None = None
    cause: str = ""
    facts: str = ""
    details: str = ""
    raised: str = ""

    @property
    def text(self) -> str:
        cause = f"  likely cause: {self.cause}" if self.cause else ""
        return "\n".join(part for part in (self.facts, cause, self.details) if part)


def passed(where: str = "") -> Finding:
    return Finding("", PASSED, where)


def skipped(why: str) -> Finding:
    return Finding("", SKIPPED, facts=why)


def failed(where: str, text: str, cause: str = "") -> Finding:
    return Finding("", FAILED, where, cause=cause, facts=f"  {text}")


def broke(where: str, error: BaseException, cause: str = "") -> Finding:
    """A failure that is an exception."""
    first, details = raised(error)
    if isinstance(error, jax.errors.ConcretizationTypeError):
        first = "JAX can't trace it, as it looks at the values of arguments"
        cause, details = "", f"  {first}: {details.splitlines()[-1].strip()}"
    return Finding("", FAILED, where, cause=cause, details=details, raised=first)


def compare(
    where: str,
    want: Any,
    got: Any,
    names: Sequence[str],
    tolerance: float,
    *,
    cause: str | None = None,
    mistakes: Callable[[], Iterable[Mistake]] = tuple,
    primals: Sequence[Any] | None = None,
    scale: float | Sequence[float] = 0.0,
    note: str = "",
    **options: Any,
) -> Finding:
    """Compare two lists of arrays, named `names`; `got` may be an exception.

    - `cause`: the likely cause, if it is known. Otherwise it is looked for in the numbers.
    - `mistakes`: makes what known mistakes would give; called on a failure only.
    - `primals`: the values that the arrays are cotangents of, to describe a pattern by sign.
    - `scale`: for each array, what is added to the norm that its error is relative to.
    - `note`: is said of a failure, such as what computed `want`.
    - `options`: of `differences`.
    """
    if isinstance(got, Exception):
        return broke(where, got, cause or "")
    found = differences(want, got, names, scale=scale, **options)
    wrong = [d for d in found if not d.error <= tolerance]
    if not wrong:
        return Finding("", PASSED, where, found[0].error, tolerance)
    # First entries that are not finite, then missing ones, then by size.
    worst, *others = sorted(wrong, key=lambda d: (np.isfinite(d.error), not d.is_missing))
    if cause is None:
        tried = outcome(lambda: list(mistakes()))
        known = [] if isinstance(tried, Exception) else tried  # a mode that there is not
        primal = None if primals is None else np.asarray(primals[list(names).index(worst.name)])
        same = [(d.expected, d.got) for d in wrong if d.name == worst.name and d is not worst]
        cause = likely_cause(worst.expected, worst.got, worst.name, known, primal, same,
                             is_random=True)  # fmt: skip
    facts = [f"at {worst.name}: relative error {worst.error:.3g}, tolerance {tolerance:.3g}"]
    facts += [note] * bool(note)
    size = lambda d: "missing" if d.is_missing else f"{d.error:.2g}"
    also = {d.name: f"{d.name} ({size(d)})" for d in reversed(others) if d.name != worst.name}
    details = side_by_side(worst)
    if also:
        details += f"\n  also wrong: {', '.join(list(also.values())[:-7:-1])}"
    where = f"{where}, {worst.name}" if where else worst.name
    text = "\n".join(f"  {fact}" for fact in facts)
    return Finding("", FAILED, where, worst.error, tolerance, cause, text, details)


class RuleCheckError(AssertionError):
    """A rule failed `check_rule`. The message is the printed report."""


class Report:
    """The result of [`eqx_grads.testing.check_rule`][].

    A printed report describes the first failure, and names the checks that fail for the same
    reason. Then come failures of another kind, and the names of the checks that passed. The
    derivative may have no reference, for example if the function raises an error at arguments
    close by. The first line then says so: only the other checks passed.

    - `findings`: all comparisons, a list of `Finding`s with the fields `check`, `verdict`,
        `error`, `tolerance`, `where`, `cause`, `text` and `raised`.
    - `numbers`: a dictionary with the `"seed"`, and the names of the perturbed leaves as
        `"leaves"`.
    """

    def __init__(self, name: str, findings: Sequence[Finding], numbers: dict[str, Any]):
        self.name = name
        self.findings = list(findings)
        self.numbers = numbers

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == FAILED]

    def __getitem__(self, check: str) -> list[Finding]:
        """The findings of one check."""
        found = [finding for finding in self.findings if finding.check == check]
        if not found:
            raise KeyError(f"no check named {check!r} was run")
        return found

    def raise_if_failed(self) -> None:
        """Raise a `RuleCheckError` with the whole report if a check failed."""
        if not self.passed:
            raise RuleCheckError(str(self))

    def __str__(self) -> str:
        status = PASSED if self.passed else FAILED
        compared = [f for f in self.findings if f.check in ("forward", "reverse")]
        is_unknown = any(f.facts.startswith(NO_REFERENCE) for f in compared)
        if self.passed and is_unknown and all(map(_is_skipped, compared)):
            status = f"{PASSED}, without a reference for the derivative"
        lines = [f"The rule of `{self.name}`: {status} (seed {self.numbers.get('seed')})"]
        for number, (first, *others) in enumerate(self._grouped(), start=1):
            lines += ["", f"{number}. {first.check}, {first.where}", *first.text.splitlines()]
            same = list(dict.fromkeys(f.where for f in others if f.check == first.check))
            more = [f"and {len(same) - _MOST_PLACES} more"] * (len(same) > _MOST_PLACES)
            also = "; ".join([*same[:_MOST_PLACES], *more])
            rest = ", ".join(dict.fromkeys(f.check for f in others if f.check != first.check))
            lines += [f"  also in: {also}"] * bool(also) + [f"  and so: {rest}"] * bool(rest)
        lines += ["", *self._listed()]
        indent = lambda line: " " * (len(line) - len(line.lstrip()) + 2)
        return "\n".join(part for x in lines for part in wrap(x, _WIDTH, indent(x)))

    __repr__ = __str__

    def _grouped(self) -> list[list[Finding]]:
        """The failures, those together that have one reason: the first one that is about
        numbers, or an exception that is raised once more."""
        groups: dict[str, list[Finding]] = {}
        for failure in self.failures:
            # If numbers of one check are wrong, those of the later ones are for that reason.
            key = failure.check if failure.error is None else "numbers"
            if failure.raised:
                # An exception names the arrays of the precision in which it was raised.
                key = failure.raised.replace("float64", "float32")
            groups.setdefault(key, []).append(failure)
        return list(groups.values())

    def _listed(self) -> list[str]:
        """What passed, what was skipped and why, and the bytes of the residuals."""
        failing = {failure.check for failure in self.failures}
        checks = dict.fromkeys(f.check for f in self.findings if f.check not in failing)
        why = {c: self[c][0].facts for c in checks if all(map(_is_skipped, self[c]))}
        done = ", ".join(check for check in checks if check not in why)
        lines = [f"{PASSED}: {done}"] * bool(done)
        lines += [
            f"{SKIPPED}: {check}, as {text.splitlines()[0]}" for check, text in why.items()
        ]
        kept = [f.where for f in self.findings if f.check == "residuals" and not f.raised]
        return lines + [f"residuals: {where}" for where in filter(None, kept)]


def _is_skipped(finding: Finding) -> bool:
    return finding.verdict == SKIPPED
