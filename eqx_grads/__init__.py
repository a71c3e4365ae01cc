"""Custom derivatives for Equinox: `import eqx_grads as eqg`.

Rules, loops and gradient ops are imported here. The modules and names below `TYPE_CHECKING` are
imported when they are first used: most programs need few of them.
"""

import importlib
from typing import TYPE_CHECKING

from . import tangents as tangents
from ._control_flow.checkpoint import filter_checkpoint as filter_checkpoint
from ._control_flow.cond import filter_cond as filter_cond
from ._control_flow.delta_rule import gated_delta_rule as gated_delta_rule
from ._control_flow.linear_recurrence import linear_recurrence as linear_recurrence
from ._control_flow.map import filter_map as filter_map
from ._control_flow.scan import filter_scan as filter_scan
from ._control_flow.selective_scan import selective_scan as selective_scan
from ._control_flow.while_loop import filter_while_loop as filter_while_loop
from ._errors import RuleError as RuleError
from ._gradient_ops.linear import (
    mask_gradient as mask_gradient,
    psum_gradient as psum_gradient,
    reversal_schedule as reversal_schedule,
    reverse_gradient as reverse_gradient,
    scale_gradient as scale_gradient,
)
from ._gradient_ops.nonlinear import (
    cast_gradient as cast_gradient,
    clip_gradient as clip_gradient,
    clip_gradient_norm as clip_gradient_norm,
    noise_gradient as noise_gradient,
    normalize_gradient as normalize_gradient,
    zero_nonfinite_gradient as zero_nonfinite_gradient,
)
from ._gradient_ops.on_backward import (
    on_backward as on_backward,
)
from ._rules.custom_gradient import custom_gradient as custom_gradient
from ._rules.custom_jvp import custom_jvp as custom_jvp
from ._rules.custom_vjp import custom_vjp as custom_vjp
from ._rules.elementwise import elementwise as elementwise
from ._rules.linear_function import (
    linear_function as linear_function,
    LinearFunction as LinearFunction,
)
from ._rules.nondifferentiable import nondifferentiable as nondifferentiable
from ._rules.replace_gradient import (
    replace_gradient as replace_gradient,
    with_gradient_of as with_gradient_of,
)
from ._zero_safe.zero_safe import zero_safe as zero_safe


if TYPE_CHECKING:
    from . import (
        losses as losses,
        nn as nn,
        safe as safe,
        ste as ste,
        surrogates as surrogates,
        testing as testing,
    )
    from ._diagnosis._memory.explain_memory import explain_memory as explain_memory
    from ._diagnosis._memory.report import (
        MemoryAdvice as MemoryAdvice,
        MemoryReport as MemoryReport,
    )
    from ._diagnosis._memory.residuals import Residual as Residual
    from ._diagnosis._nan.explain_nan import explain_nan as explain_nan
    from ._diagnosis._nan.report import NaNReport as NaNReport, NonFinite as NonFinite
    from ._diagnosis._zero.explain_zero import explain_zero as explain_zero
    from ._diagnosis._zero.report import ZeroGradient as ZeroGradient, ZeroReport as ZeroReport
    from ._diagnosis.explain_gradient import (
        explain_gradient as explain_gradient,
        Symptom as Symptom,
        SymptomReport as SymptomReport,
    )
    from ._diagnosis.gradient_flow import gradient_flow as gradient_flow
    from ._diagnosis.plots import plot_gradient_flow as plot_gradient_flow
    from ._drop_ins.equinox_decorated import (
        filter_custom_jvp as filter_custom_jvp,
        filter_custom_vjp as filter_custom_vjp,
    )
    from ._drop_ins.jax_custom_jvp import jax_custom_jvp as jax_custom_jvp
    from ._drop_ins.jax_custom_vjp import jax_custom_vjp as jax_custom_vjp
    from ._gradient_ops.probe import (
        GradientStatistics as GradientStatistics,
        probe as probe,
        tap_gradient as tap_gradient,
        watch_gradient as watch_gradient,
    )
    from ._host.host_function import (
        host_function as host_function,
        HostFunction as HostFunction,
    )
    from ._host.linear_host_function import (
        linear_host_function as linear_host_function,
        LinearHostFunction as LinearHostFunction,
    )
    from ._solvers.events import event_time as event_time, jump as jump
    from ._solvers.fixed_point import fixed_point as fixed_point
    from ._solvers.implicit import implicit as implicit

# `pyproject.toml` reads it here.
__version__ = "0.1.0"

_MODULES = ("losses", "nn", "safe", "ste", "surrogates", "testing")
_NAMES = {
    "_diagnosis._memory.explain_memory": "explain_memory",
    "_diagnosis._memory.report": "MemoryAdvice MemoryReport",
    "_diagnosis._memory.residuals": "Residual",
    "_diagnosis._nan.explain_nan": "explain_nan",
    "_diagnosis._nan.report": "NaNReport NonFinite",
    "_diagnosis._zero.explain_zero": "explain_zero",
    "_diagnosis._zero.report": "ZeroGradient ZeroReport",
    "_diagnosis.explain_gradient": "explain_gradient Symptom SymptomReport",
    "_diagnosis.gradient_flow": "gradient_flow",
    "_diagnosis.plots": "plot_gradient_flow",
    "_gradient_ops.probe": "GradientStatistics probe tap_gradient watch_gradient",
    "_drop_ins.equinox_decorated": "filter_custom_jvp filter_custom_vjp",
    "_drop_ins.jax_custom_jvp": "jax_custom_jvp",
    "_drop_ins.jax_custom_vjp": "jax_custom_vjp",
    "_solvers.events": "event_time jump",
    "_solvers.fixed_point": "fixed_point",
    "_host.host_function": "host_function HostFunction",
    "_solvers.implicit": "implicit",
    "_host.linear_host_function": "linear_host_function LinearHostFunction",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MODULE_OF} - {"TYPE_CHECKING", "importlib"})
