"""The likely cause of a wrong derivative: known mistakes, recognized from the numbers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._compare import as_double, norm


class Mistake(NamedTuple):
    """The array that a known mistake would give, and that mistake in words."""

    cause: str
    array: Any


_CLOSE = 1e-3
# The dtypes whose rounding gives errors of this size, relative to all entries.
_ROUNDED = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 5e-3}


def likely_cause(
    want: Any,
    have: Any,
    name: str,
    mistakes: Iterable[Mistake] = (),
    primal: Any = None,
    same: Sequence[tuple[Any, Any]] = (),
    *,
    is_random: bool = False,
) -> str:
    """The likely cause in one sentence, or an empty string.

    - `primal`: the value that the array is a cotangent of.
    - `same`: what is expected and what is there along other directions.
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
    if is_random and primal is not None and np.any(primal) and _is_close(primal, have):
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
        return (
            f"zero everywhere: the term of {name} is missing. If it is constant on purpose, "
            "call `jax.lax.stop_gradient` of it in function and rule; or, if it is a setting, "
            "declare it `eqx.field(static=True)`"
        )
    flat = lambda arrays: np.concatenate(list(map(np.ravel, arrays)))
    factor, words = _multiple(*map(flat, zip((want, have), *same, strict=True)))
    if not _is_close(factor, 1.0):
        sizes = (n for n in (want.size, *want.shape) if n > 3)
        n = next((n for n in sizes if _is_close(factor, n) or _is_close(factor * n, 1)), 0)
        more = f": a sum and a mean over {n} entries were confused" if n else ""
        return f"every entry is {words} the expected one{more}"
    # A mistake that does not change the expected array explains nothing.
    for mistake in (*_rearranged(want), *mistakes):
        if _is_close(mistake.array, have) and not _is_close(mistake.array, want):
            return mistake.cause
    return _of_size(want, have) or _of_entries(want, have, name, primal)


def _is_close(a, b) -> bool:
    a, b = as_double(a), as_double(b)
    return a.shape == b.shape and norm(a - b) <= _CLOSE * norm(a)


def _multiple(want, have) -> tuple[complex, str]:
    """The factor between two arrays, also in words; 1 if they are not multiples."""
    factors: dict[complex, str] = {-1.0: "minus", 2.0: "twice", 0.5: "half"}
    # Any number is a multiple of another one.
    if np.ptp(np.abs(want[want != 0])) > _CLOSE * np.max(np.abs(want)):
        fit = complex(np.vdot(want, have) / np.vdot(want, want))
        fit = fit.real if abs(fit.imag) <= _CLOSE * abs(fit) else fit
        factors.setdefault(fit, f"{fit:.4g} times")
    known = ((f, words) for f, words in factors.items() if _is_close(f * want, have))
    return next(known, (1.0, ""))


def _rearranged(want) -> Iterator[Mistake]:
    if np.iscomplexobj(want):
        yield Mistake("the complex conjugate of the expected one", np.conj(want))
    if want.ndim >= 2:
        yield Mistake("transposed: its last two axes are swapped", np.swapaxes(want, -1, -2))
    for axis in range(want.ndim):
        yield Mistake(f"reversed along axis {axis}", np.flip(want, axis))
        for step in (1, -1):
            yield Mistake(f"off by one along axis {axis}", np.roll(want, step, axis))


def _of_size(want, have) -> str:
    """The cause of an error that is small, and about as large in each entry."""
    error, size = norm(want - have) / norm(want), norm(want) / np.sqrt(want.size)
    is_even = np.max(np.abs(have - want) / (np.abs(want) + size)) <= 10 * error
    dtype = next((dtype for dtype, most in _ROUNDED.items() if error < most), "")
    return (
        f"a little off ({error:.0e} of the size of all): a factor is off, or precision was "
        f"lost, as by a cast to {dtype} or a difference of nearly equal numbers. If it is a "
        "derivative by finite differences (`step=` of a host function) or a solver that stops "
        "at a tolerance, pass `tolerance=`"
    ) * bool(is_even and dtype)


def _of_entries(want, have, name, primal) -> str:
    wrong = np.abs(have - want) > _CLOSE * np.abs(want) + 1e-6 * norm(want)
    # Most entries of a diagonal are zero, and right in any rule.
    if wrong.size < 2 or np.all(wrong | (want == 0)):
        return ""
    if primal is not None and primal.shape == wrong.shape and not np.iscomplexobj(primal):
        for sign, mask in (("negative", primal < 0), ("positive", primal > 0)):
            if wrong.sum() > 1 and np.all(mask[wrong]) and not np.all(mask):
                return f"wrong only where {name} is {sign}"
    return f"{wrong.sum()} of {wrong.size} entries are wrong: {_indices(wrong)}"


def _indices(mask) -> str:
    places = [str(place) if place else "the only entry" for place in np.argwhere(mask).tolist()]
    return ", ".join(places[:3]) + (", ..." if places[3:] else "")
