"""The likely cause of a wrong derivative: known mistakes, recognized from the numbers."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._compare import as_real, norm


class Mistake(NamedTuple):
    """The array that a known mistake would give, and that mistake in words."""

    cause: str
    array: Any


class Compared(NamedTuple):
    """Another wrong array, with the names of its directions if it is a stack along them."""

    want: Any
    have: Any
    directions: Sequence[str] = ()


_CLOSE = 1e-3
_SINGLE = 1e-6  # errors below are those of single precision
# The relative error of an array whose entries were rounded, and the largest one of an entry.
_ROUNDED = {"float16": (4e-5, 5e-4, 2.0**-10), "bfloat16": (5e-4, 4e-3, 2.0**-7)}
FINITE = "finite where the expected value is"
PRECISION = "precision was lost"
MISSING = "zero everywhere"
NO_INFLUENCE = "has no influence here"
_WORDS = {2.0: "twice", 0.5: "half", 3.0: "three times", -2.0: "minus twice"}


def likely_cause(
    want: Any,
    have: Any,
    name: str,
    mistakes: Sequence[Mistake] = (),
    primal: Any = None,
    directions: Sequence[str] = (),
    others: Sequence[Compared] = (),
) -> str:
    """The likely cause in one sentence, or an empty string.

    - `primal`: the value that the array is a cotangent of.
    - `directions`: the names of the first index, where that is the number of a direction.
    - `others`: the other arrays that are wrong.
    """
    if want.shape != have.shape:
        return f"the shape is {have.shape}, expected {want.shape}"
    if np.iscomplexobj(want) != np.iscomplexobj(have):
        return "a complex number where a real one is expected, or the reverse"
    if not np.all(np.isfinite(as_real(have))):
        places = _indices(_not_finite(have), directions)
        return f"not {FINITE}: {places}"
    if not np.all(np.isfinite(as_real(want))):
        return f"{FINITE} not"
    # Along several cotangents: along one, a gradient may have these numbers by chance.
    known = primal if len(directions) > 1 else None
    if known is not None and norm(as_real(known)) > 0 and _close(known, have):
        return (
            f"it is the value of {name}: the rule returns the primal, and not its cotangent "
            "(as `eqx.tree_at` does, which keeps the leaves that it does not replace)"
        )
    if norm(as_real(want)) == 0:
        text = f"it should be zero: {name} {NO_INFLUENCE}"
        return f"{text}; if that is meant, as of a straight-through rule, pass `reference=`"
    if norm(as_real(have)) == 0:
        return f"{MISSING}: the term of {name} is missing"
    if want.size < 2 and (_close(want, have) or _rounded_to(want, have)):
        return _factor(want, have, directions, others) or _slightly_off(want, have)
    if _rounded_to(want, have) and not _is_multiple(want, have):
        return _slightly_off(want, have)
    mistakes = [s for s in mistakes if not _close(s.array, want)]
    return (
        _factor(want, have, directions, others)
        or _rearranged(want, have, len(directions) > 0)
        or next((s.cause for s in mistakes if _close(s.array, have)), "")
        or _shifted(want, have, directions)
        or _some_entries(want, have, name, primal, directions)
    )


def _close(a, b) -> bool:
    a, b = as_real(a), as_real(b)
    return a.shape == b.shape and norm(a - b) <= _CLOSE * norm(a)


def _factor(want, have, directions, others) -> str:
    """`have` is a multiple of `want`: of several numbers, as any number is one of another. If
    there is one number, the other arrays have to be the same multiple."""
    factor = _factor_of(want, have)
    if factor is None:
        return ""
    if abs(factor + 1) < _CLOSE:
        return "the sign is wrong: every entry is minus the expected one"
    numbers = _independent(want, directions)
    if _n_different(numbers) < 2:
        factors = [_factor_of(other.want, other.have) for other in others]
        if any(other is None or abs(other / factor - 1) > _CLOSE for other in factors):
            return ""
        numbers += [x for o in others for x in _independent(o.want, o.directions)]
        if _n_different(numbers) < 2:
            return ""
    return _named_factor(want, have, factor, len(directions) > 0)


def _factor_of(want, have) -> complex | None:
    if want.shape != have.shape or not np.all(np.isfinite(as_real(have))):
        return None
    if norm(as_real(want)) == 0 or norm(as_real(have)) == 0:
        return None
    w, h = want.ravel().astype(complex), have.ravel().astype(complex)
    scale = np.max(np.abs(w))
    w, h = w / scale, h / scale
    factor = np.vdot(w, h) / np.vdot(w, w)
    # A factor close to one must be larger than the noise to be recognized.
    slack = min(_CLOSE, abs(factor - 1) / 3) if want.size > 1 else _CLOSE
    if norm(as_real(h - factor * w)) > slack * norm(as_real(h)):
        return None
    return complex(factor)


def _independent(want, directions) -> list[complex]:
    """The entries that are not multiples of others by the choice of the directions: the
    derivative of a scalar by a scalar is one number along all of them."""
    rows = np.asarray(want).astype(complex)
    if directions:
        units = [i for i, name in enumerate(directions) if "unit" in name]
        largest = int(np.argmax([norm(as_real(row)) for row in rows]))
        rows = rows[units or [largest]]
    return rows.ravel().tolist()


def _n_different(numbers: Sequence[complex]) -> int:
    """How many numbers there are, up to their signs, besides zero."""
    sizes = np.sort(np.abs(numbers))
    sizes = sizes[sizes > _SINGLE * np.max(sizes, initial=0.0)]
    return int(np.sum(np.diff(sizes) > _CLOSE * sizes[1:])) + 1 if sizes.size else 0


def _named_factor(want, have, factor: complex, is_stacked: bool) -> str:
    if abs(factor - 1) <= _SINGLE:
        return f"{_slightly_off(want, have)}; all by the same factor, 1{factor.real - 1:+.1e}"
    if abs(factor.imag) > _CLOSE * abs(factor):
        return f"every entry is {factor:.4g} times the expected one"
    factor = factor.real
    for value, word in _WORDS.items():
        if abs(factor / value - 1) < _CLOSE:
            return f"every entry is {word} the expected one"
    shown = f"{factor:.4g}"
    if shown == "1":
        shown = f"1 {'+' if factor > 1 else '-'} {abs(factor - 1):.0e}"
        return (
            f"every entry is {shown} times the expected one: a factor of the rule is a little "
            "wrong, or it is a derivative by finite differences (`step=` of a host function); "
            "if that is meant, pass `tolerance=`"
        )
    text = f"every entry is {shown} times the expected one"
    shape = want.shape[int(is_stacked) :]
    for n in {math.prod(shape), *shape} - {0, 1, 2, 3}:
        if abs(factor / n - 1) < _CLOSE or abs(factor * n - 1) < _CLOSE:
            return f"{text}: a sum and a mean over {n} entries were confused"
    return text


def _rearranged(want, have, is_stacked: bool) -> str:
    # What does not change the expected array explains nothing.
    fits = lambda array: _close(array, have) and not _close(array, want)
    if np.iscomplexobj(want) and fits(np.conj(want)):
        return "the complex conjugate of the expected one"
    if want.ndim >= 2 and fits(np.swapaxes(want, -1, -2)):
        return "transposed: its last two axes are swapped"
    for axis in range(int(is_stacked), want.ndim):
        if want.shape[axis] < 2:
            continue
        number = axis - int(is_stacked)
        if fits(np.flip(want, axis)):
            return f"reversed along axis {number}"
        for step in (1, -1):
            if want.shape[axis] > 2 and fits(np.roll(want, step, axis)):
                return f"off by one along axis {number}"
    return ""


def _shifted(want, have, directions) -> str:
    gap = as_real(have - want)
    if _n_different(_independent(want, directions)) < 2:
        return ""
    if gap.size > 1 and norm(gap - gap.mean()) <= _CLOSE * norm(gap):
        return f"a constant is added to every entry: {gap.mean():.4g}"
    return ""


def _some_entries(want, have, name, primal, directions) -> str:
    wrong = np.abs(have - want) > _CLOSE * np.abs(want) + 1e-6 * norm(as_real(want))
    n = int(wrong.sum())
    if n == 0:
        return _slightly_off(want, have)
    nearly = np.abs(have - want) > 1e-5 * np.abs(want) + 1e-6 * norm(as_real(want))
    if np.any(nearly & ~wrong):  # all are off, some by more
        return ""
    if primal is not None and primal.shape == wrong.shape and not np.iscomplexobj(primal):
        for sign, mask in (("negative", primal < 0), ("positive", primal > 0)):
            # One entry of the other sign may be right by chance.
            if n > 1 and np.all(mask[wrong]) and np.unique(primal[~mask]).size > 1:
                return f"wrong only where {name} is {sign}"
    # Of a diagonal, most entries are zero, and right in any rule.
    n_others = int(np.sum((want != 0) & ~wrong))
    if wrong.size > 1 and n <= max(1, wrong.size // 4) and (n == 1 or n_others):
        return f"{n} of {wrong.size} entries are wrong: {_indices(wrong, directions)}"
    return ""


def _slightly_off(want, have) -> str:
    error = norm(as_real(want - have)) / norm(as_real(want))
    is_off = np.abs(have - want) > 1e-7 * np.abs(want)
    which = "every entry is" if np.all(is_off | (want == 0)) else "some entries are"
    text = f"{which} a little off ({error:.0e} of the size of all)"
    factor = _factor_of(want, have)
    if factor is not None and abs(factor - 1) > _SINGLE:  # of one number, or `_factor` names it
        text += ": a factor or a term of the rule is a little wrong, or"
    else:
        text += ":"
    dtype = _rounded_to(want, have)
    if dtype:
        return (
            f"{text} {PRECISION}, as by a cast to {dtype}, by a difference of nearly equal "
            "numbers, or by the finite differences of a host function (then pass `tolerance=`)"
        )
    rest = (
        "a derivative by finite differences (`step=` of a host function), or a solver that "
        "stops at a tolerance; if that is meant, pass `tolerance=`"
    )
    if error <= _SINGLE:
        return f"{text} {PRECISION}, as by a cast to float32; or it is {rest}"
    return f"{text} it is {rest}"


def _rounded_to(want, have) -> str:
    """The dtype of half precision whose rounding explains the errors of all entries."""
    want, have = as_real(want).ravel(), as_real(have).ravel()
    error = norm(have - want) / norm(want)
    for dtype, (low, high, largest) in _ROUNDED.items():
        most = largest * np.abs(want) + 1e-6 * np.max(np.abs(want))
        if low <= error <= high and np.all(np.abs(have - want) <= most):
            return dtype
    return ""


def _is_multiple(want, have) -> bool:
    """Whether the errors of several entries are the same fraction of them."""
    want, have = as_real(want).ravel(), as_real(have).ravel()
    kept = np.abs(want) > 1e-6 * np.max(np.abs(want))
    errors = have[kept] / want[kept] - 1
    return bool(np.std(errors) < 0.05 * abs(np.mean(errors)))


def _not_finite(x):
    return ~np.isfinite(np.asarray(x))


def _indices(mask, directions: Sequence[str]) -> str:
    if mask.ndim == 0:
        return "the only entry"
    places = []
    for place in np.argwhere(mask)[:3].tolist():
        inner = place[1:] if directions else place
        entry = str(inner) if inner else "the only entry"
        places.append(f"{entry} along {directions[place[0]]}" if directions else entry)
    return ", ".join(places) + (", ..." if int(mask.sum()) > 3 else "")
