"""How many steps of a scan to compute again at a time."""

import math

import numpy as np

from .._errors import rule_error
from .chunked_scan import near_divisor


def chunk_length(steps: int, checkpoint: int | str | None) -> int | None:
    """The number of steps in a chunk; `None` to keep everything."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, str) and checkpoint == "sqrt":
        return near_divisor(steps, math.sqrt(steps)) if steps > 3 else None
    if (
        not isinstance(checkpoint, int | np.integer)
        or isinstance(checkpoint, bool)
        or checkpoint < 1
    ):
        raise rule_error(
            "`filter_scan` was given a `checkpoint` that it does not know.",
            f"it is {checkpoint!r:.60}",
            do='Give a number of steps, "sqrt", "replay", "auto" or `None`.',
        )
    return min(int(checkpoint), steps) if steps > 0 else None
