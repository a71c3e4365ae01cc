"""The sharding of arrays over the explicit axes of a mesh, which is part of their types.

Where a mesh axis is explicit, JAX does not choose shardings: an operation whose operands have
shardings that do not fit together is an error, and so is a loop that changes the sharding of
its carry. See https://docs.jax.dev/en/latest/notebooks/explicit-sharding.html.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .custom_jvp import custom_jvp


Spec = tuple[Any, ...]


def is_explicit(x: Any) -> bool:
    """Whether an axis of the mesh of `x` is explicit. Otherwise the compiler chooses."""
    return bool(jax.typeof(x).sharding.mesh.explicit_axes)


def explicit_spec(x: Any) -> Spec:
    """For each axis of `x`, the explicit mesh axes over which it is sharded, or `None`."""
    spec = tuple(jax.typeof(x).sharding.spec) if is_explicit(x) else ()
    return spec + (None,) * (jnp.ndim(x) - len(spec))


def sharding_like(x: Any, spec: Spec) -> NamedSharding | None:
    """The sharding of an array with this `spec`, on the mesh of `x`."""
    if not is_explicit(x):
        return None
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))


def distribute_like(x: jax.Array, like: Any, spec: Spec) -> jax.Array:
    """`x`, sharded by this `spec` over the mesh of `like`, if that has an explicit axis."""
    sharding = sharding_like(like, spec)
    if sharding is None or (is_explicit(x) and explicit_spec(x) == spec):
        return x
    return jax.sharding.reshard(x, sharding)


def gathered(x: jax.Array) -> jax.Array:
    """`x`, replicated on each device."""
    return distribute_like(x, x, (None,) * x.ndim)


def gathered_leaves(tree: Any) -> Any:
    """A tree whose arrays are replicated over explicit axes. The cotangent of each array has
    the sharding that the array had."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return tree
    return jax.tree.map(lambda x: gathered(x) if isinstance(x, jax.Array) else x, tree)


def rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[index]` for a matrix, sharded as `index` is."""
    return _explicit_rows(table, index) if is_explicit(index) else table[index]


@custom_jvp
def _explicit_rows(table, index):
    spec = (*explicit_spec(index), explicit_spec(table)[1])
    return table.at[index].get(out_sharding=sharding_like(index, spec))


@_explicit_rows.def_jvp
def _explicit_rows_jvp(primals, tangents):
    _, index = primals
    return _explicit_rows(*primals), _explicit_rows(tangents[0], index)


# JAX asks for an `out_sharding` here, although one was given (JAX 0.10 to 0.12).
@_explicit_rows.def_vmap
def _explicit_rows_vmap(axis_size, batched, table, index):
    table_batched, index_batched = batched
    if not table_batched:
        return _explicit_rows(table, index), True
    if not index_batched:
        index = jnp.broadcast_to(index[None], (axis_size, *index.shape))
    # As rows of all tables, one after another.
    take = jax.vmap(lambda table, index: jnp.take_along_axis(table, index.reshape(-1, 1), 0))
    out = take(table, index)
    return out.reshape(*index.shape, table.shape[-1]), True


def add_rows(table: jax.Array, index: jax.Array, terms: jax.Array) -> jax.Array:
    """`table` with terms added to the rows of this `index`: a sum over the devices, if the
    terms are sharded."""
    if not is_explicit(index):
        return table.at[index].add(terms)
    return table.at[index].add(terms, out_sharding=sharding_like(index, explicit_spec(table)))
