"""The checks `adjoint`, `linear` and `zeros`: rows of a place, what the rule gives, and what it
should give, all of them functions of the same arrays, compiled as one program."""

import functools as ft
import math
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._jaxprs.dependence import without_unused
from .._jaxprs.operands import at as pick, fill, restricted
from .._jaxprs.structure import equations, inner_programs
from ._case import Case
from ._compare import as_double, norm, pairing, size_of_all
from ._oracle import At, jvp, Row, vjp
from ._outcome import outcome
from ._random_tangents import only
from ._report import compare, FAILED, failed, Finding, skipped


NO_REVERSE = "there is no reverse mode"
_SAMPLED = 8
_NOT_LINEAR = (
    "the rule is not linear: it clips, takes the sign, or squares"
    " (if that is meant, say `nonlinear=True`)"
)


# ---------------------------------------------------------------- adjoint, linear


def adjoint(case: Case) -> Iterator[Finding]:
    """`<J v, w> = <v, J' w>`, an identity of the two modes that needs no reference."""
    options = case.options
    if options.nonlinear:
        yield skipped("adjoint", "the backward rule is declared non-linear")
    elif not (case.has_forward and case.has_reverse):
        yield skipped("adjoint", "only one mode is offered")
    elif options.reference is not None and case.forward_is_of_function:
        yield skipped("adjoint", "forward mode is the derivative of the function")
    else:
        drawn = zip(case.tangents, case.cotangents, strict=True)
        ahead, back, sizes = map(
            np.array, zip(*(_products(case, *d) for d in drawn), strict=True)
        )
        # Where the terms of a product cancel, the error is relative to their size.
        scale = max(norm(sizes) - norm(ahead), 0.0)
        yield compare(
            "adjoint", "<J v, w> = <v, J' w>", [ahead], [back], ["the product"],
            10 * case.admitted(), note="expected: <J v, w> of forward mode", scale=scale,
            cause="forward and reverse mode are not the same linear map",
        )  # fmt: skip


def _products(case: Case, v, w) -> tuple[float, float, float]:
    """`<J v, w>` and `<v, J' w>`, and the size of their terms."""
    pushed, pulled = case.derivative("jvp", v), case.derivative("vjp", w)
    pairs = zip((*pushed, *v), (*w, *pulled), strict=True)
    size = size_of_all([as_double(x) * as_double(y) for x, y in pairs])
    # Both may be zero but for rounding errors, as where `x - jnp.mean(x)` is zero.
    zero = case.admitted() * 1e-8 * math.prod(map(size_of_all, (v, w)))
    return pairing(pushed, w), pairing(v, pulled), size + zero + 1e-300


def linear(case: Case) -> Iterator[Finding]:
    """Additivity and homogeneity, in the tangent and in the cotangent."""
    if case.has_forward:
        yield from _linear(case, "tangent", "jvp", case.tangents, case.output_names)
    if case.has_reverse and not case.options.nonlinear:
        yield from _linear(case, "cotangent", "vjp", case.cotangents, case.names)
    elif not case.has_forward:
        yield skipped("linear", "the backward rule is declared non-linear")


def _linear(case: Case, what: str, row: str, drawn, names) -> Iterator[Finding]:
    a, b = drawn[:2]
    of_a, of_b = (case.derivative(row, d) for d in (a, b))
    affine = "affine: something is added that no tangent or cotangent multiplies"
    big, small = 2.0**12, -(2.0**-12)
    for where, cause, k, m in (
        ("of zero", affine, 0, 0),
        (f"of {big:g} times it", _NOT_LINEAR, big, 0),
        (f"of {small:g} times it", _NOT_LINEAR, small, 0),
        ("of a sum", "the rule is not linear: of a sum it is not the sum", 2, -3),
    ):
        mixed = [(k * x + m * y).astype(x.dtype) for x, y in zip(a, b, strict=True)]
        with np.errstate(invalid="ignore"):  # a derivative may be infinite
            terms = [(k * x, m * y) for x, y in zip(of_a, of_b, strict=True)]
            expected = [x + y for x, y in terms]
        # The terms may cancel; of zero, the error is relative to the derivative of `a`.
        sizes = [size_of_all(pair) for pair in terms] if m else 0.0
        finding = compare(
            "linear", f"in the {what}: {where}", expected,
            case.derivative(row, mixed), names,
            max(case.admitted(), case.own.tolerance if m else 0.0),
            cause=cause, scale=sizes if k else max(size_of_all(of_a), 1e-30),
        )  # fmt: skip
        yield finding
        if finding.verdict == FAILED:
            return  # the others would fail for the same reason


# ---------------------------------------------------------------- zeros


def zeros(case: Case) -> Iterator[Finding]:
    """The dense derivative for every subset, and no equations for unperturbed leaves."""
    n_leaves, n_outputs = len(case.names), len(case.outputs)
    if n_leaves < 2 and n_outputs < 2:
        yield skipped("zeros", "one leaf and one output: there are no subsets")
        return
    f, t, w = case.wide.f, case.tangents[0], case.cotangents[0]
    rows: dict[str, Row] = {}
    wanted: dict[str, tuple[Any, Sequence[str], str]] = {}
    for kept in _subsets(n_leaves):
        name = _label(kept, case.names)
        cause = f"wrong where {name} is perturbed, right where all leaves are"
        if case.has_forward:
            place = f"{name} perturbed, forward"
            rows[place] = lambda at, kept=kept: jvp(
                restricted(f, at.x, kept), pick(at.x, kept), pick(at.t, kept)
            )
            want = case.derivative("jvp", only(t, kept))
            wanted[place] = want, case.output_names, cause
        if case.has_reverse:
            place = f"{name} perturbed, reverse"
            rows[place] = lambda at, kept=kept: vjp(
                restricted(f, at.x, kept), pick(at.x, kept), at.w
            )
            wanted[place] = pick(case.derivative("vjp", w), kept), pick(case.names, kept), cause
    for kept in _subsets(n_outputs) if case.has_reverse else ():
        name = _label(kept, case.output_names)
        rows[f"{name} used"] = lambda at, kept=kept: vjp(
            lambda *xs: pick(f(*xs), kept), at.x, pick(at.w, kept)
        )
        cause = f"wrong where {name} is used, right where all outputs are"
        wanted[f"{name} used"] = case.derivative("vjp", only(w, kept)), case.names, cause
    found = case.wide.compute(rows, At(case.wide.subject.leaves, t, w))
    for place, (want, names, cause) in wanted.items():
        yield compare("zeros", place, want, found[place], names, case.admitted(), cause=cause)
    if case.has_forward and n_leaves > 1 and _is_given_none(case.subject.fn):
        yield from _dead_work(case)


def _subsets(n: int) -> list[tuple[int, ...]]:
    """Each one alone, and all without it."""
    indices = range(n if n > 1 else 0)
    singles = [(i,) for i in indices[:_SAMPLED]]
    rest = [tuple(j for j in indices if j != i) for (i,) in singles]
    return list(dict.fromkeys([*singles, *rest]))


def _label(kept: Sequence[int], names: Sequence[str]) -> str:
    return f"only {', '.join(names[i] for i in kept[:3])}{', ...' if kept[3:] else ''}"


def _is_given_none(fn: Any) -> bool:
    """Whether its rule gets `None`, or symbolic zeros, and so can take them for arrays.
    Other rules of `eqg` have no tangents of what is not perturbed, and `jax.custom_jvp` makes
    arrays of zeros itself."""
    if isinstance(fn, jax.custom_jvp):
        return bool(fn.symbolic_zeros)
    rule = getattr(getattr(getattr(fn, "__func__", fn), "_rules", None), "jvp_rule", None)
    return isinstance(fn, eqx.filter_custom_jvp) or bool(getattr(rule, "symbolic_zeros", False))


def _dead_work(case: Case) -> Iterator[Finding]:
    """With one leaf perturbed, no equation may be left that only the other tangents need.

    The number of equations to compare with: the dense tangent is linear, so its derivative
    along the tangent of one leaf is the same tangent, without the terms of the other leaves.
    """
    f, leaves = case.own.f, case.subject.leaves
    zeros = [jnp.zeros_like(x) for x in leaves]

    def counts_of(i):
        alone = lambda xs, t: jvp(restricted(f, xs, [i]), [xs[i]], [t])
        dense = lambda xs, t: jvp(f, xs, fill(zeros, [i], [t]))
        needed = lambda xs, t: jvp(ft.partial(dense, xs), [zeros[i]], [t])
        return [_count(run, leaves, case.tangents[0][i]) for run in (alone, needed)]

    for i, name in enumerate(case.names[:_SAMPLED]):
        counts = outcome(counts_of, i)
        # If there is no second derivative, there is nothing to compare with.
        if not isinstance(counts, Exception) and counts[0] > counts[1]:
            text = f"the jaxpr has {counts[0]} equations, and needs {counts[1]}: some belong "
            text += "to leaves that are not perturbed."
            cause = "a zero tangent (`None`) was made into an array of zeros"
            yield failed("zeros", f"only {name} perturbed", text, cause)


def _count(run, *args) -> int:
    """The number of equations after dead ones are dropped. The cast of a scalar does not count:
    whether the `0` in `jnp.where(x > 0, t, 0)` is cast depends on how `t` came about."""
    alive = without_unused(jax.make_jaxpr(run)(*args))
    is_cast = lambda e: (
        e.primitive.name == "convert_element_type" and e.outvars[0].aval.size == 1
    )
    return sum(not is_cast(e) and not inner_programs(e) for e in equations(alive))
