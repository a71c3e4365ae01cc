"""`explain_nan`: where and why a loss or its gradient is not finite, or too large."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ..._errors import bad_argument, rule_error, RuleError
from ..._rules.float_args import as_number
from ..._rules.tree_split import TreeSplit
from ..._zero_safe.zero_safe import zero_safe, ZeroSafe
from .._zero.gradient import try_gradient
from ..nan_checks import without_nan_checks
from ..opaque import opaque_operations
from ..origins import message_of_check, no_derivative_error, NumberedLoss, raised_error
from ..progress import doing, showing_progress
from ..report import show_list
from ..traced_loss import check_no_references, trace_loss
from .births import Births
from .causes import Cause, causes_of
from .cures import DROPPABLE
from .derivative import Derivative, differentiate
from .kinds import Kind
from .record import record_of
from .report import NaNReport, NonFinite
from .values import is_nonfinite


# The calls that are tried. The first drops only what is not selected, so what it gives is the
# derivative.
_TRIALS = {
    "selected": "`eqg.zero_safe(loss)`",
    "zero": '`eqg.zero_safe(loss, policy="zero")`',
}

# How long a trial takes, in compilations of the gradient.
_TRIAL = 3

_NOT_THESE = (
    "`eqg.zero_safe(loss)` was tried, and does not make this gradient finite: a product "
    "overflows, what is infinite is used elsewhere too, or the operation is inside a "
    "`jax.custom_vjp`, as the loop of Diffrax is."
)
_ONLY_COMPILED = (
    "XLA rounds otherwise in a program that is compiled as a whole. What is exactly zero "
    "operation by operation, such as `x - jnp.mean(x)` of equal numbers, may be a rounding "
    "error, which an infinite derivative multiplies; and what is a rounding error may be zero, "
    "of which a logarithm is infinite."
)
_OUT_OF_TIME = (
    "After {:.0f} seconds, the evaluation operation by operation was stopped: there may be "
    "more causes. Give it more time with `seconds=`, or a smaller model."
)


@showing_progress("explain_nan")
@without_nan_checks()
def explain_nan(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    threshold: float | None = None,
    seconds: float = 60.0,
    **kwargs: Any,
) -> NaNReport:
    r"""Where and why a loss or its gradient is NaN, infinite, or too large.

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
    - `model`: any PyTree. The gradient is that with respect to all of its inexact arrays.
    - `threshold`: also report where a cotangent exceeds this number. A gradient of 1e24 is
        finite, and as harmful.
    - `seconds`: the time to look for the causes, beside one compilation of the gradient. When
        it is over, the report has what is known, and the call of `zero_safe` that helps.

    **Returns:**

    A report. Print it for a table; it is false if everything is finite. `found` are records
    with the fields `file`, `line`, `primitive`, `path`, `step`, `kind`, `cure` and others:
    first the operations that make the loss not finite, then those that make its gradient not
    finite, in the order of the backward pass. `explain_nan` finds each of them, even if one
    alone makes everything NaN. In a loop, `step` is the first such step; the backward pass
    begins at the end.

    The kinds are `"dead branch"` (`mask` is what did not select it), `"zero mask"` (as a
    factor), `"zero times infinity"` (`mask` is the operation that makes the zero),
    `"true singularity"`, `"0/0"`, `"inf - inf"`, `"inf / inf"`, `"outside of the domain"`,
    `"overflow"`, `"constant infinity"` (of a `where`), `"exceeds the threshold"`,
    `"NaN in the input"` and `"inf in the input"`.

    If the loss is an [`eqx_grads.zero_safe`][], `dropped` are the places where that drops
    something, also by its policy `"zero"`.

    A loss with a `while_loop` has no gradient. `explain_nan` looks at its derivative in forward
    mode.

    **Cost:** one compilation of the gradient. If that is finite, `explain_nan` stops, unless
    there is a `threshold`. Otherwise it evaluates the gradient once, operation by operation. It
    replaces each NaN where it begins, and carries along which operation made it: what arrives
    at the loss or the gradient is a cause. If a mask or a singularity is among the causes, it
    compiles the gradients of `zero_safe(loss)` and `zero_safe(loss, policy="zero")`, and names
    the first that is finite.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar or can't be traced, if JAX can't
    differentiate an operation of it, if the model has no inexact array, or if the loss raises
    an error and nothing is found.
    """
    if threshold is not None:
        known = as_number(threshold)
        if known is None or not known > 0:
            raise rule_error(
                "The `threshold` of `explain_nan` is not a positive number.",
                f"it is {threshold!r:.60}",
                do="Give the size from which a gradient is too large, or `None`.",
            )
        threshold = known
    known = as_number(seconds)
    if known is None or not known >= 0:
        do = "Give the seconds that the search may take; `math.inf` is no limit."
        raise bad_argument("explain_nan", "seconds", "a number from zero", seconds, do)
    call = _Call(loss, model, args, kwargs, threshold, known)
    if not isinstance(loss, ZeroSafe):
        return call.explain()
    # It evaluates the function with guards, which would be shown as masks. So the records are
    # those of the function, and whether they are left is known from their places.
    report = call.explain(tries=False)
    below = dataclasses.replace(call, loss=loss.__wrapped__).explain(bool(report.bad_leaves))
    place = lambda r: (r.file, r.line, r.column, r.primitive)
    is_left = {place(r) for r in report.found}
    dropped = [r for r in below.found if place(r) not in is_left]
    if report.bad_leaves and len(dropped) == len(below.found):
        dropped = []  # not all of them, and it is not known which
    found = [r for r in below.found if r not in dropped]
    remarks = list(dict.fromkeys([*report.remarks, *below.remarks]))
    remarks = remarks if report.bad_leaves else report.remarks
    return dataclasses.replace(report, found=found, dropped=dropped, remarks=remarks)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of `explain_nan`."""

    loss: Callable[..., Any]
    model: PyTree
    args: Sequence[Any]
    kwargs: dict[str, Any]
    threshold: float | None
    seconds: float

    def explain(self, tries: bool = True) -> NaNReport:
        """- `tries`: whether `zero_safe` is tried."""
        doing("tracing the loss")
        traced = trace_loss("explain_nan", self.loss, self.model, self.args, self.kwargs)
        check_no_references("explain_nan", self.loss, traced.program)
        doing("compiling the gradient")
        begin = time.monotonic()
        gradient, error = try_gradient(traced)
        to_compile = time.monotonic() - begin
        raised = error or (gradient and gradient.error)
        check = raised if isinstance(raised, RuntimeError) else None  # of `eqx.error_if`
        value, bad = float("nan"), list(traced.leaves)
        if gradient is not None:
            value = gradient.loss
            bad = bad if check else _bad(bad, gradient.gradients, self.threshold)
        report = NaNReport([], value, bad, len(traced.leaves), not raised, self.threshold)
        if np.isfinite(value) and not bad and self.threshold is None:
            # What a training meets is the compiled program: there is nothing to look for.
            zeros = _zeros(traced.leaves, gradient.gradients) if gradient and not raised else []
            return dataclasses.replace(report, remarks=zeros)
        doing("looking for the places")
        derivative = _differentiate(NumberedLoss(traced), self.loss)
        limit = max(self.seconds - _TRIAL * to_compile, self.seconds / 2)
        births = Births(derivative, self.threshold, time.monotonic() + limit)
        carried = births.run()
        report = dataclasses.replace(
            report,
            is_reverse=derivative.is_reverse,
            raises=check is not None,
            loss=value if gradient or not carried else float(carried[0].truth),
        )
        causes = causes_of(births, carried)
        if check and not causes:
            raise raised_error(self.loss, check) from check
        remarks = [f"The error of the gradient: {message_of_check(check)}"] if check else []
        if carried is None and not check:
            remarks.append(_OUT_OF_TIME.format(limit))
        elif carried and not causes and (bad or not np.isfinite(value)):
            return dataclasses.replace(
                report,
                if_compiled=_if_compiled(value, bad),
                bad_leaves=[],
                loss=float(carried[0].truth),
                remarks=[*remarks, _ONLY_COMPILED],
            )
        left = self.seconds - (time.monotonic() - begin - to_compile)
        n_trials = 2 if left > 2 * _TRIAL * to_compile else int(left > _TRIAL * to_compile)
        helps, said = "", []
        if tries and (n_trials or not causes):
            helps, said = self._trial(causes, report, n_trials)
        found = _without_consequences([record_of(births, cause, helps) for cause in causes])
        return dataclasses.replace(report, found=found, remarks=[*remarks, *said])

    def _trial(
        self, causes: Sequence[Cause], report: NaNReport, most: int
    ) -> tuple[str, list[str]]:
        """The call of `zero_safe` that makes the gradient finite, and remarks on it.

        - `most`: how many calls there is time for. At least the one that is most likely to
            help is tried.
        """
        may_help = any(c.kind in DROPPABLE and c.birth.is_ct for c in causes) or not causes
        if not (may_help and report.is_reverse and np.isfinite(report.loss)):
            return "", []
        doing("trying `zero_safe`")
        is_dead = any(c.kind == Kind.DEAD_BRANCH for c in causes)
        chosen = ["selected", "zero"] if most > 1 else ["selected" if is_dead else "zero"]
        for policy in chosen:
            call = _TRIALS[policy]
            if self._is_finite_with(policy):
                return call, [] if causes else [f"{call} makes this gradient finite."]
        return "", [_NOT_THESE] if is_dead else []

    def _is_finite_with(self, policy: str) -> bool:
        """Whether `zero_safe` with this policy makes the compiled gradient finite."""
        safe = zero_safe(self.loss, policy=policy)
        rest, arrays = TreeSplit.split(self.model, eqx.is_inexact_array)
        loss = lambda x: safe(rest.tree(x), *self.args, **self.kwargs)
        try:
            grads = jax.jit(jax.grad(loss))(arrays)
        except RuntimeError:  # of a check in the program, such as `eqx.error_if`
            return False
        return not any(map(is_nonfinite, jax.tree.leaves(grads)))


def _bad(names: Sequence[str], derivatives: Sequence[Any], threshold) -> list[str]:
    """The leaves whose gradient is not finite, or exceeds the threshold."""
    limit = np.inf if threshold is None else threshold
    is_bad = lambda x: is_nonfinite(x) or bool(np.any(np.abs(np.asarray(x)) > limit))
    return [name for name, x in zip(names, derivatives, strict=True) if is_bad(x)]


def _differentiate(numbered: NumberedLoss, loss) -> Derivative:
    try:
        return differentiate(numbered)
    except RuleError:
        raise
    except Exception as error:  # JAX has no one type of error for it
        opaque = opaque_operations(numbered)
        if not opaque:
            raise
        raise no_derivative_error(loss, opaque) from error


def _zeros(names, gradients) -> list[str]:
    """A remark on leaves whose gradient is finite, and zero."""
    pairs = zip(names, gradients, strict=True)
    zeros = [name for name, x in pairs if np.size(x) and not np.any(x)]
    if not zeros:
        return []
    where = "" if len(zeros) == len(names) else f" of {show_list(zeros, 8)}"
    return [f"The gradient{where} is zero: `eqg.explain_zero` says why."]


def _if_compiled(value: float, bad: Sequence[str]) -> str:
    """What is finite, but not if it is compiled as a whole: the loss, or gradients."""
    found = [] if np.isfinite(value) else [f"the loss is {value:.6g}"]
    found += [f"the gradient of {show_list(bad, 8)} is not finite"] if bad else []
    return ", and ".join(found)


def _without_consequences(records: Sequence[NonFinite]) -> list[NonFinite]:
    """Without the derivative of an operation of which the value is not finite already; and once
    what JAX makes of the derivative of one operation."""
    place = lambda r: (r.file, r.line, r.column, r.caller, r.path)
    values = [r for r in records if r.is_forward]
    known = {(place(r), name) for r in values for name in (r.primitive, r.derivative_of)}
    found: dict[Any, NonFinite] = {}
    for i, r in enumerate(records):
        if r.is_forward or (place(r), r.primitive) not in known:
            found.setdefault((place(r), r.kind, r.derivative_of or i), r)
    return list(found.values())
