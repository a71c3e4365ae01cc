"""Where `zero_safe` dropped something that is not finite, for reports."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._jaxprs.structure import inner_programs
from .ranges import inexact_indices
from .transform import SCOPE


def dropped(eqn: Any, values: Sequence[Any]) -> jax.Array | None:
    """Where an equation of a derivative of a `zero_safe` function dropped an infinity or NaN.

    The equation is a selection that a guard was transposed to, or one that lets a zero win.
    `None` for all other equations. `values` are those of its operands.
    """
    if SCOPE not in str(eqn.source_info.name_stack) or not inexact_indices(eqn.outvars):
        return None
    if inner_programs(eqn) and len(values) == 2:  # the product of the policy "zero"
        factor, tangent = values
        return ((factor == 0) | (tangent == 0)) & ~jnp.isfinite(factor * tangent)
    if eqn.primitive.name != "select_n" or len(values) != 3:
        return None
    predicate, *cases = values
    lost = jnp.where(predicate, cases[0], cases[1])
    kept = jnp.where(predicate, cases[1], cases[0])
    return ~jnp.isfinite(lost) & jnp.isfinite(kept)
