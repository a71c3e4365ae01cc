"""Rules that are wrong in exactly one way: `FAULTS`, what `check_rule` is measured with."""

from . import behavior, forward, reverse, structure  # noqa: F401  they fill `FAULTS`
from .registry import Fault, FAULTS


__all__ = ["FAULTS", "Fault"]
