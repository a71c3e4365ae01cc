"""Every public op of the library with sample arguments: what `test_conformance` runs over.

`CASES` maps a name to a `Case`. An op is the part of the name before the first colon, so that
one op may have several cases: `"elementwise"`, `"elementwise: two arguments"`.
"""

from . import gradient_ops, loops, rules, straight_through, surrogates  # noqa: F401  they fill it
from .registry import Case, CASES


# Public, and no op: what has no derivative of its own, or is not called for one. Each has
# tests of its own.
NOT_OPS = {
    "RuleError",
    "GradientStatistics",
    "gradient_flow",
    "plot_gradient_flow",
    "reversal_schedule",
    "surrogates.AbstractSurrogate",
    "ste.fsq_codebook",
}

__all__ = ["CASES", "NOT_OPS", "Case"]
