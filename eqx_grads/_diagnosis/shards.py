"""A `jax.shard_map` in a program: run it with another function, or shard by shard."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import equations, inner_programs, ShardMap, structure


def enter_shard_map(
    eqn: Any, values: Sequence[Any], run: Callable[[ClosedJaxpr, Sequence[Any]], Sequence[Any]]
) -> Sequence[Any]:
    """Run the equation with `run(program, values)` instead of its program."""
    known, params = structure(eqn), eqn.params
    assert isinstance(known, ShardMap)
    axes = params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]
    return jax.shard_map(
        lambda *values: tuple(run(*known.programs, values)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=axes,
        check_vma=params["check_vma"],
    )(*values)


def is_across_shards(eqn: Any) -> bool:
    """Whether an operation in a `jax.shard_map` names an axis of the mesh, as `psum` does."""
    axes = set(eqn.params["mesh"].shape)
    inside = (
        e for p in inner_programs(eqn) for e in equations(p) if e.primitive.name != "pvary"
    )
    params = (param for e in inside for param in e.params.values())
    named = ({param} if isinstance(param, str) else _strings(param) for param in params)
    return any(names & axes for names in named)


def _strings(param: Any) -> set[str]:
    is_several = isinstance(param, tuple | frozenset)
    return {x for x in param if isinstance(x, str)} if is_several else set()


def shards_of(eqn: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """For each shard of a `jax.shard_map` the parts of the operands and of the outputs that
    belong to it, as tuples of slices."""
    sizes = dict(eqn.params["mesh"].shape)
    for place in itertools.product(*map(range, sizes.values())):
        at = dict(zip(sizes, place, strict=True))
        ins, outs = (
            [_part(v.aval.shape, spec, sizes, at) for v, spec in zip(vs, specs, strict=True)]
            for vs, specs in (
                (eqn.invars, eqn.params["in_specs"]),
                (eqn.outvars, eqn.params["out_specs"]),
            )
        )
        yield ins, outs


def _part(shape, spec, sizes, at) -> tuple[slice, ...]:
    parts = []
    for n, names in itertools.zip_longest(shape, spec):
        names = () if names is None else (names,) if isinstance(names, str) else names
        split = [sizes[name] for name in names]
        index = int(np.ravel_multi_index([at[name] for name in names], split)) if names else 0
        size = n // math.prod(split)
        parts.append(slice(index * size, (index + 1) * size))
    return tuple(parts)
