"""One rule under test: the function at its arguments in both precisions, and its directions."""

import copy
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

from .._rules.custom_vjp import ReverseRules
from ._compare import as_double, relative_error, scale_of
from ._differences import Difference, directional
from ._options import as_names, Options
from ._oracle import At, in_float64, Side, unless_error
from ._outcome import outcome
from ._random_tangents import normal_like, only
from ._subject import FlatFunction, is_output


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

# An error as large as the derivative is never one of rounding: no more is added to a tolerance.
_MOST_ROUNDING = 0.05
# With more leaves than this, one direction perturbs all of them together.
_MAX_LEAVES_ALONE = 6
# The accuracy of autodiff in float64, for a function of float64 arguments; and of differences.
_STRICT, _BY_DIFFERENCES = 1e-9, 1e-7


class Case:
    """A rule, its arguments, the options, and the random directions that a seed gives.

    - `own`, `wide`: the function in the user's precision, and in float64.
    - `reference`: what computes the expected derivatives, in words.
    """

    def __init__(self, fn: Any, args: Any, kwargs: Any, options: Options, seed: int = 0):
        self.options, self.seed = options, seed
        names = as_names("check_rule", "nondifferentiable", options.nondifferentiable)
        is_plain = options.reference is None
        of = "the function without its rule" if is_plain else "`reference`"
        self.reference = f"expected: autodiff of {of}"
        # A `reference` is a function of arrays: there, a number is a static option.
        self.subject = FlatFunction(fn, args, kwargs, names, own_numbers=is_plain)
        self.own = Side(self.subject, options)
        self.names = self.subject.names
        self.x = self.subject.leaves
        self._calls: dict[tuple[str, int], Any] = {}

    @property
    def outputs(self) -> list[Any]:
        return self.own.outputs

    @property
    def output_names(self) -> list[str]:
        return [name for name, _ in self.own.named_outputs]

    def eager(self, mode: str, number: int = 0) -> "Call":
        """The eager call with this number: calls with two numbers are two calls."""
        if (mode, number) not in self._calls:
            drawn = self.at.t if mode == "jvp" else self.at.w
            direction = list(map(jax.device_put, drawn))  # compiles nothing
            self._calls[mode, number] = outcome(eager_call, self.subject, mode, direction)
        return unless_error(self._calls[mode, number])

    def changed(self, **changes: Any) -> "Case":
        """The same case with another `seed`, or at another point `x`. Compiled programs are
        shared."""
        _ = outcome(lambda: self.wide)  # is shared; a check reports an error
        other = copy.copy(self)
        for name in ("tangents", "cotangents", "scaled", "differences"):
            vars(other).pop(name, None)
        vars(other).update(changes)
        return other

    @ft.cached_property
    def wide(self) -> Side:
        return in_float64(self.own, self.options, self.at)

    @ft.cached_property
    def own_derivatives(self) -> dict[str, Any]:
        """All rows in the user's precision, along the first directions."""
        return self.own.derive(self.at)

    @ft.cached_property
    def why_no_forward(self) -> str:
        """Why forward mode does not work: a `jax.custom_vjp` does not support it."""
        found = self.own_derivatives["jvp"]
        text = str(found) if isinstance(found, Exception) else ""
        if "`max_rule_calls` is" in text:
            return "it takes more calls of the backward rule than `max_rule_calls`"
        why = "reverse mode only, as for every `jax.custom_vjp`: see `eqx_grads.custom_vjp`"
        return why if "forward-mode" in text else ""

    @property
    def has_forward(self) -> bool:
        return not self.why_no_forward

    @property
    def has_reverse(self) -> bool:
        """JAX has no reverse mode for a `while_loop`."""
        found = self.own_derivatives["vjp"]
        return not (isinstance(found, Exception) and "everse-mode" in str(found))

    @ft.cached_property
    def offered(self) -> dict[str, tuple[str, list[str]]]:
        """The rows of a `Side` that exist: the kind of each, and its names."""
        offered = {"f": ("value", self.output_names)}
        offered |= {"jvp": ("tangent", self.output_names)} if self.has_forward else {}
        return offered | ({"vjp": ("cotangent", self.names)} if self.has_reverse else {})

    @property
    def forward_is_of_function(self) -> bool:
        """Whether the rule is for reverse mode only; forward mode is autodiff then."""
        rules = getattr(getattr(self.subject.fn, "__func__", self.subject.fn), "_rules", None)
        return isinstance(rules, ReverseRules) and rules.jvp_rule is None

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

    @property
    def at(self) -> At:
        """The leaves, and the first directions."""
        return At(self.x, self.tangents[0], self.cotangents[0])

    def derivative(
        self, row: str, direction: Any = None, x: Any = None, side: Side | None = None
    ) -> Any:
        """The values of a row along a direction, in float64. It raises the row's exception."""
        at = self.at if x is None else self.at._replace(x=x)
        if direction is not None:
            at = at._replace(**{"t" if row.startswith("jvp") else "w": direction})
        return unless_error((side or self.wide).derive(at)[row])

    @ft.cached_property
    def scaled(self) -> list[Any]:
        """A random tangent in proportion to the entries of the leaves, so that a difference
        takes a small step in each."""
        leaves = self.wide.subject.leaves
        drawn = normal_like(self.draw("differences"), list(map(as_double, leaves)), most=2)
        return [scale_of(x) * t for x, t in zip(leaves, drawn, strict=True)]

    @ft.cached_property
    def differences(self) -> list[tuple[str, list[Any], Difference]]:
        """The name of a direction, the direction, and the differences along it, without any
        rule: along each leaf, or along all of them together."""
        ways = [(name, only(self.scaled, [i])) for i, name in enumerate(self.names)]
        if len(ways) > _MAX_LEAVES_ALONE:
            ways = [("all leaves", self.scaled)]
        # In float64; rules change no values.
        leaves, side = list(map(as_double, self.x)), self.wide
        value = lambda *xs: side.one("value", side.rows["f"], At(xs))
        return [(name, t, directional(value, leaves, t, side.rounded_to)) for name, t in ways]

    # ------------------------------------------------------------ tolerances

    def admitted(self, *, exact: bool = False) -> float:
        """The relative error in float64 that rounding explains.

        - `exact`: whether the reference is autodiff, and good to 1e-15 in float64.
        """
        is_double = all(jnp.finfo(x.dtype).bits == 64 for x in self.subject.leaves)
        if self.options.tolerance is None and is_double and self.wide.lowest is None:
            return _STRICT if exact else _BY_DIFFERENCES
        return self.wide.tolerance

    def measured(self, row: str, directions: Sequence[Any] = (None,)) -> float:
        """The number to add to a tolerance that is not given, for the rounding errors of a
        row."""
        noise = self.noise(row, directions) if self.options.tolerance is None else 0.0
        return min(10 * noise, _MOST_ROUNDING) if np.isfinite(noise) else 0.0

    def noise(self, row: str, directions: Sequence[Any]) -> float:
        """The rounding error of a row in the user's precision, relative to its size. If that
        is double, by how much it differs from a smooth function."""

        def along(direction):
            at = lambda x=None, side=None: self.derivative(row, direction, x, side)
            if self.own is self.wide:
                return self._roughness(at)
            return relative_error(at(), at(side=self.own), entrywise=False)

        found = [outcome(along, direction) for direction in directions]
        return max(0.0 if isinstance(x, Exception) else x for x in found)

    def _roughness(self, fn: Callable[[list[Any]], list[Any]]) -> float:
        """The relative error of a function that rounding explains, from second differences
        between nearby points; for a smooth function they are about 1e-12."""
        rng = np.random.default_rng(0)
        leaves = list(map(as_double, self.x))
        signs = [rng.choice([-1.0, 1.0], x.shape) for x in leaves]
        at = lambda k: [x * (1 + k * 1e-6 * s) for x, s in zip(leaves, signs, strict=True)]
        values = [fn(at(k)) for k in range(-2, 3)]
        errors = [0.0]
        for before, here, after in zip(values, values[1:], values[2:], strict=False):
            with np.errstate(all="ignore"):
                middle = [(a + b) / 2 for a, b in zip(before, after, strict=True)]
                errors.append(relative_error(here, middle))
        return max(e for e in errors if np.isfinite(e))


# ---------------------------------------------------------------- eager calls

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Call(NamedTuple):
    """The result of one differentiated call.

    - `value`: the whole output, static leaves included.
    - `derivative`: the tangents of the outputs, or the cotangents of the leaves. An exception
        if the backward pass raises one.
    - `n_compiled`: the number of programs that JAX compiled in the call.
    """

    value: Any
    derivative: Any
    n_compiled: int


def eager_call(subject: FlatFunction, mode: str, direction: Sequence[Any]) -> Call:
    """The call in forward mode (`"jvp"`) or reverse mode (`"vjp"`) along random directions."""
    static: list[Any] = []
    compiled: list[str] = []

    def run(*leaves):
        outputs, rest = eqx.partition(subject.call(leaves), is_output)
        arrays, static[:] = eqx.partition([rest], lambda x: isinstance(x, jax.Array))
        return outputs, arrays

    count = lambda event, duration_secs, **_: compiled.extend([event] * (event == _COMPILED))
    monitoring.register_event_duration_secs_listener(count)
    try:
        if mode == "jvp":
            out, moved, rest = jax.jvp(run, subject.leaves, direction, has_aux=True)
            derivative = jax.tree.leaves(moved)
        else:
            out, pull, rest = jax.vjp(run, *subject.leaves, has_aux=True)
            # The rule may return another value than the function, which `primal` reports.
            tree = jax.tree.structure(out)
            derivative = outcome(lambda: list(pull(jax.tree.unflatten(tree, direction))))
        jax.block_until_ready((out, [] if isinstance(derivative, Exception) else derivative))
    finally:
        monitoring.unregister_event_duration_listener(count)
    (value,) = eqx.combine([out], rest, static)
    return Call(value, derivative, len(compiled))
