"""Every public op, layer, loss, solver and shorthand: `ENTRIES` maps a name to an `Entry`.

An op is the part of the name before the first colon, so that each of its options may have an
entry: `"safe.norm"`, `"safe.norm: of an axis"`.
"""

import importlib
import pkgutil

from .entry import ENTRIES, Entry


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# Public, and no op: what has no derivative of its own, or is not called for one. Each has
# tests of its own.
NOT_OPS = {
    "RuleError", "GradientStatistics", "HostFunction", "LinearFunction", "LinearHostFunction",
    "explain_gradient", "explain_memory", "explain_nan", "explain_zero", "gradient_flow",
    "MemoryAdvice", "MemoryReport", "NaNReport", "NonFinite", "Residual", "ZeroGradient",
    "ZeroReport", "Symptom", "SymptomReport", "plot_gradient_flow", "nn.AbstractQuantizer",
    "nn.LIFState", "nn.QuantizationReport", "surrogates.AbstractSurrogate", "safe.EighResult",
    "safe.SVDResult",
}  # fmt: skip

__all__ = ["ENTRIES", "NOT_OPS", "Entry"]
