"""The checks `linear` and `adjoint`: each mode is linear, and reverse is forward transposed."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from .._case import Case
from .._compare import as_real, difference, norm, pairing
from .._findings import compare, skipped
from .._precision import Precision
from .._report import FAILED, Finding


_DRAWN, _COMPARED = 4, 2  # pairs of a tangent and a cotangent


def adjoint(case: Case) -> Iterator[Finding]:
    """`<J v, w> = <v, J' w>`, an identity of the two modes that needs no reference."""
    if case.options.nonlinear:
        yield skipped("adjoint", "the backward rule is declared non-linear")
        return
    if not (case.offers_forward and case.offers_reverse):
        yield skipped("adjoint", "only one mode is offered")
        return
    p = case.precision
    # Those that cancel least: the rounding error of a small sum is a large part of it.
    drawn = sorted((_pairings(case, p) for _ in range(_DRAWN)), key=lambda pair: -abs(pair[0]))
    for want, have in drawn[:_COMPARED]:
        cause = "forward and reverse mode are not the same linear map"
        reference = "<J v, w> of forward mode; both are divided by the size of their terms"
        finding = compare(
            "adjoint", "<J v, w> = <v, J' w>", [np.array(want)], [np.array(have)],
            ["the product"], case.tolerance(p) * 10, cause=cause, diagnose=False,
            reference=reference,
        )  # fmt: skip
        if finding.verdict == FAILED and _is_meant(case):
            text = "the other mode is the derivative of the function, and not of the formula"
            yield skipped("adjoint", text)
            return
        yield finding
        if finding.verdict == FAILED:
            return


def _pairings(case: Case, p: Precision) -> tuple[float, float]:
    """`<J v, w>` and `<v, J' w>` of random `v` and `w`, divided by the size of their terms."""
    v, w = p.like_leaves(case.tangents()), p.like_outputs(case.cotangents())
    tangents, cotangents = p.rule.jvp(v), p.rule.vjp(w)
    ahead, back = pairing(tangents, w), pairing(v, cotangents)
    size = max(_size_of_terms(tangents, w), _size_of_terms(v, cotangents))
    size = max(size, abs(ahead), abs(back))
    if min(abs(ahead), abs(back)) == 0 and size <= _rounding_of_zero(p, v, w):
        size = 0.0  # as at a point where `x - jnp.mean(x)` is zero, or nearly
    scale = size if size > 0 else 1.0
    return ahead / scale, back / scale


def _size_of_terms(xs, ys) -> float:
    """The norm of what a pairing sums, much of which may cancel."""
    pairs = zip(xs, ys, strict=True)
    return norm(np.array([norm(as_real(x) * as_real(y)) for x, y in pairs]))


def _rounding_of_zero(p: Precision, v, w) -> float:
    size = lambda xs: norm(np.array([norm(as_real(x)) for x in xs]))
    eps = max(float(jnp.finfo(x.dtype).eps) for x in (*p.subject.leaves, *p.outputs))
    return 16 * eps * size(v) * size(w)


def _is_meant(case: Case) -> bool:
    """Whether the formula of one mode was given, and the other mode is autodiff of the
    function, as `forward` and `reverse` allow."""
    given, p = case.options, case.precision
    if (given.expected_tangent is None) == (given.expected_cotangent is None):
        return False
    is_forward = given.expected_tangent is None
    mode, names, direction = (
        ("jvp", case.output_names, p.like_leaves(case.tangents()))
        if is_forward
        else ("vjp", case.names, p.like_outputs(case.cotangents()))
    )
    try:
        plain = getattr(p.plain, mode)(direction)
    except Exception:  # the function has no derivative but that of its rule
        return False
    rule = getattr(p.rule, mode)(direction)
    return difference(plain, rule, names).error <= case.tolerance(p)


def linear(case: Case) -> Iterator[Finding]:
    """Additivity and homogeneity, in the tangent and in the cotangent."""
    p = case.precision
    if case.offers_forward:
        a, b = p.like_leaves(case.tangents()), p.like_leaves(case.tangents())
        yield from _linear(case, "in the tangent", p.rule.jvp, a, b, case.output_names)
    if case.options.nonlinear or not case.offers_reverse:
        if not case.offers_forward:
            yield skipped("linear", "the backward rule is declared non-linear")
        return
    a, b = p.like_outputs(case.cotangents()), p.like_outputs(case.cotangents())
    yield from _linear(case, "in the cotangent", p.rule.vjp, a, b, case.names)


def _linear(case, where, apply, a, b, names) -> Iterator[Finding]:
    for find in (_of_zero, _of_a_multiple, _of_a_sum):
        for finding in find(case, where, apply, a, b, names):
            yield finding
            if finding.verdict == FAILED:
                return  # the others would fail for the same reason


def _of_zero(case, where, apply, a, b, names) -> Iterator[Finding]:
    del b
    size = max(norm(np.array([norm(as_real(x)) for x in apply(a)])), 1e-30)
    scaled = [x / size for x in apply([np.zeros_like(x) for x in a])]
    yield compare(
        "linear", f"{where}: of zero", [np.zeros_like(x) for x in scaled], scaled, names,
        case.tolerance(case.precision),
        cause="affine: something is added that no tangent or cotangent multiplies",
    )  # fmt: skip


def _of_a_multiple(case, where, apply, a, b, names) -> Iterator[Finding]:
    del b
    of_a = apply(a)
    for factor in (2.0**12, -(2.0**-12)):
        got = apply([(x * factor).astype(x.dtype) for x in a])
        want = [x * factor for x in of_a]
        cause = (
            "the rule is not linear: it clips, takes the sign, or squares"
            " (if that is meant, say `nonlinear=True`)"
        )
        where_ = f"{where}: of {factor:g} times it"
        tolerance = case.tolerance(case.precision)
        yield compare("linear", where_, want, got, names, tolerance, cause=cause)


def _of_a_sum(case, where, apply, a, b, names) -> Iterator[Finding]:
    both = apply([(2 * x - 3 * y).astype(x.dtype) for x, y in zip(a, b, strict=True)])
    pairs = list(zip(apply(a), apply(b), strict=True))
    want = [2 * x - 3 * y for x, y in pairs]
    scale = [norm(as_real(2 * x)) + norm(as_real(3 * y)) for x, y in pairs]  # they may cancel
    cause = "the rule is not linear: of a sum it is not the sum"
    tolerance = case.tolerance(case.precision, *a)  # in whose dtype the sum is rounded
    yield compare(
        "linear", f"{where}: of a sum", want, both, names, tolerance, cause=cause, scale=scale
    )
