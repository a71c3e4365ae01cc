"""`explain_zero`: why the gradient of a leaf of a model is zero."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._errors import RuleError
from ..._rules.tree_split import TreeSplit
from ..._zero_safe.zero_safe import ZeroSafe
from ..nan_checks import without_nan_checks
from ..origins import is_in_derivative, no_derivative_error, NumberedLoss, Origin
from ..progress import doing, showing_progress
from ..report import show_list
from ..source_lines import UNKNOWN
from ..traced_loss import check_no_references, trace_loss, TracedLoss
from .cures import cure_of
from .derivative import AbstractDerivative, derivative_of
from .kinds import (
    factor_name,
    function_of,
    has_rules,
    INDEX,
    is_gate,
    is_rule,
    is_truncation,
    kind_of_cut,
    kind_of_end,
    kind_of_function,
    use_of_cut,
)
from .report import ZeroGradient, ZeroReport
from .structure import Cut, loss_structure
from .walk import End


@showing_progress("explain_zero")
@without_nan_checks()
def explain_zero(
    loss: Callable[..., Any], model: PyTree, *args: Any, **kwargs: Any
) -> ZeroReport:
    r"""Why the gradient of a leaf of a model is zero, and what to do.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        class Quantized(eqx.Module):
            inner: eqx.nn.Linear
            outer: eqx.nn.Linear

            def __call__(self, x):
                return self.outer(jnp.round(self.inner(x)))

        key1, key2 = jax.random.split(jax.random.key(0))
        model = Quantized(eqx.nn.Linear(3, 4, key=key1), eqx.nn.Linear(4, 1, key=key2))
        loss = lambda model, x: jnp.sum(model(x) ** 2)

        report = eqg.explain_zero(loss, model, jnp.ones(3))
        for zero in report.found:
            print(zero.leaf, zero.kind, zero.code, sep=" | ")
        ```

        ```text
        inner.weight | rounding | return self.outer(jnp.round(self.inner(x)))
        inner.bias | rounding | return self.outer(jnp.round(self.inner(x)))
        ```

    **Arguments:**

    - `loss`: called as `loss(model, *args, **kwargs)`. Returns a real scalar.
    - `model`: any PyTree. Its inexact arrays are the leaves that are looked at.
    - `*args`, `**kwargs`: anything.

    **Returns:**

    A [`eqx_grads.ZeroReport`][], which is false if no leaf has a zero gradient. `print` shows
    it. It finds two kinds of zeros:

    - *By structure*: the loss does not use the leaf, or only through operations without a
        derivative, such as `argmax`, `round`, a comparison, `stop_gradient` or the predicate of
        a `while_loop`. There is a record for each operation at which the derivative in the leaf
        is lost: the last one, on the way from the leaf to the loss, whose operand still has a
        derivative in the leaf. What comes after that need not be corrected first.
    - *By values*: the derivative exists, and is exactly zero for these arguments. It is
        multiplied by zero, or meets dead units, a mask, a saturated function, a branch that is
        not taken. There is a record for each operation where a derivative that is not zero
        becomes zero everywhere; what is nearer to the leaf then is zero as well.

    A leaf with a gradient that is zero only for some units of its layer, as these are dead for
    all examples, is in `partly`.

    What is zero by structure is found by tracing the loss once, without running it. For the
    other leaves, one gradient is evaluated operation by operation, and if one of them is zero,
    one more that is watched. Loops are compiled. If the gradient raises an error, as that of a
    `while_loop` does, it is a directional derivative in forward mode for each leaf.

    A gradient that is not exactly zero, but as small as the rounding error of the terms that
    are summed to it, is named in `remarks`.

    An operation that JAX can't differentiate at all is taken to be differentiable, and named in
    `remarks`. The leaves whose gradient passes it are not looked at by values.

    Of an [`eqx_grads.zero_safe`][] loss, the function that it differentiates is looked at. If
    the gradient of a leaf is zero because of `zero_safe`, the kind says so.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar, if the model has no inexact
    arrays, if the loss can't be traced, or if nothing is zero by structure and JAX can't
    differentiate an operation. If the derivative of the loss raises, so does this.
    """
    # What `zero_safe` puts in the program is not the user's, and has no line.
    below = loss.__wrapped__ if isinstance(loss, ZeroSafe) else loss
    doing("tracing the loss")
    traced = trace_loss("explain_zero", below, model, args, kwargs)
    check_no_references("explain_zero", below, traced.program)
    numbered = NumberedLoss(traced)
    if below is loss:
        return _Explanation(numbered, below).report()

    def gradients():
        rest, arrays = TreeSplit.split(model, eqx.is_inexact_array)
        return jax.grad(lambda arrays: loss(rest.tree(arrays), *args, **kwargs))(arrays)

    return _Explanation(numbered, below, gradients).report()


class _Explanation:
    """What is found of one loss."""

    def __init__(
        self,
        numbered: NumberedLoss,
        loss: Callable[..., Any],
        zero_safe_gradients: Callable[[], Sequence[Any]] | None = None,
    ):
        self._numbered, self._loss = numbered, loss
        self._zero_safe_gradients = zero_safe_gradients
        self._leaves = numbered.traced.leaves
        values = numbered.traced.values[: len(self._leaves)]
        self._shapes = [value.shape for value in values]
        self._structure = loss_structure(numbered)
        self._sized = [i for i, value in enumerate(values) if value.size]

    def report(self) -> ZeroReport:
        remarks = [
            f"JAX can't differentiate `{origin.primitive}` ({origin.source}), which was taken "
            "to be differentiable."
            for origin in self._structure.opaque
        ]
        integers = _integer_leaves(self._numbered.traced)
        if integers:
            remarks.append(
                f"Leaves of integers have no gradient, and are not looked at: {integers}."
            )
        found: dict[int, list[ZeroGradient]] = {
            i: self._by_structure(i) for i in self._sized if i not in self._structure.live
        }
        partly: list[ZeroGradient] = []
        not_finite: list[int] = []
        live = [i for i in self._sized if i in self._structure.live]
        doing("evaluating the gradient")
        derivative = self._derivative(live, is_needed=not found) if live else None
        if live and derivative is None:
            names = show_list([self._leaves[i] for i in live], 8)
            remarks.append(f"The gradient of {names} is not known.")
        elif derivative is not None:
            remarks.extend(derivative.remarks)
            for i, gradient in zip(live, derivative.gradients(), strict=True):
                if not np.all(np.isfinite(gradient)):
                    not_finite.append(i)
                doing("looking at leaf", i, len(self._leaves))
                if not np.any(gradient):
                    found[i] = self._by_values(i, derivative)
                else:
                    partly.extend(self._dead_units(i, derivative, gradient))
            remarks.extend(self._rounding_errors(derivative))
        names = show_list([self._leaves[i] for i in not_finite], 8)
        if not_finite and self._zero_safe_gradients is not None:
            remarks.append(f"Without `zero_safe`, the gradient of {names} would not be finite.")
            gradients = self._zero_safe_gradients()
            for i in not_finite:
                if not np.any(gradients[i]):
                    found[i] = [self._record(i, "dropped by zero_safe", None)]
        elif not_finite:
            remarks.append(
                f"The gradient of {names} is not finite: "
                "`eqg.explain_nan` says where it becomes so."
            )
        records = [record for i in sorted(found) for record in found[i]]
        return ZeroReport(records, partly, len(self._sized), remarks)

    def _derivative(self, leaves: list[int], *, is_needed: bool) -> AbstractDerivative | None:
        """`None` if an operation of the loss has no derivative."""
        try:
            return derivative_of(self._numbered, leaves, self._is_gate)
        except RuleError:
            raise
        except Exception as error:  # JAX has no one type of error for it
            if not self._structure.opaque:
                raise
            if is_needed:
                raise no_derivative_error(self._loss, self._structure.opaque) from error
            return None

    def _by_structure(self, leaf: int) -> list[ZeroGradient]:
        cuts = self._structure.cuts[leaf]
        if not cuts:
            value = self._numbered.traced.values[leaf]
            is_closed_over = any(x is value for x in self._numbered.traced.program.consts)
            kind = "closed over" if is_closed_over else "never used"
            return [self._record(leaf, kind, None, by_structure=True)]
        return list(dict.fromkeys(self._of_cut(leaf, cut) for cut in cuts))

    def _of_cut(self, leaf: int, cut: Cut) -> ZeroGradient:
        function = function_of(cut.origin, self._numbered.origins, is_random=cut.is_random)
        if function is not None:
            return self._record(leaf, kind_of_function(function), function, by_structure=True)
        return self._record(
            leaf, kind_of_cut(cut), cut.origin, detail=use_of_cut(cut), by_structure=True
        )

    def _by_values(self, leaf: int, derivative: AbstractDerivative) -> list[ZeroGradient]:
        records = [self._of_end(leaf, end) for end in derivative.ends(leaf)]
        return list(dict.fromkeys(records)) or [self._record(leaf, "zero value", None)]

    def _rounding_errors(self, derivative: AbstractDerivative) -> list[str]:
        found = derivative.rounding_errors()
        if not found:
            return []
        names = show_list([self._leaves[i] for i, _, _ in found], 8)
        _, gradient, terms = max(found, key=lambda one: one[1])
        return [
            f"The gradient of {names} is not exactly zero, but a rounding error: terms whose "
            f"sizes add up to {terms:.2g} cancel to {gradient:.2g}. The loss does not depend "
            "on such a leaf, as on a bias before a BatchNorm, or is stationary in it."
        ]

    def _dead_units(self, leaf, derivative, gradient: np.ndarray) -> list[ZeroGradient]:
        """Units that are dead for all examples, if these are zero slices of a gradient."""
        zeros = [_zero_slices(gradient, axis) for axis in range(gradient.ndim)]
        if not any(zeros):
            return []
        for end in reversed(derivative.gates(leaf)):  # the one next to the leaf
            same_size = [
                (units, zeros_of_axis)
                for units, n in end.units
                for zeros_of_axis, size in zip(zeros, gradient.shape, strict=True)
                if n == size > 1
            ]
            matches = [units for units, z in same_size if units and z.issuperset(units)]
            if matches:
                record = self._of_end(leaf, end, matches[-1])
                return [record] if record.kind == "dead units" else []
            if same_size:
                return []
        return []

    def _is_gate(self, eqn: Any) -> bool:
        origin = self._numbered.origin_of(eqn)
        return origin is not None and is_gate(origin)

    def _of_end(self, leaf: int, end: End, units=None) -> ZeroGradient:
        """A record for a place where the derivative ends.

        - `units`: those that are dead; by default all that are, and the derivative ends here.
        """
        origin_of = self._numbered.origin_of
        origins = [origin_of(eqn) for eqn in (end.eqn, *reversed(end.enclosing))]
        origin = next((o for o in origins if o is not None), None)
        function = origin and function_of(origin, self._numbered.origins)
        if function is not None:
            return self._record(leaf, kind_of_function(function), function, step=end.step)
        decides = self._structure.decided_by.get(origin.number, ()) if origin else ()
        name_of_leaf = self._numbered.traced.inputs[leaf]
        kind = kind_of_end(end, origin, set(decides), leaf, name_of_leaf)
        around = (self._numbered.origins[i] for i in (origin.enclosing if origin else ()))
        if origin and any(map(is_truncation, (origin, *around))):
            kind = "truncated"
        detail, n_units, step = "", 0, end.step
        safe = ""
        if kind in ("multiplied by zero", "zero derivative"):
            safe = _safe_function(self._numbered, origin, end)
        if kind == "multiplied by zero":
            names = [factor_name(source, origin_of) for source in end.zero_factors]
            detail = ", ".join(name for name in names if name)
        if kind == "dead units" and end.units:
            step = ()  # dead in all of them
            shape = self._shapes[leaf]
            likely = [pair for pair in end.units if pair[1] in shape] or end.units
            of_leaf, n_units = likely[-1]
            units = of_leaf if units is None else units
        return self._record(
            leaf,
            kind,
            origin,
            step=step,
            detail=detail,
            units=units or (),
            n_units=n_units,
            safe=safe,
        )

    def _record(
        self,
        leaf: int,
        kind: str,
        origin: Origin | None,
        *,
        step=(),
        detail="",
        units=(),
        n_units=0,
        by_structure=False,
        safe="",
    ) -> ZeroGradient:
        return ZeroGradient(
            leaf=self._leaves[leaf],
            kind=kind,
            **(origin.source if origin else UNKNOWN).fields(),
            primitive=origin.primitive if origin else "",
            path=origin.path if origin else "",
            step=tuple(step),
            detail=detail,
            units=tuple(units),
            n_units=n_units,
            by_structure=by_structure,
            cure=cure_of(
                kind,
                origin.primitive if origin else "",
                is_index=detail == INDEX,
                has_rules=kind == "canceled" and has_rules(self._numbered.origins),
                is_rule=origin is not None and is_rule(origin),
                safe=safe,
            ),
        )


def _safe_function(numbered: NumberedLoss, origin: Origin | None, end: End) -> str:
    """The function of `eqx_grads.safe` whose derivative is zero, or empty: the operation, or a
    factor in a derivative that the loss takes. Elsewhere, the value of a factor is zero."""
    if origin is None:
        return ""
    factors = [s for s in end.zero_factors if s is not None and not isinstance(s, str)]
    if not is_in_derivative(numbered.origins, origin):
        factors = []
    names = [o.primitive for o in (origin, *map(numbered.origin_of, factors)) if o is not None]
    return next((name for name in names if name.startswith("safe.")), "")


def _integer_leaves(traced: TracedLoss) -> str:
    """The names of those in the model, to be shown."""
    others = list(zip(traced.inputs, traced.values, strict=True))[len(traced.leaves) :]
    names = [
        name.removeprefix("model").removeprefix(".")
        for name, x in others
        if name.startswith("model") and jnp.issubdtype(x.dtype, jnp.integer)
    ]
    return show_list(names, 8)


def _zero_slices(x: np.ndarray, axis: int) -> set[int]:
    others = tuple(i for i in range(x.ndim) if i != axis)
    return set(np.flatnonzero(~np.any(x != 0, others)).tolist())
