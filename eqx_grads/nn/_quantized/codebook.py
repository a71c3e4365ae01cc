"""Layers with a codebook: vectors along an axis and the codes of indices; a codebook that is
fixed."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Integer, Key

from ... import ste
from ..._errors import bad_argument, rule_error, type_of
from ..._rules.float_args import as_floats, as_integer, as_levels
from ..._tangent_spaces import dtype_of_array
from .quantizer import Floats


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
            name, do = type(self).__name__, f"Give integers of {-self.axis - 1} axes or more."
            raise bad_argument(f"{name}.decode", "indices", "an array of them", indices, do)
        options = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
        return self._put_back(codebook.at[jnp.asarray(indices)].get(**options))


def as_axis(layer: str, axis: Any) -> int:
    """An axis that is counted from the end."""
    known = as_integer(axis)
    if known is None or known >= 0:
        do = "Give a negative one, the same axis for a batch: -3 for images, channels first."
        raise bad_argument(layer, "axis", "an axis counted from the end", axis, do)
    return known


class FSQ(AbstractCodebook):
    """Finite scalar quantization: a codebook that needs no training.

    [Mentzer et al. (2024)](https://arxiv.org/abs/2309.15505).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        fsq = eqg.nn.FSQ((8, 5, 5))
        z = jax.random.normal(jax.random.key(0), (100, 3))
        codes, indices = fsq.quantize(z)
        print(jnp.array_equal(codes, fsq(z)))
        print(jnp.array_equal(codes, fsq.decode(indices)))
        print(fsq.num_codes, indices.max() < fsq.num_codes)
        ```

        ```text
        True
        True
        200 True
        ```

    **Derivative:**

    The derivative of [`eqx_grads.ste.fsq`][].
    """

    levels: tuple[int, ...] = eqx.field(static=True)
    axis: int = eqx.field(static=True)

    def __init__(self, levels: Sequence[int], *, axis: int = -1):
        """**Arguments:**

        - `levels`: the number of levels for each number of a vector, as for
            [`eqx_grads.ste.fsq`][].
        - `axis`: the axis of the vectors, counted from the end: -3 for images with channels
            first, with or without a batch axis.
        """
        self.levels = as_levels("FSQ", levels)
        self.axis = as_axis("FSQ", axis)

    def __call__(self, z: Floats, *, key: Key[Array, ""] | None = None) -> Floats:
        """**Arguments:**

        - `z`: floats, with `len(levels)` of them along `axis`.
        - `key`: ignored.

        **Returns:**

        The codes: an array like `z`, of numbers from -1 to 1.
        """
        del key
        return self.quantize(z)[0]

    def quantize(self, z: Floats) -> tuple[Floats, Integer[Array, "..."]]:
        """The codes, and their indices, in the shape of `z` without its `axis`."""
        codes, indices = ste.fsq(self._vectors_last(z, len(self.levels)), self.levels)
        return self._put_back(codes), indices

    def decode(self, indices: Integer[Array, "..."], *, dtype: DTypeLike = float) -> Floats:
        """The codes of some indices; NaN for an index without a code."""
        return self._codes(ste.fsq_codebook(self.levels, dtype), indices)

    @property
    def num_codes(self) -> int:
        """The size of the codebook, the product of `levels`."""
        return int(np.prod(self.levels))
