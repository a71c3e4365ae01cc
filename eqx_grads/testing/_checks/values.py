"""The checks `finite` and `deterministic`: no NaN, no infinity, the same results each time."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..._rules.custom_vjp import ReverseRules
from .._case import Case, Options
from .._compare import as_real
from .._findings import broke, failed, passed, skipped
from .._report import Finding


def finite(case: Case) -> Iterator[Finding]:
    """Value and derivatives are finite, at the arguments and at every point of `at`."""
    points = [("the arguments", case)]
    for number, args in enumerate(case.options.at):
        options = Options(nondifferentiable=case.options.nondifferentiable)
        point = Case(case.subject.fn, args, case.subject.kwargs, options)
        points.append((f"at[{number}] = {_short(args)}", point))
    found = [finding for where, point in points for finding in _finite(where, point)]
    wrong = [finding for finding in found if finding.verdict != "passed"]
    if wrong:
        yield from wrong
        return
    further = len(points) - 1
    points = f" and {further} further point{'s' if further > 1 else ''}" if further else ""
    yield passed("finite", f"the arguments{points}, under `jax.debug_nans`")


def _short(args) -> str:
    text = ", ".join(" ".join(str(x).split()) for x in args)
    return f"({text if len(text) < 60 else text[:57] + '...'})"


def _finite(where: str, case: Case) -> Iterator[Finding]:
    rule = case.own.rule
    try:
        values = rule.value()
    except Exception as e:
        yield broke("finite", where, e)
        return
    t, w = case.tangents(), case.cotangents()
    quantities = {"value": lambda: values}
    if case.offers_reverse:
        quantities["cotangent"] = lambda: rule.vjp(w)
    if case.offers_forward:
        quantities["tangent"] = lambda: rule.jvp(t)
    if case.offers_reverse:
        kind = "forward over reverse" if case.offers_forward else "reverse over reverse"
        quantities["second derivative"] = lambda: rule.higher(kind, t, w, 2)
    bad = False
    for name, compute in quantities.items():
        try:
            arrays = compute()
        except Exception as e:
            if name != "second derivative":  # which the check `order` reports
                yield broke("finite", f"{where}, {name}", e)
            continue
        if not all(np.all(np.isfinite(as_real(x))) for x in arrays):
            bad = True
            names = case.output_names if name in ("value", "tangent") else case.names
            shown = ", ".join(
                f"{named} {str(np.asarray(x)).replace(chr(10), '')[:100]}"
                for named, x in zip(names, arrays, strict=True)
                if not np.all(np.isfinite(as_real(x)))
            )
            text = f"NaN or infinity in the {name}: {shown[:300]}"
            if name == "tangent" and _has_no_forward_rule(case.subject.fn):
                text += (
                    "\n  forward mode is the derivative of the function, as of every "
                    "`custom_vjp`\n  without a `def_jvp`: give it one, or use `custom_jvp`, "
                    "whose rule is\n  that of both modes"
                )
            elif name != "value":
                text += (
                    "\n  likely cause: a quotient, root or logarithm of zero in a rule; a "
                    "`where` on its\n  result is too late, and has to be around its argument, "
                    "as in `eqg.safe.where`"
                )
            yield failed("finite", f"{where}, {name}", text)
    if not bad:
        yield _debug_nans(where, case, t, w)


def _has_no_forward_rule(fn: Any) -> bool:
    rules = getattr(getattr(fn, "__func__", fn), "_rules", None)
    return isinstance(rules, ReverseRules) and rules.jvp_rule is None


def _debug_nans(where: str, case: Case, t, w) -> Finding:
    """A finite result may come from a program in which a NaN arises."""
    where = f"{where}, under `jax.debug_nans`"
    fn, leaves = case.own.rule.fn, case.subject.leaves
    try:
        with jax.debug_nans(True):
            if case.offers_reverse:
                jax.vjp(fn, *leaves)[1]([jax.numpy.asarray(x) for x in w])
            else:
                jax.jvp(fn, leaves, [jax.numpy.asarray(x) for x in t])
    except FloatingPointError as e:
        return broke("finite", where, e, "a NaN arises in an intermediate result")
    except Exception as e:
        return broke("finite", where, e)
    return passed("finite", where)


def deterministic(case: Case) -> Iterator[Finding]:
    """Repeated calls return bitwise equal results."""
    if not case.own.outputs:
        yield skipped("deterministic", "no output has a derivative")
        return
    names = [f"the value of {n}" for n in case.output_names]
    if case.offers_reverse:
        calls = [case.eager.vjp(number) for number in range(3)]
        names += [f"the cotangent of {n}" for n in case.names]
    else:
        calls = [case.eager.jvp(number) for number in range(3)]
        names += [f"the tangent of {n}" for n in case.output_names]
    runs = [[np.asarray(x) for x in (*call.outputs, *call.derivative)] for call in calls]
    for number, run in enumerate(runs[1:], start=2):
        for name, first, again in zip(names, runs[0], run, strict=True):
            if first.tobytes() != again.tobytes():
                text = (
                    f"{name} differs: call {number} and the first one return different values\n"
                    "  likely cause: hidden state, or random numbers without a key"
                )
                yield failed("deterministic", name, text)
                return
    yield passed("deterministic")
