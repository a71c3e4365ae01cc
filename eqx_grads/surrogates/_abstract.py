"""Base class of the surrogates that are given by a formula."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._errors import rule_error, type_of
from .._rules import float_args
from .._tangent_spaces import broadcasts_to
from ._spike import AbstractSurrogate


class AbstractFormula(AbstractSurrogate):
    """Two formulas, evaluated in at least single precision and rounded to the dtype of `v`."""

    @abc.abstractmethod
    def _derivative(self, v: Any) -> Any:
        """The derivative at `v`, where `v` and all fields are arrays of one dtype."""

    @abc.abstractmethod
    def _primitive(self, v: Any) -> Any:
        """The primitive at `v`, where `v` and all fields are arrays of one dtype."""

    def derivative(self, v: ArrayLike) -> Array:
        """As in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        v, surrogate, wide = _widen(self, v)
        return surrogate._derivative(wide).astype(v.dtype)

    def primitive(self, v: ArrayLike) -> Array:
        """As in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        v, surrogate, wide = _widen(self, v)
        return surrogate._primitive(wide).astype(v.dtype)


def _widen(surrogate, v):
    """`v` as an array; the surrogate and `v` in the precision of the computation."""
    v = float_args.as_floats(_name(surrogate), v, "v")
    wide = float_args.widen(v)
    for field in dataclasses.fields(surrogate):
        x = getattr(surrogate, field.name)
        if not broadcasts_to(jnp.shape(x), v.shape):
            raise rule_error(
                f"The `{field.name}` of `{_name(surrogate)}` does not broadcast to `v`.",
                f"`v` is {type_of(v)}, `{field.name}` is {type_of(x)}",
                do="Give it a number, or an array with ones for the axes that share it.",
            )
    fields = jax.tree.map(lambda x: jnp.asarray(x).astype(wide.dtype), surrogate)
    return v, fields, wide


def check_fields(surrogate: AbstractFormula, *, positive: Sequence[str]) -> None:
    """Raise if a field is not a real number, or if one of these is not positive."""
    for field in dataclasses.fields(surrogate):
        check = float_args.check_parameter
        if field.name in positive:
            check = float_args.check_positive
        check(_name(surrogate), field.name, getattr(surrogate, field.name))


def _name(surrogate):
    return f"surrogates.{type(surrogate).__name__}"
