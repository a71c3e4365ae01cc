"""`explain_nan`: where and why a loss or its gradient is not finite, or too large."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from ..._errors import rule_error, RuleError
from ..._jaxprs.evaluate import bind, evaluate
from ..._rules.float_args import as_number
from ..._rules.tree_split import TreeSplit
from ..._zero_safe.zero_safe import zero_safe, ZeroSafe
from ..nan_checks import without_nan_checks
from ..opaque import opaque_operations
from ..origins import no_derivative_error, NumberedLoss, Origin
from ..progress import doing, showing_progress
from ..report import show_list
from ..traced_loss import check_no_references, trace_loss
from .cause import Cause, causes_of_hits, causes_of_value, key_of_cause
from .cures import (
    DEAD_BRANCH,
    INDETERMINATE,
    MASKED_PRODUCT,
    SINGULARITY,
    ZERO_SAFE,
    ZERO_TIMES_INFINITY,
)
from .derivative_program import Derivative, differentiate
from .reaches import reaches_gradient
from .record import record_of
from .replay import Frame, is_bad, is_inexact
from .report import NaNReport, NonFinite, without_consequences


_MOST_CAUSES = 100

# The calls that are tried where there is a singularity, with a remark on the gradient that each
# makes finite. The first drops only what is not selected, so what it gives is the derivative.
_TRIALS = {
    "selected": (ZERO_SAFE, "makes this gradient finite."),
    "zero": (
        '`eqg.zero_safe(loss, policy="zero")`',
        "makes this gradient finite: it takes zero times an infinite derivative to be zero.",
    ),
}

# Where `zero_safe` was tried, and did not help: alone, or at all.
_NOT_ALL = (
    "`eqg.zero_safe(loss)` alone does not make this gradient finite: mend the other places."
)
_NOT_THESE = (
    "`eqg.zero_safe(loss)` was tried, and does not make this gradient finite: a product "
    "overflows, what is infinite is used elsewhere too, or the operation is inside a "
    "`jax.custom_vjp`, as the loop of Diffrax is. Keep the arguments of these operations in "
    "range, as `eqg.safe.where` does."
)

_ONLY_COMPILED = (
    "XLA rounds otherwise in a program that is compiled as a whole, as by `jax.jit`. What is "
    "exactly zero operation by operation, such as `x - jnp.mean(x)` of equal numbers, may be a "
    "rounding error, which an infinite derivative multiplies; and what is a rounding error may "
    "be zero, of which a logarithm is infinite."
)


@showing_progress("explain_nan")
@without_nan_checks()
def explain_nan(
    loss: Callable[..., Any],
    model: PyTree,
    *args: Any,
    threshold: float | None = None,
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

    **Returns:**

    A report. Print it for a table; it is false if everything is finite, compiled as well.
    `found` are records with the fields `file`, `line`, `primitive`, `path`, `step`, `kind`,
    `cure` and others: the first places, in the order of the backward pass, where a finite
    cotangent becomes non-finite (or exceeds `threshold`), and before these the places where the
    value does. Each place is found, also if one alone makes everything NaN. In a loop, it is
    the first step in the order of the backward pass, which begins at the end. Where many steps
    or elements of one operation are NaN, or infinite, 3 of them are looked at, and 16 if the
    causes of these differ: each cause is a record.

    The kinds are `"dead branch"` (`mask` is what did not select it), `"zero mask"` (as a
    factor), `"zero times infinity"` (`mask` says whether terms of the cotangent cancel, or it
    underflows), `"true singularity"`, `"0/0"`, `"inf - inf"`, `"inf / inf"`,
    `"outside of the domain"`, `"overflow"`, `"constant infinity"` (of a `where`),
    `"exceeds the threshold"`, `"NaN in the input"` and `"inf in the input"`.

    Of a loss that is an [`eqx_grads.zero_safe`][], `dropped` are the places where that drops
    something, also by its policy `"zero"`.

    A loss with a `while_loop` has no gradient. Its derivative in forward mode is looked at.

    This evaluates loss and gradient once, and once more if something is bad; if nothing is, it
    compiles the gradient to see whether that holds for the compiled program. If there is a
    mask or a singularity, the gradient of `zero_safe(loss)` is evaluated as well, and if that
    is not finite, that of `zero_safe(loss, policy="zero")`: the cure and `remarks` name the one
    that is. Outside of loops operations are evaluated one by one, which is slower than the
    compiled program and keeps all intermediate values. Loops are compiled, and those with a bad
    step run a few times more.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar or can't be traced, if JAX can't
    differentiate an operation of it, or if the model has no inexact array.
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
    report = _explain(loss, model, args, kwargs, threshold)
    if not isinstance(loss, ZeroSafe):
        return _with_zero_safe(report, loss, model, args, kwargs)
    # It evaluates the function with guards, which would be shown as masks. So the records are
    # those of the function, and whether they are left is known from their places.
    below = _explain(loss.__wrapped__, model, args, kwargs, threshold)
    place = lambda r: (r.file, r.line, r.column, r.primitive)
    is_left = {place(r) for r in report.found}
    dropped = [r for r in below.found if place(r) not in is_left]
    if report.bad_leaves and len(dropped) == len(below.found):
        dropped = []  # not all of them, and it is not known which
    found = [r for r in below.found if r not in dropped]
    is_bad = bool(report.bad_leaves)
    report = dataclasses.replace(report, found=found, dropped=dropped)
    return _with_zero_safe(report, loss.__wrapped__, model, args, kwargs) if is_bad else report


def _with_zero_safe(report: NaNReport, loss, model, args, kwargs) -> NaNReport:
    """The report, and whether `zero_safe` makes the gradient finite, which is tried."""
    is_dead = lambda r: r.kind == DEAD_BRANCH and ZERO_SAFE in r.cure
    if not report.is_reverse:
        return report
    if not np.isfinite(report.loss):
        if report.bad_leaves and any(map(is_dead, report.found)):
            doing("trying `zero_safe`")
            if not _is_finite_with("selected", loss, model, args, kwargs):
                remarks = [*report.remarks, _NOT_ALL]
                return dataclasses.replace(report, remarks=remarks)
        return report
    others = (DEAD_BRANCH, SINGULARITY, INDETERMINATE, ZERO_TIMES_INFINITY, MASKED_PRODUCT)
    is_other = lambda r: r.kind in others and not is_dead(r) and not r.is_forward
    if not any(is_dead(r) or is_other(r) for r in report.found):
        return report
    doing("trying `zero_safe`")
    policy = next(
        (p for p in _TRIALS if _is_finite_with(p, loss, model, args, kwargs)), "neither"
    )
    if policy == "neither":
        remarks = [_NOT_ALL] if any(map(is_dead, report.found)) else []
        if not all(map(is_dead, report.found)):
            return dataclasses.replace(report, remarks=[*report.remarks, *remarks])
        without = lambda r: r.cure.replace(f"{ZERO_SAFE}, or ", "")
        found = [dataclasses.replace(r, cure=without(r)) for r in report.found]
        remarks = [*report.remarks, _NOT_THESE]
        return dataclasses.replace(report, found=found, remarks=remarks)
    call, remark = _TRIALS[policy]

    names_call = not any(map(is_other, report.found))

    def cure(r):
        if is_dead(r) and names_call:
            # It names the first of the two, which is right if other places are to blame.
            return r.cure.replace(ZERO_SAFE, call)
        return f"{r.cure} In code that you can't edit, use {call}." if is_other(r) else r.cure

    found = [dataclasses.replace(r, cure=cure(r)) for r in report.found]
    if policy == "selected" and names_call:
        return report  # as its cures say
    remarks = [*report.remarks, f"{call} {remark}"]
    if policy != "selected" and not names_call and any(map(is_dead, report.found)):
        remarks.insert(len(report.remarks), _NOT_ALL)
    return dataclasses.replace(report, found=found, remarks=remarks)


def _is_finite_with(policy: str, loss, model, args, kwargs) -> bool:
    """Whether `zero_safe` with this policy makes the gradient finite, compiled as well."""
    safe = zero_safe(loss, policy=policy)
    rest, arrays = TreeSplit.split(model, eqx.is_inexact_array)

    def gradient(arrays):
        return jax.grad(lambda x: safe(rest.tree(x), *args, **kwargs))(arrays)

    program = jax.make_jaxpr(gradient)(arrays)
    # What the loss closes over is an operand, as it is in the user's program.
    run = lambda consts, values: evaluate(ClosedJaxpr(program.jaxpr, consts), values)
    operands = list(program.consts), jax.tree.leaves(arrays)
    try:
        grads = [fn(*operands) for fn in (run, jax.jit(run))]
    except RuntimeError:  # of a check in the program, such as `eqx.error_if`
        return False
    return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(grads))


def _explain(loss, model, args, kwargs, threshold) -> NaNReport:
    doing("tracing the loss and its derivative")
    traced = trace_loss("explain_nan", loss, model, args, kwargs)
    check_no_references("explain_nan", loss, traced.program)
    derivative = _differentiate(NumberedLoss(traced), loss)
    seed = jnp.ones_like(traced.program.out_avals[0])
    leaves = traced.values[: len(traced.leaves)]
    seeds = [seed] if derivative.is_reverse else [jnp.ones_like(x) for x in leaves]
    values = [*traced.values, *seeds]
    names = traced.leaves if derivative.is_reverse else ["the tangent"]
    compiled = _compiled(derivative, values)
    if compiled is not None and threshold is None and all(map(_is_finite, compiled)):
        # What a training meets is the compiled program: there is nothing to look for.
        remarks = _zeros(names, compiled[1:]) if derivative.is_reverse else []
        value, n = float(compiled[0]), len(names)
        return NaNReport([], value, [], n, derivative.is_reverse, threshold, remarks=remarks)
    root = Frame(derivative.root, values, threshold)
    bad, error = [], ""
    if root.hits:
        # What is bad may not reach the gradient.
        bad, error = _bad_leaves(derivative, values, names, threshold)
    value = float(root.results[0])
    found: list[NonFinite] = []
    remarks = [f"The error of the gradient: {error}"] if error else []
    if_compiled = ""
    if bad or not np.isfinite(value):
        numbers, dropped = _that_matter(derivative, root, threshold, bool(bad))
        found, harmless = _find(derivative, root, numbers, threshold)
        remarks += _show_harmless(harmless, found)
        remarks += _show_dropped(derivative, dropped, found)
    if not bad and np.isfinite(value) and derivative.is_reverse:
        is_exact = threshold is None or not root.hits  # and no cotangent was replaced
        remarks += _zeros(names, root.results[1:]) if is_exact else []
        if_compiled = _bad_if_compiled(compiled, names)
        remarks += [_ONLY_COMPILED] if if_compiled else []
    return NaNReport(
        found,
        value,
        bad,
        len(names),
        derivative.is_reverse,
        threshold,
        raises=bool(error),
        if_compiled=if_compiled,
        remarks=remarks,
    )


def _zeros(names, gradients) -> list[str]:
    """A remark on leaves whose gradient is finite, and zero."""
    pairs = zip(names, gradients, strict=True)
    zeros = [name for name, x in pairs if np.size(x) and not np.any(x)]
    if not zeros:
        return []
    where = "" if len(zeros) == len(names) else f" of {show_list(zeros, 8)}"
    return [f"The gradient{where} is zero: `eqg.explain_zero` says why."]


def _compiled(derivative: Derivative, values) -> list[Any] | None:
    """The loss and the gradients of the compiled program. `None` if a check in the program,
    such as `eqx.error_if`, raises an error."""
    doing("compiling the gradient")
    program = derivative.root.program
    try:
        outs = jax.jit(lambda values: evaluate(program, values, bind))(values)
        return jax.block_until_ready(outs)
    except RuntimeError:
        return None


def _is_finite(x) -> bool:
    return not is_inexact(x) or not is_bad(np.asarray(x), None).any()


def _bad_if_compiled(compiled: list[Any] | None, names) -> str:
    """What is finite, but not if it is compiled as a whole: the loss, or gradients."""
    if compiled is None:
        return ""
    loss, *gradients = compiled
    bad = [n for n, x in zip(names, gradients, strict=True) if not _is_finite(x)]
    found = [] if np.isfinite(loss) else [f"the loss is {float(loss):.6g}"]
    found += [f"the gradient of {show_list(bad, 8)} is not finite"] if bad else []
    return ", and ".join(found)


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


def _bad_leaves(derivative: Derivative, values, names, threshold) -> tuple[list[str], str]:
    """The leaves with a bad gradient, and the error that the gradient raises, if it does."""
    try:
        _, *grads = evaluate(derivative.root.program, values, bind)
    except RuleError:  # which is a `RuntimeError` too
        raise
    except RuntimeError as error:
        # A check in the program, such as `eqx.error_if`, found the non-finite value.
        lines = [line for line in str(error).splitlines() if "Error: " in line]
        return list(names), (lines or [str(error)])[-1].partition("Error: ")[2]
    bad = [
        name
        for name, grad in zip(names, grads, strict=True)
        if is_inexact(grad) and is_bad(np.asarray(grad), threshold).any()
    ]
    return bad, ""


def _that_matter(
    derivative: Derivative, root: Frame, threshold, has_bad_leaf: bool
) -> tuple[list[int], list[int]]:
    """The equations with bad cotangents, and those of them that a later mask makes harmless."""
    numbers = sorted(root.hits)[:_MOST_CAUSES]
    is_only_cause = np.isfinite(root.results[0]) and len(numbers) == 1
    if threshold is not None or is_only_cause:
        return numbers, []
    reaching = [n for n in numbers if reaches_gradient(derivative, root, n)]
    if has_bad_leaf and not reaching:
        return numbers, []
    return reaching, [n for n in numbers if n not in reaching]


def _show_dropped(derivative: Derivative, numbers: list[int], found) -> list[str]:
    """A remark on places that are none of those that were found."""
    origins = [derivative.origin(*derivative.places[n]) for n in numbers]
    shown = _other_places(origins, found)
    if not shown:
        return []
    return [
        f"What is not finite at {shown} does not reach the gradient here: a mask drops it. "
        "Once the rest is mended, call `explain_nan` again."
    ]


def _show_harmless(causes: Sequence[Cause], found) -> list[str]:
    """The same of infinities, of values of the loss."""
    shown = _other_places([cause.origin for cause in causes], found)
    if not shown:
        return []
    return [
        f"An infinity at {shown} meets what is not finite. If that is mended, it does no harm "
        "to the loss here, as `exp(-inf)` is zero."
    ]


def _other_places(origins: Iterable[Origin | None], found: Iterable[NonFinite]) -> str:
    known = {(r.file, r.line) for r in found}
    places = [o.source for o in origins if o and (o.source.file, o.source.line) not in known]
    return show_list(list(dict.fromkeys(map(str, places))), 12) if places else ""


def _find(
    derivative: Derivative, root: Frame, numbers: list[int], threshold
) -> tuple[list[NonFinite], list[Cause]]:
    """What is reported, and infinities that are none of the causes."""
    is_finite = np.isfinite(root.results[0])
    of_value, harmless = ([], []) if is_finite else causes_of_value(derivative, root)
    known = {key_of_cause(derivative, cause)[0] for cause in (*of_value, *harmless)}
    in_gradient: list[Cause] = []
    for i, number in enumerate(numbers):
        doing("looking for the cause of place", i, len(numbers))
        hits = root.hits[number]
        in_gradient += causes_of_hits(derivative, number, hits, threshold, known)
    in_gradient.sort(key=lambda cause: cause.spot.place if cause.spot else ())
    causes: dict[Any, list[Cause]] = {}
    for cause in of_value + in_gradient:
        causes.setdefault(key_of_cause(derivative, cause), []).append(cause)
    records = without_consequences(
        record_of(derivative, root, _merged(same))
        for key, same in causes.items()
        if same[0].forward or key[0] not in known  # a non-finite value explains it
    )
    return records, harmless


def _merged(same: list[Cause]) -> Cause:
    """The first of some causes that are reported once, with the largest number of steps in the
    same loops."""
    loops = lambda cause: len(cause.spot.frame.steps) if cause.spot else 0
    alike = [cause for cause in same if loops(cause) == loops(same[0])]
    largest = max(alike, key=lambda cause: (cause.n_steps, not cause.more_steps))
    n_steps, more_steps = largest.n_steps, largest.more_steps
    return dataclasses.replace(same[0], n_steps=n_steps, more_steps=more_steps)
