"""The likely cause of a wrong derivative: known mistakes, recognized from the numbers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._compare import as_double, norm


class Mistake(NamedTuple):
    """The array that a known mistake would give, and that mistake in words."""

    cause: str
    array: Any


_CLOSE = 1e-3
_WORDS = {2.0: "twice", 0.5: "half"}
# The dtypes whose rounding gives errors of this size, relative to all entries.
_ROUNDED = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 5e-3}


def likely_cause(
    want: Any,
    have: Any,
    name: str,
    mistakes: Sequence[Mistake] = (),
    primal: Any = None,
    others: Sequence[tuple[Any, Any]] = (),
    *,
    is_random: bool = False,
) -> str:
    """The likely cause in one sentence, or an empty string.

    - `primal`: the value that the array is a cotangent of.
    - `others`: the other arrays that are wrong: what is expected, and what is there.
    - `is_random`: whether the derivative is along a random direction: another gradient may be
        the value of its argument by chance.
    """
    if want.shape != have.shape:
        return f"the shape is {have.shape}, expected {want.shape}"
    if np.iscomplexobj(want) != np.iscomplexobj(have):
        return "a complex number where a real one is expected, or the reverse"
    for found, text in ((have, "not finite where the expected value is"),
                        (want, "finite where the expected value is not")):  # fmt: skip
        if not np.all(np.isfinite(found)):
            return f"{text}: {_indices(~np.isfinite(found))}"
    if is_random and primal is not None and np.any(primal) and _close(primal, have):
        return (
            f"it is the value of {name}: the rule returns the primal, and not its cotangent "
            "(as `eqx.tree_at` does, which keeps the leaves that it does not replace)"
        )
    if not np.any(want):
        return (
            f"it should be zero: {name} has no influence here; if that is meant, as of a "
            "straight-through rule, pass `reference=`"
        )
    if not np.any(have):
        return f"zero everywhere: the term of {name} is missing"
    size = norm(want) / np.sqrt(want.size)
    error = norm(want - have) / norm(want)
    factor = _factor(want, have, others)
    is_even = np.max(np.abs(have - want) / (np.abs(want) + size)) <= 10 * error
    if factor is None and is_even and error < max(_ROUNDED.values()):
        dtype = next(dtype for dtype, most in _ROUNDED.items() if error < most)
        return (
            f"a little off ({error:.0e} of the size of all): precision was lost, as by a cast "
            f"to {dtype} or a difference of nearly equal numbers, or {_MEANT}"
        )
    # A mistake that does not change the expected array explains nothing.
    for mistake in (*_rearranged(want), *mistakes):
        if _close(mistake.array, have) and not _close(mistake.array, want):
            return mistake.cause
    return _of_entries(want, have, name, primal) if factor is None else _of_factor(factor, want)


_MEANT = (
    "it is a derivative by finite differences (`step=` of a host function), or a solver that "
    "stops at a tolerance; if that is meant, pass `tolerance=`"
)


def _close(a, b) -> bool:
    a, b = as_double(a), as_double(b)
    return a.shape == b.shape and norm(a - b) <= _CLOSE * norm(a)


def _factor(want, have, others: Sequence[tuple[Any, Any]]) -> complex | None:
    """By what an array is multiplied. Any number is a multiple of another one, so the other
    arrays have to be the same multiple where all entries are one number."""
    if _n_different(want) < 2:
        pairs = [(want, have), *((w, h) for w, h in others if w.shape == h.shape)]
        columns = zip(*pairs, strict=True)
        want, have = (np.concatenate(list(map(np.ravel, xs))) for xs in columns)
    w, h = want.ravel().astype(complex), have.ravel().astype(complex)
    w, h = (x / np.max(np.abs(w)) for x in (w, h))
    factor = complex(np.vdot(w, h) / np.vdot(w, w))
    # A factor close to one must be larger than the noise to be recognized.
    slack = min(_CLOSE, abs(factor - 1) / 10)
    is_one = norm(h - factor * w) <= slack * norm(h)
    is_known = _n_different(want) > 1 or abs(factor + 1) < _CLOSE
    return factor if is_one and is_known and abs(factor - 1) > 1e-6 else None


def _n_different(x: Any) -> int:
    """How many numbers there are in it, up to their signs, apart from zero."""
    sizes = np.sort(np.abs(x).ravel())
    sizes = sizes[sizes > 1e-6 * np.max(sizes, initial=0.0)]
    return int(np.sum(np.diff(sizes) > _CLOSE * sizes[1:])) + 1 if sizes.size else 0


def _of_factor(factor: complex, want: Any) -> str:
    is_near = lambda value: abs(factor / value - 1) < _CLOSE
    if is_near(-1):
        return "the sign is wrong: every entry is minus the expected one"
    if is_near(1):
        number = f"1 {'+' if factor.real > 1 else '-'} {abs(factor - 1):.0e} times"
        more = f": a factor of the rule is a little wrong, or {_MEANT}"
    else:
        is_real = abs(factor.imag) <= _CLOSE * abs(factor)
        number = f"{factor.real if is_real else factor:.4g} times"
        number = next((word for value, word in _WORDS.items() if is_near(value)), number)
        sizes = {want.size, *want.shape} - {0, 1, 2, 3}
        n = next((n for n in sizes if is_near(n) or is_near(1 / n)), 0)
        more = f": a sum and a mean over {n} entries were confused" if n else ""
    return f"every entry is {number} the expected one{more}"


def _rearranged(want) -> Iterator[Mistake]:
    if np.iscomplexobj(want):
        yield Mistake("the complex conjugate of the expected one", np.conj(want))
    if want.ndim >= 2:
        yield Mistake("transposed: its last two axes are swapped", np.swapaxes(want, -1, -2))
    for axis in range(want.ndim):
        yield Mistake(f"reversed along axis {axis}", np.flip(want, axis))
        for step in (1, -1):
            yield Mistake(f"off by one along axis {axis}", np.roll(want, step, axis))


def _of_entries(want, have, name, primal) -> str:
    wrong = np.abs(have - want) > _CLOSE * np.abs(want) + 1e-6 * norm(want)
    # Most entries of a diagonal are zero, and right in any rule.
    if wrong.size < 2 or np.all(wrong | (want == 0)):
        return ""
    if primal is not None and primal.shape == wrong.shape and not np.iscomplexobj(primal):
        for sign, mask in (("negative", primal < 0), ("positive", primal > 0)):
            if wrong.sum() > 1 and np.all(mask[wrong]) and np.sum(~mask) > 1:
                return f"wrong only where {name} is {sign}"
    return f"{wrong.sum()} of {wrong.size} entries are wrong: {_indices(wrong)}"


def _indices(mask) -> str:
    places = [str(place) if place else "the only entry" for place in np.argwhere(mask).tolist()]
    return ", ".join(places[:3]) + (", ..." if places[3:] else "")
