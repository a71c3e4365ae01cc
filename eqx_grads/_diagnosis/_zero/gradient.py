"""The gradient of a loss, compiled once; and whether it is a rounding error."""

import dataclasses
import functools as ft
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._errors import RuleError
from ..._jaxprs.evaluate import bind, enter, evaluate
from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    Scan,
    structure,
    While,
)
from .._programs.in_float64 import evaluate_in_float64
from ..traced_loss import TracedLoss


# A gradient whose elements are all below so many standard deviations of its rounding is noise.
_SIGNIFICANT, _N_RUNS, _AGREES = 6.0, 6, 0.3
# A gradient is suspicious if it is so small relative to the loss, or if rounding changes it.
_SMALL = 1e-4


@dataclasses.dataclass
class Gradient:
    """The loss and its gradients at the arguments.

    - `error`: why reverse mode failed. The gradients are then derivatives
        along a random direction in each leaf.
    - `can_move`: whether the loss may be evaluated again. Not if it prints, for one.
    """

    loss: float
    gradients: list[np.ndarray]
    error: Exception | None
    can_move: bool
    _run: Callable[[Sequence[Any]], tuple[Any, Sequence[Any]]]

    def at(self, values: Sequence[Any]) -> tuple[float, list[np.ndarray]]:
        """The loss and its gradients for other inputs of its program, without compiling it
        again. NaN where a check in the loss raises."""
        try:
            loss, gradients = self._run(values)
            return float(loss), list(map(np.asarray, gradients))
        except Exception:  # JAX has no one type of error for it
            return float("nan"), [np.full_like(g, np.nan) for g in self.gradients]


def change_along(
    traced: TracedLoss, gradient: Gradient, along: Mapping[int, Any]
) -> Callable[[float], float]:
    """How much the loss changes by a step along directions in some leaves."""

    def change(h):
        values = list(traced.values)
        for i, direction in along.items():
            values[i] = (np.asarray(values[i]) + h * direction).astype(values[i].dtype)
        return gradient.at(values)[0] - gradient.loss

    return change


def directions(traced: TracedLoss) -> list[Any]:
    """A random direction in each leaf."""
    rng = np.random.default_rng(0)

    def like(x):
        direction = rng.normal(size=jnp.shape(x))
        if jnp.iscomplexobj(x):
            direction = direction + 1j * rng.normal(size=jnp.shape(x))
        return np.asarray(direction, x.dtype)

    return [like(x) for x in traced.values[: len(traced.leaves)]]


def try_gradient(traced: TracedLoss) -> tuple[Gradient | None, Exception | None]:
    """The gradient in reverse mode, or directional derivatives where that raises; or the error,
    if these raise too."""
    n = len(traced.leaves)
    loss = lambda values: evaluate(traced.program, values)[0]

    # With a known seed, XLA would simplify values that are NaN operation by operation.
    def reverse(values, seed):
        of_leaves = lambda leaves: loss([*leaves, *values[n:]])
        value, pull = jax.vjp(of_leaves, list(values[:n]))
        return value, pull(seed)[0]

    def forward(values, _):
        along = directions(traced)
        of_leaf = lambda i: lambda x: loss([*values[:i], x, *values[i + 1 :]])
        return loss(values), [jax.jvp(of_leaf(i), [values[i]], [along[i]])[1] for i in range(n)]

    values, error = list(traced.values), None
    seed = np.ones((), traced.program.out_avals[0].dtype)
    for mode in (reverse, forward):
        run = ft.partial(_apply, jax.jit(mode), seed)
        try:
            value, gradients = run(values)
        except RuleError:
            raise
        except Exception as raised:  # JAX has no one type of error; the report quotes it
            error = error or raised
            continue
        can_move = error is None and not traced.program.effects
        gradients = list(map(np.asarray, gradients))
        return Gradient(float(value), gradients, error, can_move, run), None
    return None, error


def _apply(fn, seed, values):
    return fn(values, seed)


def rounding_errors(traced: TracedLoss, gradient: Gradient) -> dict[int, float]:
    """The leaves whose gradient does not exceed its rounding error, with its largest element.

    The error is measured by stochastic arithmetic (D. S. Parker, 1997): each operation of the
    gradient is rounded at random. This is compiled only where a leaf is suspicious.
    """
    if not gradient.can_move:
        return {}
    moved = gradient.at(list(map(_moved_by_rounding, traced.values)))[1]
    size = lambda x: float(np.max(np.abs(np.asarray(x)), initial=0.0))
    suspicious = [
        i
        for i, g in enumerate(gradient.gradients)
        if np.any(g) and np.all(np.isfinite(g)) and not np.iscomplexobj(g)
        if size(moved[i] - g) > 0.1 * size(g)
        or size(g) * max(1.0, size(traced.values[i])) < _SMALL * abs(gradient.loss)
    ]
    if not suspicious:
        return {}
    program = _gradient_program(traced)
    run = _rounded_at_random(traced, program)
    changes = [
        [np.asarray(x) - g for x, g in zip(run(0.7 + 1.3 * k), gradient.gradients, strict=True)]
        for k in range(_N_RUNS)
    ]
    found = {}
    for i in suspicious:
        deviation = np.sqrt(np.mean(np.square([each[i] for each in changes], dtype=float), 0))
        if np.all(np.abs(gradient.gradients[i]) <= _SIGNIFICANT * deviation):
            found[i] = size(gradient.gradients[i])
    if not found:
        return {}
    # What float64 agrees with is no rounding error: in half precision, many operations that are
    # rounded at random hide a gradient that is good to a few percent.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        exact = jax.jit(lambda values: evaluate_in_float64(program, values))(traced.values)
        exact = list(map(np.asarray, exact))
    off = lambda i: np.asarray(gradient.gradients[i], float) - exact[i]
    return {i: x for i, x in found.items() if not size(off(i)) < _AGREES * x}


def _moved_by_rounding(x: Any) -> Any:
    if not _is_real(x):
        return x
    rng = np.random.default_rng(0)
    move = 4 * float(jnp.finfo(x.dtype).eps) * rng.choice([-1, 1], np.shape(x))
    return (np.asarray(x) * (1 + move)).astype(x.dtype)


def _gradient_program(traced: TracedLoss) -> ClosedJaxpr:
    n = len(traced.leaves)

    def gradients(values):
        of_leaves = lambda *leaves: evaluate(traced.program, [*leaves, *values[n:]])[0]
        return jax.grad(of_leaves, tuple(range(n)))(*values[:n])

    return jax.make_jaxpr(gradients)(list(traced.values))


def _rounded_at_random(
    traced: TracedLoss, program: ClosedJaxpr
) -> Callable[[float], Sequence[Any]]:
    """The gradient, by a number that decides how each operation is rounded."""
    values = list(traced.values)

    def run(program, values, seed):
        count = itertools.count(1)

        def hook(eqn, values):
            known, row = structure(eqn), kind_of(eqn)
            if isinstance(known, Call | CallWithRule | Checkpoint | Cond | Scan | While):
                if not (isinstance(known, Cond) and known.by_platform):
                    return enter(eqn, values, lambda program, xs, _: run(program, xs, seed))
            outs = bind(eqn, values)
            if row.layout or row.selects or eqn.primitive.name == "neg":
                return outs
            phase = seed * next(count)
            return [_rounded(x, phase) if _is_real(x) else x for x in outs]

        return evaluate(program, values, hook)

    compiled = jax.jit(lambda values, seed: run(program, values, seed))
    return lambda seed: compiled(values, seed)


def _rounded(x: Any, phase: Any) -> Any:
    noise = jnp.sin(phase + jnp.arange(jnp.size(x), dtype=jnp.float32))
    eps = 0.7 * float(jnp.finfo(x.dtype).eps)
    return x * (1 + eps * jnp.reshape(noise, jnp.shape(x))).astype(x.dtype)


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
