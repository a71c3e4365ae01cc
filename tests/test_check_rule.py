"""`check_rule`: planted faults and right rules, what a report says, options, references.

`tests/guard` has the tolerances, from both sides.
"""

import gc
import re
import statistics

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from .faults import FAULTS
from .helpers import compilations
from .right_rules import RIGHT


pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def _forget():
    """Hundreds of small programs are compiled here; do not keep them all."""
    yield
    jax.clear_caches()
    gc.collect()


# ---------------------------------------------------------------- planted faults, right rules


@pytest.mark.conformance
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    fault = FAULTS[name]
    fn, args, options = fault.make()
    report = eqgt.check_rule(fn, *args, checks=(fault.check,), raises=False, **options)
    texts = [f"{failure.where} {failure.text}" for failure in report.failures]
    assert any(re.search(fault.match, text) for text in texts), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_same_rule_without_the_fault_passes(name):
    fn, args, options = FAULTS[name].right()
    eqgt.check_rule(fn, *args, checks=(FAULTS[name].check,), **options)


def _check_right(name, dtype, **options):
    case = RIGHT[name](jnp.dtype(dtype), jr.key(0))
    if case is None:
        pytest.skip(f"this rule does not exist in {dtype}")
    fn, args, own = case
    skip = (*own.pop("skip", ()), *options.pop("skip", ()))
    eqgt.check_rule(fn, *args, skip=skip, **own, **options)


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["nested_containers_with_none", "implicit_derivative"])
def test_right_rule_is_not_accused(name):
    _check_right(name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_rule_is_not_accused_over_20_seeds(name, dtype):
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        # Transformations and leaks are much the same in each.
        skip = () if dtype == "float32" else ("transforms", "leaks", "zeros")
        _check_right(name, dtype, seed=range(20), skip=skip)


# ---------------------------------------------------------------- reports


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


def residual(y, a):
    return y**3 + y - a


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


def root_of(slope):
    return jvp_rule(jnp.sqrt, lambda p, t: slope(jnp.sqrt(p[0]), t[0]))


def raises_index(*_):
    raise IndexError("no derivative today\n" + "why?\n" * 20)


def raw_rule(fn, bwd):
    rule = jax.custom_vjp(fn)
    rule.defvjp(lambda x: (fn(x), x), bwd)
    return rule


def no_cotangent_of_y():
    f = eqg.custom_vjp(lambda x, y: x * jnp.sin(y))
    f.def_fwd(lambda x, y: (2 * f(x, y), (x, y)))
    f.def_bwd(lambda r, ct: (ct * jnp.sin(r[1]),))
    return f


constant = lambda: jvp_rule(lambda x: jnp.zeros_like(x), lambda p, t: t[0])
stopped = jax.lax.stop_gradient
no_term_of_y = lambda: jvp_rule(
    lambda x, y: jnp.sin(x) * y**2, lambda p, t: jnp.cos(p[0]) * p[1] ** 2 * t[0]
)
no_influence_at_first = lambda factor: jvp_rule(
    lambda x: jnp.sum(x**2), lambda p, t: factor * jnp.sum(p[0] * t[0])
)
CLIPPED = {**REVERSE, "nonlinear": True, "reference": identity(clip(5.0))}
AT_ZERO = jnp.zeros(3)
keeps = lambda kept: lambda x: kept.append(x) or 2 * x


def square_of_two():
    square = jax.custom_batching.custom_vmap(lambda x: x**2)
    square.def_vmap(lambda size, is_batched, x: (x[:, :2] ** 2, True))
    return lambda x: square(eqx.error_if(x, x[0] < 1.1, "too small"))


def dense_zeros():
    f = jax.custom_jvp(lambda x, y: x * y)
    dense = lambda t: jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t
    rule = lambda p, t: (f(*p), p[1] * dense(t[0]) + p[0] * dense(t[1]))
    f.defjvp(rule, symbolic_zeros=True)
    return f


# A rule, its arguments, and options: `reports.json` has what the report says.
REPORTS = {
    "an integer has no tangent": (lambda: Repeated(jnp.array(1.5), jnp.array(3)), (2.0,),
        {"checks": "forward"}),
    "a loose solver": (lambda: eqg.implicit(residual)(bisection), (2.0,), BOTH),
    "an infinite argument": (lambda: bounded(1.0), BOUNDED, BOTH),
    "a constant": (constant, (2.0,), {"checks": "forward"}),
    "no clip": (lambda: identity(lambda _, ct: (ct,)), (CLIP_X,), CLIPPED),
    "a tiny output": (lambda: vjp_rule(lambda x: (jnp.sin(x), 1e-12 * jnp.cos(x)), lambda r, ct:
        (jnp.cos(r[0]) * ct[0] - 2e-12 * jnp.sin(r[0]) * ct[1],)), (CLIP_X,), REVERSE),
    "a number": (lambda: product(lambda r, ct: (ct * r[1], 2 * ct * r[0])), (1.5, 0.7),
        {"checks": ("reverse", "adjoint")}),
    "two factors": (lambda: product(lambda r, ct: (3 * ct * r[1], 2 * ct * r[0])), (A, B),
        REVERSE),
    "a step that is learned": (straight_through_step, STEP, OF_STEP),
    "a term is missing": (lambda: of_three(lambda a, b, c, t_a, t_b, t_c: jnp.exp(b) *
        jnp.sum(t_a) + 7 * jnp.sum(c * t_c)), OF_THREE, BOTH),
    "a frozen leaf": (lambda: jvp_rule(lambda a, b, c: a * stopped(b) * c, lambda p, t:
        p[1] * p[2] * t[0]), (1.5, 0.7, 0.4), BOTH),
    "a term beside a kink": (lambda: jvp_rule(lambda x, b: jnp.abs(x) + 1e-7 * b**2, lambda p,
        t: jnp.where(p[0] < 0, -t[0], t[0]) + 3e-7 * t[1]), (0.0, 0.7), BOTH),
    "orders": (lambda: jvp_rule(lambda x: jnp.sum(jnp.sin(x)), lambda p, t:
        jnp.sum(jnp.cos(stopped(p[0])) * t[0])), (jnp.array([0.3, 1.1, 0.7]),), {"checks":
        "order"}),
    "the primal": (affine_of_primal, (LAYER, jnp.array([1.0, 2.0, 3.0])), {"checks":
        ("reverse", "adjoint", "linear")}),
    "a look at values": (lambda: jvp_rule(lambda x: x * x if x > 0 else x, lambda p, t:
        (3 * p[0] if p[0] > 0 else 1) * t[0]), (1.5,), {"skip": ("zeros", "transforms")}),
    "a NaN of a rule": (lambda: root_of(lambda y, t: jnp.where(y > 0, t / (2 * y), 0.0)),
        (jnp.array([0.0, 2.0]),), {"checks": "finite"}),
    "a value by a formula": (lambda: jvp_rule(jnp.sin, lambda p, t: jnp.cos(p[0]) * t[0],
        lambda x: stopped(jnp.sin(x))), (A,), {"checks": "order"}),
    "a constant of the function": (lambda: jvp_rule(lambda x, s: jnp.sin(x) * stopped(s),
        lambda p, t: jnp.cos(p[0]) * p[1] * t[0]), (A, A.at[0].set(0.0)), {"checks":
        "order"}),
    "right at zero only": (lambda: no_influence_at_first(10.0), (AT_ZERO,), {"checks":
        ("reverse", "order")}),
    "an exception in forward mode": (lambda: jvp_rule(lambda x: x**2, raises_index), (A,), {}),
    "an exception in reverse mode": (lambda: raw_rule(jnp.sin, raises_index), (A,), {"checks":
        ("leaks", "residuals", "finite")}),
    "a number, and an exception": (no_cotangent_of_y, (A, B), {"checks": ("primal", "reverse",
        "linear")}),
    "an argument that is never read": (lambda: raw_rule(lambda x: 2 * x, lambda _, ct:
        (2 * ct,)), (jnp.ones(9, "float32"),), {"checks": "residuals"}),
    "tangents that do not fit": (no_term_of_y, (A, B), {"checks": "forward", "tangents":
        (A, A[:2])}),
    "another output": (lambda: lambda x, y: x * y, (A, B), {**REVERSE, "reference":
        lambda x, y: jnp.sum(x * y)}),
    "no derivative": (lambda: jnp.argmax, (A,), {}),
    "an array that is captured": (lambda: lambda x: x * B, (A,), {"checks": "residuals"}),
    "forward mode only": (lambda: _with_loop(lambda t: t), (A,), {"checks": ("reverse",
        "adjoint", "order", "leaks", "residuals", "deterministic")}),
    "reverse mode only": (lambda: raw_rule(lambda x: x, clip(0.5)), (A,), {"checks":
        ("forward", "linear", "order"), "nonlinear": True}),
    "many leaves": (lambda: jvp_rule(lambda *xs: sum(map(jnp.sin, xs)), lambda p, ts: sum(ts)),
        (1.5,) * 13, BOTH),
    "a batch of another shape": (square_of_two, (A,), {"checks": "transforms"}),
    "a tracer of the function": (lambda: keeps([]), (A,), {"checks": "leaks"}),
    "an error of Equinox": (lambda: jvp_rule(jnp.sin, lambda p, t: eqx.error_if(t[0], p[0] > 0,
        "no derivative")), (A,), {"checks": "forward"}),
    "right nearby": (lambda: jvp_rule(jnp.sin, lambda p, t: t[0]), (AT_ZERO,), {"checks":
        "order"}),
    "a NaN of second order": (lambda: jvp_rule(lambda x: x**2, lambda p, t: 2 * jnp.sqrt(p[0]
        ** 2) * jnp.sign(p[0]) * t[0]), (AT_ZERO,), {"checks": "order"}),
    "zeros of JAX": (dense_zeros, (A, B), {"checks": "zeros"}),
    "two dtypes": (lambda: lambda x, y: (jnp.sin(x) * y.astype(x.dtype), y**3), (CLIP_X,
        CLIP_X.astype("float16")), {"checks": "order"}),
    "a derivative out of the range": (lambda: jvp_rule(jnp.log, lambda p, t: t[0] / p[0]),
        (jnp.array([1e-20, 1.0], "float32"),), {"checks": "finite"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_what_a_report_says(name):
    make, args, options = REPORTS[name]
    report = eqgt.check_rule(make(), *args, raises=False, **options)
    assert max(map(len, str(report).splitlines())) <= 100


NORM = lambda: identity(lambda _, ct: (ct / jnp.sqrt(jnp.sum(ct * ct)),))
# Rules that are right.
RIGHT_RULES = {
    "an infinite argument": (lambda: bounded(0.0), BOUNDED, {}),
    "a step that is learned": (straight_through_step, STEP, {**OF_STEP, "order": 1}),
    "a norm in half precision": (NORM, (CLIP_X.astype("float16"),), {**CLIPPED,
        "reference": NORM()}),
    "a NaN of a rule": (lambda: root_of(lambda y, t: eqg.safe.where(y > 0, lambda y: t /
        (2 * y), y, 0.0)), (jnp.array([0.0, 2.0]),), {"checks": "finite"}),
    "at zero": (lambda: no_influence_at_first(2.0), (AT_ZERO,), {}),
    "many leaves": (lambda: lambda *xs: sum(k * x for k, x in enumerate(xs)), (A,) * 5,
        {"checks": "zeros"}),
    # `softplus` of JAX, which `log_sigmoid` is made of, makes arrays of zero tangents.
    "dense tangents of JAX": (lambda: lambda x, y: jax.nn.log_sigmoid(x) -
        jax.nn.log_sigmoid(y), (A, B), {"checks": "zeros"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT_RULES)
def test_right_rules(name):
    make, args, options = RIGHT_RULES[name]
    eqgt.check_rule(make(), *args, **options)


# ---------------------------------------------------------------- exceptions


@pytest.mark.thorough
def test_the_line_that_raised():
    """It is the user's, not one of Python's or of an installed package."""
    raises = lambda: statistics.mean([])
    report = eqgt.check_rule(jvp_rule(lambda x: x, lambda p, t: raises()), 1.0, raises=False)
    assert f"raised below {__file__}:{raises.__code__.co_firstlineno}\n" in str(report)


# ---------------------------------------------------------------- programs


def test_a_scalar_rule_takes_few_programs():
    """One for each precision, for `order`, for `transforms` and for `finite`; the others are of
    eager calls. And none of forward mode, which JAX traces and does not compile."""
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.cos(x) * ct,))
    with compilations() as found:
        eqgt.check_rule(f, 1.0)
    assert len(found) <= 10


# ---------------------------------------------------------------- options


def test_options_that_make_no_sense():
    class Scale(eqx.Module):
        factor: Array

        @eqg.custom_jvp
        def __call__(self, x):
            return self.factor * x

    rule, method = no_term_of_y(), Scale(jnp.ones(())).__call__
    for options, match in (
        ({"checks": ("forwards",)}, "`checks` (.|\n)*'forwards'"),
        ({"skip": "backward"}, "`skip` (.|\n)*'backward'"),
        ({"skip": ("forward",), "checks": "forward"}, "told to check nothing"),
        ({"nondifferentiable": ("z",)}, "names `z`, which is not a positional argument"),
        ({"nondifferentiable": ("x.z",)}, "names `x.z`(.|\n)*there are `x`"),
        ({"at": [A]}, "is not a list of tuples"),
        ({"skip": 3}, "are not names"),
    ):
        with pytest.raises(eqg.RuleError, match=match):
            eqgt.check_rule(rule, A, B, **options)
    with pytest.raises(eqg.RuleError, match=r"there are `x`, `self\.factor`\n"):
        eqgt.check_rule(method, 1.0, nondifferentiable=("factor",))
    with pytest.raises(eqg.RuleError, match="nothing that can be differentiated"):
        eqgt.check_rule(lambda n: n + 1, 3)
    with pytest.raises(eqg.RuleError, match=r"`<lambda>` can't be called(.|\n)*missing.*'y'"):
        eqgt.check_rule(rule, A)
    with pytest.raises(eqgt.RuleCheckError, match="missing a required argument: 'y'"):
        eqgt.check_rule(rule, A, B, at=[(A,)], checks="finite")
    for fn, x in ((lambda x: (x, x), jnp.ones(2)), (jnp.sin, jnp.ones(2, complex))):
        with pytest.raises(TypeError, match="real arrays that return one array"):
            eqgt.numerical_jacobian(fn, x)


@pytest.mark.slow
def test_checks_and_skip():
    everything = eqgt.check_rule(jnp.sin, 1.0, at=[(0.0,), (2.0,)])
    names = {finding.check for finding in everything.findings}
    assert len(names) == 12
    assert "the arguments and 2 further points, under" in everything["finite"][0].where
    without = eqgt.check_rule(jnp.sin, 1.0, skip=("leaks", "transforms"), tangents=(2,))
    assert {f.check for f in without.findings} == names - {"leaks", "transforms"}


def test_single_checks_are_that_check():
    checks = ("forward", "reverse", "adjoint", "linear", "transforms", "leaks", "residuals")
    for name in checks:
        report = getattr(eqgt, f"check_{name}")(jnp.sin, jnp.array([0.5, 1.0], "bfloat16"))
        assert {finding.check for finding in report.findings} == {name}
        with pytest.raises(KeyError, match="no check named 'finite'"):
            report["finite"]


@pytest.mark.parametrize("has_rule", [False, True])
def test_a_python_number_that_is_an_argument_is_no_residual(has_rule):
    """JAX makes its own array, which was counted."""
    bwd = lambda residuals, ct: (ct * residuals[1], jnp.sum(ct * residuals[0]))
    fn = product(bwd) if has_rule else lambda x, y: x * y
    finding = eqgt.check_residuals(fn, jnp.arange(3.0), 2.0, max_residual_bytes=0)
    where = finding["residuals"][0].where
    assert where == "0 bytes per call, without the arguments (plain autodiff: 0)"


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_transpose_that_the_user_wrote_is_held_against_differences(factor):
    """It can't be removed: plain autodiff transposes as it was told to."""
    a = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "float32")
    out = jax.ShapeDtypeStruct((3,), jnp.float32)
    on_host = eqg.linear_host_function(
        lambda x: a @ x, lambda y: (factor * (a.T @ y)).astype(a.dtype), out=out
    )
    transpose = lambda a, y: jnp.asarray(factor, y.dtype) * (a.T @ y)
    in_jax = lambda x: jax.custom_derivatives.linear_call(
        lambda a, x: a @ x, transpose, jnp.asarray(a, x.dtype), x
    )
    x = jnp.array([0.5, -1.0], "float32")
    for fn in (on_host, in_jax):
        report = eqgt.check_rule(fn, x, checks=("forward", "reverse"), raises=False)
        assert [f.check for f in report.failures] == ["reverse"] * (factor != 1)


def _with_loop(rule):
    """A function that JAX has no reverse mode for, with a rule."""

    @jax.custom_jvp
    def fn(x):
        step = lambda c: (jnp.sin(c[0]), c[1] + 1)
        return jax.lax.while_loop(lambda c: c[1] < 3, step, (x, 0))[0]

    @fn.defjvp
    def fn_jvp(primals, tangents):
        step = lambda c: (jnp.sin(c[0]), c[1] * jnp.cos(c[0]), c[2] + 1)
        x, t, _ = jax.lax.while_loop(lambda c: c[2] < 3, step, (*primals, *tangents, 0))
        return x, rule(t)

    return fn


KEPT_TANGENTS = []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "failing"),
    [
        (lambda t: t, set()),
        (lambda t: 1.1 * t, {"forward"}),
        (lambda t: t * jnp.inf, {"forward", "linear", "finite"}),
        (lambda t: KEPT_TANGENTS.append(t) or t, {"leaks"}),
        # Noise of a few rounding errors, which only a comparison of the bits can notice.
        (lambda t: t * (1 + 8 * jnp.finfo(t.dtype).eps * np.random.default_rng().normal()),
         {"deterministic"}),
    ],
)  # fmt: skip
def test_a_function_with_forward_mode_only(rule, failing):
    fn, x = _with_loop(rule), jnp.array([1.0, 0.5])
    with pytest.raises(eqgt.RuleCheckError, match=re.escape('skip=("reverse",)')):
        eqgt.check_rule(fn, x)
    report = eqgt.check_rule(fn, x, skip=("reverse",), raises=False)
    assert {f.check for f in report.failures} == failing
    KEPT_TANGENTS.clear()


# ---------------------------------------------------------------- `reference=`


class Affine(eqx.Module):
    """Its rule forgets the weight."""

    weight: Array
    bias: Array
    name: str = "affine"

    def plain(self, x):
        return self.weight * x + self.bias

    @eqx.filter_jit
    def compiled(self, x):
        return self.weight * x + self.bias

    @eqg.custom_vjp
    def __call__(self, x):
        return self.weight * x + self.bias

    @__call__.def_fwd
    def _fwd(self, x):
        return self.plain(x), (self, x)

    @__call__.def_bwd
    def _bwd(residuals, ct):
        affine, _ = residuals
        return eqg.tangents.of(affine, bias=ct), ct * affine.weight


AFFINE, POINT = Affine(jnp.array([2.0, -0.5]), jnp.ones(2)), jnp.array([0.5, 3.0])
# However the Module is called, its arrays are perturbed: what is right, wrong, and a reference.
FORMS = {
    "Module": (AFFINE.plain, AFFINE, AFFINE.plain),
    "method": (AFFINE.plain, AFFINE.__call__, Affine.plain),
    "compiled method": (AFFINE.compiled, eqx.filter_jit(AFFINE.__call__), AFFINE.compiled),
    "compiled": tuple(map(eqx.filter_jit, (AFFINE.plain, AFFINE, AFFINE.plain))),
}


GIVEN = [(form, form == "compiled method") for form in FORMS] + [("Module", True)]


@pytest.mark.parametrize(("form", "is_given"), GIVEN)
def test_the_arrays_of_a_module_are_perturbed_however_it_is_called(form, is_given):
    right, wrong, reference = FORMS[form]
    options = {"checks": "reverse", "reference": reference if is_given else None}
    eqgt.check_rule(right, POINT, **options)
    with pytest.raises(eqgt.RuleCheckError, match=r"self\.weight"):
        eqgt.check_rule(wrong, POINT, **options)


def test_references_of_another_form():
    with pytest.raises(eqg.RuleError, match=r"is not a function of `self\.weight`"):
        eqgt.check_rule(AFFINE, POINT, reference=lambda x: 2 * x)
    fn = lambda x: AFFINE.plain(x)
    eqgt.check_rule(fn, POINT, checks="reverse", reference=lambda x: AFFINE.weight * x)
    # The numbers of a Module are static then.
    options = {"checks": "reverse", "reference": lambda x: -3 * x}
    eqgt.check_rule(eqg.nn.GradientReversal(3.0), POINT, **options)


def test_forward_mode_of_a_rule_without_def_jvp():
    rule = eqg.custom_vjp(lambda x: jnp.floor(2 * x))
    rule.def_fwd(lambda x: (rule(x), None))
    rule.def_bwd(lambda _, ct: (2 * ct,))
    options = {"reference": lambda x: 2 * x, "checks": ("forward", "reverse", "adjoint")}
    report = eqgt.check_rule(rule, POINT, raises=False, **options)
    assert [failure.check for failure in report.failures] == ["forward"]
    rule.def_jvp(lambda primals, ts: (rule(*primals), 2 * ts[0]))
    eqgt.check_rule(rule, POINT, **options)
    only_reverse = jax.custom_vjp(lambda x: 2 * x)
    only_reverse.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))
    report = eqgt.check_rule(rule, POINT, **{**options, "reference": only_reverse})
    assert [report[mode][0].verdict for mode in BOTH["checks"]] == ["skipped", "passed"]


@pytest.mark.slow
def test_solvers_are_no_reference_of_second_order():
    """Autodiff of a solver on the host, which stops at a tolerance, is zero."""

    @eqg.implicit(residual)
    @eqg.host_function(out=lambda a: a)
    def root(a):
        y = np.zeros_like(a)
        while np.max(np.abs(residual(y, a))) > 1e-9:
            y = y - residual(y, a) / (3 * y**2 + 1)
        return y

    with jax.enable_x64(True):
        a, checks = jnp.array([0.3, 1.0, 2.0], "float64"), ("forward", "reverse", "order")
        eqgt.check_rule(root, a, checks=checks)
        wrong = eqg.custom_vjp(lambda a: root(a))
        wrong.def_fwd(lambda a: (root(a), a))
        wrong.def_bwd(lambda a, ct: jax.vjp(root, stopped(a))[1](ct))
        report = eqgt.check_rule(wrong, a, checks=checks, raises=False)
        assert {failure.check for failure in report.failures} == {"order"}


# ---------------------------------------------------------------- the plugin

FILE = """
import jax
import jax.numpy as jnp
import eqx_grads.testing as eqgt

def test_wrong(check_rule):
    x = jnp.array([1.0, 1.1])
    check_rule(jnp.sin, x, checks=("forward",), reference=lambda x: 3.0 * jnp.sin(x))

def test_option(check_rule):
    check_rule(jnp.sin, 1.0, checks=("forwards",))

def test_name():
    eqgt.check_forward(jnp.sin, 1.0, nondifferentiable=("z",))

def test_report(check_rule):
    report = check_rule(jnp.sin, 1.0, checks=("forward",))
    assert report.numbers["seed"] != 7

@jax.custom_jvp
def square(x):
    return x * x

square.defjvp(lambda primals, tangents: (primals[0] ** 2, primals[0] * tangents[0]))

def test_gradient():
    eqgt.check_gradients(lambda x: square(x).sum(), jnp.array([3.0, 2.0]))

def test_model():
    eqgt.check_gradients(square, 3)
"""


@pytest.mark.thorough
def test_L6_the_plugin_prints_a_report_once_and_no_source_of_this_library(
    pytester, monkeypatch
):
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.setenv(name, "1")  # with which pytest prints whole messages twice
    pytester.makepyfile(FILE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--eqx-grads-seed", "7")
    result.assert_outcomes(failed=6)
    text = result.stdout.str()
    assert text.count("likely cause: every entry is 0.3333 times") == 1
    assert text.count("The rule of `sin`: passed (seed 7)") == 1
    assert text.count("Every entry is half the expected one") == 1
    assert "it is 'forwards'" in text
    assert "`nondifferentiable` names `z`" in text
    assert "without inexact arrays" in text
    sources = ("kwargs.setdefault", "def check_", "def raise_if_failed(", "def trace_loss(",
               "contextlib", "raise RuleCheckError", "signature", "_recreate_cm")  # fmt: skip
    assert not any(line in text for line in sources)
