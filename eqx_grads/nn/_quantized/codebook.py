"""Layers with a codebook: vectors along an axis, and the codes of indices."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from ..._errors import bad_argument, rule_error, type_of
from ..._rules.float_args import as_floats, as_integer
from ..._tangent_spaces import dtype_of_array


class AbstractCodebook(eqx.Module):
    """Vectors along an axis that is counted from the end."""

    axis: eqx.AbstractVar[int]

    def _vectors_last(self, z: Any, size: int) -> Array:
        """`z` with its vectors, which have this size, along the last axis."""
        name = type(self).__name__
        z = as_floats(name, z, "z")
        if z.ndim < -self.axis or z.shape[self.axis] != size:
            raise rule_error(
                f"`{name}` was given an array without vectors of its size along its axis.",
                f"`z` is {type_of(z)}, `axis` is {self.axis}, and the size is {size}",
                do=f"Give it an array with {size} numbers along that axis, or make it with "
                "another `axis`.",
            )
        return jnp.moveaxis(z, self.axis, -1)

    def _put_back(self, z: Array) -> Array:
        return jnp.moveaxis(z, -1, self.axis)

    def _codes(self, codebook: Array, indices: Any) -> Array:
        """Rows of a codebook; NaN for indices out of range."""
        dtype = dtype_of_array(indices)
        is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
        if not is_integer or jnp.ndim(indices) + 1 < -self.axis:
            raise rule_error(
                f"`{type(self).__name__}.decode` was given something that is not an array of "
                "indices.",
                f"`indices` is {type_of(indices)}, `axis` is {self.axis}",
                do=f"Give it integers, with {-self.axis - 1} axes or more.",
            )
        indices = jnp.asarray(indices)
        if jnp.iinfo(indices.dtype).bits < 32:  # the size may be too large for their dtype
            indices = indices.astype(jnp.int32)
        # JAX counts negative indices from the end, so they are not out of range for it.
        indices = jnp.where(indices < 0, len(codebook), indices)
        return self._put_back(codebook.at[indices].get(mode="fill", fill_value=jnp.nan))


def as_axis(layer: str, axis: Any) -> int:
    """An axis that is counted from the end."""
    known = as_integer(axis)
    if known is None or known >= 0:
        do = "Give a negative one, the same axis for a batch: -3 for images, channels first."
        raise bad_argument(layer, "axis", "an axis counted from the end", axis, do)
    return known
