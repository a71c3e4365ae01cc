"""The gradient of a loss, compiled once; and whether it is a rounding error."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._errors import RuleError
from .in_float64 import evaluate_in_float64
from .progress import doing
from .traced_loss import check_no_references, trace_loss, TracedLoss


# A gradient is noise if its error is so large, relative to the gradient.
_IS_NOISE = 0.7
# A gradient is suspicious if it is so small relative to the loss, or if rounding changes it.
_SMALL = 1e-4
# At a kink, the slopes differ by the same at each step. Of the smallest step, the first, they
# are exact to a thousandth for float32.
_KINK_STEPS = (2.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3)


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
    _run: Callable[[float, Sequence[Any]], tuple[Any, Sequence[Any]]]

    def at(self, values: Sequence[Any], scale: float = 1.0) -> tuple[float, list[np.ndarray]]:
        """The loss and its gradients for other inputs of its program, without compiling it
        again. NaN where a check in the loss raises. `scale`: of reverse mode."""
        try:
            loss, gradients = self._run(scale, values)
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

    return change if gradient.can_move else lambda h: 0.0


def kink(change: Callable[[float], float], rounding: float, scale: float = 1.0) -> str:
    """The slopes on the two sides, if they differ. `rounding`: of the loss. `scale`: the length
    of the direction."""
    slopes = ((change(h) / h, -change(-h) / h) for h in _KINK_STEPS)
    above, below = next(slopes)
    jump = above - below
    # A step changes a loss that is nearly stationary by a few units of rounding.
    least = max(0.2 * max(abs(above), abs(below)), 16 * rounding / _KINK_STEPS[0])
    # Of a loss in half precision, the slopes are rounding errors, and differ at each step.
    is_kink = abs(jump) > least and all(abs(a - b - jump) < 0.3 * abs(jump) for a, b in slopes)
    return f"{above / scale:.3g} above and {below / scale + 0.0:.3g} below" if is_kink else ""


def staircase(change: Callable[[float], float], rounding: float) -> str:
    """The step after which a loss changes that is flat at a point, and not just smooth."""
    least = 1000 * rounding + 1e-30
    for step in (sign * 10.0**-i for i in (3, 2, 1, 0) for sign in (1, -1)):
        whole = change(step)
        if abs(whole) > least:
            half, near = change(step / 2), change(step / 10)
            is_flat = abs(near) <= 4 * rounding
            is_step = abs(half) < 0.1 * least or abs(whole) < 3 * abs(half)
            text = f"a step of {step:.2g} changes the loss by {whole:.2g}"
            return text * (is_flat and is_step)
    return ""


def rounding_of(traced: TracedLoss, gradient: Gradient) -> float:
    return float(jnp.finfo(traced.program.out_avals[0].dtype).eps) * abs(gradient.loss)


def directions(traced: TracedLoss) -> list[Any]:
    """A random direction in each leaf."""
    rng = np.random.default_rng(0)

    def like(x):
        direction = rng.normal(size=jnp.shape(x))
        if jnp.iscomplexobj(x):
            direction = direction + 1j * rng.normal(size=jnp.shape(x))
        return np.asarray(direction, x.dtype)

    return [like(x) for x in traced.values[: len(traced.leaves)]]


def trace_gradient(
    caller: str, loss: Callable[..., Any], model: PyTree, args: Any, kwargs: Any
) -> tuple[TracedLoss, Gradient | None, Exception | None]:
    """The loss, and its gradient in reverse mode, or directional derivatives where that raises;
    or the error, if these raise too."""
    doing("tracing the loss")
    traced = trace_loss(caller, loss, model, args, kwargs)
    check_no_references(caller, loss, traced.program)
    doing("compiling the gradient")

    def forward(_, values):
        n, along = len(traced.leaves), directions(traced)
        loss = lambda *leaves: traced.loss(leaves, values[n:])
        of_leaf = lambda i: lambda x: loss(*values[:i], x, *values[i + 1 : n])
        return loss(*values[:n]), [
            jax.jvp(of_leaf(i), [values[i]], [along[i]])[1] for i in range(n)
        ]

    values, error = list(traced.values), None
    dtype = traced.program.out_avals[0].dtype
    for mode in (traced.reverse, jax.jit(forward)):
        run = lambda seed, values, mode=mode: mode(np.asarray(seed, dtype), values)
        try:
            value, gradients = run(1.0, values)
        except RuleError:
            raise
        except Exception as raised:  # JAX has no one type of error; the report quotes it
            error = error or raised
            continue
        can_move = error is None and not traced.program.effects
        gradients = list(map(np.asarray, gradients))
        return traced, Gradient(float(value), gradients, error, can_move, run), None
    return traced, None, error


def rounding_errors(traced: TracedLoss, gradient: Gradient) -> dict[int, float]:
    """The leaves whose gradient is a rounding error, with its largest element: the gradient in
    float64 is another one. It is compiled only where a leaf is suspicious."""
    if not gradient.can_move:
        return {}
    moved = gradient.at(list(map(_moved_by_rounding, traced.values)))[1]
    size = lambda x: float(np.max(np.abs(np.asarray(x)), initial=0.0))
    suspicious = {
        i: size(g)
        for i, g in enumerate(gradient.gradients)
        if np.any(g) and np.all(np.isfinite(g)) and not np.iscomplexobj(g)
        if size(moved[i] - g) > 0.1 * size(g)
        or size(g) * max(1.0, size(traced.values[i])) < _SMALL * abs(gradient.loss)
    }
    if not suspicious:
        return {}
    n = len(traced.leaves)
    program = jax.make_jaxpr(jax.grad(traced.loss))(traced.values[:n], traced.values[n:])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        try:
            run = lambda values: evaluate_in_float64(program, values)
            exact = list(map(np.asarray, jax.jit(run)(traced.values)))
        except Exception:  # not all operations run in float64
            return {}
    off = lambda i: size(gradient.gradients[i] - exact[i])
    return {i: x for i, x in suspicious.items() if not off(i) < _IS_NOISE * x}


def _moved_by_rounding(x: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    signs = np.random.default_rng(0).choice((-1, 1), np.shape(x))
    return np.asarray(x) * (1 + 4 * float(jnp.finfo(x.dtype).eps) * signs).astype(x.dtype)
