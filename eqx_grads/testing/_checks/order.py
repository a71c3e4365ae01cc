"""Are higher derivatives right, in each order of the modes: the check `order`."""

from collections.abc import Iterator

import numpy as np

from .._case import Case, Precision
from .._compare import as_real
from .._findings import broke, judge, skipped
from .._finite_differences import directional
from .._report import FAILED, Finding


_KINDS = ("forward over reverse", "reverse over reverse", "reverse over forward")
_TRUSTED = 1e-3


def check_order(case: Case) -> Iterator[Finding]:
    """Derivatives of order 2 and more, of a scalar loss of the outputs."""
    options = case.options
    explicit = options.expected_tangent or options.expected_cotangent
    if options.reference is None and (explicit or options.nonlinear):
        yield skipped("order", "no witness: give `reference=` for higher derivatives")
        return
    p = case.precision
    t, w = p.like_leaves(case.tangents()), p.like_outputs(case.cotangents())
    if not w:
        yield skipped("order", "no output has a derivative")
        return
    for order in range(2, options.order + 1):
        yield from _one_order(case, p, order, t, w)


def _one_order(case: Case, p: Precision, order, t, w) -> Iterator[Finding]:
    try:
        want = p.witness.higher("forward over reverse", t, w, order)
        if not all(np.all(np.isfinite(as_real(x))) for x in want):
            want = None
    except Exception:  # no plain derivative: a host function, a loop
        want = None
    for kind in _KINDS:
        where = f"order {order}, {kind}"
        if kind == "reverse over forward" and not case.offers_forward:
            continue
        try:
            got = p.rule.higher(kind, t, w, order)
        except Exception as e:
            if isinstance(e, TypeError) and "forward-mode" in str(e):
                continue  # a `jax.custom_vjp`
            yield broke("order", where, e, "right to first order, fails at the next")
            continue
        finding = None
        if want is not None:
            finding = _judge(case, p, where, want, got, "autodiff without the rule")
        if finding is None or finding.verdict == FAILED:
            # The first derivative has been checked: its differences are a witness. Also where
            # it is wrong on purpose, and so may be that of no function: that of a reversed
            # gradient is then the derivative of the gradient as it is.
            numeric = _by_differences(case, p, w) if order == 2 else None
            if numeric is not None:
                scaled, exact = numeric
                along = p.rule.higher(kind, p.like_leaves(scaled), w, order)
                other = _judge(case, p, where, exact, along, "differences of the gradient")
                finding = other if finding is None or other.verdict != FAILED else finding
        yield finding or skipped("order", f"no witness for {where}")


def _judge(case, p, where, want, got, witness):
    cause = "" if case.failed else "right to first order, wrong at the next"
    tolerance = 10 * case.tolerance(p)
    return judge("order", where, want, got, case.names, tolerance, cause=cause, witness=witness)


def _by_differences(case: Case, p: Precision, w):
    scaled = case.scaled_tangents()
    leaves = [np.asarray(x) for x in p.subject.leaves]
    gradient = lambda *xs: p.rule.higher("reverse over reverse", scaled, w, 1, xs)
    try:
        with p.context():
            exact, error = directional(gradient, leaves, scaled)
    except Exception:
        return None
    return (scaled, exact) if error <= _TRUSTED / 10 else None
