"""The checks `primal`, `finite` and `deterministic`: the value with the rule is that of the
function, without NaN or infinity, and the same each time."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import show_path
from .._rules.custom_vjp import ReverseRules
from ._case import are_finite, Case
from ._compare import as_real, is_number, unlike
from ._options import Options
from ._oracle import At
from ._order import forward_over_reverse, loss_of, reverse_over_reverse
from ._outcome import outcome
from ._references import jvp, vjp
from ._report import broke, compare, failed, Finding, passed, skipped


# ---------------------------------------------------------------- primal


def primal(case: Case) -> Iterator[Finding]:
    """The value under `jax.vjp` and `jax.jvp` is the value of the function."""
    value = case.eager.value
    numbers = [x for x in jax.tree.leaves(value) if is_number(x)]
    numbers = [x for x in numbers if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    tolerance = case.admitted(case.own, exact=True)
    where = "the undecorated function"
    plain = lambda at: case.own.plain(*at.x)
    got = outcome(case.own.one, "plain value", plain, At(case.subject.leaves, (), ()))
    if isinstance(got, NotImplementedError):
        yield skipped("primal", f"the rule can't be removed from the function: {got}")
    else:
        wider = case.rounding_of_values
        if not case.is_wide:
            wider = lambda: _low(case)
        yield compare("primal", where, numbers, got, case.output_names, tolerance, wider=wider,
                      cause="the value depends on being traced")  # fmt: skip
    modes: dict[str, Callable[[], Any]] = {"under `jax.vjp`": case.eager.value_of_forward_pass}
    if case.has_forward:
        modes["under `jax.jvp`"] = lambda: case.eager.jvp().value
    for where, value_of in modes.items():
        other = outcome(value_of)
        if isinstance(other, Exception):
            yield broke("primal", where, other)
        else:
            yield _same_tree(case, where, value, other, tolerance)


def _low(case: Case) -> float:
    """What rounding explains of a value that is computed in less precision than it has."""
    lowest = case.own.lowest
    return 0.0 if lowest is None else 4 * float(jnp.finfo(lowest).eps)


def _same_tree(case: Case, where, value, other, tolerance) -> Finding:
    flat, treedef = jax.tree_util.tree_flatten_with_path(value)
    flat_other, treedef_other = jax.tree_util.tree_flatten_with_path(other)
    if treedef != treedef_other:
        text = f"the structure is {treedef_other}, that of the function is {treedef}"
        return failed("primal", where, text)
    names, want, got = [], [], []
    for (path, x), (_, y) in zip(flat, flat_other, strict=True):
        name = f"output{show_path(path)}"
        why = unlike(y, x)
        if why:
            kind = "the value" if is_number(x) else "the static leaf"
            return failed("primal", f"{where}, {name}", f"{kind} differs: {why}")
        if is_number(x):
            names.append(name)
            want.append(x)
            got.append(y)
    return compare("primal", where, want, got, names, tolerance, wider=case.rounding_of_values,
                   cause="the rule returns another value than the function")  # fmt: skip


# ---------------------------------------------------------------- finite


def finite(case: Case) -> Iterator[Finding]:
    """Value and derivatives are finite, at the arguments and at every point of `at`."""
    points = [("the arguments", case)]
    for number, args in enumerate(case.options.at):
        options = Options(nondifferentiable=case.options.nondifferentiable)
        point = Case(case.subject.fn, args, case.subject.kwargs, options)
        points.append((f"at[{number}] = {_short(args)}", point))
    wrong = [finding for where, point in points for finding in _not_finite(where, point)]
    yield from wrong
    if not wrong:
        n = len(points) - 1
        further = f" and {n} further point{'s' if n > 1 else ''}" if n else ""
        yield passed("finite", f"the arguments{further}, under `jax.debug_nans`")


def _short(args) -> str:
    text = ", ".join(" ".join(str(x).split()) for x in args)
    return f"({text if len(text) < 60 else text[:57] + '...'})"


def _not_finite(where: str, case: Case) -> Iterator[Finding]:
    own, is_bad = case.own, False
    rows: dict[str, Any] = {"value": lambda at: own.f(*at.x)}
    if case.outputs and case.has_forward:
        rows["tangent"] = lambda at: jvp(own.f, at.x, at.t)
    if case.outputs and case.has_reverse:
        kind = forward_over_reverse if case.has_forward else reverse_over_reverse
        rows["cotangent"] = lambda at: vjp(own.f, at.x, at.w)
        rows["second derivative"] = lambda at: kind(own.f, loss_of, 2, at)
    at = At(case.subject.leaves, case.tangents[0], case.cotangents[0])
    found = own.compute({f"finite {name}": row for name, row in rows.items()}, at)
    for name, arrays in zip(rows, found.values(), strict=True):
        if isinstance(arrays, Exception):
            is_reported = name == "second derivative"  # by the check `order`
            if not is_reported:
                is_bad = True
                yield broke("finite", f"{where}, {name}", arrays)
        elif not are_finite(arrays):
            is_bad = True
            names = case.output_names if name in ("value", "tangent") else case.names
            shown = ", ".join(
                f"{named} {str(np.asarray(x)).replace(chr(10), '')[:100]}"
                for named, x in zip(names, arrays, strict=True)
                if not np.all(np.isfinite(as_real(x)))
            )
            text = f"NaN or infinity in the {name}: {shown[:300]}"
            cause = _cause(case, name) if name != "value" else ""
            yield failed("finite", f"{where}, {name}", text, cause)
    if not is_bad and case.outputs:
        yield from _debug_nans(where, case)


def _cause(case: Case, name: str) -> str:
    rules = getattr(getattr(case.subject.fn, "__func__", case.subject.fn), "_rules", None)
    if name == "tangent" and isinstance(rules, ReverseRules) and rules.jvp_rule is None:
        return (
            "forward mode is the derivative of the function, as of every `custom_vjp`\n"
            "  without a `def_jvp`: give it one, or use `custom_jvp`, whose rule is\n"
            "  that of both modes"
        )
    return (
        "a quotient, root or logarithm of zero in a rule; a `where` on its\n  result is too "
        "late, and has to be around its argument, as in `eqg.safe.where`"
    )


def _debug_nans(where: str, case: Case) -> Iterator[Finding]:
    """A finite result may come from a program in which a NaN arises."""
    fn, leaves = case.own.f, case.subject.leaves
    to_jax = lambda xs: list(map(jnp.asarray, xs))

    def run():
        with jax.debug_nans(True):
            if case.has_reverse:
                jax.vjp(fn, *leaves)[1](to_jax(case.cotangents[0]))
            else:
                jax.jvp(fn, leaves, to_jax(case.tangents[0]))

    error = outcome(run)
    if isinstance(error, Exception):
        is_nan = isinstance(error, FloatingPointError)
        cause = "a NaN arises in an intermediate result" if is_nan else ""
        yield broke("finite", f"{where}, under `jax.debug_nans`", error, cause)


# ---------------------------------------------------------------- deterministic


def deterministic(case: Case) -> Iterator[Finding]:
    """Repeated calls return bitwise equal results."""
    if not case.outputs:
        yield skipped("deterministic", "no output has a derivative")
        return
    names = [f"the value of {n}" for n in case.output_names]
    if isinstance(tried := outcome(case.eager.vjp), Exception) and "everse-mode" in str(tried):
        calls = [case.eager.jvp(number) for number in range(3)]
        names += [f"the tangent of {n}" for n in case.output_names]
    else:
        calls = [case.eager.vjp(number) for number in range(3)]
        names += [f"the cotangent of {n}" for n in case.names]
    runs = [[np.asarray(x) for x in (*call.outputs, *call.derivative)] for call in calls]
    for number, run in enumerate(runs[1:], start=2):
        for name, first, again in zip(names, runs[0], run, strict=True):
            if first.tobytes() != again.tobytes():
                text = (
                    f"{name} differs: call {number} and the first one return different values"
                )
                cause = "hidden state, or random numbers without a key"
                yield failed("deterministic", name, text, cause)
                return
    yield passed("deterministic")
