"""The distance of two lists of arrays: a relative two-norm, independent of their sizes."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._errors import check_flags, show_path, unlike
from .._rules.float_args import check_nonnegative_number
from ._options import check_tolerance


# The relative error that rounding explains, by the dtype of lowest precision.
_TOLERANCE = {"float64": 1e-7, "float32": 3e-5, "float16": 2e-2, "bfloat16": 8e-2}
_COARSER = 0.3
# A single entry may have this many times the error of its array, as rounding is uneven.
_ENTRY = 30.0
# A leaf smaller than this, relative to all leaves together, may have their rounding error; in
# float64, a smaller one.
_SMALL, SMALL_IN_FLOAT64 = 1e-3, 1e-9


def tolerance_of(*trees: Any) -> float:
    """The relative error that rounding explains for arrays with these dtypes."""
    # Not `jnp.result_type` of an array: in single precision, float64 is float32 to it.
    leaves = jax.tree.leaves(trees)
    dtypes = [x.dtype if hasattr(x, "dtype") else jnp.result_type(x) for x in leaves]
    real = [str(jnp.finfo(d).dtype) for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    found = [_TOLERANCE.get(name, _COARSER) for name in real]
    return max(found, default=0.0)


def tolerance_in_float64(rounded_to: Any, lowest: Any, least: float) -> float:
    """The same for a program that is evaluated in float64.

    - `rounded_to`: what a host function rounds its values to, nonetheless.
    - `lowest`: the lowest precision in the program. Numbers such as the 0.1 in `0.1 * x` are
        rounded to it, and the rule may have the number itself.
    """
    eps = 0.0 if lowest is None else float(jnp.finfo(lowest).eps)
    return max(tolerance_of(np.zeros((), rounded_to or float)), least, eps)


def norm(x: Any) -> float:
    """The two-norm of an array of numbers."""
    x = as_double(x)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.max(np.abs(x), initial=0.0)
        if scale == 0 or not np.isfinite(scale):
            return float(scale)
        return float(scale * np.linalg.norm((x / scale).ravel()))


def are_finite(arrays: Iterable[Any]) -> bool:
    return all(np.isfinite(norm(x)) for x in arrays)


def size_of_all(arrays: Iterable[Any]) -> float:
    return norm(list(map(norm, arrays)))


def scale_of(x: Any, least: float = 0.0) -> np.ndarray:
    """The sizes of the entries. An entry that is zero gets the size of a usual entry. An entry
    that is not finite gets zero, since it can't be moved.

    - `least`: the smallest size, relative to a usual entry.
    """
    x = np.abs(np.asarray(x))
    is_finite = np.isfinite(x)
    sizes = np.where(is_finite, x, 0)
    usual = norm(sizes) / max(np.sqrt(is_finite.sum()), 1) or 1.0
    if least:
        return np.maximum(sizes, least * usual)
    return np.where(is_finite & (x == 0), usual, sizes)


def pairing(xs: Sequence[Any], ys: Sequence[Any]) -> float:
    """JAX's pairing of tangents and cotangents: the real part of the sum of products, without
    conjugation."""
    terms = [np.real(np.sum(as_double(x) * as_double(y))) for x, y in zip(xs, ys, strict=True)]
    return float(np.sum(terms))


def as_double(x: Any) -> np.ndarray:
    """A float64 array, or a complex128 one."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


@dataclasses.dataclass(frozen=True)
class Difference:
    """By how much an array of a list differs from the expected one.

    - `error`: what a tolerance is compared with: relative to the size of the array, and to a
        small part of the size of all arrays, which may have rounding errors of that size.
    """

    name: str
    error: float
    expected: np.ndarray
    got: np.ndarray

    @property
    def is_missing(self) -> bool:
        """Whether an array that is wrong is zero everywhere."""
        return not np.any(self.got)


def differences(
    expected: Sequence[Any],
    got: Sequence[Any],
    names: Sequence[str],
    entrywise: bool = True,
    scale: float | Sequence[float] = 0.0,
    small: float = _SMALL,
) -> list[Difference]:
    """The difference of each leaf, the largest error first. A NaN or an infinity that is not
    expected is an infinite error. A leaf may have the rounding error of one of this part,
    `small`, of the size of all."""
    scales = np.broadcast_to(scale, len(names))
    overall = max((norm(_finite(x)) for x in expected), default=0.0)
    found = []
    for name, w, g, extra in zip(names, expected, got, scales, strict=True):
        error = _error(as_double(w), as_double(g), entrywise, extra + small * overall)
        found.append(Difference(name, error, np.asarray(w), np.asarray(g)))
    found.sort(key=lambda difference: -difference.error)
    return found or [Difference("", 0.0, np.zeros(()), np.zeros(()))]


def difference(*args: Any, **kwargs: Any) -> Difference:
    """The one of `differences` with the largest error."""
    return differences(*args, **kwargs)[0]


def relative_error(expected: Sequence[Any], got: Sequence[Any], **options: Any) -> float:
    return difference(expected, got, [""] * len(expected), **options).error


def _finite(x):
    return np.where(np.isfinite(x), x, 0.0)


def _error(want, have, entrywise, scale) -> float:
    if np.iscomplexobj(want) or np.iscomplexobj(have):  # one part may be NaN alone
        want, have = (np.stack([x.real, x.imag]) for x in (want, have))
    odd = ~np.isfinite(want)
    if want.shape != have.shape or not np.array_equal(want[odd], have[odd], equal_nan=True):
        return math.inf
    want, have = _finite(want), np.where(odd, 0.0, have)
    gap, size = have - want, norm(want) + scale
    if not np.all(np.isfinite(gap)):
        return math.inf
    if size == 0:
        return norm(gap)
    error = norm(gap) / size
    if entrywise and want.size:
        rms = size / np.sqrt(want.size)
        error = max(error, float(np.max(np.abs(gap) / (np.abs(want) + rms))) / _ENTRY)
    return error


def assert_trees_close(
    got: Any,
    expected: Any,
    *,
    tolerance: float | None = None,
    entrywise: bool = True,
    scale: float = 0.0,
) -> None:
    """Assert that two trees of arrays have the same structure, shapes, dtypes and values.

    The error of a leaf is $\\lVert got - expected \\rVert / \\lVert expected \\rVert$ with the
    two-norm, and does not grow with the number of entries: if each of a thousand
    entries is 1 % off, the error is 1 %. NaN and infinity are equal to themselves only.

    !!! example

        ```python
        import eqx_grads.testing as eqgt
        import jax.numpy as jnp

        eqgt.assert_trees_close({"a": jnp.ones(3)}, {"a": jnp.ones(3) + 1e-7})
        ```

    **Arguments:**

    - `got`, `expected`: the trees. Leaves that are not arrays are compared with `==`.
    - `tolerance`: the largest error that passes. By default, the error that rounding explains
        in the dtype of lowest precision: 1e-7 for float64, 3e-5 for float32, 2e-2 for
        float16, 8e-2 for bfloat16.
    - `entrywise`: also look for single wrong entries, which do not show in the norm of a large
        array. No entry may be off by more than 30 times the tolerance, relative to itself and
        the root mean square of all.
    - `scale`: a number that is added to $\\lVert expected \\rVert$ in the error. If larger
        numbers have canceled, pass their size.

    **Raises:**

    `AssertionError`, with the path of the worst leaf.
    """
    check_flags("assert_trees_close", entrywise=entrywise)
    check_tolerance("assert_trees_close", tolerance)
    check_nonnegative_number("assert_trees_close", scale=scale)
    found = aligned(got, expected)
    if isinstance(found, str):
        raise AssertionError(found)
    names, want, have = found
    worst = difference(want, have, names, entrywise, scale)
    limit = tolerance_of(want) if tolerance is None else tolerance
    if not worst.error <= limit:
        raise AssertionError(
            f"At {worst.name}: the relative error is {worst.error:.2g}, "
            f"more than {limit:.2g}.\n{side_by_side(worst)}"
        )


def aligned(
    got: Any, expected: Any, root: str = ""
) -> tuple[list[str], list[Any], list[Any]] | str:
    """The names of the numbers in two trees, the numbers of `expected` and of `got`; or where
    the trees differ otherwise."""
    text = "expected {}, got {}"
    if why := unlike(expected, got, root or "the tree", text, _kind):
        return f"A{why[0][1:]}."
    flat = jax.tree_util.tree_leaves_with_path(expected)
    leaves = zip(flat, jax.tree.leaves(got), strict=True)
    found = [(root + show_path(path), y, x) for (path, y), x in leaves if is_number(y)]
    names, want, have = map(list, zip(*found, strict=True)) if found else ([], [], [])
    return [name or "the only leaf" for name in names], want, have


def is_number(x: Any) -> bool:
    """Whether a leaf is an array of numbers (not of keys)."""
    if isinstance(x, bool | int | float | complex | np.ndarray | np.generic):
        return True
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _kind(x: Any) -> Any:
    """Equal for leaves that are compared as numbers, and for others that are equal."""
    if is_number(x):
        return np.shape(x), jnp.result_type(x)
    is_key = isinstance(x, jax.Array)
    return (x.dtype, jax.random.key_data(x).tolist()) if is_key else (x,)


_WIDTH = 13  # of a column of numbers, at least


def side_by_side(worst: Difference, n: int = 4) -> str:
    """A table of the entries that differ most."""
    shown = np.atleast_1d(worst.expected, worst.got)
    if shown[0].shape != shown[1].shape:
        return f"  expected shape {shown[0].shape}, got {shown[1].shape}"
    want, have = map(as_double, shown)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.nan_to_num(np.abs(have - want), nan=np.inf, posinf=np.inf)
    # Both may be infinite, or NaN.
    gap[(want == have) | (np.isnan(want) & np.isnan(have))] = 0.0
    rows: list[Any] = [("entry", "expected", "got")]
    for i in np.argsort(-gap.ravel(), kind="stable")[:n]:
        place = np.unravel_index(i, want.shape)
        texts = [str(x[place]) for x in shown]
        if shown[0].dtype.kind not in "biu":
            texts = [f"{x[place]:.7g}" for x in (want, have)]
            if texts[0] == texts[1] and gap[place] > 0:  # as many digits as show the difference
                texts = [f"{x[place]:.17g}" for x in (want, have)]
        rows.append((str([int(k) for k in place]), *texts))
    size = max(_WIDTH, *(len(text) for row in rows for text in row[1:]))
    entry = lambda text: f"  {text:>{_WIDTH + 1}}" if worst.expected.ndim else ""
    return "\n".join(f"{entry(e)}  {left:>{size}}  {right:>{size}}" for e, left, right in rows)
