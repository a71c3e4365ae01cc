"""The gradient of a loss, compiled once; and whether it is a rounding error."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import RuleError
from ..._jaxprs.evaluate import bind, enter, evaluate
from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import Call, Checkpoint, Cond, Scan, structure
from ..traced_loss import TracedLoss


# A gradient whose elements are all below so many standard deviations of its rounding is noise.
_SIGNIFICANT = 6.0
# A gradient is suspicious if it is so small relative to the loss, or if rounding changes it.
_SMALL = 1e-4


@dataclasses.dataclass
class Gradient:
    """The loss and its gradients at the arguments.

    - `error`: why there is no gradient in reverse mode. The gradients are then derivatives
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


def directions(traced: TracedLoss) -> list[Any]:
    """A random direction in each leaf."""
    rng = np.random.default_rng(0)

    def like(x):
        direction = rng.normal(size=jnp.shape(x))
        if jnp.iscomplexobj(x):
            direction = direction + 1j * rng.normal(size=jnp.shape(x))
        return np.asarray(direction, x.dtype)

    return [like(x) for x in traced.values[: len(traced.leaves)]]


def gradient_of(traced: TracedLoss) -> Gradient:
    """The gradient in reverse mode, or directional derivatives where that raises."""
    n = len(traced.leaves)
    loss = lambda values: evaluate(traced.program, values)[0]

    def reverse(values):
        of_leaves = lambda leaves: loss([*leaves, *values[n:]])
        return jax.value_and_grad(of_leaves)(list(values[:n]))

    def forward(values):
        along = directions(traced)
        of_leaf = lambda i: lambda x: loss([*values[:i], x, *values[i + 1 :]])
        return loss(values), [jax.jvp(of_leaf(i), [values[i]], [along[i]])[1] for i in range(n)]

    values, error = list(traced.values), None
    try:
        run = jax.jit(reverse)
        value, gradients = run(values)
    except Exception as reverse_error:  # JAX has no one type of error; the report quotes it
        error = reverse_error
        try:
            run = jax.jit(forward)
            value, gradients = run(values)
        except Exception:
            raise error from None
    can_move = error is None and not traced.program.effects
    return Gradient(float(value), list(map(np.asarray, gradients)), error, can_move, run)


def try_gradient(traced: TracedLoss) -> tuple[Gradient | None, Exception | None]:
    """The gradient, or the error that it raises."""
    try:
        return gradient_of(traced), None
    except RuleError:
        raise
    except Exception as error:  # JAX has no one type of error for it
        return None, error


# ---------------------------------------------------------------- rounding


def rounding_errors(traced: TracedLoss, gradient: Gradient) -> dict[int, float]:
    """The leaves whose gradient is no larger than its rounding error, with its largest element.
    The error is followed through the backward pass only where a leaf is suspicious."""
    if not gradient.can_move:
        return {}
    leaves = traced.values[: len(traced.leaves)]
    moved = gradient.at([_moved_by_rounding(x) for x in traced.values])[1]
    suspicious = [
        i
        for i, (x, g) in enumerate(zip(leaves, gradient.gradients, strict=True))
        if np.any(g)
        and np.all(np.isfinite(g))
        and not np.iscomplexobj(g)
        and (
            np.max(np.abs(moved[i] - g)) > 0.1 * np.max(np.abs(g))
            or np.max(np.abs(g)) * max(1.0, np.max(np.abs(np.asarray(x))))
            < _SMALL * abs(gradient.loss)
        )
    ]
    if not suspicious:
        return {}
    deviations = _deviations(traced)
    found = {}
    for i in suspicious:
        g, deviation = np.abs(gradient.gradients[i]), deviations[i]
        if deviation is not None and np.all(g <= _SIGNIFICANT * deviation):
            found[i] = float(np.max(g))
    return found


def _moved_by_rounding(x: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    rng = np.random.default_rng(0)
    move = 4 * float(jnp.finfo(x.dtype).eps) * rng.choice([-1, 1], np.shape(x))
    return (np.asarray(x) * (1 + move)).astype(x.dtype)


def _deviations(traced: TracedLoss) -> list[np.ndarray | None]:
    """The standard deviation of the rounding error of each gradient.

    A linear operation takes the variances of its operands to that of its output, by the squares
    of its factors, and adds its own rounding. So where terms cancel, the variance stays.
    """
    n = len(traced.leaves)

    def cotangents(values, ct):
        of_leaves = lambda *leaves: evaluate(traced.program, [*leaves, *values[n:]])[0]
        return jax.vjp(of_leaves, *values[:n])[1](ct)

    values = list(traced.values)
    ct = jnp.ones((), traced.program.out_avals[0].dtype)
    program = jax.make_jaxpr(cotangents)(values, ct)

    def run(values, ct):
        pairs = [*((x, None) for x in values), (ct, jnp.zeros_like(ct))]
        return [v for _, v in _with_variances(program, pairs)]

    variances = jax.jit(run)(values, ct)
    return [None if v is None else np.sqrt(np.asarray(v)) for v in variances]


def _with_variances(program, pairs, extra=None):
    del extra
    return evaluate(program, pairs, _variance_hook, constant=lambda x: (x, None))


def _variance_hook(eqn, pairs):
    known = structure(eqn)
    has = [v is not None for _, v in pairs]
    if any(has) and isinstance(known, Call | Checkpoint):
        return _with_variances(*known.programs, pairs)
    is_branch = isinstance(known, Cond) and not known.by_platform
    if any(has) and (is_branch or isinstance(known, Scan)):
        # In a loop, all floats have one.
        full = [(x, _zeros(x) if v is None else v) for x, v in pairs]
        index = [pairs[0][0]] if is_branch else []
        return enter(eqn, [*index, *full[len(index) :]], _full_variances)
    xs = [x for x, _ in pairs]
    outs = bind(eqn, xs)
    if not any(has):
        return [(x, None) for x in outs]
    return [(x, _variance(eqn, pairs, x, k)) for k, x in enumerate(outs)]


def _full_variances(program, pairs, extra):
    outs = _with_variances(program, pairs)
    return [(x, _zeros(x) if v is None else v) for x, v in outs]


def _zeros(x):
    return jnp.zeros(jnp.shape(x), jnp.result_type(x)) if _is_real(x) else None


def _is_real(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _variance(eqn, pairs, out, k):
    """The variance of an output; `None` if it is not a sum of the operands with factors."""
    if not _is_real(out):
        return None
    kind, name = kind_of(eqn), eqn.primitive.name
    if kind.linear in (None, "no") and name not in ("select_n", "convert_element_type"):
        return None
    has_factors = kind.linear == "each" or name == "div"
    square = lambda x: x**2 if has_factors else jnp.zeros_like(x)
    squares = [(square(x) if v is None else v) if _is_real(x) else x for x, v in pairs]
    if name in ("add", "add_any", "sub"):
        total = squares[0] + squares[1]
    else:
        total = squares[0] if name == "neg" else bind(eqn, squares)[k]
    rounds = not kind.layout and name not in ("neg", "select_n")
    return total + (rounds * float(jnp.finfo(out.dtype).eps) / 2 * out) ** 2
