"""The loss of a model as a program: its value, its gradient in both modes, its differences.

The loss is traced in the user's precision, and its program is evaluated in float64. Where that
does not work, or a host function rounds its values, a model in float64 is traced.
"""

import contextlib
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._diagnosis.in_float64 import evaluate_in_float64
from .._diagnosis.source_lines import source_line
from .._diagnosis.traced_loss import trace_loss, TracedLoss
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import Call, Checkpoint, Cond, found, holds, Scan, structure, While
from .._rules.without_tangents import WITHOUT_TANGENTS
from ._compare import as_double, pairing
from ._differences import Samples
from ._oracle import expanded, lowest_of, without_log
from ._outcome import outcome
from ._subject import double_precision, widened


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here

CALLER = "check_gradients"
# XLA takes minutes to compile more equations than this in a row (those of a scan or of a `jit`
# inside count as one). They are run one by one.
_MOST_COMPILED = 1000
_PAIR = "the point and a point nearby"


class LossProgram:
    """A loss at a model and arguments.

    - `leaves`: the inexact arrays of the model, which are perturbed; `names`: their paths.
    - `own`: the loss, traced in the user's precision; `traced`: the loss that is computed.
    - `in_its_types`: `in_its_types(run, *args)` is `run(*args)` where the equations have the
        types that they were traced with.
    - `rounded_to`: what the values are rounded to nonetheless, as by a host function.
    - `programs`: what was traced, by name.
    - `stops`: the lines of the `stop_gradient`s in it.
    """

    evaluations = 0  # of the loss

    def __init__(self, own: TracedLoss, traced: TracedLoss, slope_of: int | None):
        self.own, self.traced = own, traced
        self._context = contextlib.nullcontext if own is traced else double_precision
        self.names = list(own.leaves)
        self._n = len(self.names)
        self.leaves = [as_double(x) for x in traced.values[: self._n]]
        self.rounded_to = lowest_of(traced.program, opaque=True)
        self.lowest_of_user = lowest_of(own.program)
        self.is_compiled = len(traced.program.eqns) <= _MOST_COMPILED
        self.programs: dict[str, ClosedJaxpr] = {}
        self._calls: dict[str, Callable[..., Any]] = {}
        self.stops = list(dict.fromkeys(_stops(traced.program)))
        self._slope_of = slope_of

    def of(self, loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A loss of leaves, or its slope along a random direction. The gradient of the slope is
        the product of the Hessian with this direction."""
        if self._slope_of is None:
            return loss
        rng = np.random.default_rng(self._slope_of)
        ts = [rng.normal(size=x.shape) for x in self.leaves]
        pairs = lambda xs: zip(jax.grad(loss)(xs), ts, strict=True)
        return lambda xs: sum(jnp.sum(jnp.real(g * t.astype(g.dtype))) for g, t in pairs(xs))

    def loss(self, leaves: Sequence[Any], others: Sequence[Any], _: Any = None) -> Any:
        return self.of(lambda xs: evaluate(self.traced.program, [*xs, *others])[0])(leaves)

    def in_its_types(self, run: Callable[..., Any], *args: Any) -> Any:
        with self._context():
            return run(*args)

    def call(self, name: str, fn: Callable[..., Any], *vectors: Sequence[Any], more: Any = ()):
        """The leaves of `fn(*vectors, others, more)`, where the vectors are lists like the
        leaves: traced once for each name, and computed in float64."""
        leaves, others = self.traced.values[: self._n], list(self.traced.values[self._n :])
        args = jax.tree.leaves((*vectors, others, more))
        if name not in self._calls:
            like = lambda xs: [x.astype(y.dtype) for x, y in zip(xs, leaves, strict=True)]
            flat, treedef = jax.tree.flatten((*map(like, vectors), others, more))
            run = lambda *xs: jax.tree.leaves(fn(*jax.tree.unflatten(treedef, xs)))
            self.programs[name] = self.in_its_types(expanded, run, flat)
            call = ft.partial(evaluate_in_float64, self.programs[name])
            self._calls[name] = jax.jit(call) if self.is_compiled else call
        with double_precision():
            return list(map(np.asarray, self._calls[name](list(map(jnp.asarray, args)))))

    def gradient_at(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        return self.call("gradient", jax.grad(self.loss), leaves)

    @ft.cached_property
    def gradient(self) -> list[np.ndarray]:
        return self.gradient_at(self.leaves)

    def tangent(self, leaves: Sequence[Any], tangents: Sequence[Any]) -> float:
        """The derivative along a direction, in forward mode."""

        def tangent(xs, ts, others, _):
            return jax.jvp(lambda xs: self.loss(xs, others), (xs,), (ts,))[1]

        return float(self.call("tangent", tangent, leaves, tangents)[0])

    @ft.cached_property
    def own_gradient(self) -> tuple[Any, list[np.ndarray]] | None:
        """Value and gradient in the user's precision; `None` if that is this one, or takes long
        to compile."""
        leaves, others = list(self.own.values[: self._n]), list(self.own.values[self._n :])
        is_double = all(x.dtype.itemsize >= 8 for x in leaves)
        if not self.is_compiled or (is_double and lowest_of(self.programs["gradient"]) is None):
            return None
        # A cast to float16 and back loses digits. XLA would remove it, or not.
        options = {"xla_allow_excess_precision": False}
        own = self.own.program
        loss = lambda xs, others: self.of(lambda xs: evaluate(own, [*xs, *others])[0])(xs)
        run = jax.jit(jax.value_and_grad(loss), compiler_options=options)
        value, gradient = run(leaves, others)
        return value, list(map(np.asarray, gradient))

    # ------------------------------------------------------------ differences

    def value(self) -> float:
        return self.samples(self.leaves, [np.zeros_like(x) for x in self.leaves])(0.0)

    def samples(
        self, leaves: Sequence[Any], tangents: Sequence[Any], is_held: bool = False
    ) -> Samples:
        """The loss along a direction. NaN where it raises an error, for example in a solver
        that fails for other parameters. An error at zero is raised.

        - `is_held`: whether the result of a `stop_gradient` stays as it is at the leaves.
        """

        def at(h):
            return [x + h * t for x, t in zip(leaves, tangents, strict=True)]

        run: Any = ("held", self._held, leaves) if is_held else ("value", self.loss)

        def value(h):
            self.evaluations += 1
            with without_log():
                out = outcome(lambda: float(self.call(*run, at(h))[0]))
            if not isinstance(out, Exception):
                return out
            if h == 0 or not isinstance(out, RuntimeError | ValueError):
                raise out
            return np.nan

        eps = {} if self.rounded_to is None else {"eps": float(jnp.finfo(self.rounded_to).eps)}
        return Samples(value, **eps)

    def _held(self, here, there, others, _):
        """The loss at `there`, where each `stop_gradient` returns what it returns at `here`: of
        both points at once, each takes the value of the first one."""
        pairs = [jnp.stack(pair) for pair in zip(here, there, strict=True)]
        value = lambda xs, others: evaluate(self.traced.program, [*xs, *others], self._hold)[0]
        run = lambda xs, others: self.of(lambda xs: value(xs, others))(xs)
        return jax.vmap(run, (0, None), axis_name=_PAIR)(pairs, others)[1]

    def _hold(self, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "stop_gradient" and str(source_line(eqn)) in self.stops:
            return [jax.lax.all_gather(jax.lax.stop_gradient(x), _PAIR)[0] for x in values]
        # Not the rules: what is stopped inside of a function with a rule has the derivative of
        # the rule.
        is_entered = isinstance(structure(eqn), Call | Checkpoint | Cond | Scan | While)
        if is_entered and holds(eqn, "stop_gradient"):
            return enter(eqn, values, lambda p, xs, _: evaluate(p, xs, self._hold))
        return bind(eqn, values)


def _stops(program: ClosedJaxpr) -> list[str]:
    """The lines of the user's `stop_gradient`s. A solver's rule gives the derivative of what it
    runs without tangents."""
    stops = found(program, "stop_gradient")
    is_of_solver = lambda eqn: WITHOUT_TANGENTS in str(eqn.source_info.name_stack)
    of_solvers = {str(source_line(eqn)) for eqn in stops if is_of_solver(eqn)}
    return [line for line in map(str, map(source_line, stops)) if line not in of_solvers]


def trace(
    loss: Callable[..., Any],
    model: PyTree,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    slope_of: int | None = None,
    **options: Any,
) -> LossProgram:
    """The program of a loss, in float64. `slope_of`: the seed of a direction, for its slope."""
    own = trace_loss(CALLER, loss, model, args, kwargs, **options)
    exact = LossProgram(own, own, slope_of)
    with double_precision():
        run = ft.partial(evaluate_in_float64, own.program)
        works = not isinstance(outcome(jax.eval_shape, run, list(own.values)), Exception)
        if exact.rounded_to is None and works:
            return exact
        wide = widened((model, tuple(args), dict(kwargs)))
        traced = outcome(lambda: trace_loss(CALLER, loss, *wide, **options))
    if isinstance(traced, TracedLoss):
        in_float64 = LossProgram(own, traced, slope_of)
        if not isinstance(outcome(in_float64.value), Exception):
            return in_float64
    return exact


def along(gradient: Sequence[Any], tangents: Sequence[Any]) -> float:
    """The derivative along a direction that a gradient gives. An entry of the gradient that is
    NaN does not matter where the direction is zero."""
    pairs = zip(gradient, tangents, strict=True)
    gradient = [np.where(t == 0, 0.0, as_double(g)) for g, t in pairs]
    with np.errstate(invalid="ignore"):  # NaN, for infinite entries of both signs
        return pairing(gradient, tangents)
