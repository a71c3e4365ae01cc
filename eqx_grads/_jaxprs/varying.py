"""The mesh axes of `jax.shard_map` over which values vary, and casts of types on a mesh.

With `check_vma=True`, the type of a value says over which axes it differs between devices.
Operations that JAX's users call cast their operands to vary alike; primitives, loops and what
an interpreter evaluates do not. The transpose of the cast is the sum over the devices.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, reshard

from .versions import varying_axes_of_type


def varying_axes(x: Any) -> frozenset:
    """The mesh axes over which an array, or values of a type, vary."""
    return varying_axes_of_type(jax.typeof(x) if isinstance(x, jax.Array) else x)


def is_in_shard_map() -> bool:
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def vary_over(x: Any, axes: frozenset) -> Any:
    """`x`, cast to vary over these axes too."""
    missing = axes - varying_axes(x)
    if not missing:
        return x
    return jax.lax.pcast(jnp.asarray(x), tuple(sorted(missing)), to="varying")


def vary_alike(xs: Sequence[Any], *like: Any) -> list[Any]:
    """Arrays, cast to vary over each axis over which one of them, or of the leaves of `like`,
    does."""
    if not is_in_shard_map():
        return list(xs)
    axes = frozenset[Any]().union(*map(varying_axes, [*xs, *jax.tree.leaves(like)]))
    return [vary_over(x, axes) for x in xs] if axes else list(xs)


def vary_tracers_alike(xs: Sequence[Any]) -> list[Any]:
    """`vary_alike`, but for arrays from outside of the program: they are the same everywhere,
    and are not differentiated, and a program that was traced before took them as they are."""
    if not is_in_shard_map():
        return list(xs)
    cast = iter(vary_alike([x for x in xs if isinstance(x, Tracer)]))
    return [next(cast) if isinstance(x, Tracer) else x for x in xs]


def varying_types(types: Iterable[Any], *like: Any) -> list[Any]:
    """Types that vary over each axis over which one of them, or a leaf of `like`, does."""
    types = list(types)
    if not is_in_shard_map():
        return types
    zeros = lambda: vary_alike([jnp.zeros(t.shape, t.dtype) for t in types], types, like)
    return list(jax.make_jaxpr(zeros)().out_avals)


def cast_carry(
    step_types: Callable[[Sequence[Any]], Sequence[Any]], init: Sequence[Any]
) -> list[Any]:
    """The first carry of a loop, cast to the type that later ones have: inside `shard_map`, it
    varies over a mesh axis if that of any step does; over explicit axes, a replicated one is
    distributed as that after the first step. `step_types(carry)` are the types of the next one.

    JAX requires the types of all carries to be equal, and asks the user to cast the first one
    (https://docs.jax.dev/en/latest/notebooks/shard_map.html#scan-vma). As with weak dtypes, the
    step is traced to see what it returns.
    """
    init = list(init)
    mesh = jax.sharding.get_abstract_mesh()
    manual, is_explicit = frozenset(mesh.manual_axes), AxisType.Explicit in mesh.axis_types
    is_open = lambda x: bool(manual - varying_axes(x)) or (is_explicit and not _distributed(x))
    while any(map(is_open, init)):
        new = step_types(init)
        cast = [_cast_to(x, t, is_explicit) for x, t in zip(init, new, strict=True)]
        if all(x is y for x, y in zip(init, cast, strict=True)):
            break
        init = cast
    return init


def _cast_to(x, aval, is_explicit):
    if is_explicit and _distributed(aval) and not _distributed(x) and x.shape == aval.shape:
        x = reshard(x, aval.sharding.spec)
    return vary_over(x, varying_axes(aval))


def _distributed(x: Any) -> bool:
    """Whether a dimension is distributed over explicit axes."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return any(part is not None for part in aval.sharding.spec)
