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
    """A random tangent (or cotangent) of a value, with `None` for leaves that have no tangent.

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


def normal_like(rng: np.random.Generator, arrays: Sequence[Any]) -> list[Any]:
    return [normal(rng, np.shape(x), x.dtype) for x in arrays]


def basis(arrays: Sequence[Any], limit: int) -> list[list[Any]] | None:
    """All unit vectors, or `None` if there are more than `limit`."""
    sizes = [int(np.size(x)) * (2 if jnp.iscomplexobj(x) else 1) for x in arrays]
    if sum(sizes) > limit:
        return None
    vectors = []
    for number, x in enumerate(arrays):
        for i in range(sizes[number]):
            zeros = [np.zeros(np.shape(y), y.dtype) for y in arrays]
            flat = zeros[number].reshape(-1)
            flat[i % flat.size] = 1 if i < flat.size else 1j
            zeros[number] = flat.reshape(np.shape(x))
            vectors.append(zeros)
    return vectors


def basis_names(arrays: Sequence[Any], names: Sequence[str]) -> list[str]:
    """What the vectors of `basis` are called: the entry that is one. `names` are those of the
    arrays, which are said if there are several."""
    found = []
    for name, x in zip(names, arrays, strict=True):
        units = ("unit", "imaginary unit") if jnp.iscomplexobj(x) else ("unit",)
        for unit in units:
            for place in np.ndindex(np.shape(x)):
                entry = name if len(arrays) > 1 else ""
                entry += str(list(place)) if place else ""
                found.append(f"{unit} {entry}".strip())
    return found


def only(vectors: Sequence[Any], kept: Sequence[int]) -> list[Any]:
    """The same vectors, with zeros for those whose index is not in `kept`."""
    return [v if i in kept else np.zeros_like(v) for i, v in enumerate(vectors)]
