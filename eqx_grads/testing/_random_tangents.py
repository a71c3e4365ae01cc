"""Random tangents and cotangents, the same for the same seed."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._tangent_spaces import is_arraylike, is_differentiable
from ._options import as_seed


def random_tangent(primal: PyTree, *, seed: int = 0) -> PyTree:
    """Return a random tangent (or cotangent) of a value, with `None` for leaves that have no
    tangent.

    The entries are normally distributed.

    !!! example

        ```python
        import eqx_grads.testing as eqgt
        import jax.numpy as jnp

        tangent = eqgt.random_tangent({"x": jnp.ones(3), "n": 2}, seed=1)
        print(tangent["x"].shape, tangent["n"])
        ```

        ```text
        (3,) None
        ```

    **Arguments:**

    - `primal`: any PyTree.
    - `seed`: the same seed gives the same tangent.

    **Returns:**

    A tree like `primal`, with arrays of the same shapes and dtypes for floating-point leaves.
    """
    rng = np.random.default_rng(as_seed("random_tangent", seed))

    def random(x):
        if not (is_arraylike(x) and is_differentiable(x)):
            return None
        x = jnp.asarray(x)
        return jnp.asarray(normal(rng, x.shape, x.dtype))

    return jax.tree.map(random, primal)


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Normal numbers, each rounded to `dtype`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real, imag = (normal(rng, shape, np.float64) for _ in range(2))
        return np.asarray(real + 1j * imag).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def normal_like(
    rng: np.random.Generator, arrays: Sequence[Any], most: float = np.inf
) -> list[Any]:
    """Normal numbers like some arrays, none larger than `most`."""
    drawn = [normal(rng, np.shape(x), x.dtype) for x in arrays]
    return [(t / np.maximum(1, np.abs(t) / most)).astype(t.dtype) for t in drawn]


def only(vectors: Sequence[Any], kept: Sequence[int]) -> list[Any]:
    """The same vectors, with zeros for those whose index is not in `kept`."""
    return [v if i in kept else np.zeros_like(v) for i, v in enumerate(vectors)]
