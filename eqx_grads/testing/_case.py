"""One rule under test: the function at its arguments, in both precisions, with references."""

import contextlib
import copy
import dataclasses
import functools as ft
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._diagnosis._programs.in_float64 import evaluate_in_float64
from .._jaxprs.structure import equations
from ._argument_checks import (
    as_names,
    check_integer,
    check_options,
    check_points,
    check_tolerance,
)
from ._compare import as_real, difference, scale_of, tolerance_of
from ._compiled import Program
from ._eager import EagerCalls
from ._finite_differences import directional, FiniteDifference
from ._flat_function import double_precision, FlatFunction
from ._is_solver import is_solver
from ._precision import Precision
from ._random_tangents import normal_like, only
from ._reference import check_outputs_of_reference
from ._rounding import rounding_error
from ._same_function import changes_alike, is_same_program
from ._trace_derivatives import captures_numpy, trace_all, trace_derivatives


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `check_rule`, which documents them."""

    reference: Callable[..., Any] | None = None
    expected_tangent: Callable[..., Any] | None = None
    expected_cotangent: Callable[..., Any] | None = None
    nonlinear: bool = False
    nondifferentiable: Collection[str] = ()
    tangents: Any = None
    cotangents: Any = None
    order: int = 2
    at: Sequence[Any] = ()
    max_residual_bytes: int | None = None
    tolerance: float | None = None

    def __post_init__(self):
        functions = ("reference", "expected_tangent", "expected_cotangent")
        given = {name: getattr(self, name) for name in functions}
        check_options("check_rule", given, nonlinear=self.nonlinear)
        check_tolerance("check_rule", tolerance=self.tolerance)
        check_integer("check_rule", "order", self.order, 1)
        check_points("check_rule", "at", self.at)
        as_names("check_rule", "nondifferentiable", self.nondifferentiable)
        if self.max_residual_bytes is not None:
            check_integer("check_rule", "max_residual_bytes", self.max_residual_bytes, 0)


class DirectionalDerivative(NamedTuple):
    """The derivative along one direction, by finite differences in float64.

    - `name`: the leaf that is perturbed, or "all leaves".
    - `tangents`: the direction, one array for each leaf.
    - `by_differences`: the derivative along it, one array for each output.
    """

    name: str
    tangents: list[Any]
    by_differences: FiniteDifference


_STRICT = 1e-9
# The most that is added to a tolerance for rounding errors: an error as large as the derivative
# is never one of rounding.
_MOST_ROUNDING = 0.05
# Along how many directions two functions are compared.
_DIRECTIONS = 2
# For how many cotangents the effect of low precision is measured, and what may be larger.
_MEASURED, _MARGIN = 4, 16
# At which a function may have other values, relative to the leaves.
_DISTANCES = (1 / 8, 1 / 64, 1 / 512)
# With more leaves than this, one direction perturbs all of them together.
_MAX_LEAVES_ALONE = 6


class Case:
    """A rule, its arguments, the options, and the random directions that a seed gives.

    What several checks need is computed once, when it is first asked for.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: Options,
        seed: int = 0,
    ):
        self.options = options
        # What was asked for is a function of arrays: there, a number is a static option.
        is_asked_for = self.is_wrong_on_purpose
        names = as_names("check_rule", "nondifferentiable", options.nondifferentiable)
        self.subject = FlatFunction(fn, args, kwargs, names, own_numbers=not is_asked_for)
        self.own = Precision(self.subject, options.reference, contextlib.nullcontext)
        self.seed = seed
        self.draw_for("arguments")
        self.subject.check_points(options.at)
        if options.reference is not None:
            check_outputs_of_reference(self.own)

    def with_seed(self, seed: int) -> "Case":
        """The same case with other random directions. Compiled programs are shared."""
        other = copy.copy(self)
        other.seed = seed
        vars(other).pop("finite_differences", None)  # they are along random directions
        return other

    def draw_for(self, purpose: str) -> None:
        """Draw from the start of a sequence that the seed and the purpose determine: a check
        draws the same directions alone as it does among others."""
        self.rng = np.random.default_rng([self.seed, *purpose.encode()])

    @property
    def names(self) -> list[str]:
        return self.subject.names

    @property
    def output_names(self) -> list[str]:
        return self.own.output_names

    @ft.cached_property
    def eager(self) -> EagerCalls:
        return EagerCalls(self.subject, self.own.outputs)

    @ft.cached_property
    def is_wide(self) -> bool:
        """Whether the user's own precision is double."""
        return all(jnp.finfo(x.dtype).bits == 64 for x in self.subject.leaves)

    @ft.cached_property
    def wide(self) -> Precision | None:
        """The same in float64; `None` if the function does not run in float64, or is another
        function there."""
        return None if self.is_another_in_float64 else self._in_float64

    @ft.cached_property
    def _traced(self) -> list[ClosedJaxpr]:
        """Traced before anything is in float64, and not before the check `leaks`, which has to
        see the first trace of a rule."""
        leaves, order = self.subject.leaves, self.options.order
        programs = trace_derivatives(self.own.rule.fn, leaves, order)
        return [*programs, *trace_all([self.own.reference.fn], leaves)]

    @ft.cached_property
    def captures_numpy(self) -> bool:
        """Whether NumPy arrays are constants of the function or of a derivative of it."""
        return any(map(captures_numpy, self._traced))

    @ft.cached_property
    def has_given_transpose(self) -> bool:
        """Whether there are linear maps in it with a transpose that the user wrote, which can't
        be removed: those of `linear_host_function` and of `jax.custom_derivatives.linear_call`.
        """
        program = jax.make_jaxpr(self.own.plain.fn)(*self.subject.leaves)
        return any(
            e.primitive.name in ("eqg_linear", "linear_call") for e in equations(program)
        )

    @ft.cached_property
    def is_solver(self) -> bool:
        """Whether it is a solution of an equation, without other rules."""
        return is_solver(self.own.rule.fn, self.subject.leaves)

    @ft.cached_property
    def is_another_in_float64(self) -> bool:
        """Whether the function of float64 arguments is another function than the one of the
        user's arguments: it draws random numbers, or looks at a dtype."""
        own, wide = self.own, self._in_float64
        if wide is None or wide is own:
            return False
        try:
            program = jax.make_jaxpr(own.compared)(*own.subject.leaves)
            with double_precision():
                other = jax.make_jaxpr(wide.compared)(*wide.subject.leaves)
        except Exception:  # it looks at values, or can't be traced: a check says so
            return False
        if is_same_program(program, other):
            return False
        exact, other = self._exact(program), Program(wide.compared, [], double_precision)
        leaves = [np.asarray(x) for x in wide.subject.leaves]
        directions = [
            [scale_of(x) * t for x, t in zip(leaves, normal_like(rng, leaves), strict=True)]
            for rng in map(np.random.default_rng, range(_DIRECTIONS))
        ]
        return not changes_alike(exact.value_at, other.value_at, leaves, directions)

    def _exact(self, program: ClosedJaxpr) -> Program:
        """What a program that was traced in the user's precision computes, in float64."""
        run = lambda *xs: evaluate_in_float64(program, xs)
        return Program(run, [], double_precision)

    @ft.cached_property
    def _in_float64(self) -> Precision | None:
        wide = self._with_wide_arguments
        options = self.options
        if wide is None or options.expected_tangent or options.expected_cotangent:
            return wide  # a formula is rounded as it is written
        with wide.context():
            return wide.without_rounding()

    @ft.cached_property
    def _with_wide_arguments(self) -> Precision | None:
        if self.is_wide and jax.dtypes.canonicalize_dtype(float) == np.float64:
            return self.own
        _ = self._traced
        reference = self.options.reference
        try:
            with double_precision():
                wide = Precision(self.subject.in_float64(), reference, double_precision)
                if not wide.has_reverse_mode:
                    wide.rule.value()
            for name in ("plain", "reference"):
                own, other = getattr(self.own, name), getattr(wide, name)
                if _fails(other.value) and not _fails(own.value):
                    return None
            if self.captures_numpy and self._loses_derivatives(wide):
                return None
        except Exception:  # the function is for single precision only
            return None
        # If the rule fails in the user's precision too, a check reports that.
        return wide if wide.has_reverse_mode or not self.own.has_reverse_mode else None

    def _loses_derivatives(self, wide: Precision) -> bool:
        """Whether a derivative that can be compiled in the user's precision can't be in
        float64."""
        counts = []
        for p in (wide, self.own):
            with p.context():
                leaves = p.subject.leaves
                programs = trace_derivatives(p.rule.fn, leaves, self.options.order)
                lower = lambda program: jax.jit(jaxpr_as_fun(program)).lower(*leaves)  # noqa: B023
                counts.append(sum(not _fails(lower, program) for program in programs))
        return counts[0] < counts[1]

    @ft.cached_property
    def offers_forward(self) -> bool:
        """Whether there is a forward mode. JAX raises an error for a `jax.custom_vjp`."""
        return not (self.has_costly_forward or _raises(self.eager.jvp, "forward-mode"))

    @ft.cached_property
    def has_costly_forward(self) -> bool:
        """Whether forward mode takes more calls of the backward rule of a host function than
        the function allows."""
        return _raises(self.eager.jvp, "`max_rule_calls` is")

    @ft.cached_property
    def offers_reverse(self) -> bool:
        """Whether there is a reverse mode. JAX has none for a `while_loop`."""
        return not _raises(self.eager.vjp, "everse-mode")

    def tangents(self) -> list[Any]:
        return normal_like(self.rng, self.subject.leaves)

    def cotangents(self) -> list[Any]:
        return normal_like(self.rng, self.own.outputs)

    # ------------------------------------------------------------ expected derivatives

    @property
    def precision(self) -> Precision:
        """Float64 if the function runs in it, otherwise the user's precision."""
        return self.wide or self.own

    @property
    def is_wrong_on_purpose(self) -> bool:
        """Whether the user asked for another derivative than that of the function."""
        options = (
            self.options.reference,
            self.options.expected_tangent,
            self.options.expected_cotangent,
        )
        return any(option is not None for option in options)

    @ft.cached_property
    def finite_differences(self) -> list[DirectionalDerivative]:
        """Derivatives without any rule: along each leaf, or along all of them together."""
        rng = self.rng
        self.draw_for("finite_differences")
        p, scaled = self.precision, self.scaled_tangents()
        self.rng = rng
        # Rules change no values. Some can't be removed, as in an operator that JAX solves with.
        plain = p.rule if _fails(p.plain.value) else p.plain
        value_at, context, rounded_to = plain.value_at, p.context, p.rounded_to
        if self.is_another_in_float64:
            # In float64 all the same: the program that was traced in the user's precision.
            program = jax.make_jaxpr(p.rule.fn)(*p.subject.leaves)
            value_at, context = self._exact(program).value_at, double_precision
            rounded_to = None
        n = len(scaled)
        together = n > _MAX_LEAVES_ALONE
        found = []
        for kept in [list(range(n))] if together else [[i] for i in range(n)]:
            tangents = only(scaled, kept)
            with context():
                evaluate = lambda *xs: value_at(xs)
                leaves = [np.asarray(x) for x in p.subject.leaves]
                derivative = directional(evaluate, leaves, tangents, rounded_to)
            name = "all leaves" if together else self.names[kept[0]]
            found.append(DirectionalDerivative(name, tangents, derivative))
        return found

    def changes_at_a_distance(self) -> bool:
        """Whether the function without its rule has other values at some distance."""
        p, leaves = self.precision, list(map(np.asarray, self.precision.subject.leaves))
        with p.context():
            here = p.plain.value_at(leaves)
            for distance in _DISTANCES:
                pairs = zip(leaves, self.scaled_tangents(), strict=True)
                moved = p.like_leaves([x + distance * t for x, t in pairs])
                try:
                    there = p.plain.value_at(moved)
                except Exception:  # it is not defined that far away
                    continue
                return any(np.any(a != b) for a, b in zip(here, there, strict=True))
        return False

    def scaled_tangents(self) -> list[Any]:
        """Random tangents in proportion to the entries of the leaves, so that a finite
        difference takes a small step in each."""
        out = []
        for x, t in zip(self.precision.subject.leaves, self.tangents(), strict=True):
            t = np.clip(as_real(t), -2, 2) if not np.iscomplexobj(t) else np.asarray(t)
            out.append(scale_of(x) * t)
        return out

    # ------------------------------------------------------------ tolerances

    def tolerance(self, precision: Precision, *arrays: Any) -> float:
        """What rounding explains in this precision."""
        if self.options.tolerance is not None:
            return self.options.tolerance
        of_outputs = max(precision.tolerance(), tolerance_of(list(arrays)))
        if precision is self.own:
            return max(of_outputs, tolerance_of(self.subject.leaves))
        # The arguments were widened to float64, but constants may be float32 still.
        return max(of_outputs, 1e-5)

    def tolerance_of_derivative(self, precision: Precision) -> float:
        """The same for a first derivative, which may hardly depend on what is computed in low
        precision."""
        tolerance = self.tolerance(precision)
        if self.options.tolerance is not None:
            return tolerance
        if precision is self.own:
            least = tolerance_of(self.subject.leaves, precision.outputs)
        else:
            least = max(precision.tolerance_without_constants(), 1e-5)
            if precision.is_unrounded and not precision.rounds_constants:
                return min(least, tolerance)
        return max(min(least, tolerance), self.low_share * tolerance)

    def tolerance_of_order(self, precision: Precision) -> float:
        """The same for higher derivatives."""
        tolerance = self.tolerance(precision)
        if self.options.tolerance is None and precision.is_unrounded:
            if not precision.rounds_constants:
                least = max(precision.tolerance_without_constants(), 1e-5)
                return 10 * min(least, tolerance)
        return 10 * tolerance

    @ft.cached_property
    def low_share(self) -> float:
        """How much of the rounding errors of the lowest precision arrives in the derivative of
        the plain function, at most one: that of `x + 1e-3 * x.astype(bfloat16)` has little."""
        p = self.precision
        if not p.is_unrounded or p.lowest is None or self.options.reference is not None:
            return 1.0
        rng, errors = np.random.default_rng(0), []
        try:
            for _ in range(_MEASURED):
                w = normal_like(rng, self.own.outputs)
                exact = p.plain.vjp(p.like_outputs(w))
                errors.append(difference(exact, self.own.plain.vjp(w), self.names).error)
        except Exception:  # the function has no such derivative
            return 1.0
        error = max(errors)
        is_known = 0 < error < np.inf
        return min(1.0, _MARGIN * error / float(jnp.finfo(p.lowest).eps)) if is_known else 1.0

    def tolerance_with_rounding(self, *arrays: Any) -> tuple[float, Callable[[], float]]:
        """In the user's precision: the tolerance, and a larger one that takes the rounding
        error of plain autodiff into account, which takes a while to measure."""
        tolerance = self.tolerance(self.own, *arrays)
        return tolerance, lambda: tolerance + self.explained_by_rounding(self.noise)

    def explained_by_rounding(self, error: float) -> float:
        """What is added to a tolerance, given the error that rounding gives plain autodiff."""
        return min(10 * error, _MOST_ROUNDING)

    def is_rounding(self, error: float) -> bool:
        """Whether rounding in the user's precision gives plain autodiff errors as large as this
        one, and larger ones than any tolerance allows for."""
        return _MOST_ROUNDING < error <= 10 * self.noise

    def strict_tolerance(
        self, precision: Precision, witness: Callable[[list[Any]], list[Any]]
    ) -> tuple[float, Callable[[], float]]:
        """Of a comparison with autodiff, and a larger one that takes the rounding error of the
        witness into account.

        Autodiff in float64 is good to 1e-15 or so, and single precision inside of a rule for
        float64 arguments shows as 1e-8.

        `witness`: what the comparison is with, as a function of the leaves.
        """
        tolerance = self.tolerance(precision)
        if self.is_another_in_float64:
            return self.tolerance_with_rounding()
        if self.options.tolerance is not None or tolerance > tolerance_of(np.float64(0)):
            return tolerance, lambda: tolerance

        def wider():
            try:
                error = rounding_error(witness, precision.subject.leaves)
            except Exception:  # there is no such witness
                return tolerance
            return min(_STRICT + 30 * error, tolerance)

        return _STRICT, wider

    @ft.cached_property
    def noise(self) -> float:
        """The relative error that rounding alone gives plain autodiff in the user's
        precision, along the directions of the eager calls."""
        wide, own = self.wide, self.own
        if wide is own or (wide is None and not self.is_another_in_float64):
            return 0.0
        t, w = self.eager.tangents, self.eager.cotangents
        if wide is None:
            runs = (lambda xs: own.plain.vjp(w, xs), lambda xs: own.plain.jvp(t, xs))
            return max(self._rounding_of(run) for run in runs)
        pairs = (
            (
                lambda: wide.plain.vjp(wide.like_outputs(w)),
                lambda: own.plain.vjp(w),
                self.names,
            ),
            (
                lambda: wide.plain.jvp(wide.like_leaves(t)),
                lambda: own.plain.jvp(t),
                self.output_names,
            ),
        )
        errors = []
        for exact, rounded, names in pairs:
            try:
                errors.append(difference(exact(), rounded(), names, entrywise=False).error)
            except Exception:  # the function has no such derivative
                continue
        return max((error for error in errors if np.isfinite(error)), default=0.0)

    def _rounding_of(self, derivative: Callable[[list[Any]], list[Any]]) -> float:
        try:
            return rounding_error(derivative, self.own.subject.leaves)
        except Exception:  # the function has no such derivative
            return 0.0


def _fails(run, *args) -> bool:
    try:
        run(*args)
    except Exception:
        return True
    return False


def _raises(run, text: str) -> bool:
    """Whether JAX raises an error that says so. Other errors are reported by the checks."""
    try:
        run()  # eagerly, as tracing alone does not raise all of these errors
    except (TypeError, ValueError, NotImplementedError) as e:
        return text in str(e)
    except Exception:
        return False
    return False
