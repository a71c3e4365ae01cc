"""A function of arrays with its derivatives, each compiled once and called many times.

The arrays are small and the calls are few, so that a short compilation counts and fast programs
do not.
"""

import contextlib
import functools as ft
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._diagnosis._programs.in_float64 import evaluate_in_float64
from .._jaxprs.structure import equations


# What the flag `JAX_DISABLE_MOST_OPTIMIZATIONS` asks for, on every platform.
_UNOPTIMIZED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Fusion emitters take most of the compilation time on a CPU. JAX 0.12 has no option for them.
_UNFUSED = {
    **_UNOPTIMIZED,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@ft.cache
def _compiler_options(platform: str) -> dict[str, Any]:
    """For a short compilation: those that XLA knows in this version."""
    for options in (_UNFUSED, _UNOPTIMIZED) if platform == "cpu" else (_UNOPTIMIZED,):
        try:
            jax.jit(lambda x: x).lower(np.float32(0)).compile(compiler_options=options)
        except jax.errors.JaxRuntimeError:  # no such option
            continue
        return options
    return {}


def compiled(fn: Callable[..., Any]) -> jax.stages.Wrapped:
    """`jax.jit`, with a short compilation."""
    return jax.jit(fn, compiler_options=_compiler_options(jax.default_backend()))


def all_at_once(
    runs: Sequence[Callable[..., Sequence[Any]]],
    args: Sequence[Any],
    context: Callable[[], Any] = contextlib.nullcontext,
    eagerly: bool = True,
) -> list[Any]:
    """The result of each `run(*args)`, or the exception that it raised.

    They are compiled as one program, which is much faster than one by one. If that fails, they
    are compiled one by one. So they are if they call the host: in JAX 0.10, on a CPU with two
    cores, a program of several callbacks and large arrays can wait for ever, also one of
    `jax.pure_callback` without this library.

    `eagerly`: whether a run that can't be traced because it looks at values is made eagerly.
    """
    with context():
        try:
            together = compiled(lambda *xs: [list(run(*xs)) for run in runs])
            program = together.trace(*args).jaxpr
            results = None if _calls_host(program) else together(*args)
        except Exception:
            results = None
        if results is None:
            return [_attempt(run, args, eagerly) for run in runs]
        return [[np.asarray(x) for x in result] for result in results]


def _calls_host(program: ClosedJaxpr) -> bool:
    return any("callback" in e.primitive.name for e in equations(program))


def _attempt(run, args, eagerly):
    try:
        try:
            return [np.asarray(x) for x in compiled(run)(*args)]
        except jax.errors.ConcretizationTypeError:
            if not eagerly:
                raise
            return [np.asarray(x) for x in run(*args)]
    except Exception as e:
        return e


@contextlib.contextmanager
def without_log():
    """Without the page that JAX prints to the terminal for an error in a callback."""
    log = logging.getLogger("jax")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def count_equations(fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """How many equations a function is traced to, those of the step of a loop once. Zero if it
    can't be traced."""
    try:
        return sum(1 for _ in equations(jax.make_jaxpr(fn)(*args)))
    except Exception:  # a rule may raise anything, and a check says so
        return 0


def unrounded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its conversions to lower precision than float64, to be called under
    `jax.enable_x64`. Its rules are applied, not dropped, if `fn` is a derivative."""

    def run(*args):
        program, types = jax.make_jaxpr(fn, return_shape=True)(*args)
        out = evaluate_in_float64(program, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(types), out)

    return run


class Program:
    """`fn(*leaves) -> list of arrays` at `leaves`; all results are NumPy arrays.

    - `is_unrounded`: whether the function and its derivatives are those without conversions to
        lower precision.
    """

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        leaves: Sequence[jax.Array],
        context: Callable[[], Any] = contextlib.nullcontext,
        is_unrounded: bool = False,
    ):
        self.fn = lambda *xs: list(fn(*xs))
        self.leaves = list(leaves)
        self._context = context
        self._is_unrounded = is_unrounded
        self._compiled: dict[str, Callable[..., Any]] = {}

    def value(self) -> list[Any]:
        return self.value_at(self.leaves)

    def value_at(self, leaves: Sequence[Any]) -> list[Any]:
        return self._run("value", lambda xs: self.fn(*xs), list(leaves))

    def jvp(self, tangents: Sequence[Any], leaves: Sequence[Any] | None = None) -> list[Any]:
        leaves = list(self.leaves if leaves is None else leaves)
        return self._run("jvp", self._jvp_of, leaves, list(tangents))

    def vjp(self, cotangents: Sequence[Any], leaves: Sequence[Any] | None = None) -> list[Any]:
        leaves = list(self.leaves if leaves is None else leaves)
        return self._run("vjp", self._vjp_of, leaves, list(cotangents))

    def higher(
        self,
        kind: str,
        tangents: Sequence[Any],
        cotangents: Sequence[Any],
        order: int,
        leaves: Sequence[Any] | None = None,
        of_linear_loss: bool = False,
    ) -> list[Any]:
        """A derivative of order `order` of a scalar loss along `tangents`, as a list of arrays
        like the leaves.

        The loss is the quadratic `sum(r + r**2 / 2s)` with `r` the outputs weighted with
        `cotangents`, so that the cotangents depend on the leaves as well. With
        `of_linear_loss`, it is `sum(r)`.
        """
        leaves = list(self.leaves if leaves is None else leaves)
        args = leaves, list(tangents), list(cotangents), self._scales(cotangents)
        name = f"{kind} {order}{' linear' if of_linear_loss else ''}"
        return self._run(name, self._higher(kind, order, of_linear_loss), *args)

    def higher_of_kinds(
        self,
        kinds: Sequence[str],
        tangents: Sequence[Any],
        cotangents: Sequence[Any],
        order: int,
    ) -> dict[str, Any]:
        """`higher` for several kinds, compiled as one program. For a kind that fails, the
        exception."""
        args = self.leaves, list(tangents), list(cotangents), self._scales(cotangents)
        runs = [self._higher(kind, order) for kind in kinds]
        together = lambda *args: [x for run in runs for x in run(*args)]
        try:
            flat = iter(self._run(f"{kinds} {order}", together, *args))
        except Exception:  # one by one, to find the kind that fails
            return {kind: self._attempt_higher(kind, *args[1:3], order) for kind in kinds}
        return {kind: [next(flat) for _ in self.leaves] for kind in kinds}

    def _attempt_higher(self, *args):
        try:
            return self.higher(*args)
        except Exception as e:
            return e

    def _higher(self, kind, order, of_linear_loss=False):
        derive, loss = _HIGHER[kind], _linear_loss if of_linear_loss else _loss
        return lambda xs, t, w, s: derive(loss(self.fn, w, s), xs, t, order)

    def _scales(self, cotangents):
        products = [np.abs(x * w) for x, w in zip(self.value(), cotangents, strict=True)]
        real = [np.abs(w).dtype for w in cotangents]
        return [
            np.asarray(1 + np.max(p, initial=0)).astype(dtype)
            for p, dtype in zip(products, real, strict=True)
        ]

    def _jvp_of(self, xs, tangents):
        return jax.jvp(self.fn, xs, tangents)[1]

    def _vjp_of(self, xs, cotangents):
        return list(jax.vjp(self.fn, *xs)[1](cotangents))

    def _run(self, name, fn, *args):
        with self._context():
            run = unrounded(fn) if self._is_unrounded else fn
            run = self._compiled.setdefault(name, compiled(run))
            try:
                out = run(*args)
            except jax.errors.ConcretizationTypeError:  # looks at values: eager only
                self._compiled[name] = fn
                out = fn(*args)
            return [np.asarray(x) for x in out]


def _loss(fn, cotangents, scales):
    def loss(*xs):
        total = 0.0
        for out, w, s in zip(fn(*xs), cotangents, scales, strict=True):
            r = (out * w).real
            total = total + (r + r * r / (2 * s)).sum()
        return total

    return loss


def _linear_loss(fn, cotangents, scales):
    del scales
    return lambda *xs: sum((x * w).real.sum() for x, w in zip(fn(*xs), cotangents, strict=True))


def _gradient(fn, xs):
    """With respect to every leaf, complex ones as JAX has it."""
    return list(jax.grad(fn, argnums=tuple(range(len(xs))))(*xs))


def _forward_over_reverse(loss, xs, tangents, order):
    gradient = lambda *ys: _gradient(loss, ys)
    for _ in range(order - 1):
        gradient = _along(gradient, tangents)
    return gradient(*xs)


def _along(fn, tangents):
    return lambda *ys: jax.jvp(fn, list(ys), list(tangents))[1]


def _reverse_over_reverse(loss, xs, tangents, order):
    for _ in range(order - 1):
        loss = _slope_in_reverse(loss, tangents)
    return _gradient(loss, xs)


def _slope_in_reverse(scalar, tangents):
    def slope(*ys):
        gradient = _gradient(scalar, ys)
        terms = [(g * t).real.sum() for g, t in zip(gradient, tangents, strict=True)]
        return sum(terms[1:], terms[0])

    return slope


def _reverse_over_forward(loss, xs, tangents, order):
    for _ in range(order - 1):
        loss = _along(loss, tangents)
    return _gradient(loss, xs)


_HIGHER = {
    "forward over reverse": _forward_over_reverse,
    "reverse over reverse": _reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
}
