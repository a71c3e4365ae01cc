"""Inside `jax.shard_map`: the first carry of a loop, cast to the type of the later ones."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._tangent_spaces import vary_over, varying_axes


def varying_carry(
    step_types: Callable[[Sequence[Any]], Sequence[Any]], init: Sequence[Any]
) -> list[Any]:
    """The first carry, which varies over a mesh axis if that of any step does.
    `step_types(carry)` are the types of the next one.

    JAX requires the types of all carries to be equal, and asks the user to cast the first one
    (https://docs.jax.dev/en/latest/notebooks/shard_map.html#scan-vma). As with weak dtypes, the
    step is traced to see what it returns.
    """
    init = list(init)
    manual = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    while any(manual - varying_axes(x) for x in init):
        new = step_types(init)
        cast = [vary_over(x, varying_axes(t)) for x, t in zip(init, new, strict=True)]
        if all(x is y for x, y in zip(init, cast, strict=True)):
            break
        init = cast
    return init
