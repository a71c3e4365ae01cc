"""What `check_rule` says of a rule that raised, of a solver that stops at a tolerance, and of a
clip."""

import re
import statistics

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads.testing._compare import Difference, side_by_side
from eqx_grads.testing._mistakes import likely_cause
from jaxtyping import Array


class _Repeated(eqx.Module):
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


def test_a_rule_that_raised():
    module = _Repeated(jnp.array(1.5), jnp.array(3))
    report = eqgt.check_rule(module, jnp.array(2.0), checks=("forward",), raises=False)
    (finding,) = report["forward"]
    assert finding.error is None
    assert finding.raised.startswith("TypeError: unsupported operand")
    assert "1. forward, the tangents" in str(report)
    assert str(report).count("it raised TypeError: unsupported operand") == 1
    assert "inf of" not in str(report)
    assert "`None` is the tangent or cotangent of a leaf that can't be" in str(report)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "raises", [lambda: statistics.mean([]), lambda: np.reshape(np.ones(3), 2)]
)
def test_the_line_that_raised(raises):
    """It is the user's, not one of Python's or of an installed package."""

    @eqg.custom_jvp
    def f(x):
        return x

    @f.def_jvp
    def f_jvp(primals, tangents):
        raises()
        return primals[0], tangents[0]

    report = eqgt.check_rule(f, 1.0, raises=False)
    line = raises.__code__.co_firstlineno
    assert f"raised below {__file__}:{line}\n" in str(report)


def test_no_line_of_the_users_raised():
    """`host_function` raises it itself, in a property of Python's `functools`."""
    sine = eqg.host_function(np.sin, out=lambda x: "float32")
    report = eqgt.check_rule(eqg.elementwise(sine, lambda out, x: out), 1.0, raises=False)
    assert "it raised RuleError: `out` of `sin` does not say" in str(report)
    assert "raised below" not in str(report)


def test_the_tangent_of_an_integer_field_is_none():
    module = _Repeated(jnp.array(1.5), jnp.array(3))
    with pytest.raises(TypeError, match="NoneType") as caught:
        jax.jvp(module, (jnp.array(2.0),), (jnp.array(1.0),))
    (note,) = [n for n in caught.value.__notes__ if "_call_jvp" in n]
    assert "(an integer, a key)" in note


def test_two_tangents_that_were_exchanged():
    @eqg.custom_jvp
    def f(line, x):
        return line.weight * x

    @f.def_jvp
    def jvp(primals, tangents):
        (line, x), (t_x, t_line) = primals, tangents
        return f(line, x), t_line.weight * x + line.weight * t_x

    line = eqx.nn.LayerNorm(())
    line = eqx.tree_at(lambda m: m.weight, line, jnp.array(2.0))
    with pytest.raises(AttributeError, match="weight") as caught:
        jax.grad(lambda x: f(line, x))(1.0)
    (note,) = [n for n in caught.value.__notes__ if "in the rule `jvp`" in n]
    assert "jvp(primals, tangents" in note


def _residual(y, a):
    return y**3 + y - a


def _bisection(a):
    def halve(ends):
        low, high = ends
        middle = (low + high) / 2
        above = _residual(middle, a) > 0
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    is_long = lambda ends: ends[1] - ends[0] > 1e-3
    low, high = jax.lax.while_loop(is_long, halve, (jnp.zeros_like(a), jnp.full_like(a, 10)))
    return (low + high) / 2


@pytest.mark.slow
def test_a_solver_that_stops_at_a_tolerance():
    root = eqg.implicit(_residual)(_bisection)
    checks = ("forward", "reverse")
    report = eqgt.check_rule(root, jnp.array(2.0), checks=checks, raises=False)
    assert not report.passed
    assert "a solver that stops at a tolerance" in str(report)
    assert "is it zero at the solution?" in str(report)  # the residual may be another one
    assert "has no influence" not in str(report)


def _with_a_bound(slope_at_infinity):
    """The right slope in `rate` is zero where `upper` is infinite. Autodiff: NaN."""

    @eqg.custom_jvp
    def below(rate, mean, upper):
        return jnp.tanh((upper - mean) * rate)

    @below.def_jvp
    def _(primals, tangents):
        (rate, mean, upper), (t_rate, t_mean, t_upper) = primals, tangents
        y = below(rate, mean, upper)
        is_bound = jnp.isfinite(upper)
        width = jnp.where(is_bound, upper - mean, 0.0)
        slope = (1 - y**2) * (width * t_rate + rate * (t_upper - t_mean))
        if slope_at_infinity:
            slope = slope + jnp.where(is_bound, 0.0, slope_at_infinity) * t_rate
        return y, slope

    return below


BOUNDED = 2.0, 0.3, jnp.array([0.5, jnp.inf])


@pytest.mark.slow
def test_a_right_rule_of_an_infinite_argument():
    """It failed, with an error that is infinite: differences moved all entries to NaN."""
    report = eqgt.check_rule(_with_a_bound(0.0), *BOUNDED)
    assert "Entries of `upper` are not finite. Finite differences do not move them" in str(
        report
    )
    assert report.numbers["not_finite"] == ["`upper`"]


@pytest.mark.slow
def test_a_wrong_rule_of_an_infinite_argument():
    report = eqgt.check_rule(_with_a_bound(1.0), *BOUNDED, raises=False)
    failed = {(f.check, f.where) for f in report.failures}
    assert {("forward", "`rate`"), ("reverse", "`rate`")} <= failed
    assert "nan" not in str(report["forward"][0].text)
    assert "finite differences in float64" in report["forward"][0].text


def test_a_function_that_is_constant():
    @eqg.custom_jvp
    def constant(x):
        return jnp.zeros_like(x)

    constant.def_jvp(lambda primals, tangents: (constant(*primals), tangents[0]))
    report = eqgt.check_rule(constant, jnp.array(2.0), checks=("forward",), raises=False)
    assert "it should be zero: `x` has no influence here" in str(report)


def _identity(bwd):
    rule = eqg.custom_vjp(lambda x: x)
    rule.def_fwd(lambda x: (x, None))
    rule.def_bwd(bwd)
    return rule


def _clip(bound):
    """A backward rule, and also the formula that is expected of one."""
    return lambda _, ct: (jnp.clip(ct, -bound, bound),)


def _unclipped(_, ct):
    return (ct,)


X = jnp.array([1.0, 2.0])
_CLIP_X = jnp.array([0.5, 3.0, -1.0], dtype="float32")


@pytest.mark.parametrize(
    "options",
    [{"expected_cotangent": _clip(5.0)}, {"reference": _identity(_clip(5.0))}],
    ids=["formula", "reference"],
)
def test_a_clip_that_was_forgotten(options):
    options = {**options, "nonlinear": True, "checks": "reverse", "raises": False}
    report = eqgt.check_rule(_identity(_unclipped), _CLIP_X, **options)
    (finding,) = [f for f in report["reverse"] if f.verdict == "FAILED"]
    assert finding.where == "of 4096 times the cotangent, `x`"
    assert "wrong for 4096 times larger ones" in finding.text
    assert eqgt.check_rule(_identity(_clip(5.0)), _CLIP_X, **options).passed


def test_a_threshold_that_was_forgotten():
    def shrunk(_, ct):
        return (jnp.where(jnp.abs(ct) < 1e-2, 0.0, ct),)

    options = {"expected_cotangent": shrunk, "nonlinear": True, "checks": "reverse"}
    with pytest.raises(eqgt.RuleCheckError, match="wrong for 4096 times smaller ones"):
        eqgt.check_rule(_identity(_unclipped), _CLIP_X, **options)
    eqgt.check_rule(_identity(shrunk), _CLIP_X, **options)


def test_a_norm_in_half_precision_stays_in_its_range():
    def by_norm(_, ct):
        return (ct / jnp.sqrt(jnp.sum(ct * ct)),)

    # For float16 only: there is no comparison in float64.
    def narrow(x):
        if x.dtype != jnp.float16:
            raise ValueError("float16 only")
        return x

    rule = eqg.custom_vjp(narrow)
    rule.def_fwd(lambda x: (narrow(x), None))
    rule.def_bwd(by_norm)
    options = {"expected_cotangent": by_norm, "nonlinear": True, "checks": "reverse"}
    report = eqgt.check_rule(rule, _CLIP_X.astype("float16"), **options)
    places = [finding.where for finding in report["reverse"]]
    assert "of 16 times the cotangent" in places
    with pytest.raises(eqgt.RuleCheckError, match="at `x`"):
        eqgt.check_rule(_identity(_unclipped), _CLIP_X.astype("float16"), **options)


def test_precision_is_blamed_only_if_float64_is_right_along_the_same_cotangent():
    """With some of these seeds, only the cotangent that is drawn last is larger than 1."""
    rule = _identity(_clip(1.0))
    options = {"reference": lambda x: x, "checks": "reverse", "seed": range(12)}
    report = eqgt.check_rule(rule, jnp.array(0.5, "float32"), raises=False, **options)
    assert "right in float64" not in str(report)
    found = [f for f in report["reverse"] if f.where.startswith("of another direction")]
    assert found
    assert all("autodiff of `reference`" in f.text for f in found)

    def rounded(_, ct):
        return (ct * 1.5 if ct.dtype == jnp.float32 else ct,)

    with pytest.raises(eqgt.RuleCheckError, match="right in float64, wrong in float32"):
        eqgt.check_rule(_identity(rounded), jnp.array(0.5, "float32"), **options)


def _straight_through(x):
    return eqg.clip_gradient(eqg.with_gradient_of(jnp.round, lambda x: x)(x), -0.5, 0.5)


def test_higher_orders_of_a_cotangent_that_is_not_linear_have_no_reference():
    options = {"reference": lambda x: x, "checks": ("reverse", "order"), "nonlinear": True}
    report = eqgt.check_rule(
        _straight_through, _CLIP_X, expected_cotangent=_clip(0.5), order=3, **options
    )
    assert [(f.verdict, f.text) for f in report["order"]] == [
        ("skipped", "no reference for a non-linear `expected_cotangent`")
    ]


@pytest.mark.slow
def test_the_reference_of_higher_orders_is_named():
    double = eqg.with_gradient_of(jnp.sin, lambda x: 2 * jnp.sin(x))
    options = {"checks": "order", "order": 3, "raises": False}
    report = eqgt.check_rule(double, _CLIP_X, reference=jnp.sin, **options)
    assert "expected: autodiff of `reference`" in str(report)
    assert "without the rule" not in str(report)


@eqg.custom_jvp
def _square(x):
    return x * x


@_square.def_jvp
def _square_jvp(primals, tangents):
    (x,), (t_x,) = primals, tangents
    return _square(x), 2 * x * t_x


def test_further_points():
    x = jnp.array([1.0, 2.0])
    check = lambda at: eqgt.check_rule(_square, x, at=at, checks=("finite",))
    (finding,) = check([(0 * x,), (x + 1,)])["finite"]
    assert "the arguments and 2 further points, under" in finding.where
    with pytest.raises(eqg.RuleError, match="is not a list of tuples"):
        check([x])
    with pytest.raises(eqg.RuleError, match=r"`at\[1\]` of `check_rule` are not the arguments"):
        check([(x,), (_square, x)])


def _residuals_line(fn, *args):
    (finding,) = eqgt.check_rule(fn, *args, checks="residuals")["residuals"]
    return finding.where


def _newton(a):
    step = lambda _, y: y - _residual(y, a) / (3 * y**2 + 1)
    return jax.lax.fori_loop(0, 40, step, a)


class _Cubic(eqx.Module):
    scale: Array

    @eqg.implicit(lambda y, self, a: _residual(y, self.scale * a))
    def root(self, a):
        return _newton(self.scale * a)


@pytest.mark.slow
def test_plain_autodiff_of_an_implicit_function_is_that_of_the_solver():
    rule = jax.custom_jvp(_newton)
    rule.defjvp(lambda p, t: (rule(*p), t[0] / (3 * rule(*p) ** 2 + 1)))
    a = jnp.array([1.0, 2.0])
    *_, of_solver = _residuals_line(rule, a).partition("(plain autodiff: ")
    assert int(of_solver.split()[0]) > 40 * a.nbytes
    line = _residuals_line(eqg.implicit(_residual)(_newton), a)
    assert line.endswith(f"(plain autodiff: {of_solver}")
    method = _residuals_line(_Cubic(jnp.array(1.5)).root, a)
    assert "(plain autodiff: " in method
    assert "(plain autodiff: 0" not in method


@pytest.mark.slow
def test_nothing_is_said_of_plain_autodiff_where_there_is_none():
    on_host = eqg.host_function(lambda a: a / 2, out=lambda a: a)
    assert "plain" not in _residuals_line(eqg.implicit(lambda y, a: 2 * y - a)(on_host), X)
    assert "plain" not in _residuals_line(eqg.implicit(_residual)(_bisection), X[1])
    called_inside = eqg.implicit(_residual)(_newton)
    assert "plain" not in _residuals_line(lambda a: 2 * called_inside(a), X)


def _product(cotangents):
    rule = eqg.custom_vjp(lambda a, b: a * b)
    rule.def_fwd(lambda a, b: (a * b, (a, b)))
    rule.def_bwd(cotangents)
    return rule


_A, _B = jnp.array([1.1, 2.3, -0.7, 0.9]), jnp.array([1.3, 0.37, 2.1, -1.7])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("of", ["residual", "cotangent"])
@pytest.mark.parametrize("seed", range(3))
def test_a_cast_to_half_precision(dtype, of, seed):
    def cotangents(residuals, ct):
        a, b = residuals
        if of == "cotangent":
            return ct.astype(dtype).astype(ct.dtype) * b, ct * a
        return ct * b.astype(dtype).astype(b.dtype), ct * a

    options = {"checks": ("reverse", "linear"), "raises": False, "seed": seed}
    report = eqgt.check_rule(_product(cotangents), _A, _B, **options)
    causes = [line for line in str(report).splitlines() if "likely cause" in line]
    assert f"precision was lost, as by a cast to {dtype}" in causes[0], report
    assert all("precision was lost" in line for line in causes)
    assert "not the sum" not in str(report)


@pytest.mark.parametrize("error", [3e-7, 1.4e-5])
def test_the_error_of_finite_differences_is_no_half_precision(error):
    rule = _product(lambda residuals, ct: (_off(ct * residuals[1], error), ct * residuals[0]))
    options = {"checks": "reverse", "raises": False, "tolerance": 1e-9}
    with jax.enable_x64(True):
        report = eqgt.check_rule(rule, np.asarray(_A, float), np.asarray(_B, float), **options)
    assert "float16" not in str(report)
    assert "finite differences" in str(report)
    assert "`step=`" in str(report)


def _off(x, error):
    return x * (1 + error * jnp.cos(jnp.arange(x.size) ** 2))


def test_forward_mode_of_a_reverse_rule_at_a_singular_point():
    """The backward rule is right at zero, and forward mode is autodiff of the function."""

    @eqg.custom_vjp
    def length(x):
        return jnp.sqrt(jnp.sum(x**2))

    @length.def_fwd
    def _(x):
        return length(x), (length(x), x)

    @length.def_bwd
    def _(residuals, ct):
        norm, x = residuals
        return (ct * x / jnp.where(norm == 0, 1.0, norm),)

    says = "without a `def_jvp`: give it one, or use `custom_jvp`"
    with pytest.raises(eqgt.RuleCheckError, match=re.escape(says)):
        eqgt.check_rule(length, jnp.zeros(3), checks=("finite",))

    @length.def_jvp
    def _(primals, tangents):
        (x,) = primals
        return length(x), jnp.zeros(())

    eqgt.check_rule(length, jnp.zeros(3), checks=("finite",))


def test_the_number_of_directions_is_not_a_number_of_entries():
    want = np.arange(1.0, 16.0).reshape(5, 3)

    def cause(want):
        directions = [f"tangent {i}" for i in range(len(want))]
        return likely_cause(want, 5 * want, "`x`", directions=directions)

    assert cause(want) == "every entry is 5 times the expected one"
    assert cause(want.T).endswith("a sum and a mean over 5 entries were confused")


def test_a_factor_of_one_number_is_no_cause():
    cause = lambda want, have: likely_cause(np.asarray(want), np.asarray(have), "`x`")
    assert cause(1.3, 0.7084 * 1.3) == ""
    assert "every entry" not in cause([1.3, 0.0], [0.7084 * 1.3, 0.0])
    assert cause(1.3, -1.3) == "the sign is wrong: every entry is minus the expected one"
    assert cause(1.3, 2.6) == ""
    # A small factor looks like a rounding.
    assert "a factor or a term of the rule is a little wrong, or" in cause(1.3, 0.9995 * 1.3)
    assert cause([1.5, 1.5], [3.0, 3.0]) == ""
    assert "reversed" not in cause([1.5, 1.5], [1.5 + 1e-4, 1.5 + 1e-4])
    assert cause([1.5, 0.7], [3.0, 1.4]) == "every entry is twice the expected one"
    assert cause(2 * np.eye(8), np.eye(8)) == ""  # not: 8 of 64 entries are wrong
    assert "0.7084 times" in cause([1.3, 0.4], [0.7084 * 1.3, 0.7084 * 0.4])


def test_numbers_have_no_column_of_indices():
    rule = _product(lambda residuals, ct: (ct * residuals[1], 2 * ct * residuals[0]))
    report = eqgt.check_rule(rule, 1.5, 0.7, checks=("reverse", "adjoint"), raises=False)
    assert "entry  " not in str(report)
    (adjoint,) = report["adjoint"]
    assert "expected: <J v, w> of forward mode" in adjoint.text
    assert "divided by" in adjoint.text
    assert "and so: adjoint" in str(report)


@pytest.mark.slow
def test_one_error_is_one_row():
    rule = _product(lambda residuals, ct: (jnp.ones(7, ct.dtype), ct * residuals[0]))
    text = str(eqgt.check_rule(rule, _A, _B, raises=False))
    assert text.count("does not fit its argument") == 1
    assert "and so: " in text
    assert "2. " not in text


def test_arguments_that_the_function_does_not_take():
    def scaled(x, *, v):
        return v * x

    with pytest.raises(eqg.RuleError, match=r"`scaled` can't be called with .*'v'") as caught:
        eqgt.check_rule(scaled, _A, kwargs={"v": 1.5})
    assert "1 by position, and by keyword `kwargs`" in str(caught.value)
    assert "check_rule(scaled, ..., v=...)" in str(caught.value)


def test_a_derivative_that_is_meant():
    constant = jax.custom_jvp(lambda x: jnp.zeros_like(x))
    constant.defjvp(lambda p, t: (jnp.zeros_like(p[0]), t[0]))
    report = eqgt.check_rule(constant, _A, checks="forward", raises=False)
    assert "if that is meant, as of a straight-through rule, pass `reference=`" in str(report)
    eqgt.check_rule(constant, _A, checks="forward", reference=lambda x: x)


@pytest.mark.slow
def test_a_rule_of_the_first_order():
    @eqg.host_function(out=lambda a: a)
    def square(a):
        return np.asarray(a) ** 2

    square.def_fwd(lambda a: (np.asarray(a) ** 2, a))
    square.def_bwd(lambda a, ct: (2 * np.asarray(a) * ct,))
    with pytest.raises(eqgt.RuleCheckError, match=r"the first order only, .*pass `order=1`"):
        eqgt.check_rule(square, _A, checks="order")
    eqgt.check_rule(square, _A, checks="order", order=1)


@pytest.mark.slow
def test_a_straight_through_rule_is_of_the_first_order():
    """The gradient of a learned step differs from its reference at the second order."""
    rounded = lambda step, x: step * jnp.round(x / step)
    quantized = eqg.custom_jvp(rounded)

    @quantized.def_jvp
    def _(primals, tangents):
        (step, x), (t_step, t_x) = primals, tangents
        return rounded(step, x), t_x + (jnp.round(x / step) - x / step) * t_step

    straight_through = eqg.with_gradient_of(jnp.round, lambda x: x)
    reference = lambda step, x: step * straight_through(x / step)
    args = jnp.array(0.5), jnp.array([0.3, 0.9])
    with pytest.raises(eqgt.RuleCheckError, match=r"wrong at the next;.*pass `order=1`"):
        eqgt.check_rule(quantized, *args, reference=reference)
    eqgt.check_rule(quantized, *args, reference=reference, order=1)


def _of_three(t_of):
    """`sum(a) * exp(b) + sum(c)`, with another tangent."""

    @eqg.custom_jvp
    def fn(a, b, c):
        return jnp.sum(a) * jnp.exp(b) + jnp.sum(c**2)

    fn.def_jvp(lambda primals, tangents: (fn(*primals), t_of(*primals, *tangents)))
    a, b, c = jnp.arange(3.0), jnp.array(-9.0), jnp.array([50.0, 100.0])
    return lambda **options: eqgt.check_rule(fn, a, b, c, raises=False, **options)


def test_the_relative_error_is_that_of_the_numbers():
    """The derivative by `b` is a ten-thousandth of that by `c`."""
    check = _of_three(
        lambda a, b, c, t_a, t_b, t_c: (
            jnp.exp(b) * (jnp.sum(t_a) + 201 * jnp.sum(a) * t_b) + 2 * jnp.sum(c * t_c)
        )
    )
    report = check(checks=("forward", "reverse"))
    for failure in report.failures:
        assert failure.error == pytest.approx(200, rel=1e-4)
        assert "at `b`: relative error 2e+02" in failure.text
        assert "every entry" not in failure.text  # it is one number


def test_what_is_missing_comes_first():
    check = _of_three(
        lambda a, b, c, t_a, t_b, t_c: jnp.exp(b) * jnp.sum(t_a) + 7 * jnp.sum(c * t_c)
    )
    report = check(checks=("forward", "reverse"))
    assert len(report.failures) == 2
    for failure in report.failures:
        assert "at `b`: relative error 1," in failure.text
        assert "zero everywhere: the term of `b` is missing" in failure.text
        assert "also wrong: `c` (2.5)" in failure.text
    check = _of_three(lambda a, b, c, t_a, t_b, t_c: jnp.exp(b) * jnp.sum(t_a))
    (failure,) = check(checks="reverse").failures
    assert "also wrong: `c` (missing)" in failure.text or "`b` (missing)" in failure.text


def test_a_factor_fits_two_different_numbers():
    """The derivatives by `a` are one number, and those by all of `x` and `y` are two."""

    def causes(factors):
        @eqg.custom_vjp
        def fn(a, x, y):
            return jnp.sum(a) * 1.5 + 2.0 * x - 0.3 * y

        rates = 1.5, 2.0, -0.3
        scaled = [factor * rate for factor, rate in zip(factors, rates, strict=True)]
        fn.def_fwd(lambda a, x, y: (fn(a, x, y), a))
        fn.def_bwd(
            lambda a, ct: (jnp.full_like(a, scaled[0]) * ct, *(ct * s for s in scaled[1:]))
        )
        args = jnp.arange(4.0), jnp.array(0.5), jnp.array(0.7)
        report = eqgt.check_rule(fn, *args, checks="reverse", raises=False)
        return [line for line in str(report).splitlines() if "likely cause" in line]

    assert not causes((7, 1, 1))
    assert not causes((1, 1, 7))
    assert not causes((2, 1, 7))
    (line,) = causes((1, 7, 7))
    assert "every entry is 7 times the expected one" in line


def test_a_backward_rule_that_raises_is_no_wrong_value():
    rule = _product(lambda residuals, ct: (jnp.ones(7, ct.dtype), ct * residuals[0]))
    report = eqgt.check_rule(rule, _A, _B, checks=("primal", "reverse"), raises=False)
    assert {finding.verdict for finding in report["primal"]} == {"passed"}
    assert [failure.check for failure in report.failures] == ["reverse"]


def test_numbers_have_seven_digits_or_those_that_differ():
    table = lambda *pair: side_by_side(Difference("x", 1.0, *map(np.asarray, pair)))
    assert table(1 / 3, 2 / 3).split()[-2:] == ["0.3333333", "0.6666667"]
    assert table(1 / 3, 1 / 3 + 1e-10).split()[-2:] == ["0.333333333333", "0.333333333433"]
    assert table(np.nan, 2.0).split()[-2:] == ["nan", "2"]
    assert table(np.float32(0.1), jnp.bfloat16(0.3)).split()[-2:] == ["0.1", "0.3007812"]


def test_orders_of_modes_with_the_same_numbers_are_one_finding():
    @eqg.custom_jvp
    def fn(x):
        return jnp.sum(jnp.sin(x) * jnp.exp(x))

    slope = lambda x: jnp.cos(jax.lax.stop_gradient(x)) + jnp.sin(x)
    fn.def_jvp(lambda p, t: (fn(*p), jnp.sum(jnp.exp(p[0]) * slope(p[0]) * t[0])))
    x = jnp.array([0.3, 1.1, 0.7])
    text = str(eqgt.check_rule(fn, x, checks="order", raises=False))
    assert "2. " not in text
    assert text.count("at `x`") == 1


@pytest.mark.slow
def test_the_primal_is_returned_as_the_cotangent():
    @eqg.custom_vjp
    def affine(layer, x):
        return layer.weight @ x

    @affine.def_fwd
    def _fwd(layer, x):
        return affine(layer, x), (layer, x)

    @affine.def_bwd
    def _bwd(residuals, ct):
        layer, x = residuals
        t_layer = eqx.tree_at(lambda m: m.weight, layer, jnp.outer(ct, x))
        return t_layer, layer.weight.T @ ct

    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    with pytest.raises(eqgt.RuleCheckError, match="FAILED") as caught:
        eqgt.check_rule(affine, layer, jnp.array([1.0, 2.0, 3.0]))
    text = str(caught.value)
    assert text.count("it is the value of `layer.bias`: the rule returns the primal") == 1
    # One fault, one cause.
    assert "and so: " in text
    for other in ("it clips", "of a sum it is not", "the sign is wrong"):
        assert other not in text


@pytest.mark.parametrize("factor", [1.01, 1.001])
def test_a_rule_that_is_wrong_in_single_precision_only(factor):
    """Rounding explains 1e-6 here, and no percent."""

    @eqg.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.def_jvp
    def _jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return sine(x), (factor if x.dtype == jnp.float32 else 1.0) * jnp.cos(x) * t

    with pytest.raises(eqgt.RuleCheckError, match="right in float64, wrong in float32"):
        eqgt.check_rule(sine, jnp.array([0.5, 0.7], jnp.float32), checks=("forward",))


# ---------------------------------------------------------------- consequences


def _with_jvp(fn, rule):
    decorated = eqg.custom_jvp(fn)
    decorated.def_jvp(rule)
    return decorated


@pytest.mark.slow
def test_a_wrong_value_of_the_rule_is_no_fault_of_vmap():
    rule = lambda primals, tangents: (
        2 * jnp.sin(primals[0]),
        jnp.cos(primals[0]) * tangents[0],
    )
    report = eqgt.check_rule(_with_jvp(jnp.sin, rule), jnp.array(1.0), raises=False)
    assert {f.check for f in report.failures} == {"primal", "transforms"}
    assert "right eagerly" not in str(report)
    assert "and so: transforms" in str(report)


@pytest.mark.slow
def test_a_wrong_first_derivative_is_named_in_the_check_of_the_second():
    rule = lambda p, t: (jnp.sin(p[0]) * p[1] ** 2, jnp.cos(p[0]) * p[1] ** 2 * t[0])
    fn = _with_jvp(lambda x, y: jnp.sin(x) * y**2, rule)
    report = eqgt.check_rule(fn, jnp.array(1.0), jnp.array(0.5), raises=False)
    assert {"forward", "reverse", "order"} <= {f.check for f in report.failures}
    assert "the term of `y` is missing" in report["forward"][0].text
    assert "no influence" not in str(report)
    assert "and so: reverse, order" in str(report)


def test_a_second_derivative_that_fails_as_the_first_one_does():
    rule = lambda primals, tangents: (jnp.sin(primals[0]), jnp.sum(tangents[0]))
    report = eqgt.check_rule(_with_jvp(jnp.sin, rule), jnp.ones(3), raises=False)
    assert "Did a sum drop an axis?" in str(report)
    assert "right to first order" not in str(report)


@pytest.mark.slow
def test_one_exception_of_all_checks_is_described_once():
    """JAX's message names the function of the check that was traced."""
    rule = lambda p, t: (jnp.sin(p[0]), jnp.cos(np.asarray(p[0])) * t[0])
    report = eqgt.check_rule(_with_jvp(jnp.sin, rule), jnp.ones(3), raises=False)
    assert len(report.failures) > 10
    assert str(report).count("it raised TracerArrayConversionError") <= 2  # 1 for each shape


def test_where_a_nan_of_a_rule_comes_from():
    def rule(primals, tangents):
        y = jnp.sqrt(primals[0])
        return y, jnp.where(y > 0, tangents[0] / (2 * y), 0.0)

    report = eqgt.check_rule(
        _with_jvp(jnp.sqrt, rule), jnp.array([0.0, 2.0]), raises=False, checks=("finite",)
    )
    assert "a `where` on its" in report.failures[0].text

    def mended(primals, tangents):
        y = jnp.sqrt(primals[0])
        return y, eqg.safe.where(y > 0, lambda y: tangents[0] / (2 * y), y, 0.0)

    eqgt.check_rule(_with_jvp(jnp.sqrt, mended), jnp.array([0.0, 2.0]), checks=("finite",))


# ---------------------------------------------------------------- right by chance


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


@pytest.mark.slow
def test_a_missing_factor_that_is_one_is_not_called_right_to_first_order():
    x = jnp.array([0.4, -1.1, 2.0])
    text = str(eqgt.check_rule(Scaled(jnp.ones(3)), x, raises=False))
    assert "as if a factor is missing that is 1 here" in text
    assert "order=1" not in text
    text = str(eqgt.check_rule(Scaled(jnp.array([1.0, 0.5, 2.0])), x, raises=False))
    assert "1. forward" in text
    assert "1 here" not in text


def test_one_right_entry_of_the_other_sign_is_no_pattern():
    """The scale of that entry is one."""
    x, scale = jnp.array([-0.7, 0.2, 1.5, 3.0]), jnp.array([1.0, 0.5, -2.0, 0.3])
    report = eqgt.check_rule(Scaled(scale), x, checks="reverse", raises=False)
    assert not report.passed
    assert "only where" not in str(report)


# ---------------------------------------------------------------- rounding


def test_some_entries_that_are_a_little_off():
    want = np.array([1.0, 2.0, 3.0])
    assert likely_cause(want, want * (1 + 3e-5), "`x`").startswith("every entry is")
    cause = likely_cause(want, want + np.array([0.0, 2e-5, -3e-5]), "`x`")
    assert cause.startswith("some entries are a little off")


def test_what_differs_by_rounding_under_vmap_is_not_called_wrong():
    double = eqg.custom_jvp(lambda x: 2 * jnp.sin(x))
    double.def_jvp(lambda p, t: (double(*p), 2 * jnp.cos(p[0]) * t[0]))

    @double.def_vmap
    def double_vmap(axis_size, batched, x):
        return double(x.astype("bfloat16").astype(x.dtype)), batched[0]

    report = eqgt.check_rule(double, jnp.array([0.3, 0.8]), checks="transforms", raises=False)
    texts = [f.text for f in report.failures if f.where.startswith("vmap")]
    assert texts
    for text in texts:
        assert "right eagerly" not in text
        assert "rounded differently: one of them is cast to lower precision" in text


_BY_FORMULA = "returns its value by a formula instead of calling the function"


def _sine_with_value(value, slope=jnp.cos):
    return lambda f: _with_jvp(
        f, lambda primals, tangents: (value(*primals), slope(*primals) * tangents[0])
    )


def _sine_in_reverse(f):
    decorated = eqg.custom_vjp(f)
    decorated.def_fwd(lambda x: (jax.lax.stop_gradient(jnp.sin(x)), x))
    decorated.def_bwd(lambda x, ct: (ct * jnp.cos(x),))
    return decorated


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("decorate", "is_named"),
    [
        (_sine_with_value(lambda x: jax.lax.stop_gradient(jnp.sin(x))), True),
        (_sine_in_reverse, True),
        (_sine_with_value(jnp.sin, lambda x: jax.lax.stop_gradient(jnp.cos(x))), False),
    ],
)
def test_a_value_by_a_formula_has_no_rule_at_second_order(decorate, is_named):
    x = jnp.array([0.2, 1.7, -2.4])
    report = eqgt.check_rule(decorate(jnp.sin), x, checks=("order",), raises=False)
    assert "right to first order" in str(report)
    assert (_BY_FORMULA in str(report)) == is_named


def _with_slope(fn, slope):
    """A rule of one argument."""
    return _with_jvp(
        fn, lambda primals, tangents: (fn(*primals), slope(*primals) * tangents[0])
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_odd_function_at_zero(dtype):
    # Right at zero to second order: the second derivative of `tanh` is zero there, too.
    wrong = _with_slope(jnp.tanh, jnp.ones_like)
    right = _with_slope(jnp.tanh, lambda x: 1 - jnp.tanh(x) ** 2)
    zero = np.zeros(3, dtype)
    report = eqgt.check_rule(wrong, zero, checks=("reverse", "order"), raises=False)
    assert "a term that is 0 here" in str(report)
    eqgt.check_rule(right, zero, checks=("reverse", "order"))


def test_a_rule_that_follows_a_stop_gradient_is_right_nearby():
    stopped = lambda x: x * jax.lax.stop_gradient(jnp.sin(x))
    rule = _with_slope(stopped, lambda x: jax.lax.stop_gradient(jnp.sin(x)))
    eqgt.check_rule(rule, jnp.array([1.0, 2.0]), checks=("order",))
