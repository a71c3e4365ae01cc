"""The result of `check_rule`: a list of findings, printed as a table."""

import dataclasses
from collections.abc import Iterator, Sequence


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

_SHOWN = 4  # places where a failure happens again
# JAX says which function was traced: one of a check.
# Lines of JAX's messages that say how a check traced the function.
_TRACED = (
    "    The error occurred while tracing the function",
    "    This BatchTracer with object id",  # before JAX 0.12
    "    This VmapTracer with object id",
    "      /",  # the line of this package that made it
)
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
NO_REFERENCE = "no reference for the derivative"


def apart(error: float, tolerance: float, kind: str) -> tuple[str, str]:
    """An error and its tolerance, with as many digits as show which one is larger.

    - `kind`: of the format, `"e"` or `"g"`.
    """
    pair = "", ""
    for digits in (1, 2, 4, 16):
        more = digits + (kind == "g")
        pair = f"{error:.{more}{kind}}", f"{tolerance:.{more - 1}{kind}}"
        if (float(pair[0]) > float(pair[1])) == (error > tolerance):
            break
    return pair


@dataclasses.dataclass(frozen=True)
class Finding:
    """One comparison.

    - `check`: the name of the check.
    - `verdict`: `"passed"`, `"FAILED"` or `"skipped"`.
    - `error`, `tolerance`: the relative error and the largest one that passes; `None` where
        the check measures no error.
    - `where`: the leaf, mode or transformation, in the names of the user's parameters.
    - `text`: the description of a failure, or the reason why a check was skipped.
    - `raised`: the type and the first line of an exception, if the failure is one.
    """

    check: str
    verdict: str
    error: float | None = None
    tolerance: float | None = None
    where: str = ""
    text: str = ""
    raised: str = ""


class RuleCheckError(AssertionError):
    """A rule failed `check_rule`. The message is the printed report."""


class Report:
    """The result of [`eqx_grads.testing.check_rule`][].

    A printed report is a table with one row for each check, followed by a description of
    each failure. If there was no reference for the derivative, as where the function raises
    an error at arguments close by, the first line says so: what passed are the other checks.

    - `findings`: all comparisons, a list of `Finding`s with the fields `check`, `verdict`,
        `error`, `tolerance`, `where`, `text` and `raised`.
    - `numbers`: a dictionary with the `"seed"`, the names of the perturbed leaves as
        `"leaves"`, and of those with entries that are not finite, which finite differences do
        not move, as `"not_finite"`.
    """

    def __init__(self, name: str, findings: Sequence[Finding], numbers: dict[str, object]):
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
        if self.passed and self._is_without_reference():
            status = f"{PASSED}, without a reference for the derivative"
        lines = [f"The rule of `{self.name}`: {status} (seed {self.numbers.get('seed')})", ""]
        names = self.numbers.get("not_finite")
        if isinstance(names, list) and names:
            lines[1:1] = [
                f"Entries of {', '.join(names)} are not finite. Finite differences do not move "
                "them;",
                "`nondifferentiable=` leaves out an argument, or a part of one.",
            ]
        lines += list(self._table())
        for number, (first, *others) in enumerate(self._alike(), start=1):
            lines += ["", f"{number}. {first.check}, {first.where}", first.text]
            if others:
                places = [f"{other.check}, {other.where}" for other in others]
                more = f"; and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
                lines.append(f"  the same in: {'; '.join(places[:_SHOWN])}{more}")
        return "\n".join(lines)

    __repr__ = __str__

    def _is_without_reference(self) -> bool:
        """Whether the derivative was compared with nothing, in no mode."""
        found = [f for f in self.findings if f.check in ("forward", "reverse")]
        is_compared = any(f.verdict != SKIPPED for f in found)
        return not is_compared and any(f.text.startswith(NO_REFERENCE) for f in found)

    def _alike(self) -> list[list[Finding]]:
        """The failures, those together whose texts differ in the likely cause only: an
        exception of the function is raised in most checks."""
        groups: dict[str, list[Finding]] = {}
        for failure in self.failures:
            # An exception names the arrays of the precision in which it was raised.
            text = failure.text
            text = (text.replace("float64", "float32") if failure.raised else text).splitlines()
            differ = ("  likely cause", *(_TRACED if failure.raised else ()))
            key = "\n".join(line for line in text if not line.startswith(differ))
            groups.setdefault(key, []).append(failure)
        return list(groups.values())

    def _table(self) -> Iterator[str]:
        yield f"{'check':<14}{'status':<10}{'worst error':<20}where"
        repeated = self._repeated()
        for check in dict.fromkeys(finding.check for finding in self.findings):
            if check in repeated:
                continue
            row = _worst(self[check])
            error = ""
            if row.error is not None and row.tolerance is not None:
                error = " of ".join(apart(row.error, row.tolerance, "e"))
            where = row.where
            if row.verdict == SKIPPED:
                where = row.text.splitlines()[0]
            elif row.verdict == FAILED:
                n = len([finding for finding in self[check] if finding.verdict == FAILED])
                where += f" (and {n - 1} more)" if n > 1 else ""
                if row.raised:
                    error = "raised"
                    where += f": {row.raised.partition(':')[0]}"
            yield f"{check:<14}{row.verdict:<10}{error:<19} {where}".rstrip()
        for number in dict.fromkeys(repeated.values()):
            checks = ", ".join(c for c, n in repeated.items() if n == number)
            yield f"{'the others':<14}{FAILED:<10}{f'the error of {number}.':<20}{checks}"

    def _repeated(self) -> dict[str, int]:
        """The checks that have no other failure than an exception of a check above, with its
        number in the report."""
        alike = self._alike()
        number = {id(f): n for n, group in enumerate(alike, start=1) for f in group}
        repeated = {}
        for check in dict.fromkeys(failure.check for failure in self.failures):
            failures = [f for f in self.failures if f.check == check]
            first = alike[number[id(failures[0])] - 1][0]
            same = len({number[id(f)] for f in failures}) == 1
            if same and first.raised and first.check != check:
                repeated[check] = number[id(failures[0])]
        return repeated


def _worst(findings: Sequence[Finding]) -> Finding:
    def badness(finding):
        error = finding.error if finding.error is not None else 0.0
        error = float("inf") if finding.raised else error
        ratio = error / finding.tolerance if finding.tolerance else error
        return ([SKIPPED, PASSED, FAILED].index(finding.verdict), ratio)

    return max(findings, key=badness)
