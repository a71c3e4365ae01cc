"""The tolerances of the checkers, each probed from both sides.

A row of a table has what is barely right, which passes, and what is barely wrong, which fails
with the name of its check. The rows write a tolerance as a number of their own: no row reads
it from the library.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads.testing._compare import difference, scale_of
from eqx_grads.testing._differences import directional, Samples, Sides, Slope
from eqx_grads.testing._mistakes import likely_cause, Mistake


# ---------------------------------------------------------------- assert_trees_close


def _ones(dtype="float64", n=4):
    return np.ones(n, dtype)


def _off(error, dtype="float64", n=4):
    return np.asarray(1 + error * np.ones(n)).astype(dtype)


def _one_wrong(error, n=10_000):
    return 1 + error * (np.arange(n) == n // 3)


BIG, NAN, INF = np.full(4, 1e3, np.float32), np.nan, np.inf
SMALL = lambda x: {"a": BIG, "b": np.full(1, x, np.float32)}
MIXED = lambda error: {"a": _off(error, "float32"), "b": _ones(jnp.bfloat16)}
# What is expected, what passes, what fails, and options.
CLOSE: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    **{
        f"{dtype}, {right}": (_ones(dtype), _off(right, dtype), _off(wrong, dtype), {})
        for dtype, right, wrong in (
            ("float64", 0.9e-7, 1.2e-7), ("float32", 2.8e-5, 3.3e-5),
            ("float32", -2.8e-5, -3.3e-5), ("float16", 20 / 1024, 21 / 1024),
            (jnp.bfloat16, 10 / 128, 11 / 128), ("complex64", 2.8e-5j, 3.3e-5j),
            ("complex128", 0.9e-7j, 1.2e-7j),
        )
    },
    "one entry": (np.float64(1), np.float64(1 + 0.9e-7), np.float64(1 + 1.2e-7), {}),
    "given": (_ones(), _off(0.9e-2), _off(1.2e-2), {"tolerance": 1e-2}),
    "given, zero": (_ones(), _ones(), _off(1e-15), {"tolerance": 0.0}),
    "scale": (_ones(), _off(0.055), _off(0.065), {"tolerance": 1e-2, "scale": 10.0}),
    # Among 10,000 entries, the error of one is a hundredth in the norm.
    "one of many": (_ones(n=10_000), _one_wrong(0.055), _one_wrong(0.065), {"tolerance": 1e-3}),
    "one of many, in the norm": (_ones(n=10_000), _one_wrong(0.095), _one_wrong(0.11),
                                 {"tolerance": 1e-3, "entrywise": False}),
    "a small leaf": (SMALL(1e-3), SMALL(1e-3 + 5.5e-5), SMALL(1e-3 + 7e-5), {}),
    "the lowest precision of all": (MIXED(0.0), MIXED(0.075), MIXED(0.085), {}),
    "zero": (np.zeros(4), np.full(4, 0.45e-7), np.full(4, 0.6e-7), {}),
    "beside a NaN": ([NAN, 1.0], [NAN, 1 + 0.9e-7], [NAN, 1 + 1.2e-7], {"tolerance": 1e-7}),
    "huge": (1e300 * _ones(), 1e300 * _off(0.9e-7), 1e300 * _off(1.2e-7), {}),
    "tiny": (1e-300 * _ones(), 1e-300 * _off(0.9e-7), 1e-300 * _off(1.2e-7), {}),
    # What is equal passes.
    **{
        name: (want, want, wrong, {})
        for name, want, wrong in (
            ("NaN", np.array([NAN, 1.0]), np.array([1.0, 1.0])),
            ("NaN, for a number", np.array([2.0, 1.0]), np.array([2.0, NAN])),
            ("NaN, in one part", np.array([complex(NAN, 1)]), np.array([complex(NAN, 2)])),
            ("NaN, in another part", np.array([complex(NAN, 1)]), np.array([complex(1, NAN)])),
            ("infinity", np.array([INF, 1.0]), np.array([-INF, 1.0])),
            ("NaN, for infinity", np.array([INF]), np.array([NAN])),
            ("infinity, for a number", np.array([2.0]), np.array([INF])),
            ("shape", np.ones((2, 1)), np.ones((1, 2))),
            ("dtype", np.ones(2, np.float32), np.ones(2, np.float16)),
            ("integers", np.arange(3), np.array([0, 2, 2])),
            ("structure", {"a": 1.0}, {"b": 1.0}), ("None", [None, 1.0], [0.0, 1.0]),
            ("no number", ["relu", 1.0], ["gelu", 1.0]), ("a number for none", ["relu"], [1.0]),
            ("keys", jr.key(0), jr.key(1)),
            ("kinds of keys", jr.key(0, impl="rbg"), jr.key(0, impl="unsafe_rbg")),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSE)
def test_assert_trees_close(name):
    want, right, wrong, options = CLOSE[name]
    eqgt.assert_trees_close(right, want, **options)
    with pytest.raises(AssertionError, match=r"^At "):
        eqgt.assert_trees_close(wrong, want, **options)


def test_assert_trees_close_names_the_worst_leaf():
    want = {"a": np.ones(3), "b": [np.ones(2), np.ones(2)]}
    got = {"a": np.ones(3) + 1e-4, "b": [np.ones(2), np.ones(2) + 1e-3]}
    with pytest.raises(AssertionError, match=r"At \['b'\]\[1\]: .* 0\.001, more than 1e-07"):
        eqgt.assert_trees_close(got, want)


def test_assert_trees_close_shows_integers_and_booleans_as_they_are():
    for want, got, row in (
        (np.array([True, False]), np.array([True, True]), r"\[1\] +False +True"),
        (np.array([123456789]), np.array([123456780]), r"\[0\] +123456789 +123456780"),
    ):
        with pytest.raises(AssertionError, match=row):
            eqgt.assert_trees_close(got, want)


def test_the_norm_of_a_difference_is_that_of_numpy():
    rng = np.random.default_rng(0)
    want, got = rng.normal(size=(2, 30)), rng.normal(size=(2, 30))
    other = rng.normal(size=5) * 50
    size = np.linalg.norm(want) + 1e-3 * np.linalg.norm(other) + 2.0
    expected = np.linalg.norm(got - want) / size
    found = difference([want, other], [got, other], ["x", "y"], False, scale=2.0)
    assert found.name == "x"
    np.testing.assert_allclose(found.error, expected, rtol=1e-12)
    sizes = scale_of(np.array([3.0, 0.0, -4.0, np.inf]))
    np.testing.assert_allclose(sizes, [3.0, 5 / math.sqrt(3), 4.0, 0.0], rtol=1e-12)


# ---------------------------------------------------------------- check_rule


@dataclasses.dataclass(frozen=True)
class Row:
    """`make(k)` returns `(fn, args, options)` for `check_rule`: right for `right`, and wrong
    for `wrong`, where `check` fails, and `match` is in the place or the text of a failure."""

    make: Callable[[Any], tuple[Any, ...]]
    check: str
    match: str
    right: Any
    wrong: Any
    x64: bool = False


ROWS: dict[str, Row] = {}


def row(check, match, right, wrong, x64=False, name=""):
    def enter(make):
        key = name or make.__name__
        assert key not in ROWS
        ROWS[key] = Row(make, check, match, right, wrong, x64)
        return make

    return enter


def jvp_rule(fn, tangent, symbolic_zeros=False):
    f = eqg.custom_jvp(fn)
    rule = lambda primals, tangents: (f(*primals), tangent(primals, tangents))
    f.def_jvp(rule, symbolic_zeros=symbolic_zeros)
    return f


def vjp_rule(fn, cotangents, value=None, symbolic_zeros=False):
    f = eqg.custom_vjp(fn)
    f.def_fwd(lambda *xs: ((value or f)(*xs), xs))
    f.def_bwd(lambda xs, ct: cotangents(xs, ct), symbolic_zeros=symbolic_zeros)
    return f


X = np.array([0.5, 1.5, -0.7])


def x_of(dtype):
    x = X + (0.3j * np.arange(3) if jnp.issubdtype(dtype, jnp.complexfloating) else 0)
    return jnp.asarray(x.astype(dtype))


def cube(x):
    return x**3


def cube_rule(factor):
    return jvp_rule(cube, lambda p, t: 3 * p[0] ** 2 * t[0] * factor(p[0]))


def cube_backward(factor):
    return vjp_rule(cube, lambda xs, ct: (3 * xs[0] ** 2 * ct * factor(xs[0]),))


def constant(k):
    return lambda t: np.asarray(1 + k, t.dtype)


def rounds(k):
    """It loses digits in single precision: its relative error is about `k`."""

    def factor(x):
        large = k / EPS * jnp.cos(0 * x)
        return ((jnp.cos(x) + large) - large) / jnp.cos(x)

    return factor


EPS = 2.0**-24
# In float64, the references are good to 1e-9. The rule of a function in another dtype is
# compared in float64 with 1e-5, and with what its rounded constants explain; then with itself
# in its own dtype, with what rounding explains.
_FACTORS = {
    "float64": ("float64", constant, 1e-9, 0.5, 2.5),
    "float32": ("float32", constant, 1e-5, 0.5, 2.5),
    "bfloat16": ("bfloat16", constant, 8e-3, 0.5, 2.5),
    "complex64": ("complex64", constant, 1e-5, 0.5, 2.5),
    "rounding": ("float32", rounds, 3e-5, 0.1, 20.0),
}


def _enter_factors():
    for name, (dtype, factor, tolerance, right, wrong) in _FACTORS.items():
        for mode, rule in (("forward", cube_rule), ("reverse", cube_backward)):

            def make(k, dtype=dtype, factor=factor, tolerance=tolerance, rule=rule):
                return rule(factor(k * tolerance)), (x_of(dtype),)

            match = "in your own precision" if name == "rounding" else ""
            key = f"{mode}, {name}"
            row(mode, match, right, wrong, x64=dtype == "float64", name=key)(make)


_enter_factors()


def conversions_inside(dtype, k):
    """The function rounds to another dtype, and its rule is compared without that."""
    fn = lambda x: x.astype(dtype).astype(x.dtype) ** 3
    factor = lambda t: np.asarray(1 + k * 8e-3, t.dtype)
    return jvp_rule(fn, lambda p, t: 3 * p[0] ** 2 * t[0] * factor(p[0])), (x_of("float32"),)


for _dtype in ("bfloat16", "float8_e4m3fn"):
    _enter = row("forward", "", 0.5, 2.5, name=f"conversions to {_dtype}")
    _enter(ft.partial(conversions_inside, _dtype))


@row("forward", "y", 0.5, 2.0)
def one_argument_is_wrong(k):
    def tangent(p, t):
        return (
            jnp.cos(p[0]) * p[1] * t[0]
            + np.float64(1 + k * 1e-5).astype(t[1].dtype) * jnp.sin(p[0]) * t[1]
        )

    x = x_of("float32")
    return jvp_rule(lambda x, y: jnp.sin(x) * y, tangent), (x, 2 + x)


@row("forward", "", 0.0, 1e-4, x64=True)
def rounding_of_the_reference(k):
    """log(1 + x) loses half of its digits here, and log1p none."""
    slope = lambda x: 2e-9 * jnp.log1p(1e-9 * x) / (1 + 1e-9 * x) * (1 + k)
    fn = lambda x: jnp.log(1 + 1e-9 * x) ** 2
    return jvp_rule(fn, lambda p, t: slope(p[0]) * t[0]), (x_of("float64"),)


@row("forward", "", 1.0, 1.01)
def rounding_in_single_precision(k):
    """The reference loses three digits, and so does the rule."""
    fn = lambda x: (jnp.exp(x) - 1) ** 2
    slope = lambda x: k * 2 * (jnp.exp(x) - 1) * jnp.exp(x)
    return jvp_rule(fn, lambda p, t: slope(p[0]) * t[0]), (1e-3 * x_of("float32"),)


@row("reverse", "", 0.3, 2.0)
def one_of_many_entries(k):
    # Of 400 entries, one has 60 times the error that the norm may have.
    def backward(xs, ct):
        factor = np.ones(400)
        factor[7] += k * 1e-5 * 30 * 2
        return (2 * xs[0] * ct * factor.astype(ct.dtype),)

    return vjp_rule(lambda x: x**2, backward), (jnp.ones(400),), {}


@row("linear", "of zero", 2e-4, 6.0)
@row("linear", "of -0.000244", 2e-4, 1.5, name="affine, less than rounding")
def affine(k):
    # Relative to a cotangent of ones, what is added is a third of the tolerance.
    return vjp_rule(cube, lambda xs, ct: (ct * 3 + ct.dtype.type(k * 1e-5),)), (jnp.ones(200),)


@row("linear", "of 4096 times it", 10.0, 0.1)
def clipped(k):
    # 4096 times the largest of 200 normal numbers is between 1e4 and 2e4.
    bound = 1.5e4 * k
    return vjp_rule(cube, lambda xs, ct: (3 * jnp.clip(ct, -bound, bound),)), (jnp.ones(200),)


@row("linear", "of -0.000244", 1e-4, 0.1)
def dead_below_a_bound(k):
    # The largest of 200 normal numbers, divided by 4096, is about 7e-4.
    def backward(xs, ct):
        return (3 * jnp.where(jnp.max(jnp.abs(ct)) > 1e-2 * k, ct, 0.0),)

    return vjp_rule(cube, backward), (jnp.ones(200),)


@row("linear", "of a sum", 0.1, 100.0)
def homogeneous_only(k):
    def backward(xs, ct):
        other = ct[0] ** 3 / jnp.maximum(jnp.sum(ct**2), 1e-30)
        return (3 * ct + ct.dtype.type(k * 1e-5) * other,)

    return vjp_rule(cube, backward), (jnp.ones(3),)


def _two(k_none_y=0.0, k_none_x=0.0):
    """`x**2 * y`, whose rule is wrong where one argument is not perturbed."""

    def tangent(p, t):
        (x, y), (tx, ty) = p, t
        terms = []
        if tx is not None:
            factor = 1 + (k_none_y * 1e-5 if ty is None else 0)
            terms.append(2 * x * y * tx * np.asarray(factor, tx.dtype))
        if ty is not None:
            factor = 1 + (k_none_x * 1e-5 if tx is None else 0)
            terms.append(x**2 * ty * np.asarray(factor, ty.dtype))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    rule = jvp_rule(lambda x, y: x**2 * y, tangent, symbolic_zeros=True)
    return rule, (x_of("float32"), 2 + x_of("float32"))


row("zeros", "only x perturbed, forward", 0.5, 2.0, name="only x")(lambda k: _two(k_none_y=k))
row("zeros", "only y perturbed", 0.5, 2.0, name="only y")(lambda k: _two(k_none_x=k))


@row("zeros", "equations", 0, 1)
def one_equation_too_many(k):
    def tangent(p, t):
        (x, y), (tx, ty) = p, t
        terms = [] if tx is None else [2 * x * y * tx]
        terms += [] if ty is None else [x**2 * ty]
        alone = terms[0] * 1.0 if k else terms[0]
        return alone if len(terms) == 1 else terms[0] + terms[1]

    rule = jvp_rule(lambda x, y: x**2 * y, tangent, symbolic_zeros=True)
    return rule, (x_of("float32"), 2 + x_of("float32"))


@row("zeros", "only x perturbed, reverse", 0.5, 2.0)
def only_x_perturbed_in_reverse(k):
    f = eqg.custom_vjp(lambda x, y: x * y)
    f.def_fwd(lambda x, y: (f(x, y), (x, y)))

    def backward(xs, ct, *, perturbed):
        factor = 1 + k * 1e-5 * (perturbed == (True, False))
        return xs[1] * ct * np.asarray(factor, ct.dtype), xs[0] * ct

    f.def_bwd(backward)
    return f, (X, 2 + X)  # in float64, which JAX makes float32


@row("zeros", "output[0] used", 0.5, 2.0)
def only_one_output_used(k):
    def backward(xs, cts):
        (x,), (a, b) = xs, cts
        if b is None:
            return (jnp.cos(x) * a * np.asarray(1 + k * 1e-5, x.dtype),)
        of_a = 0 if a is None else jnp.cos(x) * a
        return (of_a - jnp.sin(x) * b,)

    fn = lambda x: (jnp.sin(x), jnp.cos(x))
    return vjp_rule(fn, backward, symbolic_zeros=True), (x_of("float32"),)


def _second(k, third=0.0):
    """`x**3`, whose first derivative has a wrong derivative of its own."""
    slope = jvp_rule(
        lambda x: 3 * x**2, lambda p, t: curvature(p[0]) * t[0] * np.asarray(1 + k, t[0].dtype),
    )  # fmt: skip
    curvature = jvp_rule(
        lambda x: 6 * x, lambda p, t: 6 * t[0] * np.asarray(1 + third, t[0].dtype)
    )
    return jvp_rule(cube, lambda p, t: slope(p[0]) * t[0])


def _enter_tolerances():
    """The adjoint, and the second order, by the dtype and with a tolerance that is given."""
    for name, dtype, unit, options in (
        ("float32", "float32", 1e-4, {}), ("float64", "float64", 1e-6, {}),
        ("given", "float32", 1e-2, {"tolerance": 1e-3}),
    ):  # fmt: skip
        x, of = x_of(dtype) if dtype == "float32" else X, {"x64": dtype == "float64"}
        scaled = lambda k, unit=unit: cube_backward(constant(k * unit))
        adjoint = lambda k, f=scaled, x=x, o=options: (f(k), (jnp.asarray(x[0]),), o)
        row("adjoint", "", 0.5, 2.0, name=f"adjoint, {name}", **of)(adjoint)
        two = lambda k, u=unit: lambda a, b: (_second(k * u)(a), 0.1 * jnp.sin(b))
        args = lambda x=x: (jnp.asarray(x), jnp.asarray(x + 2))
        second = lambda k, args=args, o=options, f=two: (f(k), args(), o)
        row("order", "order 2", 0.8, 4.0, name=f"second order, {name}", **of)(second)


_enter_tolerances()


_small = lambda k: (vjp_rule(lambda x: 1e-10 * x, lambda xs, ct: (k * ct,)), (x_of("float32"),))
row("adjoint", "", 1e-10, 2e-10, name="adjoint of a small derivative")(_small)
_third = lambda order: (_second(0.0, third=0.5), (x_of("float32"),), {"order": order})
row("order", "order 3", 2, 3, name="third order")(_third)


@row("order", "right to first order", 0, 1)
def asymmetric_hessian(k):
    # The gradient of x * y, whose first entry forgets that it depends on y.
    @eqg.custom_jvp
    def first(x, y):
        return y

    first.def_jvp(lambda p, t: (first(*p), t[1] if not k else jnp.zeros_like(p[0])))
    f = jvp_rule(lambda x, y: x * y, lambda p, t: first(*p) * t[0] + p[0] * t[1])
    return f, (jnp.float32(1.5), jnp.float32(0.7))


@row("order", "reverse over forward", 0.0, 0.1)
def backward_pass_of_a_tangent(k):
    wrong = lambda xs, ct: (6 * xs[0] * ct * np.asarray(1 + k, ct.dtype),)
    slope = vjp_rule(lambda x: 3 * x**2, wrong)
    slope.def_jvp(lambda p, t: (slope(*p), 6 * p[0] * t[0]))
    f = cube_backward(constant(0.0))
    f.def_jvp(lambda p, t: (f(*p), slope(*p) * t[0]))
    return f, (x_of("float32"),)


@row("order", "right at these arguments", 1.0, 0.0)
def factor_that_is_one_here(k):
    # Of x**2 / 2 at 1, the factor x is one.
    tangent = lambda p, t: t[0] * (p[0] if k else jnp.ones_like(p[0]))
    return jvp_rule(lambda x: x**2 / 2, tangent), (jnp.ones(2, jnp.float32),)


def _batched(factor):
    """One; in a batch, another number."""

    @jax.custom_batching.custom_vmap
    def mark(x):
        return jnp.ones_like(x)

    @mark.def_vmap
    def _(size, is_batched, x):
        return jnp.full_like(x, factor), True

    return mark


@row("transforms", "vmap of the derivative", 0.5, 4.0)
def derivative_under_vmap(k):
    mark = _batched(1 + k * 3e-5)
    tangent = lambda p, t: 3 * p[0] ** 2 * t[0] * mark(jax.lax.stop_gradient(p[0]))
    return jvp_rule(cube, tangent), (x_of("float32"),), {"order": 1}


@row("transforms", "vmap", 0.5, 4.0)
def value_under_vmap(k):
    mark = _batched(1 + k * 3e-5)
    rule = jvp_rule(lambda x: x**3 * mark(x), lambda p, t: 3 * p[0] ** 2 * t[0])
    return rule, (x_of("float32"),), {"reference": cube}


@row("transforms", "jit", 0.5, 4.0)
def derivative_under_jit(k):
    is_traced = lambda x: isinstance(x, jax.core.Tracer)

    def backward(xs, ct):
        factor = 1 + k * 3e-5 * is_traced(ct)
        return (3 * xs[0] ** 2 * ct * np.asarray(factor, ct.dtype),)

    f = jax.custom_vjp(cube)
    f.defvjp(lambda x: (cube(x), (x,)), backward)
    return f, (x_of("float32"),)


@row("transforms", "over x", 0, 1)
def batch_of_one_argument(k):
    """It is wrong where `x` is in a batch and `y` is not: the sum over the batch of `y`."""

    @jax.custom_batching.custom_vmap
    def product(x, y):
        return x * y

    @product.def_vmap
    def _(size, is_batched, x, y):
        factor = 1 + 0.01 * (k and is_batched == [True, False])
        return jax.vmap(lambda x, y: x * y * factor, [0 if b else None for b in is_batched])(
            x, y
        ), True

    tangent = lambda p, t: p[1] * t[0] + p[0] * t[1]
    x = x_of("float32")
    return jvp_rule(product, tangent), (x, x + 2), {"reference": lambda x, y: x * y}


@row("transforms", "derivative of vmap", 0, 1)
def examples_that_are_mixed(k):
    """The derivative is the same for all examples, and their cotangents are not."""
    mix = jax.custom_batching.custom_vmap(lambda ct: ct)
    mix.def_vmap(lambda size, is_batched, ct: (ct[::-1] if k else ct, True))
    f = jax.custom_vjp(lambda x: 2.0 * x)
    f.defvjp(lambda x: (2.0 * x, None), lambda _, ct: (2.0 * mix(ct),))
    return f, (x_of("float32"),)


@row("primal", "under jax.vjp", 0.5, 4.0, x64=True, name="value in float64")
@row("primal", "under jax.vjp", 3e4 * 0.5, 3e4 * 4.0, name="value in float32")
def value(k):
    wrong = lambda x: x**3 * np.asarray(1 + k * 1e-9, x.dtype)
    dtype = "float64" if jax.config.jax_enable_x64 else "float32"
    return vjp_rule(cube, lambda xs, ct: (3 * xs[0] ** 2 * ct,), wrong), (x_of(dtype),)


@row("primal", "under jax.jvp", 0.5, 4.0)
def value_in_forward_mode(k):
    f = eqg.custom_jvp(cube)
    value = lambda x: x**3 * np.asarray(1 + k * 3e-5, x.dtype)
    f.def_jvp(lambda p, t: (value(*p), 3 * p[0] ** 2 * t[0]))
    return f, (x_of("float32"),)


@row("primal", "gelu", "relu", "gelu")
def static_leaf(name):
    f = eqx.filter_custom_vjp(lambda x: (x**3, "relu"))
    f.def_fwd(lambda perturbed, x: ((x**3, name), x))
    f.def_bwd(lambda residuals, ct, perturbed, x: 3 * x**2 * ct[0])
    return f, (x_of("float32"),)


@row("reverse", "dtype float32", "float16", "float32")
def cast_missing(dtype):
    wide = lambda x: x.astype("float32")
    f = jax.custom_vjp(lambda x: wide(x) ** 2)
    f.defvjp(lambda x: (wide(x) ** 2, x), lambda x, ct: ((2 * wide(x) * ct).astype(dtype),))
    return f, (x_of("float16"),)


_at = lambda x: (jnp.sqrt, (jnp.float32(1.0),), {"at": [(jnp.float32(x),)]})
row("finite", "at[0]", 0.1, 0.0, name="finite at")(_at)
_log = lambda x: (jnp.log, (jnp.float32(x),))
row("finite", "the arguments, value", 0.5, -0.5, name="finite value")(_log)


@row("finite", "second derivative", 1e-30, 0.0)
def finite_second_derivative(x):
    # That of |x|**1.5 at zero is infinite. Near zero it is only too large for float32.
    slope = lambda x: 1.5e25 * jnp.sign(x) * jnp.abs(x) ** 0.5
    f = jvp_rule(lambda x: 1e25 * jnp.abs(x) ** 1.5, lambda p, t: slope(p[0]) * t[0])
    return f, (jnp.float32(x),)


@row("finite", "jax.debug_nans", 1.0, 0.0)
def finite_between(x):
    # The infinite slope of the branch that is not taken is dropped.
    f = jvp_rule(
        lambda x: jnp.where(x > 0.5, x, 0.0),
        lambda p, t: t[0] * jnp.where(p[0] > 0.5, p[0] / p[0], 0.0),
    )
    return f, (jnp.float32(x),)


@row("deterministic", "call 2", (4, np.nan, 1.0), (2, 0.0, -0.0), name="second call")
@row("deterministic", "call 3", (4, 1.0, 2.0), (3, 1.0, 1.000001))
def third_call(at):
    """The number of a call, the factor of all others, and that of this one."""
    n, *factors = at
    calls: list[int] = []

    def backward(xs, ct):
        calls.append(1)
        return (3 * xs[0] ** 2 * ct * factors[len(calls) == n],)

    f = jax.custom_vjp(cube)
    f.defvjp(lambda x: (cube(x), (x,)), backward)
    return f, (x_of("float32"),)


@row("transforms", "scan", False, True)
def residual_in_a_variable(keeps):
    saved: dict[str, Any] = {}

    def forward(x):
        saved["x"] = x
        return cube(x), (x,)

    f = jax.custom_vjp(cube)
    f.defvjp(forward, lambda xs, ct: (3 * (saved["x"] if keeps else xs[0]) ** 2 * ct,))
    return f, (x_of("float32"),)


# The forward rule keeps three float32 numbers beside the argument: 12 bytes.
@row("residuals", "12 bytes", 12, 11)
def most_bytes(n):
    f = eqg.custom_vjp(jnp.exp)
    f.def_fwd(lambda x: (f(x), jnp.exp(2 * x)))
    f.def_bwd(lambda y, ct: (jnp.sqrt(y) * ct,))
    return f, (x_of("float32"),), {"max_residual_bytes": n}


@row("residuals", "never read", False, True)
def unread_residual(keeps):
    f = eqg.custom_vjp(lambda x: jax.pure_callback(np.exp, x, x))  # no plain autodiff
    f.def_fwd(lambda x: (f(x), (jnp.exp(2 * x), jnp.sin(x) if keeps else None)))
    f.def_bwd(lambda res, ct: (jnp.sqrt(res[0]) * ct,))
    return f, (x_of("float32"),)


@row("leaks", "keeps a tracer", False, True)
def kept_tracer(keeps):
    kept: list[Any] = []

    def backward(xs, ct):
        kept.append(xs[0]) if keeps else None
        return (3 * xs[0] ** 2 * ct,)

    return vjp_rule(lambda x: jax.lax.map(cube, x), backward), (x_of("float32"),)


@row("leaks", "compiled", False, True)
def compiles_each_time(is_new):
    known = jax.jit(jnp.sin)

    def backward(xs, ct):
        sin = jax.jit(lambda x: jnp.sin(x)) if is_new else known
        return (-sin(xs[0]) * ct,)

    f = jax.custom_vjp(jnp.cos)
    f.defvjp(lambda x: (jnp.cos(x), (x,)), backward)
    return f, (x_of("float32"),)


# Cotangents that are asked for are compared at 4096 times the size, too.
@row("reverse", "of 4096 times", 10.0, 0.1)
def bound_of_a_formula(k):
    bound = 1.5e4 * k
    backward = lambda xs, ct: (jnp.clip(ct, -bound, bound),)
    options = {"reference": lambda x: x, "nonlinear": True}
    return vjp_rule(lambda x: x, backward), (jnp.ones(200),), options


@row("reverse", "of 0.000244", 1e-3, 1.0)
def smallest_of_a_formula(k):
    backward = lambda xs, ct: (jnp.where(jnp.max(jnp.abs(ct)) > 1e-2 * k, ct, 0.0),)
    options = {"reference": lambda x: x, "nonlinear": True}
    return vjp_rule(lambda x: x, backward), (jnp.ones(200),), options


# Finite differences are the reference where there is no autodiff: those of a host function.
@row("forward", "", 0.5, 2.0)
def against_differences(k):
    f = eqg.host_function(lambda x: np.sin(x), out=lambda x: x)
    factor = 1 + k * 1e-5
    f.def_bwd(lambda res, ct: ((jnp.cos(res[0]) * ct * np.asarray(factor, ct.dtype)),))
    f.def_jvp(lambda p, t: (f(*p), jnp.cos(p[0]) * t[0] * np.asarray(factor, p[0].dtype)))
    return f, (x_of("float32"),), {"order": 1}


@row("forward", "given", 0.5, 2.0)
def along_given_tangents(k):
    # The error is six times smaller along random directions in 40 dimensions.
    n = 40
    tangent = lambda p, t: t[0] + jnp.mean(t[0]) * np.asarray(k * 1e-5, t[0].dtype)
    options = {"tangents": (jnp.full(n, 20.0),)}
    return jvp_rule(lambda x: x, tangent), (jnp.ones(n),), options


@row("forward", "", 0.3, 1.2)
def slope_at_a_kink(k):
    """It is 0 on one side and 1 on the other. Autodiff of a maximum has a half."""

    def tangent(p, t):
        slope = jnp.where(p[0] == 0, k, jnp.where(p[0] > 0, 1.0, 0.0))
        return jnp.sum(slope * t[0]) + 2 * jnp.sum(p[1] * t[1])

    fn = lambda x, y: jnp.sum(jnp.maximum(x, 0)) + jnp.sum(y**2)
    return jvp_rule(fn, tangent), (jnp.array([0.0, 1.0]), jnp.arange(6.0).reshape(2, 3))


@row("forward", "", 0.0, 1.0)
def rule_of_jax_is_kept(k):
    return jvp_rule(jax.nn.relu, lambda p, t: k * t[0]), (jnp.zeros(25),)


@row("reverse", "", 1.0, 2.0)
def operator_of_a_solver_of_jax(k):
    """The matrix is its own inverse, so to apply it, with a function of JAX, is to solve."""
    backward = lambda xs, ct: (k * jnp.outer(ct, xs[1]), xs[0].T @ ct)
    product = vjp_rule(lambda a, x: a @ x, backward)

    def solve(a, b):
        apply = lambda x: product(a, x)
        return jax.lax.custom_linear_solve(apply, b, jax.tree.map, jax.tree.map)

    return solve, (jnp.array([[1.0, 2.0, 3.0], [0.0, -1.0, 0.0], [0.0, 0.0, -1.0]]), X)


def _check(row_, k, seed=0):
    with jax.enable_x64(row_.x64):
        fn, args, *options = row_.make(k)
        options = {"seed": seed, **(options[0] if options else {})}
        return eqgt.check_rule(fn, *args, checks=(row_.check,), raises=False, **options)


@pytest.mark.parametrize("name", ROWS)
def test_check_rule(name):
    one = ROWS[name]
    right = _check(one, one.right)
    assert right.passed, str(right)
    assert any(f.verdict == "passed" for f in right[one.check]), str(right)
    wrong = _check(one, one.wrong)
    failures = wrong.failures
    assert failures
    assert {f.check for f in failures} == {one.check}
    texts = [f"{f.where}\n{f.text}".replace("`", "") for f in failures]
    assert any(one.match in text for text in texts), str(wrong)


# ---------------------------------------------------------------- likely causes


W = np.array([[1.0, -2.5, 0.4], [3.0, 0.7, -1.1], [0.2, 5.0, 1.7], [-0.9, 2.2, 0.3]])
Z = W + 1j * W[::-1]
ZEROS = np.where(W > 0, W, 0.0)
ODD = np.zeros((4, 3))
ODD[[0, 0, 1], [0, 1, 2]] = 0.1, 3e-6, 3e-7
NOISE = np.array([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])


def _with(n, change=0.3):
    x = W.copy()
    x.ravel()[5 : 5 + n] += change * (1 + np.arange(n))
    return x


def _noisy(x, error):
    """With an error in the norm of all."""
    return x + error * NOISE * np.linalg.norm(x) / np.sqrt(x.size)


def _to(dtype):
    return W.astype(dtype).astype(float)


# What is expected, what is got, a word of the cause (empty: no cause), and options.
CAUSES: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "sign": (W, -W, "minus", {}), "no sign": (W, -1.002 * W, "-1.002 times", {}),
    "sign of one number": (np.array(2.0), np.array(-2.0), "minus", {}),
    "twice": (W, 2 * W, "twice", {}), "twice, nearly": (W, 2.0015 * W, "twice", {}),
    "more than twice": (W, 2.003 * W, "2.003 times", {}), "imaginary": (Z, 1j * Z, "1j", {}),
    "a sum for a mean": (W, 12 * W, "over 12 entries", {}),
    "along one axis": (W, 4 * W, "over 4 entries", {}),
    "no number of entries": (W, 5 * W, "5 times", {}),
    "a factor with noise": (W, _noisy(5 * W, 0.8e-3), "times the expected", {}),
    "no factor": (W, _noisy(5 * W, 1.5e-3), "", {}),
    "a factor near one": (W, W * (1 + 1e-5), "1e-05", {}),
    "one factor of one number": (np.array(2.0), np.array(5.0), "", {}),
    "conjugate": (Z, Z.conj(), "conjugate", {}),
    "transposed": (W[:3], W[:3].T, "transposed", {}),
    "transposed, nearly": (W[:3], W[:3].T + 0.8e-3 * np.linalg.norm(W[:3]) * np.eye(3) / 2,
                           "transposed", {}),
    "not transposed": (W[:3], W[:3].T + 3e-3 * np.linalg.norm(W[:3]) * np.eye(3), "", {}),
    "reversed": (W, W[::-1], "reversed along axis 0", {}),
    "off by one": (W, np.roll(W, 1, 0), "off by one along axis 0", {}),
    "off by two": (W, np.roll(W, 2, 0), "", {}),
    "known mistake": (W, W**2, "squared", {"mistakes": [Mistake("squared", W**2)]}),
    "one entry": (1e-4 * W, 1e-4 * _with(1), "1 of 12 entries", {"primal": W}),
    "half of zeros": (W * (W > 0), W * (W > 0) + _with(6) - W, "6 of 12 entries", {}),
    # An error of 3e-6 of the norm counts where zero is expected, and one of 3e-7 does not.
    "beside zeros": (ZEROS, ZEROS + ODD * np.linalg.norm(ZEROS), "2 of 12 entries", {}),
    "where negative": (W, np.where(W < 0, W**2, W), "negative", {"primal": W}),
    "negative everywhere": (W, _with(2), "2 of 12 entries", {"primal": -np.abs(W)}),
    "also elsewhere": (W, np.where(W < 1, W**2, W), "7 of 12 entries", {"primal": W}),
    "missing": (W, 0 * W, "zero everywhere: the term of `x`", {}),
    "complex": (W, Z, "complex", {}), "no influence": (0 * W, W, "no influence", {}),
    "shape": (W, W.T, "shape is (3, 4)", {}),
    "NaN": (W, np.where(W == 5, np.nan, W), "[2, 1]", {}),
    "NaN expected": (np.where(W == 5, np.nan, W), W, "finite where", {}),
    "the primal": (W, W * (W > 0), "value of `x`", {"primal": W * (W > 0), "is_random": True}),
    "the primal, by chance": (W, W**3 + 7, "", {"primal": W**3 + 7}),
    "bfloat16": (W, _to(jnp.bfloat16), "bfloat16", {}),
    "float16": (W, _to(np.float16), "float16", {}),
    "float32": (W, _to(np.float32), "float32", {}),
    "a little off": (W, _noisy(W, 2e-6), "`step=`", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_likely_cause(name):
    want, have, word, options = CAUSES[name]
    cause = likely_cause(want, have, "`x`", **options)
    assert word in cause
    assert bool(word) == bool(cause)
    if name == "no number of entries":
        assert "sum and a mean" not in cause


A = np.array([[1.0, 2.0, -1.0], [0.5, -3.0, 0.3], [2.0, 0.1, 4.0]])


def _product(backward):
    a = lambda x: np.asarray(A, x.dtype)
    return vjp_rule(lambda x: a(x) @ x, lambda xs, ct: (backward(a(ct), ct),)), X


def _of_pair(backward):
    return vjp_rule(lambda x, y: x**2 * jnp.sin(y), lambda xs, ct: backward(*xs, ct)), X, X + 2


# By the words of the cause: wrong backward rules, and their arguments.
FAULTS = {
    "transposed: a Jacobian": _product(lambda a, ct: a @ ct),
    "it is what belongs to":
        _of_pair(lambda x, y, ct: (x**2 * jnp.cos(y) * ct, 2 * x * jnp.sin(y) * ct)),
    "the term of y is missing": _of_pair(lambda x, y, ct: (2 * x * jnp.sin(y) * ct, 0 * y)),
    "conjugate":
        (vjp_rule(lambda z: z**2, lambda zs, ct: ((2 * zs[0] * ct).conj(),)), X + 0.3j),
    "no influence here": (vjp_rule(lambda x, y: x * 1.0, lambda xs, ct: (ct, ct)), X, X + 1),
    # A number times a vector: the cotangent of the number is a sum.
    "0.3333 times": (vjp_rule(lambda a, x: a * x,
        lambda xs, ct: (jnp.mean(ct * xs[1]), ct * xs[0])), 2.0, X),
    "it is the value of x": _product(lambda a, ct: jnp.asarray(X, ct.dtype) + 0 * ct),
    "wrong only where x is negative": (vjp_rule(
        lambda x: x * x, lambda xs, ct: (2 * jnp.abs(xs[0]) * ct,)), np.append(X, -1)),
}  # fmt: skip


@pytest.mark.parametrize("cause", FAULTS)
def test_causes_of_rules(cause):
    fn, *args = FAULTS[cause]
    args = [jnp.asarray(x, "complex64" if np.iscomplexobj(x) else "float32") for x in args]
    with pytest.raises(eqgt.RuleCheckError, match="likely cause"):
        eqgt.check_rule(fn, *args, checks=("reverse",))


# ---------------------------------------------------------------- differences and slopes


SMOOTH = {
    "sin": (np.sin, np.cos), "exp": (np.exp, np.exp), "square": (np.square, lambda x: 2 * x),
    "reciprocal": (np.reciprocal, lambda x: -1 / x**2),
    "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_numerical_jacobian(name):
    fn, slope = SMOOTH[name]
    for scale in (1.0, 3.0, *([1e-6] if name in ("sin", "tanh", "square") else [])):
        x = np.array([0.7, -1.3, 0.4]) * scale
        jacobian = eqgt.numerical_jacobian(lambda x: fn(np.asarray(x)), x)
        np.testing.assert_allclose(jacobian, np.diag(slope(x)), rtol=2e-9, atol=1e-11)


def test_numerical_jacobian_of_several_leaves_and_its_calls():
    calls = []

    def fn(tree, n):
        calls.append(1)
        return np.asarray(tree["a"])[:, None] * np.asarray(tree["b"]) ** n

    a, b = np.array([1.0, 2.0]), np.array([3.0, -1.0, 0.5])
    of_a, of_b = eqgt.numerical_jacobian(fn, {"a": a, "b": b}, 2)
    np.testing.assert_allclose(
        of_a, np.einsum("ij,k->ikj", np.eye(2), b**2), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(
        of_b, np.einsum("i,kl->ikl", a, np.diag(2 * b)), rtol=1e-9, atol=1e-9
    )
    assert 9 * 5 <= len(calls) <= 32 * 5


def test_numerical_jacobian_at_an_edge():
    def root(x):
        if np.any(np.asarray(x) < 1.0):
            raise ValueError("below one")
        return np.asarray(x) ** 1.5

    np.testing.assert_allclose(eqgt.numerical_jacobian(root, np.float64(1.0)), 1.5, rtol=1e-7)
    above = lambda x: -root(2.0 - np.asarray(x))
    np.testing.assert_allclose(eqgt.numerical_jacobian(above, np.float64(1.0)), 1.5, rtol=1e-7)
    inner = lambda x, y: np.asarray(x) * root(1.0 - np.abs(np.asarray(y) - 1.0)).sum()
    with pytest.raises(ValueError, match=r"at entry \[0\] of `y`: .* ValueError: below one"):
        eqgt.numerical_jacobian(inner, np.float64(2.0), np.array([1.0, 1.0]))


@pytest.mark.parametrize("x", [0.3, 2.0, 40.0])
def test_differences_of_rounded_values(x):
    """Values in float32 have long steps, and an estimate of what rounding does."""
    fn = lambda x: [np.sin(x).astype(np.float32)]
    found = directional(fn, [np.array(x)], [np.array(x)])
    gap = abs(found.tangents_out[0] - x * np.cos(x))
    assert found.is_rounded
    assert 0 < gap <= found.errors[0] <= 3e-4 * max(1.0, x)
    exact = directional(lambda x: [np.sin(x)], [np.array(x)], [np.array(x)])
    assert not exact.is_rounded
    assert abs(exact.tangents_out[0] - x * np.cos(x)) <= 1e-8 * x
    assert exact.errors[0] <= 1e-8 * x


SLOPES = {
    "sin": (lambda h: math.sin(1 + h), math.cos(1.0)),
    "steep": (lambda h: math.exp(30 * h), 30.0),
    "large offset": (lambda h: 1e6 + math.tanh(h - 0.5), 1 / math.cosh(0.5) ** 2),
    "small": (lambda h: 1e-9 * math.sin(h + 0.2), 1e-9 * math.cos(0.2)),
    "stationary": (lambda h: 2.0 + h**2, 0.0),
}


@pytest.mark.parametrize("name", SLOPES)
def test_the_error_of_a_slope_is_estimated(name):
    fn, slope = SLOPES[name]
    samples = Samples(fn)
    found = samples.slope(abs(slope))
    # Eight units in the last place, at the shortest step but one of the longest ones.
    least = 8 * 2.0**-52 * abs(fn(0.0)) / found.step
    assert least <= found.error
    assert abs(found.value - slope) <= 2 * found.error <= 1e-5 * max(abs(slope), abs(fn(0.0)))
    assert samples.confirmed(found) == found
    assert not samples.sides.is_kink
    assert samples.is_settled(found)


# The slopes on the two sides, and whether they are a kink.
KINKS = {
    "relu": (lambda h: max(h, 0.0), 0.0, 1.0, True),
    "of 1e-4": (lambda h: math.sin(h) + 1e-4 * abs(h), 1 - 1e-4, 1 + 1e-4, True),
    "below rounding": (lambda h: 1.0 + h + 1e-14 * abs(h), 1.0, 1.0, False),
    "none": (lambda h: math.sin(h), 1.0, 1.0, False),
}


@pytest.mark.parametrize("name", KINKS)
def test_kinks(name):
    fn, left, right, is_kink = KINKS[name]
    samples = Samples(fn)
    found = samples.sides
    np.testing.assert_allclose([found.left, found.right], [left, right], atol=1e-6)
    assert found.is_kink is is_kink
    if is_kink:
        width = right - left
        for inside in (left, right, (left + right) / 2):
            assert found.admits(inside)
        assert not found.admits(left - 1e-2 * width)
        assert not found.admits(right + 1e-2 * width)


@pytest.mark.parametrize(
    ("gap", "error", "is_kink"),
    [(1.0, 0.09, True), (1.0, 0.11, False), (2e-6, 0.0, True), (0.5e-6, 0.0, False)],
)
def test_what_is_a_kink(gap, error, is_kink):
    assert Sides(1.0 - gap, 1.0, error).is_kink is is_kink
    sides = Sides(-1.0, 1.0, 0.0)
    assert [sides.admits(1 + x) for x in (1.5e-6, 3e-6)] == [True, False]


def test_a_slope_of_long_steps_is_not_confirmed():
    # It turns within 1e-5: long steps have the slope of an average.
    fn = lambda h: h + 1e-5 * math.sin(2e5 * h)
    samples = Samples(fn)
    assert abs(samples.confirmed(Slope(1.0, 1e-9, step=2.0**-10)).value - 3.0) < 1e-3


def test_noise_is_not_settled():
    rng = np.random.default_rng(0)
    noisy = Samples(lambda h: h * 1e-3 + 1e-6 * rng.normal())
    assert not noisy.is_settled(Slope(0.0, 1e-9, step=2.0**-10))
    smooth = Samples(lambda h: math.sin(h))
    assert smooth.is_settled(Slope(1.0, 1e-8, step=2.0**-10))
    assert not smooth.is_settled(Slope(1.0 + 3e-7, 1e-8, step=2.0**-10))
    # Zero, but for changes that are no rounding errors.
    flat = Samples(lambda h: 1.0)
    assert flat.is_settled(Slope(0.0, 1e-13, step=2.0**-10))
    assert not flat.is_settled(Slope(0.0, 1e-9, step=2.0**-10))


def test_random_tangent():
    tree = {"x": np.zeros((200, 50), np.float32), "z": np.zeros(4000, np.complex64), "n": 2,
            "h": np.zeros(3, np.float16)}  # fmt: skip
    with jax.enable_x64(True):
        one, same, other = (eqgt.random_tangent(tree, seed=s) for s in (1, 1, 2))
    assert one["n"] is None
    assert all(one[name].dtype == tree[name].dtype for name in "xzh")
    np.testing.assert_array_equal(one["x"], same["x"])
    assert not np.any(np.asarray(one["x"]) == np.asarray(other["x"]))
    for x in (one["x"], one["z"].real, one["z"].imag):
        x = np.asarray(x).ravel()
        assert abs(x.mean()) < 4 / math.sqrt(x.size)
        assert abs(x.std() - 1) < 4 / math.sqrt(x.size)
        assert abs(np.mean(x**4) - 3) < 40 / math.sqrt(x.size)
    assert abs(np.corrcoef(one["z"].real, one["z"].imag)[0, 1]) < 0.07


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e6, 1e9])
def test_the_error_of_differences_is_estimated(offset):
    """Of values that are rounded, two may be equal by chance, and no evidence."""
    rng = np.random.default_rng(0)
    for x in np.exp(rng.normal(size=10)) * (4e-7 if offset == 1.0 else 1.0):
        found = directional(lambda x: [np.sin(x) + offset], [np.array(x)], [np.array(x)])
        slope = x * np.cos(x)
        gap = abs(found.tangents_out[0] - slope)
        assert gap <= 3 * found.errors[0] <= max(1e-8, 1e-3 * offset) * abs(slope)
    constant = directional(lambda x: [0 * x + 1e6, x], [np.array(1.0)], [np.array(0.7)])
    assert constant.errors[0] == 0.0
    assert constant.errors[1] < 1e-11
    # Extrapolated central differences are exact for polynomials of degree four.
    cube = directional(lambda x: [x**3], [np.array(1.3)], [np.array(1.3)])
    assert abs(cube.tangents_out[0] - 3 * 1.3**3) <= cube.errors[0] < 1e-11


# ---------------------------------------------------------------- check_gradients


class Model(eqx.Module):
    first: jax.Array
    second: jax.Array
    act: Any = eqx.field(static=True, default=None)

    def __call__(self, x):
        return jnp.sum(self.act(self.first + x) * self.second)


def _loss(model, x):
    return model(x) ** 2


def _model(act, dtype="float32", x=(0.3, -1.2)):
    first, second = jnp.array([0.5, 1.5], dtype), jnp.array([1.0, -0.4], dtype)
    return _loss, Model(first, second, act), jnp.array(x, dtype)


def _sine(k=0.0, mode="reverse"):
    """A sine with a wrong factor, in one mode."""
    factor = lambda t: np.asarray(1 + k, t.dtype)
    f = eqg.custom_vjp(jnp.sin)
    f.def_fwd(lambda x: (f(x), x))
    of = lambda is_wrong, t: t * factor(t) if is_wrong else t
    f.def_bwd(lambda x, ct: (jnp.cos(x) * of(mode != "forward", ct),))
    f.def_jvp(lambda p, t: (f(*p), jnp.cos(p[0]) * of(mode != "reverse", t[0])))
    return f


def _rounded(fn):
    return lambda x: fn(x.astype("bfloat16")).astype(x.dtype)


def _relu(slope, above=1.0):
    """`relu`, with this slope at zero, and that one above."""
    f = eqg.custom_jvp(lambda x: jnp.maximum(x, 0.0))
    of = lambda x: jnp.where(x > 0, above, jnp.where(x < 0, 0.0, slope)).astype(x.dtype)
    f.def_jvp(lambda p, t: (f(*p), of(p[0]) * t[0]))
    return f


def _noise(size):
    rng = np.random.default_rng(0)

    def host(x):
        assert x.dtype == np.float32
        return np.float32(1 + size * rng.uniform(-1, 1))

    def call(x):
        out = jax.ShapeDtypeStruct((), x.dtype)
        return jnp.sin(x) * jax.pure_callback(host, out, jax.lax.stop_gradient(x[0]))

    return call


# What is right, what is wrong, the fault's kind, its function, the verdicts of the two leaves
# of what is wrong, and those of what is right.
WRONG = ("WRONG", "right")
GRADIENTS: dict[str, tuple[Any, Any, str, str, Any, Any]] = {
    "float32": (_model(_sine(0.4e-6)), _model(_sine(8e-6)), "wrong", "sin", WRONG, ()),
    # It is compared in float64, without the casts.
    "bfloat16": (_model(_rounded(_sine(0.4e-6))), _model(_rounded(_sine(0.05))), "wrong", "sin",
                 WRONG, ()),
    "forward mode": (_model(_sine(0.4e-6, "forward")), _model(_sine(8e-6, "forward")),
                     "modes disagree", "", WRONG, ()),
    "both modes": (_model(_sine(0.4e-6, "")), _model(_sine(8e-6, "")), "wrong", "sin", WRONG,
                   ()),
    "cut": (_model(jnp.sin), _model(_sine(-1.0, "")), "cut", "sin", WRONG, ()),
    "stopped": (_model(lambda x: jnp.sin(jax.lax.stop_gradient(x))),
                _model(lambda x: _sine(8e-6)(x) * jax.lax.stop_gradient(x)), "wrong", "sin",
                WRONG, ("stopped", "right")),
    "not a derivative": (_model(jnp.round, x=(0.3, -1.5)),
                         _model(eqg.ste.round, x=(0.3, -1.5)), "not a derivative", "", WRONG,
                         ("flat", "right")),
    "a kink": (_model(_relu(0.8), x=(-0.5, 1.0)), _model(_relu(0.8, 1.2), x=(-0.5, 1.0)),
               "wrong", "", WRONG, ("kink", "right")),
    "not finite": (_model(lambda x: jnp.sqrt(x + 0.1), x=(-0.5, 1.0)),
                   _model(lambda x: jnp.sqrt(jnp.abs(x)), x=(-0.5, 1.0)), "not finite", "",
                   WRONG, ()),
    "random": (_model(_noise(1e-7)), _model(_noise(2e-6)), "random", "pure_callback",
               ("not measured", "not measured"), ("right", "right")),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_check_gradients(name):
    right, wrong, kind, function, verdicts, of_right = GRADIENTS[name]
    report = eqgt.check_gradients(*right, raises=False)
    assert report.passed, str(report)
    assert tuple(x.verdict for x in report.leaves) == (of_right or ("right", "right"))
    report = eqgt.check_gradients(*wrong, raises=False)
    assert {f.kind for f in report.found} == {kind}
    assert tuple(x.verdict for x in report.leaves) == verdicts
    if function:
        assert {f.primitive for f in report.found} == {function}
    if verdicts == WRONG:
        assert [f.leaf for f in report.found] == ["first"]
    with pytest.raises(eqgt.GradientCheckError, match="FAILED"):
        report.raise_if_failed()


def test_check_gradients_with_a_tolerance():
    passes = lambda k: (
        eqgt.check_gradients(*_model(_sine(k)), tolerance=1e-3, raises=False).passed
    )
    assert passes(0.4e-3)
    assert not passes(5e-3)
    report = eqgt.check_gradients(*_model(_sine()), raises=False)
    assert report.numbers["tolerance"] == 1e-6


def test_the_numbers_of_check_gradients_are_those_of_numpy():
    loss, model, x = _model(_sine(0.5, ""))
    report = eqgt.check_gradients(loss, model, x, raises=False)
    first, second, x = (np.asarray(v, float) for v in (model.first, model.second, x))
    leaf = report["first"]
    # Along any direction, the gradient is 1.5 times the slope.
    np.testing.assert_allclose(leaf.reverse / leaf.differences, 1.5, rtol=1e-6)
    np.testing.assert_allclose(leaf.forward / leaf.differences, 1.5, rtol=1e-6)
    inner = first + x
    gradient = 2 * np.sum(np.sin(inner) * second) * np.cos(inner) * second
    size = np.linalg.norm(1.5 * gradient * first)
    gap = 0.5 * abs(leaf.differences)
    np.testing.assert_allclose(
        leaf.relative_error, gap / max(size, abs(leaf.differences)), rtol=1e-5
    )
    assert eqgt.check_gradients(loss, model, x.astype("float32"), skip="first").passed


@pytest.mark.parametrize(("steps", "n_found"), [(1e-4, 0), (1e-2, 1)])
def test_check_gradients_of_a_wrong_entry(steps, n_found):
    """One wrong entry of a bias beside large weights."""
    f = eqg.custom_vjp(lambda w, b: jnp.sum(jnp.sin(w)) * 1e3 + jnp.sum(jnp.cos(b)))
    f.def_fwd(lambda w, b: (f(w, b), (w, b)))
    wrong = lambda b: np.where(np.arange(4) == 2, 1 + steps, 1.0).astype(b.dtype)
    f.def_bwd(lambda r, ct: (jnp.cos(r[0]) * 1000 * ct, -jnp.sin(r[1]) * ct * wrong(r[1])))
    model = {"w": jnp.linspace(0.1, 1.0, 5), "b": jnp.linspace(0.5, 1.5, 4)}
    report = eqgt.check_gradients(
        lambda m: f(m["w"], m["b"]), model, tolerance=1e-3, raises=False
    )
    assert len(report.found) == n_found
    assert [x.leaf for x in report.found] == ["['b']"] * n_found
