"""Whether a function of float64 arguments is the function of the user's precision.

It is another one if it draws random numbers (`jax.random` draws other bits for float64), or
looks at a dtype. Its derivative in float64 is then no reference for that of the user's.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from .._jaxprs.host_calls import host_function_in
from .._jaxprs.structure import inner_programs
from ._compare import as_real, norm


# Constants of two programs that differ by less are the same number, one of them rounded.
_ROUNDED = 1e-6
# Changes that differ by less are the same but for rounding, and for constants such as
# `jnp.finfo(x.dtype).eps`.
_SAME_CHANGE = 1e-2
_STEP = 2.0**-10


def is_same_program(one: Any, other: Any) -> bool:
    """Whether two traced programs have the same equations with the same numbers in them,
    whatever the dtypes: then they differ in rounding only."""
    pairs = itertools.zip_longest(_items(one), _items(other))
    return all(_is_same_item(a, b) for a, b in pairs)


def _items(program: Any) -> Iterator[Any]:
    for x in program.consts:
        yield _constant(x)
    for eqn in program.eqns:
        if eqn.primitive.name != "convert_element_type":
            numbers = sorted((k, v) for k, v in eqn.params.items() if isinstance(v, int))
            yield f"{eqn.primitive.name} {[v.aval.shape for v in eqn.outvars]} {numbers}"
        for v in eqn.invars:
            if isinstance(v, Literal):
                yield _constant(v.val)
        # What is in the call of a host function depends on the thread, see `host_bits.py`.
        for inner in () if host_function_in(eqn) else inner_programs(eqn):
            yield from _items(inner)


def _constant(x: Any) -> Any:
    if isinstance(x, Tracer):
        # An inner program may hold what the program around it computes (JAX 0.12).
        return str(jnp.shape(x))
    is_number = not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
    return as_real(x if is_number else jax.random.key_data(x))


def _is_same_item(a: Any, b: Any) -> bool:
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and np.allclose(a, b, rtol=_ROUNDED, atol=0.0, equal_nan=True)


def changes_alike(
    one: Callable[[list[Any]], Sequence[Any]],
    other: Callable[[list[Any]], Sequence[Any]],
    leaves: Sequence[Any],
    directions: Sequence[Sequence[Any]],
) -> bool:
    """Whether two functions change by the same amounts near `leaves`. Both compute in float64.

    Values are compared, and no derivatives: rules may be wrong, and the derivative of JAX's
    `relu` at zero is that of a rule.
    """
    moved = [
        [x + _STEP * t for x, t in zip(leaves, tangents, strict=True)]
        for tangents in directions
    ]
    values = []
    for fn in (one, other):
        try:
            values.append([list(map(as_real, fn(xs))) for xs in (list(leaves), *moved)])
        except Exception:  # of the function, which the checks report
            return True
    return all(map(_are_alike, *map(_changes, values)))


def _changes(values: list[list[np.ndarray]]) -> list[np.ndarray]:
    here, *others = values
    with np.errstate(invalid="ignore"):
        return [np.asarray(y - x) for ys in others for x, y in zip(here, ys, strict=True)]


def _are_alike(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    finite = np.isfinite(a)
    return norm(a[finite] - b[finite]) <= _SAME_CHANGE * max(norm(a[finite]), norm(b[finite]))
