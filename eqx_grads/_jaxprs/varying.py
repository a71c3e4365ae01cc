"""The mesh axes of `jax.shard_map` over which values vary, and casts to types that vary.

With `check_vma=True`, the type of a value says over which axes it differs between devices.
JAX's public functions cast their operands to vary over the same axes. Primitives and loops do
not, and neither does an interpreter of jaxprs. The transpose of the cast is the sum over the
devices.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec, reshard

from .current_trace import is_in_shard_map
from .versions import varying_axes_of_type


def varying_axes(x: Any) -> frozenset:
    """The mesh axes over which an array, or values of a type, vary."""
    return varying_axes_of_type(jax.typeof(x) if isinstance(x, jax.Array) else x)


def vary_over(x: Any, axes: frozenset) -> Any:
    """`x`, cast to vary over these axes too."""
    missing = axes - varying_axes(x)
    if not missing:
        return x
    return jax.lax.pcast(jnp.asarray(x), tuple(sorted(missing)), to="varying")


def vary_alike(xs: Sequence[Any], *like: Any) -> list[Any]:
    """Arrays, cast to vary over each axis over which one of them, or of the leaves of `like`,
    does."""
    axes = frozenset[Any]().union(*map(varying_axes, [*xs, *jax.tree.leaves(like)]))
    return [vary_over(x, axes) for x in xs]


def vary_tracers_alike(xs: Sequence[Any]) -> list[Any]:
    """`vary_alike` of tracers only. Other arrays are replicated and not differentiated, and a
    program that was traced before was given them without a cast."""
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
    """The first carry of a loop, cast to the type of the later ones.

    Inside `shard_map`, it is cast to vary over each mesh axis over which a later carry does.
    Over explicit axes, a replicated carry is sharded as the carry after the first step is.
    `step_types(carry)` returns the types of the next carry: as for weak dtypes, the step is
    traced to get them.

    JAX requires the types of all carries to be equal, and asks the user to cast the first one
    (https://docs.jax.dev/en/latest/notebooks/shard_map.html#scan-vma).
    """
    mesh = jax.sharding.get_abstract_mesh()
    init = list(map(on_explicit_mesh, init))
    manual, is_explicit = frozenset(mesh.manual_axes), AxisType.Explicit in mesh.axis_types
    may_change = lambda x: bool(manual - varying_axes(x)) or (is_explicit and not _sharded(x))
    while any(map(may_change, init)):
        new = step_types(init)
        cast = list(map(cast_to, init, new))
        if all(x is y for x, y in zip(init, cast, strict=True)):
            break
        init = cast
    return init


def on_explicit_mesh(x: Any) -> Any:
    """Where axes are explicit: `x`, with a type that says that it is replicated over them.

    The type of a constant has no mesh. If it is the carry of a `while_loop`, or an operand of a
    `cond`, `jax.vmap` over an explicit axis fails there (JAX 0.10 to 0.12).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes or jax.typeof(x).sharding.mesh.axis_names:
        return x
    return reshard(x, PartitionSpec(*(None,) * jnp.ndim(x)))


def cast_to(x: Any, aval: Any) -> Any:
    """`x`, sharded over the axes of the mesh, and varying over them, as values of a type."""
    if _sharded(aval) and not _sharded(x) and x.shape == aval.shape:
        x = reshard(x, aval.sharding.spec)
    return vary_over(x, varying_axes(aval))


def _sharded(x: Any) -> bool:
    """Whether a dimension is sharded over explicit axes."""
    aval = jax.typeof(x) if isinstance(x, jax.Array) else x
    return any(part is not None for part in aval.sharding.spec)
