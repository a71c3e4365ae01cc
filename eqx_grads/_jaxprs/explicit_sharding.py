"""How arrays are distributed over the explicit axes of a mesh, which is a part of their types.

Where a mesh axis is explicit, JAX does not choose how values are distributed: an operation
whose operands are distributed in different ways is an error, and so is a loop whose carry
changes. See https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


Spec = tuple[Any, ...]


def explicit_spec(x: Any) -> Spec | None:
    """For each axis of `x`, the explicit mesh axes over which it is distributed; `None` if no
    mesh axis is explicit, and the compiler chooses."""
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.explicit_axes:
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (jnp.ndim(x) - len(spec))


def sharding_like(x: Any, spec: Spec | None) -> NamedSharding | None:
    """The sharding of an array with this `spec`, on the mesh of `x`."""
    if spec is None:
        return None
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def distribute_like(x: jax.Array, like: Any, spec: Spec | None) -> jax.Array:
    """`x`, distributed by this `spec` over the mesh of `like`. For `None` the identity."""
    if spec is None or explicit_spec(x) == spec:
        return x
    return jax.sharding.reshard(x, sharding_like(like, spec))
