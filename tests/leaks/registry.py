"""The definition of a shape, and its check."""

import contextlib
import dataclasses
import functools as ft
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax

from ..helpers import assert_close
from ..rules.formulas import sin_times, sin_times_cotangents, sin_times_tangent


class WithRules:
    """Functions, with the rules that they are given."""

    @staticmethod
    def jvp(fn, rule, **options):
        decorated = eqg.custom_jvp(fn)
        decorated.def_jvp(rule, **options)
        return decorated

    @staticmethod
    def vjp(fn, fwd, bwd):
        decorated = eqg.custom_vjp(fn)
        decorated.def_fwd(fwd)
        decorated.def_bwd(bwd)
        return decorated

    gradient = staticmethod(eqg.custom_gradient)
    elementwise = staticmethod(eqg.elementwise)


class Plain:
    """The same functions, without."""

    jvp = staticmethod(lambda fn, rule, **options: fn)
    vjp = staticmethod(lambda fn, fwd, bwd: fn)
    gradient = staticmethod(lambda fn: lambda *args: fn(*args)[0])
    elementwise = staticmethod(lambda fn, derivative: fn)


def ruled(rules, kind, fn, tangent=None, cotangents=None, plain=None):
    """A function with a rule of this kind: by the formulas `tangent(*primals, *tangents)` and
    `cotangents(*primals, ct)`, or by autodiff of the function. `plain` represents a function
    that JAX can't differentiate by itself."""

    def jvp(primals, tangents):
        if tangent is not None:
            return f(*primals), ran(tangent(*primals, *tangents))
        return f(*primals), ran(eqx.filter_jvp(fn, primals, tangents)[1])

    def fwd(*args):
        return f(*args), ran(args)

    def bwd(args, ct):
        return cotangents(*args, ct) if cotangents else eqx.filter_vjp(fn, *args)[1](ct)

    if rules is Plain and plain is not None:
        return plain
    f = rules.jvp(fn, jvp) if kind == "jvp" else rules.vjp(fn, fwd, bwd)
    return f


@dataclasses.dataclass(frozen=True)
class Shape:
    """`run(rules)` returns a tree of results; `rules` is `WithRules` or `Plain`.

    Where the right answer is an error, `error` is a pattern for its text.
    """

    run: Callable[[Any], Any]
    error: str | None = None


SHAPES: dict[str, Shape] = {}


def shape(fn: Callable[[Any], Any]):
    """Decorator: `fn(rules)` is a shape, under its own name."""
    _add(fn.__name__, Shape(fn))
    return fn


def _add(name, new):
    assert name not in SHAPES
    SHAPES[name] = new


def op_of(kind: str, rules: Any) -> Callable[..., Any]:
    """`sin(x) * y`, with a rule of this kind."""
    return ruled(rules, kind, sin_times, sin_times_tangent, sin_times_cotangents)


def for_each(*kinds: str, error: str | None = None):
    """Decorator: `fn(rules, kind)` is one shape for each kind of rule."""

    def register(fn):
        for kind in kinds:
            _add(f"{fn.__name__}-{kind}", Shape(ft.partial(fn, kind=kind), error))
        return fn

    return register


def composition(fn: Callable[[Callable[..., Any]], Any]):
    """Decorator: `fn(f)` composes transformations of `f(x, y) = sin(x) * y`. It makes two
    shapes, one with a forward rule and one with a reverse rule."""
    for kind in ("jvp", "vjp"):
        _add(f"{fn.__name__}-{kind}", Shape(lambda rules, kind=kind: fn(op_of(kind, rules))))
    return fn


def both(fn: Callable[[Callable[..., Any]], Any]):
    """Decorator: `fn(ruled)` gives functions rules. It makes two shapes as well."""
    for kind in ("jvp", "vjp"):
        run = lambda rules, kind=kind: fn(ft.partial(ruled, rules, kind))
        _add(f"{fn.__name__}-{kind}", Shape(run))
    return fn


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
