"""One rule under test: the function at its arguments in both precisions, and its directions."""

import copy
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._diagnosis.source_lines import source_line
from .._jaxprs.structure import equations
from ._compare import as_real, difference, scale_of
from ._differences import Difference, directional
from ._eager import EagerCalls
from ._options import as_names, Options
from ._oracle import At, in_float64, in_own_precision, Side
from ._outcome import outcome
from ._random_tangents import normal_like, only
from ._references import check_outputs_of_reference
from ._subject import FlatFunction


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

# The calls that `eqg.implicit`, around a host function or another solver, makes.
_OF_SOLVERS = {"_differentiable_solution", "host_call"}
# An error as large as the derivative is never one of rounding: no more is added to a tolerance.
_MOST_ROUNDING = 0.05
# With more leaves than this, one direction perturbs all of them together.
_MAX_LEAVES_ALONE = 6
# What autodiff in float64 is good to, of a function of float64 arguments; and what differences
# are good to.
_STRICT, _BY_DIFFERENCES = 1e-9, 1e-7


class Case:
    """A rule, its arguments, the options, and the random directions that a seed gives.

    - `own`, `wide`: the function in the user's precision, and in float64.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: Options,
        seed: int = 0,
    ):
        self.options, self.seed = options, seed
        # What was asked for is a function of arrays: there, a number is a static option.
        names = as_names("check_rule", "nondifferentiable", options.nondifferentiable)
        own_numbers = not options.is_wrong_on_purpose
        self.subject = FlatFunction(fn, args, kwargs, names, own_numbers=own_numbers)
        self.own = in_own_precision(self.subject, options)
        self.names = self.subject.names
        self.subject.check_points(options.at)
        if options.reference is not None:
            check_outputs_of_reference(self.subject, self.outputs, options.reference)

    @property
    def outputs(self) -> list[Any]:
        return self.own.outputs

    @property
    def output_names(self) -> list[str]:
        return self.own.output_names

    @ft.cached_property
    def eager(self) -> EagerCalls:
        return EagerCalls(self.subject, self.outputs)

    def with_seed(self, seed: int) -> "Case":
        """The same case with other random directions. Compiled programs are shared."""
        _ = outcome(lambda: (self.wide, self.eager))  # are shared; a check reports an error
        other = copy.copy(self)
        other.seed = seed
        for name in ("tangents", "cotangents", "differences"):
            vars(other).pop(name, None)
        return other

    def in_own_types(self) -> "Case":
        """The same case, whose programs are those of the user's precision, in float64."""
        other = copy.copy(self)
        other.wide = self.own.exactly()
        return other

    @property
    def is_wide(self) -> bool:
        """Whether the user's own precision is double."""
        return all(
            x.dtype.itemsize >= 8 * (1 + np.iscomplexobj(x)) for x in self.subject.leaves
        )

    @ft.cached_property
    def wide(self) -> Side:
        at = At(self.subject.leaves, self.eager.tangents, self.eager.cotangents)
        return in_float64(self.own, self.options, at)

    @ft.cached_property
    def _own_derivatives(self) -> dict[str, Any]:
        return self.own.derive(self.eager.tangents, self.eager.cotangents)

    @property
    def is_solver(self) -> bool:
        """Whether its only rules are those of solutions of equations, and those of the packages
        that solve them, such as Optimistix."""
        program = self.own.program()
        found = [] if program is None else list(equations(program))
        calls = {str(eqn.params["call"]) for eqn in found if eqn.primitive.name == "eqg_call"}
        is_rule = lambda eqn: eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
        is_users = any(is_rule(eqn) and not source_line(eqn).library for eqn in found)
        return "_differentiable_solution" in calls and calls <= _OF_SOLVERS and not is_users

    def why_no_forward(self) -> str:
        """Why there is no forward mode: there is none of a `jax.custom_vjp`."""
        text = str(self._error("jvp"))
        if "`max_rule_calls` is" in text:
            return "it takes more calls of the backward rule than `max_rule_calls`"
        if "forward-mode" in text:
            why = "reverse mode only, as of every `jax.custom_vjp`"
            return f"{why}; `eqx_grads.custom_vjp` has both modes"
        return ""

    @ft.cached_property
    def has_forward(self) -> bool:
        return not self.why_no_forward()

    @ft.cached_property
    def has_reverse(self) -> bool:
        """JAX has no reverse mode for a `while_loop`."""
        return "everse-mode" not in str(self._error("vjp"))

    def _error(self, mode: str) -> Any:
        found = self._own_derivatives[mode]
        return found if isinstance(found, Exception) else ""

    # ------------------------------------------------------------ directions

    def draw(self, purpose: str) -> np.random.Generator:
        """From the start of a sequence that the seed and the purpose determine: a check draws
        the same directions alone as it does among others."""
        return np.random.default_rng([self.seed, *purpose.encode()])

    @ft.cached_property
    def tangents(self) -> list[list[Any]]:
        rng = self.draw("tangents")
        return [normal_like(rng, self.subject.leaves) for _ in range(4)]

    @ft.cached_property
    def cotangents(self) -> list[list[Any]]:
        rng = self.draw("cotangents")
        return [normal_like(rng, self.outputs) for _ in range(4)]

    def derivative(self, side: Side, row: str, direction: Sequence[Any], x: Any = None) -> Any:
        """The derivative of a row along a direction. It raises what that raises."""
        t, w = self.tangents[0], self.cotangents[0]
        t, w = (direction, w) if row.startswith("jvp") else (t, direction)
        found = side.derive(t, w, x)[row]
        if isinstance(found, Exception):
            raise found
        return found

    @ft.cached_property
    def scaled(self) -> list[Any]:
        """A random tangent in proportion to the entries of the leaves, so that a difference
        takes a small step in each."""
        return self.scaled_tangent(self.draw("differences"))

    def scaled_tangent(self, rng: np.random.Generator) -> list[Any]:
        drawn = normal_like(rng, self.wide.subject.leaves)
        clip = lambda t: t if np.iscomplexobj(t) else np.clip(t, -2, 2)
        leaves = self.wide.subject.leaves
        return [scale_of(x) * clip(t) for x, t in zip(leaves, drawn, strict=True)]

    @ft.cached_property
    def differences(self) -> list[tuple[str, list[Any], Difference]]:
        """The name of a direction, the direction, and the differences along it, without any
        rule: along each leaf, or along all of them together."""
        n = len(self.scaled)
        together = n > _MAX_LEAVES_ALONE
        found = []
        for kept in [list(range(n))] if together else [[i] for i in range(n)]:
            tangents = only(self.scaled, kept)
            name = "all leaves" if together else self.names[kept[0]]
            found.append((name, tangents, self.along(tangents)))
        return found

    def along(self, tangents: Sequence[Any], x: Any = None) -> Difference:
        """Differences of the values in float64; rules change no values."""
        leaves = [np.asarray(y) for y in (self.subject.leaves if x is None else x)]
        wide = [y.astype(np.complex128 if np.iscomplexobj(y) else float) for y in leaves]
        value = lambda *xs: self.wide.value(xs)
        return directional(value, wide, tangents, self.wide.rounded_to)

    # ------------------------------------------------------------ tolerances

    def admitted(self, side: Side, *, exact: bool = False, order: int = 1) -> float:
        """The relative error that rounding explains.

        - `exact`: whether the reference is autodiff, and good to 1e-15 in float64.
        """
        tolerance = side.tolerance
        if self.options.tolerance is None and self.is_wide and side.lowest is None:
            tolerance = _STRICT if exact else _BY_DIFFERENCES
        return tolerance * (10 if order > 1 else 1)

    def measured(self, row: str, direction: Sequence[Any], names: Sequence[str]) -> float:
        """What is added to a tolerance: ten times the rounding error of the reference in the
        user's precision. If that is double, by how much it differs from a smooth function."""
        if self.options.tolerance is not None:
            return 0.0
        if self.own is self.wide:
            error = self._roughness(lambda x: self.derivative(self.wide, row, direction, x))
        else:
            runs = [
                lambda s=s: self.derivative(s, row, direction) for s in (self.wide, self.own)
            ]
            values = list(map(outcome, runs))
            if any(isinstance(v, Exception) for v in values):
                return 0.0
            exact, rounded = values
            error = difference(exact, rounded, names, entrywise=False).error
        return min(10 * error, _MOST_ROUNDING) if np.isfinite(error) else 0.0

    def rounding_of_values(self) -> float:
        """What is added to the tolerance of a value in double precision."""
        if not self.is_wide:
            return 0.0
        return min(10 * self._roughness(self.own.value), _MOST_ROUNDING)

    def _roughness(self, fn: Callable[[list[Any]], list[Any]]) -> float:
        """The relative error of a function that rounding explains, from second differences
        between nearby points, at which those of a smooth function are about 1e-12."""
        rng = np.random.default_rng(0)
        leaves = [np.asarray(x) for x in self.subject.leaves]
        signs = [rng.choice([-1.0, 1.0], x.shape) for x in leaves]
        at = lambda k: [
            (x * (1 + k * 1e-6 * s)).astype(x.dtype) for x, s in zip(leaves, signs, strict=True)
        ]
        values = [outcome(fn, at(k)) for k in range(-2, 3)]
        if any(isinstance(v, Exception) for v in values):
            return 0.0
        errors = []
        with np.errstate(all="ignore"):
            for before, here, after in zip(values, values[1:], values[2:], strict=False):
                middle = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
                errors.append(difference(here, middle, [""] * len(here)).error)
        return max((e for e in errors if np.isfinite(e)), default=0.0)


def are_finite(arrays: Sequence[Any]) -> bool:
    return all(np.all(np.isfinite(as_real(x))) for x in arrays)
