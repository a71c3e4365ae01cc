"""Finite scalar quantization as a layer."""

from collections.abc import Sequence

import equinox as eqx
import numpy as np
from jaxtyping import Array, DTypeLike, Integer, Key

from ... import ste
from ..._rules.float_args import as_levels
from .codebook import AbstractCodebook, as_axis
from .quantizer import Floats


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
