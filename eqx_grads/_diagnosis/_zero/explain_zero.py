"""`explain_zero`: why the gradient of a leaf of a model is zero."""

import contextlib
import dataclasses
import functools as ft
import math
import operator
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._jaxprs.dependence import free_variables
from ..._jaxprs.evaluate import bind
from ..._jaxprs.structure import holds, ShardMap, While
from ..._zero_safe.zero_safe import ZeroSafe
from .._nan.births import Births, labels_of, Value
from .._nan.derivative import differentiate
from .._nan.zeros import CANCELS
from ..carried import outward, Place, walk
from ..eager import SHORT_COMPILATION
from ..gradient import (
    change_along,
    directions,
    Gradient,
    kink,
    rounding_errors,
    rounding_of,
    staircase,
    trace_gradient,
)
from ..opaque import no_gradient
from ..origins import is_in_derivative, NumberedLoss, Origin
from ..pairs import is_inexact
from ..parameters import no_parameters, remark_on
from ..progress import diagnosing, doing
from ..report import show_list
from ..source_lines import is_stop_gradient, safe_function
from ..traced_loss import TracedLoss
from .advice import cure_of, kind_without_derivative
from .deaths import Death, Deaths, Died, Fact
from .kinds import kind_of_death, NO_DERIVATIVE
from .report import ZeroGradient, ZeroReport
from .roundings import roundings


# The time to find where a cotangent ends in reverse mode.
_SECONDS = 30.0
_MOST_REMARKS = 4
# Other results of an operation. Some of them are on the other side of most comparisons.
_OTHERS = (np.nan, 100.0, -100.0, 0.0, 1.0, 1e4)


@diagnosing("explain_zero")
def explain_zero(
    loss: Callable[..., Any], model: PyTree, *args: Any, **kwargs: Any
) -> ZeroReport:
    r"""Find why the gradient of a leaf of a model is zero, and what to do.

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
    - `model`: any PyTree. `explain_zero` looks at its inexact arrays, the leaves.
    - `*args`, `**kwargs`: anything.

    **Returns:**

    A [`eqx_grads.ZeroReport`][], which is false if no leaf has a zero gradient. `print` shows
    it. It finds two kinds of zeros:

    - *By structure*: no values revive the derivative. The loss does not use the leaf, or only
        through operations without a derivative, such as `argmax`, `round`, a comparison,
        `stop_gradient` or the predicate of a `while_loop`.
    - *By values*: other values would revive it. A factor is zero, a mask selects nothing, or a
        function is flat here.

    There is a record for each operation at which a tangent of the leaf becomes zero everywhere.
    You need not correct later operations first. The kind is the name of the
    experiment that revives the tangent.

    `remarks` name

    - a vector, such as a bias, whose gradient is zero for some units;
    - a gradient that is as small as the rounding error of the backward pass;
    - parts of the model that are not arrays of floats, such as a Python number;
    - how the loss changes as a leaf with a zero gradient moves, at a kink or on a staircase.

    The loss and its gradient are compiled once. If no gradient is zero, that is all. Otherwise,
    the loss is evaluated operation by operation up to the place where the tangents end. If the
    gradient raises an error, as the gradient of a `while_loop` does, `explain_zero` uses
    directional derivatives in forward mode.

    If the loss is decorated with [`eqx_grads.zero_safe`][], `explain_zero` inspects the
    undecorated loss.

    **Raises:**

    [`eqx_grads.RuleError`][] if the loss is not a real scalar or can't be traced, or if the
    model has no inexact arrays. Also if JAX can't differentiate an operation, or the derivative
    of the loss raises an error.
    """
    # The equations that `zero_safe` adds are not the user's, and have no line.
    below = loss.__wrapped__ if isinstance(loss, ZeroSafe) else loss
    traced, gradient, error = trace_gradient("explain_zero", below, model, args, kwargs)
    report = explain_traced(below, traced, gradient, error)
    more = remark_on(no_parameters(model))
    if report.not_finite and below is not loss:
        more.append("`zero_safe` was left out here, and may drop what is not finite.")
    return dataclasses.replace(report, remarks=[*report.remarks, *more])


def _dead_units(
    traced: TracedLoss, gradient: Gradient, noise: Collection[str]
) -> dict[str, str]:
    """Vectors that have a gradient, but not for some units: a remark for each leaf."""
    remarks = {}
    for leaf, g in zip(traced.leaves, gradient.gradients, strict=True):
        is_of_units = g.ndim == 1 and leaf not in noise and leaf != "model"
        units = np.flatnonzero(g == 0) if is_of_units else ()
        if 0 < len(units) < g.size:
            which = show_list(list(map(str, units)), 8)
            remarks[leaf] = (
                f"The gradient of {leaf} is zero for {len(units)} of {g.size} units ({which}). "
                "Dead units, as after a `jax.nn.relu`, and saturated ones do not learn from "
                "these arguments."
            )
    return remarks


def explain_traced(
    loss: Callable[..., Any],
    traced: TracedLoss,
    gradient: Gradient | None,
    error: Exception | None = None,
) -> ZeroReport:
    """The report on a loss whose gradient is known, or raises this error."""
    if gradient is None:
        assert error is not None
        raise no_gradient(loss, traced, error) from error
    sized = [i for i in range(len(traced.leaves)) if traced.values[i].size]
    noise = {traced.leaves[i]: x for i, x in rounding_errors(traced, gradient).items()}
    remarks, at_points = [], {}
    if gradient.error is not None:
        why = ": ".join([type(gradient.error).__name__, *str(gradient.error).splitlines()[:1]])
        remarks.append(
            f"The gradient of this loss raises {why.rstrip('.')}. Directional derivatives in "
            "forward mode were used. For a `while_loop`, use `eqg.filter_while_loop` with "
            "`max_steps`; for a solver, `eqg.implicit`."
        )
    else:
        remarks += _first(_dead_units(traced, gradient, noise))
    bad = [i for i in sized if not np.all(np.isfinite(gradient.gradients[i]))]
    zero = [i for i in sized if i not in bad and not np.any(gradient.gradients[i])]
    explanation, found = _Explanation(traced, gradient, zero), []
    rounding = rounding_of(traced, gradient)
    for i in zero:
        doing("looking at leaf", i, len(traced.leaves))
        found += explanation.records(i)
        # A step has to be larger than the rounding of a large leaf.
        scale = max(1.0, float(np.max(np.abs(np.asarray(traced.values[i])))))
        change = change_along(traced, gradient, {i: scale})
        if text := kink(change, rounding, scale):
            text = f" is at a kink, and the other side has a slope: {text}"
        elif text := staircase(change, rounding):
            text = f": the loss is flat here, but changes over longer steps: {text}"
        if text:
            at_points[traced.leaves[i]] = f"{traced.leaves[i]}{text}."
    remarks += _first(at_points)
    if not zero:  # these have their rows
        remarks += roundings(traced.program, len(traced.leaves))
    not_finite = [traced.leaves[i] for i in bad]
    if bad:
        names = show_list(not_finite, 8)
        remarks.append(f"The gradient of {names} is not finite: see `eqg.explain_nan`.")
    if noise:
        remarks.append(
            f"The gradient of {show_list(list(noise), 8)} is not exactly zero, but a rounding "
            f"error of at most {max(noise.values()):.2g}. Either the loss does not depend on "
            "the leaf, like a bias before a BatchNorm, or an operation loses all digits, like "
            "`eigh` of equal eigenvalues."
        )
    return ZeroReport(found, len(sized), remarks, noise, not_finite)


def _first(remarks: dict[str, str]) -> list[str]:
    more = f"And so for {show_list([*remarks][_MOST_REMARKS:], 8)}."
    shown = [*remarks.values()][:_MOST_REMARKS]
    return [*shown, more] if len(remarks) > _MOST_REMARKS else shown


class _Explanation:
    """The causes of zero gradients in one loss."""

    def __init__(self, traced: TracedLoss, gradient: Gradient, zero: Sequence[int]):
        self.traced, self._gradient = traced, gradient
        self._died: dict[int, Died] = {}
        self._known: dict[Any, Any] = {}
        self._directions = directions(traced) if zero else []
        self._moving: set[int] = set()
        self._used: dict[int, bool] = {}
        program = traced.program.jaxpr
        used = set(free_variables(program.eqns, program.outvars)) if zero else ()
        self._follow([i for i in zero if program.invars[i] in used])

    @ft.cached_property
    def _numbered(self) -> NumberedLoss:
        return NumberedLoss(self.traced)

    def records(self, leaf: int) -> list[ZeroGradient]:
        """The causes of one leaf with a zero gradient."""
        name = self.traced.leaves[leaf]
        if leaf in self._moving:
            # Zero in reverse mode only. In forward mode, a rounding error or a number remains.
            kind = "underflow" if self._underflows(leaf) else "canceled"
            where = self._end_of_cotangent(leaf)
            return [ZeroGradient(leaf=name, kind=kind, cure=cure_of(kind), **where)]
        if leaf not in self._died:
            consts = self.traced.program.consts
            is_closed_over = any(x is self.traced.values[leaf] for x in consts)
            kind = "closed over" if is_closed_over else "never used"
            return [ZeroGradient(leaf=name, kind=kind, by_structure=True, cure=cure_of(kind))]
        return self._records_of(leaf, self._died[leaf])

    def _records_of(self, leaf: int, died: Died) -> list[ZeroGradient]:
        in_order = sorted(died, key=lambda d: d.step)
        last = {(id(d.place.eqn), d.k): d for d in in_order}
        found = [(self._record(leaf, death), death) for death in last.values()]
        found = [(r, d) for r, d in found if d.is_used] or found
        # In a loop, a value that is zero in some steps is not a cause if all steps end anyway.
        places = lambda d: [
            (id(p.around.eqn), p.step) for p in outward(d.place) if p.around is not None
        ]
        loops = lambda d: {eqn for eqn, step in places(d) if step is not None}
        cut = set().union(*(loops(d) for r, d in found if r.by_structure))
        found = [(r, d) for r, d in found if r.by_structure or not loops(d) & cut]
        # Where one is inside of another, it says more.
        around = {eqn for _, d in found for eqn, _ in places(d)}
        found = [(r, d) for r, d in found if id(d.place.eqn) not in around]
        if not all(r.by_structure for r, _ in found):
            # An operation that only decides is not a cause if values end a derivative.
            is_stop = lambda e: e.primitive.name == "stop_gradient" and not is_stop_gradient(e)
            decides = lambda e, k: not is_inexact(e.outvars[k]) or is_stop(e)
            is_value = lambda d: not decides(d.place.eqn, d.k)
            found = [(r, d) for r, d in found if not r.by_structure or is_value(d)]
        place = operator.attrgetter("file", "line", "primitive", "kind")
        records = sorted((r for r, _ in found), key=place)
        # For the guess of a solver, and for a window, one record says it all.
        for kind in ("initial guess", "truncated"):
            records = [r for r in records if r.kind == kind][:1] or records
        return list(dict.fromkeys(records))

    def _follow(self, leaves: Sequence[int]) -> None:
        """Find the deaths of leaves. Many leaves are followed as one, and in halves if they
        have several deaths."""
        if not leaves:
            return
        pairs = enumerate(zip(self.traced.values, self.traced.inputs, strict=True))
        along = lambda i: self._directions[i] if i in leaves else None
        facts = [Fact(x, along(i), made=name) for i, (x, name) in pairs]
        loss = walk(self.traced.program, facts, Deaths(self._known))[0]
        is_one = loss.t is None and len({id(d.place.eqn) for d in loss.died}) == 1
        if len(leaves) > 1 and not is_one:
            self._follow(leaves[: len(leaves) // 2])
            self._follow(leaves[len(leaves) // 2 :])
        elif loss.t is not None:
            self._moving.update(leaves)
        elif loss.died:
            self._died.update(dict.fromkeys(leaves, loss.died))

    # ------------------------------------------------------------ a record

    @ft.cached_property
    def _backward(self) -> tuple[Births, list[Value] | None]:
        births = Births(differentiate(self._numbered), None, time.monotonic() + _SECONDS)
        return births, births.run()

    def _underflows(self, leaf: int) -> bool:
        """Whether the gradient of a larger multiple of the loss is not zero."""
        most = jnp.finfo(self.traced.program.out_avals[0].dtype).maxexp
        scales = (2.0 ** (most * i // 16) for i in (2, 4, 8, 12))
        scaled = (self._gradient.at(self.traced.values, s)[1][leaf] for s in scales)
        is_alive = lambda g: bool(np.any(np.isfinite(g) & (g != 0)))
        return self._gradient.can_move and any(map(is_alive, scaled))

    def _end_of_cotangent(self, leaf: int) -> dict[str, Any]:
        """The fields of a record that say where a cotangent becomes zero in reverse mode."""
        births, outs = self._backward
        if outs is None or not births.derivative.is_reverse:
            return {}
        zeros = [births.zeros.found[label] for label in labels_of(outs[1 + leaf].zero)]
        origins = (births.derivative.origin(z.place) for z in zeros if z.why == CANCELS)
        return next((origin.fields() for origin in origins if origin is not None), {})

    def _origin_of(self, place: Place) -> Origin:
        return self._numbered.origin_at([p.eqn for p in outward(place)][::-1])

    def _record(self, leaf: int, death: Death) -> ZeroGradient:
        origin = self._origin_of(death.place)
        kind, factor = kind_of_death(death)
        detail, made, by_structure = "", origin, kind == NO_DERIVATIVE
        of = lambda f: f.made if isinstance(f.made, str) else self._origin_of(f.made)
        death.is_used = not by_structure or self._is_used(death)
        if not death.is_used:
            kind, by_structure = "not selected", False
        elif by_structure:
            kind = kind_without_derivative(self._numbered.around(origin))
        elif factor is not None and kind == "multiplied by zero":
            made = of(factor)
            detail = f"`{made}`" if made else ""
            if not isinstance(made, str):
                detail = f"the result of `{self._name(made)}` at {made.source}"
        elif kind in ("dead units", "saturated"):
            moves = (of(f) for f in death.values if f.t is not None)
            before = next((x.path for x in moves if not isinstance(x, str)), "")
            detail = f"after `{before}`" if before not in ("", origin.path) else ""
        # The operation, or a factor in a derivative that the loss takes.
        is_inner = is_in_derivative(self._numbered.origins, origin)
        at = [origin, made] if is_inner and not isinstance(made, str) else [origin]
        safe = next((x for x in map(self._name, at) if x.startswith("safe.")), "")
        return ZeroGradient(
            leaf=self.traced.leaves[leaf],
            kind=kind,
            **origin.fields(),
            step=() if by_structure else death.step,
            detail=detail,
            by_structure=by_structure,
            cure=cure_of(kind, origin.primitive, safe),
        )

    def _is_used(self, death: Death) -> bool:
        """Whether the loss changes with the results of an operation."""
        origin, program = self._origin_of(death.place), self.traced.program
        outs = [v.aval for v in origin.eqn.outvars]
        # With other numbers, a `while_loop` may not end.
        can_change = all(map(is_inexact, outs)) and self._gradient.can_move
        if not can_change or holds(program, While, ShardMap):
            return True
        if origin.number not in self._used:
            self._used[origin.number] = True
            replaced: list[Any] = []

            def others(values, s):
                replaced.append(s)
                ramp = lambda x: (s * np.linspace(1, 2, x.size)).reshape(x.shape)
                each = bind(origin.eqn, values)
                return [jnp.where(jnp.isinf(s), x, ramp(x).astype(x.dtype)) for x in each]

            @ft.partial(jax.jit, compiler_options=SHORT_COMPILATION)
            def loss_with(s, values):
                instead = {origin.number: lambda values: others(values, s)}
                return self._numbered.replaced(instead)(*values)

            run = lambda s: float(loss_with(s, list(self.traced.values)))
            with contextlib.suppress(Exception):  # of a check in the loss
                loss = run(math.inf)  # its own results
                differs = any(run(s) != loss for s in _OTHERS)
                self._used[origin.number] = differs or not replaced
        return self._used[origin.number]

    def _name(self, origin: Origin) -> str:
        """The operation, or the function of `eqx_grads.safe` that it is in."""
        around = self._numbered.around(origin)
        return safe_function(o.eqn for o in around) or origin.primitive
