"""A `jax.shard_map` in a program, run as a `jax.vmap` over its shards."""

import itertools
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
    specs = params["in_specs"], params["out_specs"]
    tuples = [x for each in specs for spec in each for x in spec if isinstance(x, tuple)]
    # An array that is split over several axes is split over the first one first.
    order = dict.fromkeys([*itertools.chain(*tuples), *params["mesh"].shape])
    sizes = {name: params["mesh"].shape[name] for name in order if name in manual}
    if any(list(names) != [name for name in sizes if name in names] for names in tuples):
        raise NotImplementedError("two arrays are split in two orders")  # stays one operation
    fn = lambda *values: tuple(run(*known.programs, values))
    for name in reversed(sizes):
        fn = _over(fn, name, sizes[name], *([_axis(x, name) for x in each] for each in specs))
    return list(fn(*values))


def of_shards(eqn: Any, values: Sequence[Any]) -> Sequence[Any] | None:
    """The outputs of what only a `shard_map` tells apart, in a `vmap`: whether a value is the
    same for all shards. `None` for other equations."""
    if eqn.primitive.name == "pvary":
        return values
    is_sum = eqn.primitive.name == "psum_invariant"
    return jax.lax.psum(list(values), eqn.params["axes"]) if is_sum else None


def _axis(spec: Any, name: str) -> int | None:
    """The axis of an array that is split over an axis of the mesh."""
    is_split = lambda x: name in x if isinstance(x, tuple) else x == name
    return next((i for i, x in enumerate(spec) if is_split(x)), None)


def _over(fn, name, n, ins, outs):
    """The function of all shards along an axis of the mesh."""

    def split(x, axis):
        if axis is None:
            return x
        return jnp.reshape(x, (*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :]))

    def join(x, axis):
        if axis is None:
            return x
        return jnp.reshape(x, (*x.shape[:axis], n * x.shape[axis + 1], *x.shape[axis + 2 :]))

    mapped = jax.vmap(fn, tuple(ins), tuple(outs), axis_name=name, axis_size=n)
    return lambda *values: tuple(map(join, mapped(*map(split, values, ins)), outs))
