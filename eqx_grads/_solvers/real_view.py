"""PyTrees of floats, complex ones and half precision included, as lists of real arrays.

A linear solver works in one real dtype. A complex function need not be holomorphic, and then
its derivative is linear over the real numbers only: a complex element is two real ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


class RealView:
    """To and from lists of real arrays, for trees of these shapes and dtypes.

    `None` is no leaf. The real arrays are of `dtype`, which is `float32` unless a tree given to
    `working_dtype` holds double precision.
    """

    def __init__(self, like: PyTree[Any], dtype: Any):
        leaves, self._treedef = jax.tree.flatten(like)
        self._dtypes = [x.dtype for x in leaves]
        self._dtype = dtype
        self.types = [
            jax.ShapeDtypeStruct(x.shape, dtype)
            for x in leaves
            for _ in range(2 if _is_complex(x.dtype) else 1)
        ]

    @property
    def size(self) -> int:
        return sum(x.size for x in self.types)

    @property
    def has_complex(self) -> bool:
        return any(map(_is_complex, self._dtypes))

    def to_real(self, tree: PyTree[Array]) -> list[Array]:
        arrays = []
        for x in jax.tree.leaves(tree):
            parts = (jnp.real(x), jnp.imag(x)) if _is_complex(x.dtype) else (x,)
            arrays += [part.astype(self._dtype) for part in parts]
        return arrays

    def from_real(self, arrays: list[Array]) -> PyTree[Array]:
        rest = iter(arrays)
        leaves = []
        for dtype in self._dtypes:
            x = next(rest)
            x = jax.lax.complex(x, next(rest)) if _is_complex(dtype) else x
            leaves.append(x.astype(dtype))
        return jax.tree.unflatten(self._treedef, leaves)

    def zeros(self) -> list[Array]:
        return [jnp.zeros(x.shape, x.dtype) for x in self.types]


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def working_dtype(*trees: PyTree[Any]) -> np.dtype:
    """Single precision, or double if any leaf is double."""
    digits = [jnp.finfo(x.dtype).bits for x in jax.tree.leaves(trees)]
    return np.dtype(np.float64 if max(digits, default=32) > 32 else np.float32)


def real_map(
    fn: Callable[[PyTree[Array]], PyTree[Array]], domain: RealView, codomain: RealView
) -> Callable[[list[Array]], list[Array]]:
    """A linear function of trees, as one of lists of real arrays."""
    return lambda arrays: codomain.to_real(fn(domain.from_real(arrays)))
