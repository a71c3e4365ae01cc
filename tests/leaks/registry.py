"""The definition of a shape, and its check."""

import contextlib
import dataclasses
import functools as ft
import re
from collections.abc import Callable, Sequence
from typing import Any

import eqx_grads as eqg
import jax

from ..helpers import assert_close
from ..rules.formulas import sin_times, sin_times_cotangents, sin_times_tangent


class WithRules:
    """Functions, with the rules that they are given.

    `plain` represents a function that JAX can't differentiate by itself.
    """

    @staticmethod
    def jvp(fn, rule, plain=None, **options):
        del plain
        decorated = eqg.custom_jvp(fn)
        decorated.def_jvp(rule, **options)
        return decorated

    @staticmethod
    def vjp(fn, fwd, bwd, plain=None, **options):
        del plain
        decorated = eqg.custom_vjp(fn)
        decorated.def_fwd(fwd)
        decorated.def_bwd(bwd, **options)
        return decorated

    gradient = staticmethod(eqg.custom_gradient)
    elementwise = staticmethod(eqg.elementwise)
    nondifferentiable = staticmethod(eqg.nondifferentiable)


class Plain:
    """The same functions, without."""

    @staticmethod
    def jvp(fn, rule, plain=None, **options):
        del rule, options
        return fn if plain is None else plain

    @staticmethod
    def vjp(fn, fwd, bwd, plain=None, **options):
        del fwd, bwd, options
        return fn if plain is None else plain

    @staticmethod
    def gradient(fn):
        return lambda *args: fn(*args)[0]

    @staticmethod
    def elementwise(fn, derivative):
        del derivative
        return fn

    @staticmethod
    def nondifferentiable(x):
        return x


@dataclasses.dataclass(frozen=True)
class Shape:
    """`run(rules)` returns a tree of results; `rules` is `WithRules` or `Plain`.

    Where the right answer is an error, `error` is a pattern for its text.
    """

    run: Callable[[Any], Any]
    error: str | None = None


SHAPES: dict[str, Shape] = {}


def shape(
    fn: Callable[[Any], Any] | None = None,
    *,
    error: str | None = None,
):
    """Decorator: `fn` is a shape, under its own name."""
    if fn is None:
        return lambda fn: shape(fn, error=error)
    _add(fn.__name__, Shape(fn, error))
    return fn


def _add(name, new):
    assert name not in SHAPES
    SHAPES[name] = new


def op_of(kind: str, rules: Any) -> Callable[..., Any]:
    """`sin(x) * y`, with a rule of this kind."""

    def jvp(primals, tangents):
        return f(*primals), ran(sin_times_tangent(*primals, *tangents))

    def fwd(x, y):
        return f(x, y), ran((x, y))

    def bwd(residuals, ct):
        return sin_times_cotangents(*residuals, ct)

    f = rules.jvp(sin_times, jvp) if kind == "jvp" else rules.vjp(sin_times, fwd, bwd)
    return f


def composition(fn: Callable[[Callable[..., Any]], Any]):
    """Decorator: `fn(f)` composes transformations of `f(x, y) = sin(x) * y`. It makes two
    shapes, one with a forward rule and one with a reverse rule."""
    for kind in ("jvp", "vjp"):
        _add(f"{fn.__name__}-{kind}", Shape(lambda rules, kind=kind: fn(op_of(kind, rules))))
    return fn


def for_each(kinds: Sequence[str], **options: Any):
    """Decorator: `fn(rules, kind)` is one shape for each kind of rule."""

    def register(fn):
        for kind in kinds:
            _add(f"{fn.__name__}-{kind}", Shape(ft.partial(fn, kind=kind), **options))
        return fn

    return register


_n_ran = 0


def ran(x):
    """The identity, inside a rule. A shape whose rules never run compares plain autodiff
    with itself."""
    global _n_ran
    _n_ran += 1
    return x


def check(name: str, context: Callable[[], Any] = contextlib.nullcontext) -> None:
    """Raise if the shape of this name fails in a context."""
    shape = SHAPES[name]
    with context():
        if shape.error is not None:
            _expect_error(shape)
            return
        before = _n_ran
        got = shape.run(WithRules)
    assert _n_ran > before, "no rule was used"
    assert_close(got, _expected(name))


@ft.cache
def _expected(name):
    return SHAPES[name].run(Plain)


def _expect_error(shape):
    error = None
    try:
        shape.run(WithRules)
    except Exception as raised:
        error = raised
    # JAX's checker finds the tracers that are in the traceback of any error, and raises
    # another one in its place (`test_errors_are_leaks_to_the_checker`).
    while not isinstance(error, eqg.RuleError) and jax.config.jax_check_tracer_leaks:
        assert error is not None
        error = error.__context__
    assert isinstance(error, eqg.RuleError), repr(error)
    assert re.search(shape.error, str(error)), f"{shape.error!r} is not in {str(error)!r}"
