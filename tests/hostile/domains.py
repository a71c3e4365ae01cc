"""The values that an argument may have, as its documentation says: predicates of a value.

A traced array counts as one with the right values, as only its shape and dtype are known.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


Domain = Callable[[Any], bool]


# ---------------------------------------------------------------- numbers


def _dtype(x):
    """The dtype that JAX gives to a number or an array of numbers; `None` for all else."""
    if isinstance(x, np.ma.MaskedArray):
        return None
    if isinstance(x, jax.Array):
        return x.dtype
    if isinstance(x, np.ndarray | np.generic | bool | int | float | complex):
        kind = np.asarray(x).dtype
        if kind.kind not in "biufc" or (kind.kind in "iu" and not _fits(x)):
            return None
        return jax.dtypes.canonicalize_dtype(kind)
    return None


def _fits(x):
    bounds = np.iinfo(jax.dtypes.canonicalize_dtype(int))
    return bool(np.all((np.asarray(x) >= bounds.min) & (np.asarray(x) <= bounds.max)))


def _is(x, *kinds):
    dtype = _dtype(x)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _values(x, holds):
    """Whether a condition holds for all values, as far as they are known."""
    return isinstance(x, jax.core.Tracer) or bool(np.all(holds(np.asarray(x))))


def floats(x: Any) -> bool:
    return _is(x, jnp.floating)


def reals(x: Any) -> bool:
    return _is(x, jnp.floating, jnp.integer)


def inexact(x: Any) -> bool:
    return _is(x, jnp.inexact)


def numbers(x: Any) -> bool:
    return _is(x, jnp.number, jnp.bool_)


def bools(x: Any) -> bool:
    return _is(x, jnp.bool_)


def integers(x: Any) -> bool:
    return _is(x, jnp.integer)


def positive(x: Any) -> bool:
    return reals(x) and _values(x, lambda x: x > 0)


def not_negative(x: Any) -> bool:
    return reals(x) and _values(x, lambda x: x >= 0)


def not_nan(x: Any) -> bool:
    return reals(x) and _values(x, lambda x: ~np.isnan(x))


def finite_positive(x: Any) -> bool:
    return positive(x) and _values(x, np.isfinite)


def between(low: float, high: float, of: Domain = reals) -> Domain:
    return lambda x: of(x) and _values(x, lambda x: (x >= low) & (x <= high))


# ---------------------------------------------------------------- shapes


def shaped(domain: Domain, *shape: int | None) -> Domain:
    """Of this shape, `None` being any size."""

    def holds(x):
        if not domain(x) or np.ndim(x) != len(shape):
            return False
        return all(n in (None, m) for n, m in zip(shape, np.shape(x), strict=True))

    return holds


def broadcasting(domain: Domain, *shape: int) -> Domain:
    """A shape that broadcasts together with this one."""

    def holds(x):
        try:
            return domain(x) and np.broadcast_shapes(np.shape(x), shape) is not None
        except ValueError:
            return False

    return holds


def broadcasting_to(domain: Domain, *shape: int) -> Domain:
    """A shape that broadcasts to this one."""
    together = broadcasting(domain, *shape)
    return lambda x: together(x) and np.broadcast_shapes(np.shape(x), shape) == shape


def ranked(domain: Domain, *ranks: int) -> Domain:
    return lambda x: domain(x) and np.ndim(x) in ranks


def scalar(domain: Domain) -> Domain:
    return ranked(domain, 0)


def at_least(domain: Domain, rank: int) -> Domain:
    return lambda x: domain(x) and np.ndim(x) >= rank


def ending(domain: Domain, *shape: int) -> Domain:
    """With these last axes."""
    n = len(shape)
    return lambda x: domain(x) and np.ndim(x) >= n and np.shape(x)[-n:] == shape


# ---------------------------------------------------------------- options


def anything(x: Any) -> bool:
    return True


def is_none(x: Any) -> bool:
    return x is None


def either(*domains: Domain) -> Domain:
    return lambda x: any(domain(x) for domain in domains)


def optional(domain: Domain) -> Domain:
    return either(is_none, domain)


def flag(x: Any) -> bool:
    return isinstance(x, bool | np.bool_)


def one_of(*names: Any) -> Domain:
    return lambda x: isinstance(x, str | type(None)) and x in names


def integer(low: int = -(2**31), high: int = 2**31 - 1) -> Domain:
    """An integer of Python or NumPy that is known."""

    def holds(x):
        if isinstance(x, bool | np.bool_) or not isinstance(x, int | np.integer):
            return isinstance(x, jax.Array) and _known_integer(x, low, high)
        return bool(low <= x <= high)

    return holds


def _known_integer(x, low, high):
    """`operator.index` takes an array with one integer, if it is not traced."""
    if isinstance(x, jax.core.Tracer) or x.ndim or not jnp.issubdtype(x.dtype, jnp.integer):
        return False
    return low <= int(x) <= high


size = integer(1, 10**40)


def number(low: float = -np.inf, high: float = np.inf) -> Domain:
    """A real number in an interval, or an array that holds one, if it is known."""

    def holds(x):
        if isinstance(x, int):
            return not isinstance(x, bool) and bool(low <= x <= high)
        is_known = reals(x) and np.ndim(x) == 0 and not isinstance(x, jax.core.Tracer)
        return is_known and bool(low <= np.asarray(x) <= high)

    return holds


def axis(ndim: int) -> Domain:
    return integer(-ndim, ndim - 1)


def axes(ndim: int) -> Domain:
    """An axis, or several different ones, or `None` for all."""
    one = axis(ndim)

    def holds(x):
        if x is None or one(x):
            return True
        if not isinstance(x, tuple | list | range) or not all(one(i) for i in x):
            return False
        return len({int(i) % ndim for i in x}) == len(x)

    return holds


def function(x: Any) -> bool:
    return callable(x) and not isinstance(x, type)


def key(x: Any) -> bool:
    """One key, of either kind."""
    if not isinstance(x, jax.Array):
        return False
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x.shape == ()
    return x.dtype == jnp.uint32 and x.shape in ((2,), (4,))


def dtype(*kinds: Any) -> Domain:
    """A dtype of one of the kinds, or `None`, which is not a dtype here."""

    def holds(x):
        if x is None or isinstance(x, np.ndarray | jax.Array | list | tuple | dict):
            return False
        try:
            found = jnp.dtype(x)
        except TypeError:
            return False
        return any(jnp.issubdtype(found, kind) for kind in kinds)

    return holds


float_dtype = optional(dtype(jnp.floating))


def tree_of(domain: Domain) -> Domain:
    """A PyTree whose leaves are all in the domain."""
    return lambda x: all(domain(leaf) for leaf in jax.tree.leaves(x))


def no_floats(x: Any) -> bool:
    """A PyTree that has no tangent."""
    return not any(inexact(leaf) for leaf in jax.tree.leaves(x))


def float_tree(x: Any) -> bool:
    """An array of floats, or a PyTree without complex numbers."""
    if jax.tree_util.all_leaves([x]):
        return floats(x)
    return not any(_is(leaf, jnp.complexfloating) for leaf in jax.tree.leaves(x))


def sine(x: Any) -> bool:
    """The one function among the kinds that maps an array to an array."""
    return x is jnp.sin


def text(x: Any) -> bool:
    return isinstance(x, str)


def of_type(*types: type) -> Domain:
    return lambda x: isinstance(x, types)


def equal(value: tuple[Any, ...]) -> Domain:
    return lambda x: isinstance(x, tuple) and x == value


def empty(x: Any) -> bool:
    return isinstance(x, tuple | list | dict | set | range) and not len(x)


def some_of(domain: Domain) -> Domain:
    """Several values, or none."""

    def holds(x):
        if isinstance(x, Iterator):  # used up before it is checked here
            return True
        several = isinstance(x, tuple | list | range | set | dict | bytes)
        several = several or (isinstance(x, np.ndarray) and x.ndim > 0)
        return several and all(map(domain, x))

    return holds


def sliced(n: int) -> Domain:
    """A tree of arrays with so many slices, and other leaves."""

    def holds(x):
        is_array = lambda x: hasattr(x, "dtype") and not isinstance(x, jax.ShapeDtypeStruct)
        given = [leaf for leaf in jax.tree.leaves(x) if is_array(leaf)]
        return all(
            isinstance(leaf, jax.Array | np.ndarray) and np.shape(leaf)[:1] == (n,)
            for leaf in given
        )

    return holds
