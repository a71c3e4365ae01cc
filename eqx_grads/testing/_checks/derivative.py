"""Is the first derivative right: `forward` and `reverse`.

Two witnesses: plain autodiff of the function without its rule, which is exact, and finite
differences, which no rule has touched. Where these two disagree (a `stop_gradient` inside of
the function, a NaN of autodiff's), the rule has to agree with one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._case import Case, Precision
from .._compare import as_real, difference, pairing
from .._findings import broke, failed, judge, skipped
from .._likely_cause import Suspect
from .._random_tangents import basis, only
from .._report import FAILED, Finding, PASSED


_FULL_JACOBIAN = 16  # the number of entries up to which every unit vector is a direction
_RANDOM = 2  # directions for each leaf above it
_LEAVES = 12  # above this, all leaves are perturbed together
_TRUSTED = 1e-3  # finite differences that are less sure of themselves are no witness


# ---------------------------------------------------------------- forward


def check_forward(case: Case) -> Iterator[Finding]:
    """Forward mode against both witnesses."""
    if not case.own.outputs:
        yield skipped("forward", "no output has a derivative")
        return
    if not case.offers_forward:
        why = "reverse mode only, as of every `jax.custom_vjp`"
        yield skipped("forward", f"{why}; `eqx_grads.custom_vjp` has both modes")
        return
    p = case.precision
    by_leaf = _directions_by_leaf(case)
    names = [n for n, _ in by_leaf for _ in case.own.outputs]
    if len(case.own.outputs) > 1:
        pairs = [(n, out) for n, _ in by_leaf for out in case.output_names]
        names = [f"{n} (in {out})" for n, out in pairs]
    got = _columns(p.rule.jvp, p, by_leaf)
    conjugate = lambda: _columns(
        lambda t: case.expected_jvp(p, [np.conj(x) for x in t]), p, by_leaf
    )
    compare = lambda want, have, tolerance, witness: judge(
        "forward", "", want, have, names, tolerance, witness=witness,
        suspects=lambda: [
            *_swapped(names, want),
            *_transposed_forward(case, p, by_leaf),
            *(Suspect("the tangent was conjugated", x) for x in conjugate()),
        ],
    )  # fmt: skip
    expected = lambda: _columns(lambda t: case.expected_jvp(p, t), p, by_leaf)
    numeric = lambda: _forward_by_differences(case, p)
    findings = list(_two_witnesses(case, "forward", p, expected, got, compare, numeric))
    yield from findings
    if p is not case.own and not any(f.verdict == FAILED for f in findings):
        tangents = case.tangents()
        have = case.own.rule.jvp(tangents)
        wants = [
            lambda: case.expected_jvp(p, p.like_leaves(tangents)),
            lambda: case.expected_jvp(case.own, tangents),
            lambda: p.rule.jvp(p.like_leaves(tangents)),
        ]
        yield _in_own_precision(case, "forward", wants, have, case.output_names)


def _in_own_precision(case: Case, check, wants, have, names) -> Finding:
    """Against the best witness of these. Autodiff in float64 is exact, but draws other random
    numbers; in the user's precision it errs by rounding; where there is neither, the rule in
    float64 has been checked."""
    tolerance = case.tolerance(case.own) + 10 * case.noise
    cause = f"right in float64, wrong in {case.subject.leaves[0].dtype}"
    finding = None
    for want in wants:
        try:
            arrays = want()
        except Exception:  # no plain derivative
            continue
        if finding is not None and want is wants[-1]:
            break
        if all(np.all(np.isfinite(as_real(x))) for x in arrays):
            where = "in your own precision"
            other = judge(check, where, arrays, have, names, tolerance, cause=cause)
            if finding is None or other.verdict == PASSED:
                finding = other
    return finding or skipped(check, "no witness in your own precision")


def _directions_by_leaf(case: Case) -> list[tuple[str, list[list[Any]]]]:
    leaves = case.subject.leaves
    units = basis(leaves, _FULL_JACOBIAN)
    given = [] if case.options.tangents is None else [_given(case, case.options.tangents)]
    if len(leaves) > _LEAVES:
        return [("all leaves", [case.tangents(), case.tangents(), *given])]
    by_leaf = []
    for number, name in enumerate(case.names):
        if leaves[number].size == 0:
            continue
        if units is not None:
            mine = [u for u in units if np.any(u[number])]
            mine.append(only(case.tangents(), [number]))
        else:
            mine = [only(case.tangents(), [number]) for _ in range(_RANDOM)]
        by_leaf.append((name, mine))
    if given:
        by_leaf.append(("the tangents given", given))
    return by_leaf


def _given(case, tangents):
    leaves = [t for t in jax.tree.leaves(tangents) if t is not None]
    if len(leaves) != len(case.subject.leaves):
        raise ValueError(
            f"`tangents` holds {len(leaves)} arrays, and {len(case.subject.leaves)} leaves "
            f"can be perturbed: {', '.join(case.names)}. Give one for each."
        )
    return [np.asarray(t) for t in leaves]


def _columns(jvp, p: Precision, by_leaf) -> list[Any]:
    """For each leaf and output: the derivatives along all directions, stacked."""
    columns = []
    for _, directions in by_leaf:
        outs = [jvp(p.like_leaves(t)) for t in directions]
        columns += [np.stack(column) for column in zip(*outs, strict=True)]
    return columns


def _swapped(names: Sequence[str], want: Sequence[Any]) -> list[Suspect]:
    return [
        Suspect(f"it is what belongs to {name}", array)
        for name, array in zip(names, want, strict=True)
    ]


class _BySteps(NamedTuple):
    """Finite differences `want` along some directions, with their relative error; what the
    rule gives there, and autodiff without it."""

    want: list[Any]
    names: list[str]
    error: float
    have: list[Any]
    exact: Callable[[], list[Any]]


def _forward_by_differences(case: Case, p: Precision) -> _BySteps:
    parts = _differences(case)
    error = max((e for *_, e in parts), default=0.0)
    want = [d for _, _, derivative, _ in parts for d in derivative]
    names = [name for name, _, derivative, _ in parts for _ in derivative]
    along = lambda jvp: [d for _, t, _, _ in parts for d in jvp(p.like_leaves(t))]
    exact = lambda: along(lambda t: case.expected_jvp(p, t))
    return _BySteps(want, names, error, along(p.rule.jvp), exact)


def _differences(case: Case):
    """Finite differences: for each leaf its name, the direction, the derivative along it and
    the estimated error. Made once for both modes."""
    if case.differences is None:
        tangents = case.scaled_tangents()
        n = len(tangents)
        sets = [[i] for i in range(n)] if n <= _LEAVES // 2 else [list(range(n))]
        case.differences = []
        for kept in sets:
            t = only(tangents, kept)
            derivative, error = case.finite_difference(t)
            name = case.names[kept[0]] if len(sets) > 1 or n == 1 else "all leaves"
            case.differences.append((name, t, derivative, error))
    return case.differences


def _two_witnesses(case, check, p, expected, got, compare, numeric) -> Iterator[Finding]:
    """Hold `got` against autodiff and against finite differences."""
    tolerance = case.tolerance(p)
    exact, why = None, ""
    try:
        exact = expected()
    except Exception as e:
        if case.is_wrong_on_purpose:
            yield broke(check, "the derivative that is expected", e)
            return
        why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:100]
    if case.is_wrong_on_purpose:
        yield compare(exact, got, tolerance, "the derivative that was asked for")
        return
    by_autodiff = None
    if exact is not None:
        witness = "autodiff of the function without its rule"
        by_autodiff = compare(exact, got, tolerance, witness)
    try:
        by_steps = numeric()
    except Exception as e:
        by_steps = None
        why += f"; finite differences: {type(e).__name__}"
    if by_steps is None or by_steps.error > _TRUSTED:
        if by_autodiff is None:
            yield skipped(check, f"no witness for the derivative ({why or 'not smooth here'})")
        else:
            yield by_autodiff
        return
    loose = max(tolerance, 10 * by_steps.error)
    want, names = by_steps.want, by_steps.names
    by_differences = judge(
        check, "", want, by_steps.have, names, loose, witness="finite differences in float64"
    )
    if by_autodiff is None:
        yield by_differences
    elif PASSED in (by_autodiff.verdict, by_differences.verdict):
        # They differ, so autodiff and finite differences do, unless one saw an entry that the
        # other could not.
        agree = difference(want, by_steps.exact(), names, False).error <= loose
        if agree and by_autodiff.verdict == FAILED:
            yield by_autodiff
        elif agree and by_differences.verdict == FAILED:
            yield by_differences
        else:
            yield by_autodiff if by_autodiff.verdict == PASSED else by_differences
    else:
        yield by_autodiff


# ---------------------------------------------------------------- reverse


def check_reverse(case: Case) -> Iterator[Finding]:
    """Reverse mode against both witnesses."""
    if not case.own.outputs:
        yield skipped("reverse", "no output has a derivative")
        return
    if not case.offers_reverse:
        why = "JAX says that this function has no reverse mode"
        do = 'where that is meant, say `skip=("reverse",)`'
        yield failed("reverse", "reverse mode", f"{why}; {do}")
        return
    p = case.precision
    units = basis(case.own.outputs, _FULL_JACOBIAN)
    # Unit vectors are exact in every precision, so they do not show where some is lost.
    directions = [*(units or []), *(case.cotangents() for _ in range(_RANDOM))]
    if case.options.cotangents is not None:
        directions.append([np.asarray(w) for w in jax.tree.leaves(case.options.cotangents)])
    stack = lambda vjp: [
        np.stack(rows)
        for rows in zip(*[vjp(p.like_outputs(w)) for w in directions], strict=True)
    ]
    got = stack(p.rule.vjp)
    primals = None
    if len(directions) == 1:
        primals = [np.asarray(x)[None] for x in case.subject.leaves]
    else:
        shape = lambda x: (len(directions), *np.shape(x))
        primals = [np.broadcast_to(_plain(x), shape(x)) for x in case.subject.leaves]
    compare = lambda want, have, tolerance, witness: judge(
        "reverse", "", want, have, case.names, tolerance, witness=witness, primals=primals,
        suspects=lambda: [
            *_swapped(case.names, want), *_transposed_reverse(case, p, directions)
        ],
    )  # fmt: skip
    expected = lambda: stack(lambda w: case.expected_vjp(p, w))
    numeric = lambda: _reverse_by_differences(case, p)
    findings = list(_two_witnesses(case, "reverse", p, expected, got, compare, numeric))
    yield from findings
    if p is not case.own and not any(f.verdict == FAILED for f in findings):
        w = case.cotangents()
        have = case.own.rule.vjp(w)
        yield from _dtypes(case, have)
        wants = [
            lambda: case.expected_vjp(p, p.like_outputs(w)),
            lambda: case.expected_vjp(case.own, w),
            lambda: p.rule.vjp(p.like_outputs(w)),
        ]
        yield _in_own_precision(case, "reverse", wants, have, case.names)


def _dtypes(case: Case, cotangents) -> Iterator[Finding]:
    """JAX lets a backward rule return another dtype, and fails where it is added to one."""
    for name, leaf, ct in zip(case.names, case.subject.leaves, cotangents, strict=True):
        if ct.dtype != leaf.dtype:
            text = f"the cotangent of {name} has dtype {ct.dtype}, {name} has {leaf.dtype}"
            yield failed("reverse", name, text)


def _plain(x):
    x = np.asarray(x)
    return x if np.iscomplexobj(x) else x.astype(np.float64)


_TRANSPOSED = "transposed: a Jacobian and its transpose were confused"


def _transposed_forward(case: Case, p: Precision, by_leaf) -> list[Suspect]:
    """What reverse mode should give, for the directions of forward mode."""
    suspects = []
    outputs = case.own.outputs
    for number, leaf in enumerate(case.subject.leaves):
        if len(by_leaf) == len(case.subject.leaves) and _same_space([leaf], outputs):
            vjp = lambda t, i=number: case.expected_vjp(p, p.like_outputs([t[i]]))[i]
            rows = [vjp(t) for t in by_leaf[number][1]]
            suspects.append(Suspect(_TRANSPOSED, np.stack(rows)))
    return suspects


def _transposed_reverse(case: Case, p: Precision, directions) -> list[Suspect]:
    """What forward mode should give, for the directions of reverse mode."""
    suspects = []
    leaves, outputs = case.subject.leaves, case.own.outputs
    zeros = [np.zeros(x.shape, x.dtype) for x in leaves]
    for number, leaf in enumerate(leaves):
        if _same_space([leaf], outputs):
            at = lambda w, i=number: [*zeros[:i], w[0], *zeros[i + 1 :]]
            rows = [case.expected_jvp(p, p.like_leaves(at(w)))[0] for w in directions]
            suspects.append(Suspect(_TRANSPOSED, np.stack(rows)))
    return suspects


def _same_space(xs, ys) -> bool:
    return [(x.shape, x.dtype) for x in xs] == [(y.shape, y.dtype) for y in ys]


def _reverse_by_differences(case: Case, p: Precision) -> _BySteps:
    parts = _differences(case)
    error = max((e for *_, e in parts), default=0.0)
    w = p.like_outputs(case.cotangents())
    want = [np.asarray(pairing(derivative, w)) for _, _, derivative, _ in parts]
    along = lambda cts: [np.asarray(pairing(cts, p.like_leaves(t))) for _, t, _, _ in parts]
    names = [name for name, *_ in parts]
    exact = lambda: along(case.expected_vjp(p, w))
    return _BySteps(want, names, error, along(p.rule.vjp(w)), exact)
