"""`explain_nan`: where and why a loss or its gradient is not finite, or too large."""

import dataclasses
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..._errors import bad_argument
from ..._jaxprs.current_trace import setting
from ..._jaxprs.primitives import ELEMENTWISE
from ..._jaxprs.structure import equations
from ..._rules.float_args import as_number
from ..._zero_safe.analysis import TREATMENT
from ..._zero_safe.zero_safe import zero_safe, ZeroSafe
from ..eager import SHORT_COMPILATION
from ..gradient import trace_gradient
from ..opaque import no_gradient
from ..origins import equation_tag, message_of_check, NumberedLoss, raised_error
from ..progress import diagnosing, doing
from ..traced_loss import trace_loss
from .births import Births, is_nonfinite
from .causes import Cause, causes_of, Kind
from .cures import DROPPABLE
from .derivative import differentiate
from .record import record_of
from .report import NaNReport, NonFinite


# The calls that are tried. The first drops unselected terms only, so its result is the
# derivative.
_TRIALS = {
    "selected": "`eqg.zero_safe(loss)`",
    "zero": '`eqg.zero_safe(loss, policy="zero")`',
}

# A loss of more equations is compiled without optimization, which takes long. In a smaller one,
# other rounding does not make a zero of what is none, as in `x - jnp.mean(x)`.
_LARGE = 3000

_ONLY_COMPILED = (
    "Operation by operation, all is finite. Compiled as a whole, XLA rounds differently: an "
    "exact zero, such as `x - jnp.mean(x)` of equal numbers, may be a rounding error. In half "
    "precision, a sum may overflow: compute in float32."
)
_FORWARD = "The loss has no gradient in reverse mode. This is its derivative in forward mode."
_OUT_OF_TIME = (
    "After {:.0f} seconds, the evaluation operation by operation was stopped: there may be "
    "more causes. Give it more time with `seconds=`, or a smaller model."
)


@diagnosing("explain_nan")
def explain_nan(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    threshold: float | None = None,
    seconds: float = 60.0,
    **kwargs: Any,
) -> NaNReport:
    r"""Find where and why a loss or its gradient is NaN, infinite, or too large.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax.numpy as jnp

        def loss(x):
            return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

        report = eqg.explain_nan(loss, jnp.array([1.0, 0.0]))
        print(report.found[0].kind, report.found[0].code, sep=" | ")
        print(bool(eqg.explain_nan(loss, jnp.array([1.0, 2.0]))))
        ```

        ```text
        dead branch | return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))
        False
        ```

    JAX computes the derivative of a branch that a `where` does not take, and multiplies it by
    zero: $0 \cdot \infty$ is NaN.

    **Arguments:**

    - `loss`: called as `loss(model, *args, **kwargs)`. Returns a real scalar.
    - `model`: any PyTree. The gradient is taken with respect to all its inexact arrays.
    - `threshold`: also report where a cotangent exceeds this number. A gradient of 1e24 is
        finite, but just as harmful.
    - `seconds`: the time to look for the causes, without the compilations. After that, the
        report has the causes that are known, and the call of `zero_safe` that helps.

    **Returns:**

    A report. Print it for a table; it is false if everything is finite. `found` are records
    with the fields `file`, `line`, `primitive`, `path`, `step`, `kind`, `cure` and others. The
    operations that make the loss not finite come first. Those that make its gradient not finite
    follow, in the order of the backward pass. `explain_nan` finds each of them, even if one
    alone makes everything NaN. In a loop, `step` is the first such step. In the backward pass,
    the last step comes first.

    The kinds are `"dead branch"` (`mask` is what did not select it), `"zero mask"` (as a
    factor), `"zero times infinity"` (`mask` is the operation that makes the zero),
    `"true singularity"`, `"0/0"`, `"inf - inf"`, `"inf / inf"`, `"outside of the domain"`,
    `"overflow"`, `"constant infinity"` (of a `where`), `"exceeds the threshold"`,
    `"NaN in the input"` and `"inf in the input"`.

    If the loss is decorated with [`eqx_grads.zero_safe`][], a term that `zero_safe` drops is
    not a cause. To find such terms, pass the undecorated loss.

    A loss with a `while_loop` has no gradient. `explain_nan` looks at its derivative in forward
    mode.

    **Cost:** one compilation of the gradient. If the gradient is finite, `explain_nan` stops,
    unless you pass a `threshold`. Otherwise it evaluates the gradient once, operation by
    operation. It replaces each NaN where it begins, and records which operation made it. A
    record that arrives at the loss or the gradient is a cause. If a mask or a singularity is
    among the causes, it compiles the gradients of `zero_safe(loss)` and `zero_safe(loss,
    policy="zero")`, and names the first that is finite. In both, only the operations at which
    something is not finite get another derivative. When the time is up, it compiles only the
    second, for the whole loss.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar or can't be traced. Also if JAX
    can't differentiate one of its operations, if the model has no inexact array, or if the loss
    raises an error and nothing is found.
    """
    limit = math.inf if threshold is None else as_number(threshold)
    if limit is None or not limit > 0:
        do = "Give the size from which a gradient is too large, or `None`."
        raise bad_argument("explain_nan", "threshold", "a positive number", threshold, do)
    time_limit = as_number(seconds)
    if time_limit is None or not time_limit >= 0:
        do = "Give the seconds that the search may take; `math.inf` removes the limit."
        raise bad_argument("explain_nan", "seconds", "a number of at least zero", seconds, do)
    explain = lambda loss: _explain(loss, (model, args, kwargs), limit, time_limit)
    report = explain(loss)
    if not (report and isinstance(loss, ZeroSafe)):
        return report
    # Its guards are shown as masks. So the records are those of the function inside, and
    # whether they are left is known from their places.
    below = explain(loss.__wrapped__)
    place = operator.attrgetter("file", "line", "column", "primitive")
    left = set(map(place, report.found))
    found = [r for r in below.found if place(r) in left] or below.found
    remarks = list(dict.fromkeys([*report.remarks, *below.remarks]))
    return dataclasses.replace(report, found=found, remarks=remarks)


def _explain(
    loss: Callable[..., Any], given: tuple[Any, Any, Any], limit: float, seconds: float
) -> NaNReport:
    """- `given`: the model, and the other arguments of the loss."""
    traced, gradient, error = trace_gradient("explain_nan", loss, *given)
    value, bad = float("nan"), list(traced.leaves)
    if gradient is not None:
        is_bad = lambda x: not np.all(np.isfinite(x)) or bool(np.any(np.abs(x) > limit))
        value, error = gradient.loss, gradient.error
        bad = [x for x, g in zip(bad, gradient.gradients, strict=True) if is_bad(g)]
    # From `eqx.error_if`. An operation that JAX can't differentiate is a `RuntimeError` too.
    has_no_rule = isinstance(error, NotImplementedError)
    is_check = isinstance(error, RuntimeError) and not has_no_rule
    bad = list(traced.leaves) if is_check else bad
    threshold = None if limit == math.inf else limit
    n = len(traced.leaves)
    if np.isfinite(value) and not bad and threshold is None:
        # A training meets the compiled program: there is nothing to look for.
        return NaNReport([], value, [], n, None, remarks=[] if error is None else [_FORWARD])
    doing("looking for the places")
    if gradient is None and error is not None and not is_check:
        raise no_gradient(loss, traced, error) from error
    derivative = differentiate(NumberedLoss(traced))
    deadline = time.monotonic() + seconds
    births = Births(derivative, threshold, deadline, is_bad=not np.isfinite(value))
    carried = births.run()
    if gradient is None and carried is not None:
        value = float(carried[0].truth)
    causes, remarks = causes_of(births, carried), []
    if is_check and error is not None:
        if not causes:
            raise raised_error(loss, error) from error
        remarks.append(f"The error of the gradient: {message_of_check(error)}")
    elif carried is None:
        remarks.append(_OUT_OF_TIME.format(seconds))
    elif not causes and (bad or not np.isfinite(value)):
        remarks.append(_ONLY_COMPILED)
    helps = ""
    if bad and derivative.is_reverse and np.isfinite(value):
        helps = _trial(births, causes, loss, given, carried is not None)
        remarks += [f"{helps} makes this gradient finite."] if helps and not causes else []
    found = _without_consequences([record_of(births, cause, helps) for cause in causes])
    if found and not derivative.is_reverse:
        remarks.append(_FORWARD)
    return NaNReport(found, value, bad, n, threshold, remarks=remarks)


def _trial(
    births: Births, causes: Sequence[Cause], loss: Any, given: Any, is_whole: bool
) -> str:
    """The call of `zero_safe` that makes the compiled gradient finite.

    - `is_whole`: whether all births are known. Then `zero_safe` treats their equations only. It
        would not change a number at the others: zero times a finite number is zero anyway.
        Without the births, it treats the whole loss, and there is time for one trial.
    """
    if causes and not any(c.kind in DROPPABLE and c.birth.is_ct for c in causes):
        return ""
    doing("trying `zero_safe`")
    numbered, is_known = births.derivative.numbered, is_whole and bool(causes)
    real = trace_loss("explain_nan", loss, *given, steps_are_visible=False)
    names = lambda traced: [e.primitive.name for e in equations(traced.program)]
    if names(real) != names(numbered.traced):  # a loop has a rule, where no births are known
        numbered, is_known = NumberedLoss(real), False
    origins = filter(None, (births.derivative.origin(b.place) for b in births.births))
    # What `zero_safe` makes of an equation may have no number.
    tags = {"", *(str(o.number) for origin in origins for o in numbered.around(origin))}
    treats = lambda eqn: not is_known or equation_tag(eqn) in tags
    leaves = range(len(numbered.traced.leaves))
    options = SHORT_COMPILATION if len(numbered.origins) > _LARGE else {}
    is_dead = all(c.kind == Kind.DEAD_BRANCH for c in causes)
    for policy in ["selected", "zero"] if is_dead and is_whole else ["zero"]:
        # A zero that wins needs no guards.
        free = ELEMENTWISE if is_known and policy == "zero" else ()
        treatment = lambda e, free=free: (treats(e) and e.primitive.name not in free, treats(e))
        gradient = jax.grad(zero_safe(numbered, policy=policy), tuple(leaves))
        try:
            with setting(TREATMENT, treatment):
                found = jax.jit(gradient, compiler_options=options)(*numbered.traced.values)
        except Exception:  # JAX has no one type of error for what it can't differentiate
            continue
        if not any(map(is_nonfinite, jax.tree.leaves(found))):
            return _TRIALS[policy]
    return ""


def _without_consequences(records: Sequence[NonFinite]) -> list[NonFinite]:
    """Without the derivative of an operation whose value is not finite already."""
    place = operator.attrgetter("file", "line", "column", "caller", "path", "primitive")
    known = {place(r) for r in records if r.is_forward}
    return [r for r in records if r.is_forward or place(r) not in known]
