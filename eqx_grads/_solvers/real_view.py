"""PyTrees of floats, complex ones and half precision included, as real vectors.

A linear solver works in one real dtype. A complex function need not be holomorphic, and then
its derivative is linear over the real numbers only: a complex element is two real ones.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree


class RealView:
    """To and from real vectors of this dtype, for trees with these shapes and dtypes."""

    def __init__(self, like: PyTree[Any], dtype: np.dtype):
        self.like = like
        self.dtype = dtype
        leaves, self._treedef = jax.tree.flatten(like)
        self._dtypes = [x.dtype for x in leaves]
        self.has_complex = any(map(_is_complex, self._dtypes))
        self._shapes = [x.shape for x in leaves for _ in range(1 + _is_complex(x.dtype))]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.size = sum(self._sizes)

    def to_arrays(self, tree: PyTree[Array]) -> list[Array]:
        """The leaves, with the imaginary part after the real part."""
        arrays = []
        for x in jax.tree.leaves(tree):
            parts = (jnp.real(x), jnp.imag(x)) if _is_complex(x.dtype) else (x,)
            arrays += [part.astype(self.dtype) for part in parts]
        return arrays

    def from_arrays(self, arrays: list[Array]) -> PyTree[Array]:
        rest = iter(arrays)
        leaves = []
        for dtype in self._dtypes:
            x = next(rest)
            x = jax.lax.complex(x, next(rest)) if _is_complex(dtype) else x
            leaves.append(x.astype(dtype))
        return jax.tree.unflatten(self._treedef, leaves)

    def to_vector(self, tree: PyTree[Array]) -> Float[Array, " n"]:
        arrays = [x.reshape(-1) for x in self.to_arrays(tree)]
        return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)

    def from_vector(self, vector: Float[Array, " n"]) -> PyTree[Array]:
        parts = jnp.split(vector, np.cumsum(self._sizes[:-1]))
        pairs = zip(parts, self._shapes, strict=True)
        return self.from_arrays([x.reshape(shape) for x, shape in pairs])


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def working_dtype(*trees: PyTree[Any]) -> np.dtype:
    """Single precision, or double if any leaf is double."""
    bits = [jnp.finfo(x.dtype).bits for x in jax.tree.leaves(trees)]
    return np.dtype(np.float64 if max(bits, default=32) > 32 else np.float32)
