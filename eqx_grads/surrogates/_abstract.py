"""Base class of the surrogates that are given by a formula: the formula of the primitive."""

import abc
import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from .._errors import rule_error, type_of
from .._rules import float_args
from .._tangent_spaces import broadcasts_to
from ._spike import AbstractSurrogate


positive = ft.partial(eqx.field, metadata={"is_positive": True})


class AbstractFormula(AbstractSurrogate):
    """One formula, evaluated in at least single precision and rounded to the dtype of `v`. It
    has the derivative of the formula."""

    @abc.abstractmethod
    def _primitive(self, v: Any) -> Any:
        """The primitive at `v`, where `v` and all fields are arrays of one dtype."""

    def __check_init__(self):
        for field in dataclasses.fields(self):
            check = float_args.check_parameter
            if field.metadata.get("is_positive"):
                check = float_args.check_positive
            check(_name(self), field.name, getattr(self, field.name))

    def derivative(self, v: ArrayLike) -> Array:
        """As in [`eqx_grads.surrogates.AbstractSurrogate`][]."""
        v, surrogate, wide = _widen(self, v)
        slope = jax.jvp(surrogate._primitive, (wide,), (jnp.ones_like(wide),))[1]
        return slope.astype(v.dtype)

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


def _name(surrogate):
    return f"surrogates.{type(surrogate).__name__}"
