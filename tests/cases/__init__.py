"""Every public op of the library with sample arguments: what `test_conformance` runs over.

`CASES` maps a name to a `Case`. An op is the part of the name before the first colon, so that
one op may have several cases: `"elementwise"`, `"elementwise: two arguments"`.
"""

from . import (  # noqa: F401  they fill it
    events,
    fixed_points,
    gradient_layers,
    gradient_ops,
    host,
    linear_layers,
    loops,
    losses,
    quantization_layers,
    rules,
    safe_elementwise,
    safe_reductions,
    solvers,
    spiking_cells,
    spiking_layers,
    straight_through,
    surrogates,
)
from .registry import Case, CASES


# Public, and no op: what has no derivative of its own, or is not called for one. Each has
# tests of its own.
NOT_OPS = {
    "RuleError",
    "GradientStatistics",
    "HostFunction",  # made by `host_function`
    "LinearFunction",
    "LinearHostFunction",
    "explain_memory",
    "explain_nan",
    "explain_gradient",
    "explain_zero",
    "Symptom",
    "SymptomReport",
    "gradient_flow",
    "MemoryAdvice",
    "MemoryReport",
    "NaNReport",
    "NonFinite",
    "Residual",
    "ZeroGradient",
    "ZeroReport",
    "plot_gradient_flow",
    "reversal_schedule",
    "nn.AbstractQuantizer",
    "nn.LIFState",
    "nn.QuantizationReport",
    "nn.quantize_model",
    "nn.to_integers",
    "surrogates.AbstractSurrogate",
    "ste.fsq_codebook",
    "safe.EighResult",
    "safe.SVDResult",
}

__all__ = ["CASES", "NOT_OPS", "Case"]
