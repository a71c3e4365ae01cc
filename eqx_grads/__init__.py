"""Custom derivatives for Equinox: `import eqx_grads as eqg`."""

from . import (
    losses as losses,
    nn as nn,
    safe as safe,
    ste as ste,
    surrogates as surrogates,
    tangents as tangents,
    testing as testing,
)
from ._control_flow.checkpoint import filter_checkpoint as filter_checkpoint
from ._control_flow.cond import filter_cond as filter_cond
from ._control_flow.linear_recurrence import linear_recurrence as linear_recurrence
from ._control_flow.scan import filter_scan as filter_scan
from ._control_flow.while_loop import filter_while_loop as filter_while_loop
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
from ._diagnosis.gradient_flow import gradient_flow as gradient_flow
from ._diagnosis.plot import plot_gradient_flow as plot_gradient_flow
from ._diagnosis.probe import (
    GradientStatistics as GradientStatistics,
    probe as probe,
    tap_gradient as tap_gradient,
    watch_gradient as watch_gradient,
)
from ._drop_ins.filter_custom_jvp import filter_custom_jvp as filter_custom_jvp
from ._drop_ins.filter_custom_vjp import filter_custom_vjp as filter_custom_vjp
from ._drop_ins.jax_custom_jvp import jax_custom_jvp as jax_custom_jvp
from ._drop_ins.jax_custom_vjp import jax_custom_vjp as jax_custom_vjp
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
from ._gradient_ops.value_or_gradient_only import (
    on_backward as on_backward,
    on_forward as on_forward,
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
from ._solvers.event_time import event_time as event_time
from ._solvers.fixed_point import fixed_point as fixed_point
from ._solvers.host_function import (
    host_function as host_function,
    HostFunction as HostFunction,
)
from ._solvers.implicit import implicit as implicit
from ._solvers.jump import jump as jump
from ._solvers.linear_host_function import (
    linear_host_function as linear_host_function,
    LinearHostFunction as LinearHostFunction,
)
from ._zero_safe.zero_safe import zero_safe as zero_safe


# `pyproject.toml` reads it here.
__version__ = "0.1.0"
