"""A `jax.shard_map` in a program, run as a `jax.vmap` over its shards."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import ShardMap, structure


def enter_shard_map(
    eqn: Any, values: Sequence[Any], run: Callable[[ClosedJaxpr, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Run the equation with `run(program, values)` instead of its program, which may exchange
    values along the axes of the mesh: `jax.vmap` names its axes as these."""
    known, params = structure(eqn), eqn.params
    assert isinstance(known, ShardMap)
    manual = params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]
    sizes = {name: n for name, n in params["mesh"].shape.items() if name in manual}
    ins, outs = (list(map(_names, params[key])) for key in ("in_specs", "out_specs"))
    fn = lambda *values: tuple(run(*known.programs, values))
    for name in reversed(sizes):
        axes = (
            tuple(0 if any(name in d for d in dims) else None for dims in each)
            for each in (ins, outs)
        )
        fn = jax.vmap(fn, *axes, axis_name=name, axis_size=sizes[name])
    shards = [_split(x, dims, sizes) for x, dims in zip(values, ins, strict=True)]
    return [_joined(x, dims, sizes) for x, dims in zip(fn(*shards), outs, strict=True)]


def of_shards(eqn: Any, values: Sequence[Any]) -> Sequence[Any] | None:
    """The outputs of what only a `shard_map` tells apart, in a `vmap`: whether a value is the
    same for all shards. `None` for other equations."""
    if eqn.primitive.name == "pvary":
        return values
    is_sum = eqn.primitive.name == "psum_invariant"
    return jax.lax.psum(list(values), eqn.params["axes"]) if is_sum else None


def _names(spec: Any) -> list[tuple[str, ...]]:
    """The axes of the mesh that each axis of an array is split over."""
    return [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]


def _split(x, dims, sizes):
    """An array with its shards along the first axes, one for each axis of the mesh."""
    shape, at = [], {}
    for n, names in zip(x.shape, _padded(dims, x.ndim), strict=True):
        at |= {name: len(shape) + i for i, name in enumerate(names)}
        split = [sizes[name] for name in names]
        shape += [*split, n // math.prod(split)]
    return jnp.moveaxis(jnp.reshape(x, shape), *_moves(at, sizes))


def _joined(x, dims, sizes):
    """Join the shards of an array."""
    local, at, shape, axis = x.shape[sum(map(len, dims)) :], {}, [], 0
    for n, names in zip(local, _padded(dims, len(local)), strict=True):
        at |= {name: axis + i for i, name in enumerate(names)}
        axis += len(names) + 1
        shape.append(n * math.prod(sizes[name] for name in names))
    return jnp.reshape(jnp.moveaxis(x, *_moves(at, sizes)[::-1]), shape)


def _padded(dims, ndim):
    return [*dims, *[()] * (ndim - len(dims))]


def _moves(at, sizes) -> tuple[list[int], list[int]]:
    """From where the axes of the shards are to the first ones."""
    found = [at[name] for name in sizes if name in at]
    return found, list(range(len(found)))
