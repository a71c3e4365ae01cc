"""How many steps of a scan to compute again at a time."""

import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from ._chunks import near_divisor
from ._errors import rule_error
from ._scan_step import Step


# Below this, all that the steps keep stays in the cache of a CPU, and there is nothing to win.
_FEW_BYTES = 2**24


def chunk_length(
    step: Step, steps: int, checkpoint: int | str | None, truncate: int | None
) -> int | None:
    """The number of steps in a chunk; `None` to keep everything."""
    if checkpoint is None:
        checkpoint = truncate
    if checkpoint is None:
        return None
    if checkpoint == "sqrt":
        return near_divisor(steps, math.sqrt(steps)) if steps > 3 else None
    if checkpoint == "auto":
        return _automatic(step, steps)
    if not isinstance(checkpoint, int) or isinstance(checkpoint, bool) or checkpoint < 1:
        raise rule_error(
            "`filter_scan` was given a `checkpoint` that it does not know.",
            f"it is {checkpoint!r:.60}",
            do='Give a number of steps, "sqrt", "auto" or `None`.',
        )
    return min(checkpoint, steps) if steps > 0 else None


def _automatic(step: Step, steps: int) -> int | None:
    if steps <= 3:
        return None
    per_step = _bytes_kept(step)
    if per_step * steps <= _FEW_BYTES:
        return None
    carry = sum(_bytes(x) for x in step.init)
    # `steps / chunk` carries and the insides of `chunk` steps: the least of the sum.
    best = math.sqrt(steps * max(carry, 1) / max(per_step, 1))
    return near_divisor(steps, min(max(best, 1), steps))


def _bytes_kept(step: Step) -> int:
    """What one step leaves for its derivative, beyond what is there anyway."""

    def residuals(init, xs):
        return jax.vjp(step, init, [x[0] for x in xs])[1]

    closed = jax.make_jaxpr(residuals)(step.init, step.xs)
    # The weights that a step closes over are kept once.
    there = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
    kept = {v for v in closed.jaxpr.outvars if not isinstance(v, Literal)} - there
    return sum(_bytes(v.aval) for v in kept)


def _bytes(x: Any) -> int:
    itemsize = getattr(x.dtype, "itemsize", 4)  # a key has none
    return int(np.prod(x.shape)) * itemsize
