"""The likely cause of a wrong derivative: known mistakes, recognized from the numbers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._compare import as_real, norm


class Mistake(NamedTuple):
    """The array that a known mistake would give, and that mistake in words."""

    cause: str
    array: Any


class Compared(NamedTuple):
    """Another wrong array."""

    want: Any
    have: Any


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
    others: Sequence[Compared] = (),
    *,
    is_random: bool = False,
) -> str:
    """The likely cause in one sentence, or an empty string.

    - `primal`: the value that the array is a cotangent of.
    - `others`: the other arrays that are wrong.
    - `is_random`: whether the derivative is along a random direction: another gradient may be
        the value of its argument by chance.
    """
    if want.shape != have.shape:
        return f"the shape is {have.shape}, expected {want.shape}"
    if np.iscomplexobj(want) != np.iscomplexobj(have):
        return "a complex number where a real one is expected, or the reverse"
    if not np.all(np.isfinite(as_real(have))):
        places = _indices(~np.isfinite(have))
        return f"not {FINITE}: {places}"
    if not np.all(np.isfinite(as_real(want))):
        return f"{FINITE} not"
    is_known = is_random and primal is not None and norm(as_real(primal)) > 0
    if is_known and _close(primal, have):
        return (
            f"it is the value of {name}: the rule returns the primal, and not its cotangent "
            "(as `eqx.tree_at` does, which keeps the leaves that it does not replace)"
        )
    if norm(as_real(want)) == 0:
        text = f"it should be zero: {name} {NO_INFLUENCE}"
        return f"{text}; if that is meant, as of a straight-through rule, pass `reference=`"
    if norm(as_real(have)) == 0:
        return f"{MISSING}: the term of {name} is missing"
    # What does not change the expected array explains nothing.
    fits = lambda known: next(
        (m.cause for m in known if _close(m.array, have) and not _close(m.array, want)), ""
    )
    factor = _named_factor(want, have, others)
    is_one_factor = want.size > 1 and _is_multiple(want, have)
    if _rounded_to(want, have) and not is_one_factor:
        return (factor if want.size < 2 else "") or _slightly_off(want, have)
    if want.size < 2 and _close(want, have):
        return factor or _slightly_off(want, have)
    if found := fits(_rearranged(want)) or fits(mistakes) or factor:
        return found
    shift = as_real(have - want)
    is_shifted = shift.size > 1 and norm(shift - shift.mean()) <= _CLOSE * norm(shift)
    if is_shifted and _n_different(want) > 1:
        return f"a constant is added to every entry: {shift.mean():.4g}"
    return _some_entries(want, have, name, primal)


def _close(a, b) -> bool:
    a, b = as_real(a), as_real(b)
    return a.shape == b.shape and norm(a - b) <= _CLOSE * norm(a)


# ---------------------------------------------------------------- factors


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
    return (
        complex(factor) if norm(as_real(h - factor * w)) <= slack * norm(as_real(h)) else None
    )


def _n_different(*arrays: Any) -> int:
    """How many numbers there are in them, up to their signs, besides zero."""
    sizes = np.sort(np.concatenate([np.abs(x).ravel() for x in arrays]))
    sizes = sizes[sizes > _SINGLE * np.max(sizes, initial=0.0)]
    return int(np.sum(np.diff(sizes) > _CLOSE * sizes[1:])) + 1 if sizes.size else 0


def _named_factor(want, have, others: Sequence[Compared]) -> str:
    """`have` is a multiple of `want`: of several numbers, as any number is one of another. If
    there is one number, the other arrays have to be the same multiple."""
    factor = _factor_of(want, have)
    if factor is None:
        return ""
    if abs(factor + 1) < _CLOSE:
        return "the sign is wrong: every entry is minus the expected one"
    if _n_different(want) < 2:
        factors = [_factor_of(other.want, other.have) for other in others]
        if any(other is None or abs(other / factor - 1) > _CLOSE for other in factors):
            return ""
        if _n_different(want, *(other.want for other in others)) < 2:
            return ""
    if abs(factor - 1) <= _SINGLE:
        return f"{_slightly_off(want, have)}; all by the same factor, 1{factor.real - 1:+.1e}"
    if abs(factor.imag) > _CLOSE * abs(factor):
        return f"every entry is {factor:.4g} times the expected one"
    factor = factor.real
    is_near = lambda value: abs(factor / value - 1) < _CLOSE
    if word := next((word for value, word in _WORDS.items() if is_near(value)), ""):
        return f"every entry is {word} the expected one"
    shown = f"{factor:.4g}"
    if shown == "1":
        shown = f"1 {'+' if factor > 1 else '-'} {abs(factor - 1):.0e}"
        return (
            f"every entry is {shown} times the expected one: a factor of the rule is a little "
            "wrong, or it is a derivative by finite differences (`step=` of a host function); "
            "if that is meant, pass `tolerance=`"
        )
    sizes = {want.size, *want.shape} - {0, 1, 2, 3}
    n = next((n for n in sizes if is_near(n) or is_near(1 / n)), 0)
    text = f": a sum and a mean over {n} entries were confused" if n else ""
    return f"every entry is {shown} times the expected one{text}"


# ---------------------------------------------------------------- entries


def _rearranged(want) -> Iterator[Mistake]:
    if np.iscomplexobj(want):
        yield Mistake("the complex conjugate of the expected one", np.conj(want))
    if want.ndim >= 2:
        yield Mistake("transposed: its last two axes are swapped", np.swapaxes(want, -1, -2))
    for axis in range(want.ndim):
        along = f"along axis {axis}"
        yield Mistake(f"reversed {along}", np.flip(want, axis))
        for step in (1, -1) if want.shape[axis] > 2 else ():
            yield Mistake(f"off by one {along}", np.roll(want, step, axis))


def _some_entries(want, have, name, primal) -> str:
    gap, rounding = np.abs(have - want), 1e-6 * norm(as_real(want))
    wrong = gap > _CLOSE * np.abs(want) + rounding
    n = int(wrong.sum())
    if n == 0:
        return _slightly_off(want, have)
    if np.any((gap > 1e-5 * np.abs(want) + rounding) & ~wrong):  # all are off, some by more
        return ""
    if primal is not None and primal.shape == wrong.shape and not np.iscomplexobj(primal):
        for sign, mask in (("negative", primal < 0), ("positive", primal > 0)):
            # One entry of the other sign may be right by chance.
            if n > 1 and np.all(mask[wrong]) and np.unique(primal[~mask]).size > 1:
                return f"wrong only where {name} is {sign}"
    # Of a diagonal, most entries are zero, and right in any rule.
    n_others = int(np.sum((want != 0) & ~wrong))
    if wrong.size > 1 and (n_others or n <= wrong.size // 2):
        return f"{n} of {wrong.size} entries are wrong: {_indices(wrong)}"
    return ""


def _slightly_off(want, have) -> str:
    error = norm(as_real(want - have)) / norm(as_real(want))
    is_off = np.abs(have - want) > 1e-7 * np.abs(want)
    which = "every entry is" if np.all(is_off | (want == 0)) else "some entries are"
    factor = _factor_of(want, have)
    is_factor = factor is not None and abs(factor - 1) > _SINGLE  # of one number
    more = " a factor or a term of the rule is a little wrong, or" if is_factor else ""
    text = f"{which} a little off ({error:.0e} of the size of all):{more}"
    if dtype := _rounded_to(want, have):
        return (
            f"{text} {PRECISION}, as by a cast to {dtype}, by a difference of nearly equal "
            "numbers, or by the finite differences of a host function (then pass `tolerance=`)"
        )
    cast = f" {PRECISION}, as by a cast to float32; or" if error <= _SINGLE else ""
    return (
        f"{text}{cast} it is a derivative by finite differences (`step=` of a host function), "
        "or a solver that stops at a tolerance; if that is meant, pass `tolerance=`"
    )


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


def _indices(mask) -> str:
    places = [str(place) if place else "the only entry" for place in np.argwhere(mask).tolist()]
    return ", ".join(places[:3]) + (", ..." if places[3:] else "")
