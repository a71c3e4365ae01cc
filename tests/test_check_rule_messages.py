"""The words of a report of `check_rule`: a table of rules, of words that its report has, and of
words that it does not have."""

import statistics

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from .helpers import unwrapped


X = jnp.array([1.0, 2.0])
A, B = jnp.array([1.1, 2.3, -0.7, 0.9]), jnp.array([1.3, 0.37, 2.1, -1.7])
CLIP_X = jnp.array([0.5, 3.0, -1.0], dtype="float32")
BOTH = {"checks": ("forward", "reverse")}
REVERSE = {"checks": "reverse"}


def jvp_rule(fn, tangent, value=None):
    """A rule for forward mode: `tangent(primals, tangents)`."""
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(lambda p, t: ((value or rule)(*p), tangent(p, t)))
    return rule


def vjp_rule(fn, cotangents):
    """A rule for reverse mode: `cotangents(arguments, ct)`."""
    rule = eqg.custom_vjp(fn)
    rule.def_fwd(lambda *xs: (rule(*xs), xs))
    rule.def_bwd(cotangents)
    return rule


def product(cotangents):
    return vjp_rule(lambda a, b: a * b, cotangents)


def identity(bwd):
    return vjp_rule(lambda x: x, bwd)


def clip(bound):
    """A backward rule, and also the formula that is expected of one."""
    return lambda _, ct: (jnp.clip(ct, -bound, bound),)


def unclipped(_, ct):
    return (ct,)


# ---------------------------------------------------------------- rules that are wrong


class Frozen(eqx.Module):
    weight: Array
    scale: Array

    @eqg.custom_jvp
    def __call__(self, x):
        return jnp.sin(self.weight * x) * jax.lax.stop_gradient(self.scale)

    @__call__.def_jvp
    def _jvp(primals, tangents):
        (self, x), (t_self, t_x) = primals, tangents
        t = t_self.weight * x + self.weight * t_x
        return self(x), jnp.cos(self.weight * x) * self.scale * t


class Repeated(eqx.Module):
    """An integer field has no tangent."""

    weight: Array
    count: Array

    @eqg.custom_jvp
    def __call__(self, x):
        return self.weight * x * self.count

    @__call__.def_jvp
    def _call_jvp(primals, tangents):
        (self, x), (t_self, t_x) = primals, tangents
        t_out = (t_self.weight * x + self.weight * t_x) * self.count
        return self(x), t_out + self.weight * x * t_self.count


def bounded(slope_at_infinity):
    """The right slope in `rate` is zero where `upper` is infinite. Autodiff: NaN."""

    def tangent(primals, tangents):
        (rate, mean, upper), (t_rate, t_mean, t_upper) = primals, tangents
        y, is_bound = rule(*primals), jnp.isfinite(upper)
        width = jnp.where(is_bound, upper - mean, 0.0)
        slope = (1 - y**2) * (width * t_rate + rate * (t_upper - t_mean))
        if slope_at_infinity:
            slope = slope + jnp.where(is_bound, 0.0, slope_at_infinity) * t_rate
        return slope

    rule = jvp_rule(lambda rate, mean, upper: jnp.tanh((upper - mean) * rate), tangent)
    return rule


BOUNDED = 2.0, 0.3, jnp.array([0.5, jnp.inf])


def of_three(t_of):
    """`sum(a) * exp(b) + sum(c)`, with another tangent."""
    fn = lambda a, b, c: jnp.sum(a) * jnp.exp(b) + jnp.sum(c**2)
    return jvp_rule(fn, lambda p, t: t_of(*p, *t))


OF_THREE = jnp.arange(3.0), jnp.array(-9.0), jnp.array([50.0, 100.0])


def with_rates(factors):
    """The derivatives by `a` are one number, and those by all of `x` and `y` are two."""
    rates = (1.5, 2.0, -0.3)
    of_a, *rest = (factor * rate for factor, rate in zip(factors, rates, strict=True))
    fn = lambda a, x, y: jnp.sum(a) * 1.5 + 2.0 * x - 0.3 * y
    return vjp_rule(
        fn, lambda xs, ct: (jnp.full_like(xs[0], of_a) * ct, *(ct * s for s in rest))
    )


RATES = jnp.arange(4.0), jnp.array(0.5), jnp.array(0.7)


def residual(y, a):
    return y**3 + y - a


def newton(a):
    step = lambda _, y: y - residual(y, a) / (3 * y**2 + 1)
    return jax.lax.fori_loop(0, 40, step, a)


def bisection(a):
    def halve(ends):
        low, high = ends
        middle = (low + high) / 2
        above = residual(middle, a) > 0
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    is_long = lambda ends: ends[1] - ends[0] > 1e-3
    low, high = jax.lax.while_loop(is_long, halve, (jnp.zeros_like(a), jnp.full_like(a, 10)))
    return (low + high) / 2


def affine_of_primal():
    """It returns the primal as the cotangent of the bias."""

    def bwd(residuals, ct):
        layer, x = residuals
        t_layer = eqx.tree_at(lambda m: m.weight, layer, jnp.outer(ct, x))
        return t_layer, layer.weight.T @ ct

    return vjp_rule(lambda layer, x: layer.weight @ x, bwd)


LAYER = eqx.nn.Linear(3, 2, key=jax.random.key(0))


def straight_through_step():
    """The gradient of a learned step differs from its reference at the second order."""
    rounded = lambda step, x: step * jnp.round(x / step)
    of_step = lambda p: jnp.round(p[1] / p[0]) - p[1] / p[0]
    return jvp_rule(rounded, lambda p, t: t[1] + of_step(p) * t[0])


straight_through = eqg.with_gradient_of(jnp.round, lambda x: x)
STEP = jnp.array(0.5), jnp.array([0.3, 0.9])
OF_STEP = {"reference": lambda step, x: step * straight_through(x / step)}


class Scaled(eqx.Module):
    """The rule lacks the factor `scale` of the term of `x`."""

    scale: jax.Array

    @eqg.custom_jvp
    def __call__(self, x):
        return self.scale * jnp.tanh(x)

    @__call__.def_jvp
    def _(primals, tangents):
        (self, x), (t_self, t_x) = primals, tangents
        return self(x), (1 - jnp.tanh(x) ** 2) * t_x + jnp.tanh(x) * t_self.scale


def sine(value=jnp.sin, slope=jnp.cos):
    return jvp_rule(jnp.sin, lambda p, t: slope(p[0]) * t[0], value)


def root_of(slope):
    return jvp_rule(jnp.sqrt, lambda p, t: slope(jnp.sqrt(p[0]), t[0]))


constant = lambda: jvp_rule(lambda x: jnp.zeros_like(x), lambda p, t: t[0])
stopped = jax.lax.stop_gradient
by_formula = "does the rule return `f(*primals)` as the value"
no_axis = lambda a, ct: (jnp.ones(7, ct.dtype), ct * a[0])
wrong_value = lambda: sine(value=lambda x: 2 * jnp.sin(x))
no_term_of_y = lambda: jvp_rule(
    lambda x, y: jnp.sin(x) * y**2, lambda p, t: jnp.cos(p[0]) * p[1] ** 2 * t[0]
)
second_order = lambda: jvp_rule(
    lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x)),
    lambda p, t: jnp.sum(jnp.exp(p[0]) * (jnp.cos(stopped(p[0])) + jnp.sin(p[0])) * t[0]),
)
P, N = pytest.param, pytest.mark.slow
# A wrong rule, its arguments, options, what the report says, and what it does not say. A number
# before a text is how often it is there.
REPORTS = {
    "an integer has no tangent": (lambda: Repeated(jnp.array(1.5), jnp.array(3)), (2.0,),
        {"checks": "forward"}, ["1. forward, the tangents", (1, "it raised TypeError: unsupp"),
        "`None` is the tangent or cotangent of a leaf that can't be"], ["inf of"]),
    "an error of a host function": (lambda: eqg.elementwise(eqg.host_function(np.sin,
        out=lambda x: "float32"), lambda out, x: out), (1.0,), {},
        ["it raised RuleError: `out` of `sin` does not say"], ["raised below"]),
    "a loose solver": (lambda: eqg.implicit(residual)(bisection), (2.0,), BOTH,
        ["a solver that stops at a tolerance", "is it zero at the solution?"], ["influence"]),
    "an infinite argument": (lambda: bounded(1.0), BOUNDED, BOTH,
        ["1. forward, `rate`", "finite differences in float64"], ["nan"]),
    "a constant": (constant, (2.0,), {"checks": "forward"}, ["it should be zero: `x` has no "
        "influence here; if that is meant, as of a straight-through rule, pass `reference=`"],
        []),
    "no clip": (lambda: identity(unclipped), (CLIP_X,), {**REVERSE, "nonlinear": True,
        "reference": identity(clip(5.0))}, ["of 4096 times the cotangent, `x`",
        "as if a bound were missing"], []),
    "a tiny output": (lambda: vjp_rule(lambda x: (jnp.sin(x), 1e-12 * jnp.cos(x)), lambda r, ct:
        (jnp.cos(r[0]) * ct[0] - 2e-12 * jnp.sin(r[0]) * ct[1],)), (CLIP_X,), REVERSE,
        ["`x` (in output[1])", "every entry is twice the expected one"], []),
    "a number": (lambda: product(lambda r, ct: (ct * r[1], 2 * ct * r[0])), (1.5, 0.7),
        {"checks": ("reverse", "adjoint")}, ["and so: adjoint"], ["entry  "]),
    "a step that is learned": (straight_through_step, STEP, {**OF_STEP},
        ["wrong at the next", "pass `order=1`"], []),
    "a term is missing": (lambda: of_three(lambda a, b, c, t_a, t_b, t_c: jnp.exp(b) *
        jnp.sum(t_a) + 7 * jnp.sum(c * t_c)), OF_THREE, BOTH, ["at `b`: relative error 0.9",
        "zero everywhere: the term of `b` is missing", "also wrong: `c` (2.5)"], []),
    "one factor": (lambda: with_rates((1, 7, 7)), RATES, REVERSE,
        ["every entry is 7 times the expected one"], []),
    "orders": (second_order, (jnp.array([0.3, 1.1, 0.7]),), {"checks": "order"},
        [(1, "at `x`")], ["2. "]),
    "the primal": (affine_of_primal, (LAYER, jnp.array([1.0, 2.0, 3.0])), {},
        [(1, "it is the value of `layer.bias`: the rule returns the primal"), "and so: "],
        ["it clips", "of a sum it is not", "the sign is wrong"]),
    "another value": (wrong_value, (1.0,), {}, ["1. primal", "and so: transforms"],
        ["right eagerly"]),
    "a first derivative": (no_term_of_y, (1.0, 0.5), {}, ["the term of `y` is missing",
        "and so: reverse, order"], ["no influence"]),
    "a NaN of a rule": (lambda: root_of(lambda y, t: jnp.where(y > 0, t / (2 * y), 0.0)),
        (jnp.array([0.0, 2.0]),), {"checks": "finite"}, ["a `where` on its"], []),
    "a factor that is one": (lambda: Scaled(jnp.ones(3)), (jnp.array([0.4, -1.1, 2.0]),), {},
        ["as if a factor is missing that is 1 here"], ["order=1"]),
    "a value by a formula": (lambda: sine(value=lambda x: stopped(jnp.sin(x))), (A,),
        {"checks": "order"}, ["right to first order", by_formula], []),
    "a slope that is held": (lambda: jvp_rule(jnp.sin, lambda p, t: stopped(jnp.cos(p[0])) *
        t[0]), (A,), {"checks": "order"}, ["does the rule hold something"], [by_formula]),
    "a constant of the function": (lambda: Frozen(jnp.array([1.0, 2.0]), X), (X,), {},
        ["constant in `self.scale`. Is its rule constant"], [by_formula, "`order=1`"]),
    "an odd function at zero": (lambda: jvp_rule(jnp.tanh, lambda p, t: t[0]), (np.zeros(3),),
        {"checks": ("reverse", "order")}, ["a term that is 0 here"], []),
}  # fmt: skip
QUICK = {
    *("a constant", "a tiny output", "no clip", "a number", "a term is missing"),
    *("a NaN of a rule", "orders"),
}


@pytest.mark.parametrize("name", [n if n in QUICK else P(n, marks=N) for n in REPORTS])
def test_what_a_report_says(name):
    make, args, options, words, never = REPORTS[name]
    report = eqgt.check_rule(make(), *args, raises=False, **options)
    assert not report.passed
    text = unwrapped(report)
    for word in words:
        n, word = word if isinstance(word, tuple) else (0, word)
        assert word in text
        assert not n or text.count(word) == n
    assert not any(word in text for word in never), text


# Rules that are right.
RIGHT = {
    "an infinite argument": (lambda: bounded(0.0), BOUNDED, {}),
    "a constant that is meant": (constant, (A,), {"checks": "forward",
        "reference": lambda x: x}),
    "a step that is learned": (straight_through_step, STEP, {**OF_STEP, "order": 1}),
    "clipped": (lambda: identity(clip(5.0)), (CLIP_X,), {**REVERSE, "nonlinear": True,
        "reference": identity(clip(5.0))}),
    "a norm in half precision": (lambda: identity(lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct *
        ct)),)), (CLIP_X.astype("float16"),), {**REVERSE, "nonlinear": True,
        "reference": identity(lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct * ct)),))}),
    "a NaN of a rule": (lambda: root_of(lambda y, t: eqg.safe.where(y > 0, lambda y: t /
        (2 * y), y, 0.0)), (jnp.array([0.0, 2.0]),), {"checks": "finite"}),
    "an odd function at zero": (lambda: jvp_rule(jnp.tanh, lambda p, t: (1 - jnp.tanh(p[0]) **
        2) * t[0]), (np.zeros(3),), {"checks": ("reverse", "order")}),
    "a stopped gradient": (lambda: jvp_rule(lambda x: x * stopped(jnp.sin(x)), lambda p, t:
        stopped(jnp.sin(p[0])) * t[0]), (X,), {"checks": "order"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_rules(name):
    make, args, options = RIGHT[name]
    eqgt.check_rule(make(), *args, **options)


# ---------------------------------------------------------------- one by one


@pytest.mark.thorough
@pytest.mark.parametrize(
    "raises", [lambda: statistics.mean([]), lambda: np.reshape(np.ones(3), 2)]
)
def test_the_line_that_raised(raises):
    """It is the user's, not one of Python's or of an installed package."""
    rule = jvp_rule(lambda x: x, lambda p, t: raises())
    report = eqgt.check_rule(rule, 1.0, raises=False)
    line = raises.__code__.co_firstlineno
    assert f"raised below {__file__}:{line}\n" in str(report)


def test_the_tangent_of_an_integer_field_is_none():
    module = Repeated(jnp.array(1.5), jnp.array(3))
    with pytest.raises(TypeError, match="NoneType") as caught:
        jax.jvp(module, (jnp.array(2.0),), (jnp.array(1.0),))
    (note,) = [n for n in caught.value.__notes__ if "_call_jvp" in n]
    assert "(an integer, a key)" in note


@pytest.mark.parametrize("factors", [(7, 1, 1), (1, 1, 7), (2, 1, 7)])
def test_one_number_is_no_factor(factors):
    report = eqgt.check_rule(with_rates(factors), *RATES, checks="reverse", raises=False)
    assert "likely cause" not in str(report)


def test_a_backward_rule_that_raises_is_no_wrong_value():
    rule = product(no_axis)
    report = eqgt.check_rule(rule, A, B, checks=("primal", "reverse"), raises=False)
    assert [failure.check for failure in report.failures] == ["reverse"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("of", [0, 1])
def test_a_cast_to_half_precision(dtype, of):
    """A cast of the cotangent or of a residual."""
    cast = lambda x, is_cast: x.astype(dtype).astype(x.dtype) if is_cast else x
    rule = product(lambda r, ct: (cast(ct, of == 0) * cast(r[1], of == 1), ct * r[0]))
    options = {"checks": ("reverse", "linear"), "raises": False, "seed": range(3)}
    report = eqgt.check_rule(rule, A, B, **options)
    causes = [failure.cause for failure in report.failures]
    assert all("precision was lost" in cause for cause in causes)
    assert f"as by a cast to {dtype}" in causes[0]


def test_further_points():
    square = jvp_rule(lambda x: x * x, lambda p, t: 2 * p[0] * t[0])
    check = lambda at: eqgt.check_rule(square, X, at=at, checks=("finite",))
    (finding,) = check([(0 * X,), (X + 1,)])["finite"]
    assert "the arguments and 2 further points, under" in finding.where
    with pytest.raises(eqg.RuleError, match="is not a list of tuples"):
        check([X])
    with pytest.raises(eqgt.RuleCheckError, match="can't be called with these arguments"):
        check([(X,), (square, X)])


# ---------------------------------------------------------------- residuals


def test_an_exception_does_not_follow_from_a_wrong_number():
    @eqg.custom_vjp
    def f(x, y):
        return x * jnp.sin(y)

    f.def_fwd(lambda x, y: (2 * f(x, y), (x, y)))
    f.def_bwd(lambda r, ct: (ct * jnp.sin(r[1]),))
    report = eqgt.check_rule(f, A, B, checks=("primal", "reverse", "linear"), raises=False)
    _, of_value, of_rule = str(report).split("\n\n")[:3]
    assert "1. primal" in of_value
    assert "raised" not in of_value
    assert "2. reverse" in of_rule
    assert "one cotangent for each argument" in unwrapped(of_rule)
    assert "and so: linear" in of_rule


@pytest.mark.parametrize("checks", [("forward", "order"), ("residuals", "reverse"), ("order",)])
def test_a_report_fits_100_columns(checks):
    """Whatever failed: a wrong number, an exception, and what is said of them."""
    f = eqg.custom_vjp(lambda x, y: x * jnp.sin(y))
    f.def_fwd(lambda x, y: (jnp.sin(y) * x, (x, y, x + y)))
    stopped = jax.lax.stop_gradient
    f.def_bwd(lambda r, ct: (ct * jnp.sin(r[1]), ct * stopped(r[0]) * jnp.cos(r[1])))
    broken = eqg.custom_vjp(lambda x, y: x * y)
    broken.def_fwd(lambda x, y: (x * y, (x, y)))
    broken.def_bwd(lambda r, ct: (jnp.sum(ct * r[1]), ct * r[0]))
    for rule in (f, broken):
        report = eqgt.check_rule(rule, A, B, checks=checks, raises=False)
        assert not report.passed
        assert max(map(len, str(report).splitlines())) <= 100
