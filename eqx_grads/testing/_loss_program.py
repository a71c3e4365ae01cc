"""The loss of a model as a program: its value, its gradient in both modes, its differences."""

import contextlib
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import PyTree

from .._diagnosis._programs.in_float64 import evaluate_in_float64
from .._diagnosis._programs.lowest_precision import lowest_precisions
from .._diagnosis.traced_loss import trace_loss, TracedLoss
from .._errors import first_line
from .._jaxprs.evaluate import evaluate
from .._tangent_spaces import is_differentiable
from ._compare import pairing, scale_of
from ._oracle import without_log
from ._random_tangents import normal
from ._same_function import changes_alike, is_same_program
from ._slope import Samples
from ._subject import double_precision
from ._trace_derivatives import captures_numpy, trace_all


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


def jit_as_written(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit`, but a cast to float16 and back does lose digits. XLA would remove it, or not,
    depending on what is around it."""
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})


def traced_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays that is traced in its first call, to equations that are run one by
    one. That is many times faster than to differentiate it in each call."""
    known: list[Any] = []

    def run(*args):
        if not known:
            program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
            known[:] = program, jax.tree.structure(out)
        program, treedef = known
        return jax.tree.unflatten(treedef, evaluate(program, jax.tree.leaves(args)))

    return run


# XLA takes minutes to compile more equations than this in a row (those of a scan or of a `jit`
# inside count as one). They are run one by one.
_MOST_COMPILED = 1000
# For so many steps at once: an operation takes about as long for these as for one. For a model
# of few parameters, the same is true of more steps.
_STEPS_AT_ONCE = 16
_STEPS_AT_ONCE_OF_SMALL = 64
_SMALL = 1000


class LossProgram:
    """A loss at a model and arguments.

    - `leaves`: the inexact arrays of the model, which are perturbed; `names`: their paths.
    - `others`: the other arrays of the model and the arguments.
    - `lowest`: the dtype of lowest precision that the loss is computed in from the leaves and
        the arguments, `None` if that is float64. That of a constant alone does not count.
    """

    def __init__(self, traced: TracedLoss, context: Callable[[], Any]):
        self.traced = traced
        self.context = context
        self.names = list(traced.leaves)
        self.leaves = [np.asarray(x) for x in traced.values[: len(self.names)]]
        self.others = list(traced.values[len(self.names) :])
        found = [d for d in lowest_precisions(traced.program) if d is not None]
        self.lowest = max(found, key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)

    @property
    def is_compiled(self) -> bool:
        return len(self.traced.program.eqns) <= _MOST_COMPILED

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return jit_as_written(fn) if self.is_compiled else traced_once(fn)

    def _loss(self, leaves, others):
        return evaluate(self.traced.program, [*leaves, *others])[0]

    @ft.cached_property
    def _gradient(self):
        return self.compile(jax.grad(self._loss))

    @ft.cached_property
    def _tangent(self):
        def tangent(leaves, tangents, others):
            return jax.jvp(lambda xs: self._loss(xs, others), (leaves,), (tangents,))[1]

        return self.compile(tangent)

    @ft.cached_property
    def _values_at(self):
        """The losses at steps along a direction. In float64 even where the program is not."""

        def value_at(leaves, tangents, others, step):
            leaves = [x + step * t for x, t in zip(leaves, tangents, strict=True)]
            if self.lowest is None:
                return self._loss(leaves, others)
            return evaluate_in_float64(self.traced.program, [*leaves, *others])[0]

        one = self.compile(value_at)
        if self.is_compiled:
            return lambda *args, steps: [one(*args, step) for step in steps]
        many = traced_once(jax.vmap(value_at, in_axes=(None, None, None, 0)))

        is_small = sum(x.size for x in self.leaves) <= _SMALL
        at_once = _STEPS_AT_ONCE_OF_SMALL if is_small else _STEPS_AT_ONCE

        def values_at(*args, steps):
            try:
                found = []
                for i in range(0, len(steps), at_once):
                    part = steps[i : i + at_once]
                    padded = np.resize(part, at_once)
                    found += list(np.asarray(many(*args, padded)))[: len(part)]
                return found
            except NotImplementedError:  # for a primitive without a batching rule
                return [one(*args, step) for step in steps]

        return values_at

    def value(self) -> float:
        zeros = [np.zeros(x.shape, in_float64(x).dtype) for x in self.leaves]
        return self.samples(self.leaves, zeros)(0.0)

    def value_as_written(self) -> float:
        """The loss in the precision of the program, and not in float64."""
        with self.context():
            return float(self.compile(self._loss)(self.leaves, self.others))

    @ft.cached_property
    def gradient(self) -> list[np.ndarray]:
        return self.gradient_at(self.leaves)

    def gradient_at(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        with self.context():
            leaves = list(map(jnp.asarray, self.like_leaves(leaves)))
            return [np.asarray(g) for g in self._gradient(leaves, self.others)]

    @ft.cached_property
    def traced_gradient(self) -> ClosedJaxpr | None:
        """`None` if it can't be traced: where it is computed, there is an error."""
        (program,) = trace_all([jax.grad(self._loss)], (self.leaves, self.others)) or [None]
        return program

    def check_gradient(self) -> None:
        """Raise an error if the gradient can't be traced or compiled, as that of a rule that
        returns another dtype than the function has."""
        try:
            gradient = jax.make_jaxpr(jax.grad(self._loss))(self.leaves, self.others)
        except ValueError:  # no reverse mode, in whatever precision
            return
        if captures_numpy(gradient):
            jax.jit(jaxpr_as_fun(gradient)).lower(*jax.tree.leaves((self.leaves, self.others)))

    def tangent(self, leaves: Sequence[Any], tangents: Sequence[Any]) -> float:
        """The derivative along a direction, in forward mode."""
        with self.context():
            leaves, tangents = self.like_leaves(leaves), self.like_leaves(tangents)
            leaves, tangents = (list(map(jnp.asarray, xs)) for xs in (leaves, tangents))
            return float(self._tangent(leaves, tangents, self.others))

    def samples(self, leaves: Sequence[Any], tangents: Sequence[Any]) -> Samples:
        """The loss along a direction, in float64."""
        with double_precision():
            leaves, tangents = (
                [jnp.asarray(in_float64(x)) for x in xs] for xs in (leaves, tangents)
            )

        def values_at(steps):
            with double_precision():
                found = self._values_at(leaves, tangents, self.others, steps=steps)
                return [float(value) for value in found]

        return Samples(_where_defined(values_at))

    def like_leaves(self, arrays: Sequence[Any]) -> list[Any]:
        return [np.asarray(a).astype(x.dtype) for a, x in zip(arrays, self.leaves, strict=True)]

    def mode_error(self, run: Callable[[], Any], mode: str) -> str | None:
        """What JAX says if there is no derivative in this mode: forward mode for a
        `jax.custom_vjp`, reverse mode for a `while_loop`. Other errors are raised."""
        try:
            run()
        except (TypeError, ValueError, NotImplementedError) as error:
            if mode not in str(error).lower():
                raise
            return first_line(error)
        return None


def _where_defined(values_at: Callable[[list[float]], Any]) -> Callable[..., list[float]]:
    """The values at steps from zero; NaN where the loss raises an error, as a solver does that
    fails for other parameters. An error at zero is raised."""
    failed = {True: np.inf, False: np.inf}  # the shortest step that did, on either side

    def value_at(step):
        if abs(step) >= failed[step > 0]:
            return np.nan
        try:
            return values_at([step])[0]
        except (RuntimeError, ValueError):
            if step == 0:
                raise
            failed[step > 0] = abs(step)
            return np.nan

    def values(steps):
        with without_log():
            if min(failed.values()) == np.inf:
                with contextlib.suppress(RuntimeError, ValueError):
                    return values_at(steps)
                value_at(0.0)
            # Shorter steps first: none is tried beyond one that failed.
            known = {step: value_at(step) for step in sorted(steps, key=abs)}
        return [known[step] for step in steps]

    return values


def trace_in_both_precisions(
    caller: str,
    loss: Callable[..., Any],
    model: PyTree,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    only_own: bool = False,
    **options: Any,
) -> tuple[LossProgram, LossProgram | None, str]:
    """The program in the user's precision, that in float64, and why there is none if so.

    There is none if the loss can't be differentiated in float64, and if it is another function
    there, which draws other random numbers.
    """
    traced = trace_loss(caller, loss, model, args, kwargs, **options)
    own = LossProgram(traced, contextlib.nullcontext)
    if only_own:
        return own, None, ""
    # Of a NumPy array that the loss captures, JAX has one constant for both precisions: see
    # `_trace_derivatives.py`.
    captures = own.traced_gradient is not None and captures_numpy(own.traced_gradient)
    try:
        with double_precision():
            wide_model, wide_args, wide_kwargs = _in_float64((model, tuple(args), dict(kwargs)))
            traced = trace_loss(caller, loss, wide_model, wide_args, wide_kwargs, **options)
            wide = LossProgram(traced, double_precision)
            wide.check_gradient()
    except Exception as error:  # the loss is for one precision only, and the report says so
        if captures:
            why = "The loss captures NumPy arrays, and can't run in float64"
            return own, None, f"{why}: it can with `jnp.asarray` of them."
        why = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return own, None, f"The loss can't be differentiated in float64 ({why})."
    if _is_another(own, wide):
        return own, None, "In float64 the loss draws other random numbers, or looks at a dtype."
    return own, wide, ""


def _is_another(own: LossProgram, wide: LossProgram) -> bool:
    """Whether the loss of a model in float64 is another function of it."""
    if own.lowest is None or is_same_program(own.traced.program, wide.traced.program):
        return False
    leaves = [in_float64(x) for x in own.leaves]
    zeros = [np.zeros_like(x) for x in leaves]
    rng = np.random.default_rng(0)
    direction = [scale_of(x) * normal(rng, x.shape, x.dtype) for x in leaves]
    one, other = ((lambda xs, p=p: [p.samples(xs, zeros)(0.0)]) for p in (own, wide))
    return not changes_alike(one, other, leaves, [direction])


def _in_float64(tree: PyTree) -> PyTree:
    """All arrays of floats in float64. Python numbers stay as they are: a model may use them as
    configuration."""
    return jax.tree.map(lambda x: jnp.asarray(in_float64(x)) if _is_float_array(x) else x, tree)


def _is_float_array(x) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic) and is_differentiable(x)


def in_float64(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def along(gradient: Sequence[Any], tangents: Sequence[Any]) -> float:
    """The derivative along a direction that a gradient gives. An entry of the gradient that is
    NaN does not matter where the direction is zero."""
    gradient = [
        np.where(t == 0, 0.0, in_float64(g)) for g, t in zip(gradient, tangents, strict=True)
    ]
    with np.errstate(invalid="ignore"):  # NaN, for infinite entries of both signs
        return pairing(gradient, tangents)
