"""A loss of tokens whose arguments are sharded over the explicit axes of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec, reshard

from .._rules.explicit_sharding import gathered
from ._linear_cross_entropy_rules import Options


def on_explicit_axes(
    fn: Callable[..., Any],
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    class_weight: jax.Array | None,
    labels: jax.Array,
    *,
    options: Options,
) -> Any:
    """`fn(x, weight, bias, class_weight, labels, options=options)`: sums over tokens, or arrays
    with an element for each.

    If the type of `x` or of `weight` is sharded over explicit axes, each device calls `fn` on
    its tokens and its part of the vocabulary, in a `jax.shard_map`. So the gradient of the
    weight is summed over the devices once, and not once for each chunk. Along an axis that
    shards both the tokens and the vocabulary, the weight is gathered. So are features.
    """
    args, is_sum = (x, weight, bias, class_weight, labels), options.reduction != "none"
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return fn(*args, options=options)
    batch = _axes_by_dimension(x, explicit)[:-1]
    of_tokens = tuple(name for names in batch for name in names)
    rows = _axes_by_dimension(weight, explicit)[0]
    vocabulary = tuple(name for name in rows if name not in of_tokens)
    if not of_tokens and not vocabulary:
        return fn(*jax.tree.map(gathered, args), options=options)
    rows = PartitionSpec(vocabulary)
    each = PartitionSpec(*batch)
    columns = each if labels.ndim < x.ndim else PartitionSpec(*batch, vocabulary)
    specs = (PartitionSpec(*batch, None), PartitionSpec(vocabulary, None), rows, rows, columns)
    pairs = zip(args, specs, strict=True)
    args = [None if arg is None else reshard(arg, spec) for arg, spec in pairs]

    def local(*args):
        out = fn(*args, options=options._replace(axes=vocabulary, token_axes=of_tokens))
        return jax.lax.psum(out, of_tokens) if is_sum and of_tokens else out

    out_specs = PartitionSpec() if is_sum else each
    return jax.shard_map(local, in_specs=specs, out_specs=out_specs, axis_names=explicit)(*args)


def _axes_by_dimension(x: jax.Array, explicit: set[Any]) -> list[tuple[Any, ...]]:
    """The explicit axes of the mesh over which each dimension of `x` is sharded."""
    spec = jax.typeof(x).sharding.spec
    entries = [*spec, *([None] * (x.ndim - len(spec)))]
    as_tuple = lambda e: e if isinstance(e, tuple) else () if e is None else (e,)
    return [tuple(name for name in as_tuple(e) if name in explicit) for e in entries]
