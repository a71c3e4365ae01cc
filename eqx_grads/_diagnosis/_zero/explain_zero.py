"""`explain_zero`: why the gradient of a leaf of a model is zero."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._jaxprs.dependence import free_variables
from ..._jaxprs.structure import CallWithRule, structure
from ..._rules.tree_split import TreeSplit
from ..._zero_safe.zero_safe import ZeroSafe
from ..carried import Place
from ..nan_checks import without_nan_checks
from ..origins import (
    is_in_derivative,
    no_derivative_error,
    NumberedLoss,
    Origin,
    raised_error,
)
from ..parameters import remark_on_parameters
from ..progress import doing, showing_progress
from ..report import show_list
from ..source_lines import is_of_jax, is_stop_gradient, safe_function
from ..traced_loss import check_no_references, trace_loss, TracedLoss
from .advice import at_values, CURES, is_truncation, without_derivative
from .deaths import Deaths, TooManyOperations
from .facts import Death, Died, Fact
from .gradient import directions, Gradient, rounding_errors, try_gradient
from .kinds import kind_of_death, NO_DERIVATIVE, zero_origin
from .report import ZeroGradient, ZeroReport


# Units die at the function that their own layer applies, or not at all.
_MOST_IN_A_LAYER = 12


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

    - *By structure*: no values revive the derivative. The loss does not use the leaf, or only
        through operations without a derivative, such as `argmax`, `round`, a comparison,
        `stop_gradient` or the predicate of a `while_loop`.
    - *By values*: other values do. A factor is zero, a mask selects nothing, or a function is
        flat here.

    There is a record for each operation at which a tangent of the leaf becomes zero everywhere.
    What comes after that operation need not be corrected first. The kind is the name of the
    experiment that revives the tangent.

    If a leaf has a gradient, but not for some units of its layer because these are dead for all
    examples, its record is in `partly`. `remarks` name a gradient that is not exactly zero, but
    as small as the rounding error of the backward pass, and parts of the model that are no
    arrays of floats, such as a Python number.

    The loss and its gradient are compiled once. If no gradient is zero, that is all. Otherwise,
    the loss is evaluated operation by operation up to the place where the tangents end. If the
    gradient raises an error, as the gradient of a `while_loop` does, `explain_zero` uses
    directional derivatives in forward mode.

    An operation that JAX can't differentiate at all is taken to be differentiable, and named in
    `remarks`. The leaves whose gradient passes it are not looked at by values.

    Of an [`eqx_grads.zero_safe`][] loss, the function that it differentiates is looked at. If
    the gradient of a leaf is zero because of `zero_safe`, the kind says so.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar, if the model has no inexact
    arrays, if the loss can't be traced, or if nothing is zero by structure and JAX can't
    differentiate an operation, or if the derivative of the loss raises an error.
    """
    # What `zero_safe` puts in the program is not the user's, and has no line.
    below = loss.__wrapped__ if isinstance(loss, ZeroSafe) else loss
    doing("tracing the loss")
    traced = trace_loss("explain_zero", below, model, args, kwargs)
    check_no_references("explain_zero", below, traced.program)
    doing("compiling the gradient")
    gradient, error = try_gradient(traced)
    report = explain_traced(below, traced, gradient, error)
    remarks, records = list(report.remarks), list(report.found)
    names = lambda leaves: show_list(list(leaves), 8)
    if report.not_finite and below is loss:
        remarks.append(
            f"The gradient of {names(report.not_finite)} is not finite: `eqg.explain_nan` says "
            "where."
        )
    elif report.not_finite:
        remarks.append(
            f"The gradient of {names(report.not_finite)} would not be finite without "
            "`zero_safe`."
        )
        rest, arrays = TreeSplit.split(model, eqx.is_inexact_array)
        of_arrays = lambda arrays: loss(rest.tree(arrays), *args, **kwargs)
        gradients = zip(traced.leaves, jax.grad(of_arrays)(arrays), strict=True)
        kind = "dropped by zero_safe"
        records += [
            ZeroGradient(leaf=leaf, kind=kind, cure=CURES[kind])
            for leaf, g in gradients
            if leaf in report.not_finite and not np.any(g)
        ]
    if report.noise:
        remarks.append(
            f"The gradient of {names(report.noise)} is not exactly zero, but a rounding error "
            f"of at most {max(report.noise.values()):.2g}. The loss does not depend on such a "
            "leaf, as on a bias before a BatchNorm, or is stationary in it."
        )
    remarks += remark_on_parameters(model)
    return dataclasses.replace(report, found=records, remarks=remarks)


def explain_traced(
    loss: Callable[..., Any],
    traced: TracedLoss,
    gradient: Gradient | None,
    error: Exception | None = None,
) -> ZeroReport:
    """The report on a loss whose gradient is known, or raises this error."""
    sized = [i for i in range(len(traced.leaves)) if traced.values[i].size]
    explanation = _Explanation(traced)
    remarks: list[str] = []
    names = lambda leaves: show_list([str(traced.leaves[i]) for i in leaves], 8)
    if gradient is None:
        records = {i: explanation.records(i, sized) for i in sized}
        unknown = sorted(explanation.moving)
        found = {i: r for i, r in records.items() if i not in unknown}
        opaque = explanation.opaque()
        if error is not None and isinstance(error, jax.errors.JaxRuntimeError):
            raise raised_error(loss, error) from error
        if not found and opaque and error is not None:
            raise no_derivative_error(loss, opaque) from error
        if error is not None and not opaque:
            raise error
        remarks += [
            f"JAX can't differentiate `{o.primitive}` ({o.source}), which was taken to be "
            "differentiable."
            for o in opaque
        ]
        remarks += [f"The gradient of {names(unknown)} is not known."] if unknown else []
        records = [r for i in sorted(found) for r in found[i]]
        return ZeroReport(records, [], len(sized), remarks)
    if gradient.error is not None:
        why = ": ".join([type(gradient.error).__name__, *str(gradient.error).splitlines()[:1]])
        remarks.append(
            f"The gradient of this loss raises {why.rstrip('.')}. Directional derivatives in "
            "forward mode were used."
        )
    bad = [i for i in sized if not np.all(np.isfinite(gradient.gradients[i]))]
    zero = [i for i in sized if i not in bad and not np.any(gradient.gradients[i])]
    found = []
    for i in zero:
        doing("looking at leaf", i, len(traced.leaves))
        records = explanation.records(i, zero)
        note = other_side(traced, gradient, i)
        found += [dataclasses.replace(r, elsewhere=note) for r in records]
    partly = []
    for i in sized if gradient.error is None else ():
        if i not in zero and i not in bad:
            partly += explanation.dead_units(i, gradient.gradients[i])
    noise = rounding_errors(traced, gradient)
    return ZeroReport(
        found,
        partly,
        len(sized),
        remarks,
        {traced.leaves[i]: size for i, size in noise.items()},
        [traced.leaves[i] for i in bad],
    )


class _Explanation:
    """The causes of zero gradients in one loss."""

    def __init__(self, traced: TracedLoss):
        self._traced = traced
        self._passes: list[Deaths] = []
        self._died: dict[int, Died] = {}
        self.moving: set[int] = set()

    @ft.cached_property
    def _numbered(self) -> NumberedLoss:
        return NumberedLoss(self._traced)

    @ft.cached_property
    def _origins(self) -> dict[tuple[int, ...], Origin]:
        origins = self._numbered.origins
        key = lambda o: (*(id(origins[i].eqn) for i in o.enclosing), id(o.eqn))
        return {key(o): o for o in origins}

    @ft.cached_property
    def _has_rules(self) -> bool:
        """Whether a derivative of the loss may be that of another function."""
        return any(is_stop_gradient(o.eqn) or _is_rule(o) for o in self._numbered.origins)

    @ft.cached_property
    def _directions(self) -> list[Any]:
        return directions(self._traced)

    def opaque(self) -> list[Origin]:
        places = [place for one in self._passes for place in one.opaque]
        return list({o.number: o for o in map(self._origin_of, places)}.values())

    def records(self, leaf: int, zero: Sequence[int]) -> list[ZeroGradient]:
        """The causes of one leaf, of those with a zero gradient."""
        if not self._died and not self.moving:
            program = self._traced.program.jaxpr
            used = set(free_variables(program.eqns, program.outvars))
            self._follow([i for i in zero if program.invars[i] in used])
        died = self._died.get(leaf)
        if leaf in self.moving:
            # Exactly zero in reverse mode only: in forward mode, a rounding error remains.
            cure = at_values("canceled", None, has_rules=self._has_rules)
            return [ZeroGradient(leaf=self._traced.leaves[leaf], kind="canceled", cure=cure)]
        if died is None:
            value = self._traced.values[leaf]
            is_closed_over = any(x is value for x in self._traced.program.consts)
            kind = "closed over" if is_closed_over else "never used"
            name = self._traced.leaves[leaf]
            return [ZeroGradient(leaf=name, kind=kind, by_structure=True, cure=CURES[kind])]
        return self._records_of(leaf, died)

    def _records_of(self, leaf: int, died: Died) -> list[ZeroGradient]:
        uses: dict[Any, set[str]] = {}
        last: dict[Any, Death] = {}
        for death, use in died:
            key = (id(death.place.eqn), death.k)
            uses.setdefault(key, set()).add(use)
            last[key] = max(last.get(key, death), death, key=lambda d: d.step)
        found = [(self._record(leaf, death, uses[key]), death) for key, death in last.items()]
        # In a loop, a value that is zero in some steps is no cause if all steps end anyway.
        places = lambda d: [p for p in d.place.outward() if p.around is not None]
        loops = lambda d: {id(p.around.eqn) for p in places(d) if p.step is not None}
        cut = set().union(*(loops(d) for r, d in found if r.by_structure))
        in_cut = lambda d: bool(loops(d) & cut)
        found = [(r, d) for r, d in found if r.by_structure or not in_cut(d)]
        # Where one is inside of another, it says more.
        around = {id(p.around.eqn) for _, d in found for p in places(d)}
        found = [(r, d) for r, d in found if id(d.place.eqn) not in around]
        if not all(r.by_structure for r, _ in found):
            # What only decides, for a value whose derivative ends at these values, is no cause.
            found = [(r, d) for r, d in found if not r.by_structure or self._is_cut(d, uses)]
        records = [r for r, _ in found]
        records.sort(key=lambda r: (r.file, r.line, r.primitive, r.kind))
        # Of what a solver does with its guess, and of a window, one record says it all.
        for kind in ("initial guess", "truncated"):
            records = [r for r in records if r.kind == kind][:1] or records
        return list(dict.fromkeys(records))

    def _is_cut(self, death: Death, uses) -> bool:
        """Whether a value without a derivative is itself a part of the loss."""
        is_of_jax = death.place.eqn.primitive.name == "stop_gradient" and not is_stop_gradient(
            death.place.eqn
        )
        return "" in uses[id(death.place.eqn), death.k] and not is_of_jax

    def _follow(self, leaves: Sequence[int], most: int = 4) -> None:
        """Find the deaths of leaves. Many leaves are followed as one, and in halves if they
        have several deaths."""
        if not leaves:
            return
        alone = len(leaves) <= most
        deaths, moving = self._run(
            {i: i if alone else leaves[0] for i in leaves}, self._directions
        )
        if alone:
            self._died |= deaths
            self.moving |= moving
            return
        (died,) = deaths.values() or [frozenset()]
        if not moving and len({id(d.place.eqn) for d, _ in died}) == 1:
            self._died.update(dict.fromkeys(leaves, died))
            return
        half = len(leaves) // 2
        self._follow(leaves[:half], most)
        self._follow(leaves[half:], most)

    def _run(
        self, keys: dict[int, int], along: Sequence[Any], most: int | None = None
    ) -> tuple[dict[int, Died], set[int]]:
        """The deaths of the loss, by the key of a leaf, and the keys with which it moves."""
        deaths = Deaths(most)
        self._passes.append(deaths)
        facts = [
            Fact(x, name, {keys[i]: along[i]} if i in keys else {})
            for i, (x, name) in enumerate(
                zip(self._traced.values, self._traced.inputs, strict=True)
            )
        ]
        (loss,) = deaths.run(self._traced.program, facts)
        return loss.died, set(loss.tangents)

    def dead_units(self, leaf: int, gradient: np.ndarray) -> list[ZeroGradient]:
        """The units of a leaf that learns otherwise, if they are dead for all examples."""
        for axis in range(gradient.ndim):
            others = tuple(i for i in range(gradient.ndim) if i != axis)
            dead = np.flatnonzero(~np.any(gradient != 0, others))
            if not 0 < len(dead) < gradient.shape[axis]:
                continue
            mask = np.zeros(gradient.shape[axis], bool)
            mask[dead] = True
            shape = [-1 if i == axis else 1 for i in range(gradient.ndim)]
            along = list(self._directions)
            along[leaf] = along[leaf] * mask.reshape(shape)
            try:
                died = self._run({leaf: leaf}, along, _MOST_IN_A_LAYER)[0].get(
                    leaf, frozenset()
                )
            except TooManyOperations:
                return []
            records = self._records_of(leaf, died)
            if records and all(r.kind == "dead units" for r in records):
                units = {"units": tuple(dead.tolist()), "n_units": len(mask), "step": ()}
                return [dataclasses.replace(r, **units) for r in records[:1]]
        return []

    # ------------------------------------------------------------ a record

    def _origin_of(self, place: Place) -> Origin:
        key = tuple(id(p.eqn) for p in reversed(list(place.outward())))
        return self._origins[key]

    def _record(self, leaf: int, death: Death, uses: set[str]) -> ZeroGradient:
        origin = self._origin_of(death.place)
        around = [self._numbered.origins[i] for i in reversed(origin.enclosing)]
        kind, factor = kind_of_death(death)
        detail, by_structure = "", kind == NO_DERIVATIVE
        if any(map(is_truncation, (origin, *around))):
            kind, by_structure = "truncated", False
            cure = CURES[kind]
        elif by_structure:
            is_random = any(f.is_random for f in death.values)
            kind, cure = without_derivative(origin, around, uses, is_random)
            detail = _use_of(uses)
        else:
            if factor is not None and kind == "multiplied by zero":
                origin, kind, detail = self._factor(origin, factor, kind)
            cure = at_values(
                kind,
                origin,
                has_rules=kind == "canceled" and self._has_rules,
                is_rule=_is_rule(origin),
                is_of_leaf=factor is not None and self._is_leaf(zero_origin(factor)),
                safe=self._safe_function(origin, factor),
            )
        return ZeroGradient(
            leaf=self._traced.leaves[leaf],
            kind=kind,
            **origin.source.fields(),
            primitive=origin.primitive,
            path=origin.path,
            step=() if by_structure else death.step,
            detail=detail,
            by_structure=by_structure,
            cure=cure,
        )

    def _factor(self, origin: Origin, factor: Fact, kind: str) -> tuple[Origin, str, str]:
        """What the zero factor of a product is. In a derivative that the loss takes, it may be
        what a clamp or a mask makes of it."""
        source = zero_origin(factor)
        if isinstance(source.made, str):
            return origin, kind, f"`{source.made}`" if source.made else ""
        of_factor = self._origin_of(source.made[0])
        if is_in_derivative(self._numbered.origins, of_factor) and of_factor.source.file:
            # The mask of a clamp is made on the line of the clamp.
            on_line = [o for o in self._numbered.origins if o.source == of_factor.source]
            clamps = [o for o in on_line if o.primitive in ("max", "min", "clamp", "relu")]
            if clamps and of_factor.primitive in ("select_n", "convert_element_type"):
                detail = f"`{clamps[0].primitive}` takes its constant"
                return clamps[0], "dead units", detail
        return origin, kind, f"the result of `{self._name(of_factor)}` at {of_factor.source}"

    def _is_leaf(self, fact: Fact) -> bool:
        return fact.made in self._traced.inputs[: len(self._traced.leaves)]

    def _name(self, origin: Origin) -> str:
        """The operation, or the function of `eqx_grads.safe` that it is in."""
        around = [self._numbered.origins[i].eqn for i in reversed(origin.enclosing)]
        return safe_function([origin.eqn, *around]) or origin.primitive

    def _safe_function(self, origin: Origin, factor: Fact | None) -> str:
        """The function of `eqx_grads.safe` whose derivative is zero, or empty: the operation,
        or a factor in a derivative that the loss takes."""
        names = [self._name(origin)]
        if factor is not None and is_in_derivative(self._numbered.origins, origin):
            made = zero_origin(factor).made
            names += [] if isinstance(made, str) else [self._name(self._origin_of(made[0]))]
        return next((name for name in names if name.startswith("safe.")), "")


_USES = {
    "while": "predicate of a `while_loop`",
    "cond": "predicate of a `cond`",
    "where": "predicate of a `where`",
}


def _use_of(uses: set[str]) -> str:
    """What a value without a derivative decides, if it does nothing else."""
    if "" in uses or not uses:
        return ""
    return "an index" if "an index" in uses else _USES.get(first := min(uses), first)


def _is_rule(origin: Origin) -> bool:
    """Whether it calls a function with a rule that is not JAX's."""
    return isinstance(structure(origin.eqn), CallWithRule) and not is_of_jax(origin.eqn)


def other_side(traced: TracedLoss, gradient: Gradient, leaf: int) -> str:
    """What the loss does along a leaf with a zero gradient, by longer and longer steps."""
    x = np.asarray(traced.values[leaf])
    if not gradient.can_move or np.iscomplexobj(x):
        return ""
    eps = float(jnp.finfo(x.dtype).eps)
    scale = max(1.0, float(np.max(np.abs(x))))

    def change(h):
        values = list(traced.values)
        values[leaf] = (x + h).astype(x.dtype)
        return gradient.at(values)[0] - gradient.loss

    least = 100 * eps * max(abs(gradient.loss), 1e-30)
    slopes = []
    for h in (1e-3 * scale, -1e-3 * scale):
        whole, half = change(h), change(h / 2)
        is_slope = abs(whole) > least and abs(whole - 2 * half) < 0.1 * abs(whole)
        if abs(half) > least and not is_slope:
            return ""
        slopes.append(whole / h if is_slope else 0.0)
    above, below = slopes
    if abs(above - below) > 0.1 * max(map(abs, slopes)):
        return f"It is at a kink, with slope {above:.3g} above and {below:.3g} below."
    if above:
        return f"The loss itself has slope {above:.3g} here."
    for step in (s * sign * scale for s in (1e-3, 1e-2, 1e-1, 1.0) for sign in (1, -1)):
        whole, half = abs(change(step)), abs(change(step / 2))
        if whole > 10 * least:
            is_smooth = half > least and whole > 3 * half
            text = f"a step of {step:.2g} changes it by {change(step):.2g}"
            flat = f"The loss is flat here, but changes over longer steps: {text}."
            return "" if is_smooth else flat
    return ""
