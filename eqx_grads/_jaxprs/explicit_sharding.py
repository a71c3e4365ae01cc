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


def gathered(x: jax.Array) -> jax.Array:
    """`x`, the whole of it on each device."""
    return x if explicit_spec(x) is None else distribute_like(x, x, (None,) * x.ndim)


def batch_of_copies(x: jax.Array, size: int, like: Any) -> jax.Array:
    """`x` for each of `size` examples, distributed as the first axis of an array of examples,
    `like`, is."""
    copies = jnp.broadcast_to(x[None], (size, *x.shape))
    of_like = explicit_spec(like)
    if of_like is None:
        return copies
    spec = explicit_spec(x) or (None,) * x.ndim
    return distribute_like(copies, like, (of_like[0], *spec))


def rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` for a matrix, distributed as `index` is."""
    of_index = explicit_spec(index)
    if of_index is None:
        return table[index]
    spec = explicit_spec(table) or (None, None)
    return table.at[index].get(out_sharding=sharding_like(index, (*of_index, spec[1])))


def add_rows(table: jax.Array, index: jax.Array, terms: jax.Array) -> jax.Array:
    """`table` with terms added to the rows of this `index`: a sum over the devices, if the
    terms are distributed."""
    if explicit_spec(index) is None:
        return table.at[index].add(terms)
    spec = explicit_spec(table) or (None,) * table.ndim
    return table.at[index].add(terms, out_sharding=sharding_like(index, spec))
