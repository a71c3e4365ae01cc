"""A surrogate that is a formula: half precision is computed in single precision."""

import abc
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._errors import rule_error
from ._spike import AbstractSurrogate, as_floats


# A number is a constant; an array can be learned.
Parameter: TypeAlias = float | int | np.floating | np.ndarray | Array


class AbstractFormula(AbstractSurrogate):
    """Half precision is computed in single precision, and then rounded."""

    @abc.abstractmethod
    def _derivative(self, v: Any) -> Any:
        """The bump, where `v` and the fields are arrays of one dtype."""

    @abc.abstractmethod
    def _primitive(self, v: Any) -> Any:
        """The smooth step, likewise."""

    def derivative(self, v: ArrayLike) -> Array:
        """The bump, as in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        v = as_floats(v)
        wide, v_wide = _widened(self, v)
        return wide._derivative(v_wide).astype(v.dtype)

    def primitive(self, v: ArrayLike) -> Array:
        """The smooth step, as in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        v = as_floats(v)
        wide, v_wide = _widened(self, v)
        return wide._primitive(v_wide).astype(v.dtype)


def _widened(surrogate, v):
    dtype = v.dtype if jnp.finfo(v.dtype).bits >= 32 else jnp.float32
    cast = lambda x: jnp.asarray(x).astype(dtype)
    return jax.tree.map(cast, surrogate), cast(v)


def check_positive(surrogate: AbstractSurrogate, *names: str) -> None:
    """Raise if a field is a number, and so can be looked at, that is not positive."""
    for name in names:
        field = getattr(surrogate, name)
        if isinstance(field, float | int | np.ndarray | np.generic) and not np.all(
            np.asarray(field) > 0
        ):
            raise rule_error(
                f"The {name} of `{type(surrogate).__name__}` is not positive.",
                f"it is {field!r:.80}",
                do=f"Give it a positive {name}.",
            )
