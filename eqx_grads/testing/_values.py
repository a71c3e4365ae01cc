"""The checks `primal`, `finite` and `deterministic`: the value with the rule equals the value
of the function, without NaN or infinity, and the same each time."""

import functools as ft
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._diagnosis.report import count
from ._case import Case
from ._compare import aligned, are_finite
from ._options import Options
from ._oracle import jvp, Side, unless_error, vjp
from ._outcome import outcome
from ._report import broke, compare, failed, Finding, passed
from ._subject import is_output
from ._table import FORWARD_OVER_REVERSE, higher, REVERSE_OVER_REVERSE


# ---------------------------------------------------------------- primal


def primal(case: Case) -> Iterator[Finding]:
    """The value under `jax.vjp` and `jax.jvp` is the value of the function."""
    value = case.subject.fn(*case.subject.args, **case.subject.kwargs)
    is_wide = case.own is case.wide
    tolerance = case.admitted(exact=True) if is_wide else case.own.tolerance
    tolerance += case.measured("f")
    for mode in ("vjp", "jvp") if case.has_forward else ("vjp",):
        where = f"under `jax.{mode}`"
        call = outcome(case.eager, mode)
        if isinstance(call, Exception):
            yield broke(where, call)
            continue
        found = aligned(call.value, value, "output")
        cause = "the rule returns another value than the function"
        if isinstance(found, str):
            yield failed(where, found, cause)
        else:
            names, want, got = found
            yield compare(where, want, got, names, tolerance, cause=cause)


# ---------------------------------------------------------------- finite


def finite(case: Case) -> Iterator[Finding]:
    """Value and derivatives are finite, at the arguments and at every point of `at`."""
    points = [("the arguments", case)]
    options = Options(nondifferentiable=case.options.nondifferentiable)
    for number, args in enumerate(case.options.at):
        text = textwrap.shorten(", ".join(map(str, args)), 60, placeholder="...")
        point = Case(case.subject.fn, args, case.subject.kwargs, options)
        points.append((f"at[{number}] = ({text})", point))
    wrong = [finding for where, point in points for finding in _not_finite(where, point)]
    yield from wrong
    if not wrong:
        further = f" and {count(len(points) - 1, 'further point')}" * (len(points) > 1)
        yield passed(f"the arguments{further}, under `jax.debug_nans`")


_CAUSE = (
    "a quotient, root or logarithm of zero in a rule; a `where` on its\n  result is too late, "
    "and has to be around its argument, as in `eqg.safe.where`"
)


def _not_finite(where: str, case: Case) -> list[Finding]:
    rows = {kind: (case.own_derivatives[row], of) for row, (kind, of) in case.offered.items()}
    if case.has_reverse:
        rows[_SECOND] = _second_derivative(case, case.own), case.names
    found = []
    for kind, (arrays, names) in rows.items():
        place = f"{where}, {kind}"
        if isinstance(arrays, Exception):  # of second order, the check `order` reports it
            found += [broke(place, arrays)] * (kind != _SECOND)
            continue
        bad = [(n, x) for n, x in zip(names, arrays, strict=True) if not are_finite([x])]
        if bad and not (kind == _SECOND and _is_too_large(case, arrays)):
            shown = [f"{n} {str(np.asarray(x)).replace(chr(10), '')[:100]}" for n, x in bad[:3]]
            text = f"NaN or infinity in the {kind}: {', '.join(shown)}"
            found.append(failed(place, text, _CAUSE * (kind != "value")))
    if not found:
        error = outcome(_under_debug_nans, case)
        if isinstance(error, Exception):
            found.append(broke(f"{where}, under `jax.debug_nans`", error))
    return found


_SECOND = "second derivative"


def _second_derivative(case: Case, side: Side) -> Any:
    kind = FORWARD_OVER_REVERSE if case.has_forward else REVERSE_OVER_REVERSE
    name = f"order 2, {kind}"  # as in the check `order`, which traces the same program
    return side.compute({name: ft.partial(higher, kind, side.f, 2)}, case.at)[name]


def _is_too_large(case: Case, arrays: Sequence[Any]) -> bool:
    """Whether each entry that is not finite is a number in float64, and too large for its
    dtype."""
    exact = _second_derivative(case, case.wide)
    return not isinstance(exact, Exception) and all(
        np.all(np.isfinite(x) | (np.isfinite(y) & (abs(y) > float(jnp.finfo(x.dtype).max))))
        for x, y in zip(arrays, exact, strict=True)
    )


def _under_debug_nans(case: Case) -> None:
    """A finite result may come from a program in which a NaN arises."""
    derive, drawn = (vjp, case.at.w) if case.has_reverse else (jvp, case.at.t)
    with jax.debug_nans(True):
        derive(case.own.f, case.x, jax.device_put(drawn))


# ---------------------------------------------------------------- deterministic


def deterministic(case: Case) -> Iterator[Finding]:
    """Repeated calls return bitwise equal results."""
    # Without a trace, which is a call as well.
    mode = "jvp" if "everse-mode" in str(outcome(case.eager, "vjp")) else "vjp"
    calls = [case.eager(mode, number) for number in range(3)]
    arrays = lambda call: filter(is_output, jax.tree.leaves(call.value))
    runs = [[np.asarray(x) for x in (*arrays(c), *unless_error(c.derivative))] for c in calls]
    offered = [case.offered[row] for row in ("f", mode)]
    names = [f"the {kind} of {n}" for kind, of in offered for n in of]
    for number, run in enumerate(runs[1:], start=2):
        for name, first, again in zip(names, runs[0], run, strict=True):
            if first.tobytes() != again.tobytes():
                text = f"{name} differs: call {number} does not return what the first one does"
                cause = "hidden state, or random numbers without a key"
                yield failed(name, text, cause)
                return
    yield passed()
