"""`check_rule`: what it compiles, its tolerances, the mode that is not given, its messages."""

import io
import re

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads._diagnosis import progress
from jax import monitoring

from .helpers import unwrapped


pytestmark = pytest.mark.x64


pytest_plugins = ["pytester"]

X = np.array([0.3, -1.2, 2.1, 0.7])


# ---------------------------------------------------------------- L5: speed


def _compiled_by(run):
    """The number of programs that are compiled. It does not depend on the machine."""
    counts = [0]

    def count(event, duration, **_):
        counts[0] += event == "/jax/core/compile/backend_compile_duration"

    monitoring.register_event_duration_secs_listener(count)
    try:
        run()
    finally:
        monitoring.unregister_event_duration_listener(count)
    return counts[0]


def _times_sin(factor):
    @eqg.custom_vjp
    def rule(x, y):
        return factor * jnp.sin(x) * y

    rule.def_fwd(lambda x, y: (rule(x, y), (x, y)))
    rule.def_bwd(lambda saved, ct: _multiplied(factor * ct, *saved))
    return rule


def _multiplied(ct, x, y):
    return jnp.cos(x) * y * ct, jnp.sin(x) * ct


@pytest.mark.slow
def test_L5_programs_are_shared_between_the_checks():
    args = jnp.float32(0.7), jnp.float32(1.3)
    eqgt.check_rule(_times_sin(1.0), *args)  # compiles single operations as well
    assert _compiled_by(lambda: eqgt.check_rule(_times_sin(2.0), *args)) <= 13


# ---------------------------------------------------------------- L2: single precision


def _in_single(fn):
    return lambda x: fn(x.astype("float32")).astype("float64")


def _jvp_rule(fn, slope, value=None):
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(
        lambda p, t: ((value or rule)(*p), (slope(p[0]) * t[0]).astype(fn(p[0]).dtype))
    )
    return rule


# With float64 arguments: a function, its slope and value by the rule, the check, and words of
# the report; none if the rule is right.
IN_DOUBLE = {
    # Errors below 1e-7, and the reference is good to 1e-16.
    "a cast": (jnp.sin, _in_single(jnp.cos), None, "forward", "as by a cast to float32"),
    "a factor": (jnp.sin, lambda x: jnp.cos(x) * (1 + 3e-8), None, "forward",
        "as by a cast to float32"),
    "right": (jnp.sin, jnp.cos, None, "forward", ""),
    "a value": (jnp.sin, jnp.cos, _in_single(jnp.sin), "primal", "another value"),
    # log(1 + x) loses half of its digits here, and log1p none.
    "rounding of the reference": (lambda x: jnp.log(1 + 1e-9 * x) ** 2, lambda x: 2e-9 *
        jnp.log1p(1e-9 * x) / (1 + 1e-9 * x), None, "forward", ""),
    "an output in float32": (lambda x: jnp.sin(x).astype("float32"), jnp.cos, None, "forward",
        ""),
}  # fmt: skip


@pytest.mark.parametrize("x", [X, X[0]])
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_L2_float64_arguments(name, x):
    fn, slope, value, check, words = IN_DOUBLE[name]
    with jax.enable_x64(True):
        rule = _jvp_rule(lambda x: fn(x), slope, value)
        report = eqgt.check_rule(rule, jnp.asarray(x), checks=check, raises=False)
    assert report.passed == (not words)
    assert words in unwrapped(report)


# ---------------------------------------------------------------- L6: messages


def test_L6_an_argument_that_is_never_read_is_said_not_to_be_counted():
    rule = jax.custom_vjp(lambda x: 2 * x)
    rule.defvjp(lambda x: (2 * x, x), lambda _, ct: (2 * ct,))
    report = eqgt.check_rule(rule, jnp.ones(9, "float32"), checks="residuals", raises=False)
    (failure,) = report.failures
    assert failure.where.startswith("0 bytes per call")
    assert "float32[9] (an argument, which is not in the bytes above)" in failure.text


def test_L6_an_exception_is_printed_once():
    rule = jax.custom_vjp(jnp.sin)

    def cotangents(x, ct):
        raise ValueError("no derivative today")

    rule.defvjp(lambda x: (jnp.sin(x), x), cotangents)
    report = eqgt.check_rule(rule, jnp.asarray(X), raises=False)
    text = str(report)
    assert len(report.failures) > 8
    assert text.count("no derivative today") == 1
    assert "and so: " in text


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
    check_rule(jnp.sin, 1.0, checks=("forward",))
    assert False

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
@pytest.mark.parametrize("ci", ["", "1"])  # with which pytest prints whole messages twice
def test_L6_the_plugin_prints_a_report_once_and_no_source_of_this_library(
    pytester, monkeypatch, ci
):
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.setenv(name, ci)
    pytester.makepyfile(FILE)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=6)
    text = result.stdout.str()
    assert text.count("likely cause: every entry is 0.3333 times") == 1
    assert text.count("The rule of `sin`: passed (seed 0)") == 1
    assert text.count("Every entry is half the expected one") == 1
    assert "There is no check `forwards`" in text
    assert "`nondifferentiable` names `z`" in text
    assert "without inexact arrays" in text
    for line in (
        "kwargs.setdefault",
        "_recreate_cm",
        "def check_rule(",
        "def check_gradients(",
        "def raise_if_failed(",
        "def trace_loss(",
        "contextlib",
        "raise RuleCheckError",
        "signature",
    ):
        assert line not in text


# ---------------------------------------------------------------- the line of progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_L5_a_line_on_the_terminal_says_which_check_is_running(monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.01)
    monkeypatch.setattr(progress, "_INTERVAL", 0.01)
    monkeypatch.setattr("sys.stderr", Terminal())
    eqgt.check_rule(jnp.sin, 1.0, checks=("forward", "transforms"))
    text = progress.sys.stderr.getvalue()
    assert "check_rule: the check `transforms`, 2 of 2 (" in text
    assert text.endswith("\r\x1b[K")  # it is taken back


@pytest.mark.thorough
def test_an_error_of_a_rule_is_not_called_a_leak():
    """JAX's leak checker reports the tracers in the traceback of the error."""

    @eqg.custom_jvp
    def square(x):
        return x**2

    @square.def_jvp
    def square_jvp(primals, tangents):
        raise ValueError("no formula yet")

    report = eqgt.check_rule(square, jnp.array(3.0), raises=False)
    assert {failure.check for failure in report.failures} >= {"forward", "leaks"}
    for failure in report.failures:
        assert "no formula yet" in failure.text
        assert "keeps a tracer" not in failure.text


def _sum_of_squares(factor):
    @eqg.custom_jvp
    def fn(x):
        return jnp.sum(x**2)

    @fn.def_jvp
    def fn_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return fn(x), factor * jnp.sum(x * t)

    return fn, jnp.zeros(3)


def _log_determinant(is_transposed):
    @eqg.custom_jvp
    def fn(a):
        return jnp.linalg.slogdet(a)[1]

    @fn.def_jvp
    def fn_jvp(primals, tangents):
        (a,), (t,) = primals, tangents
        inverse = jnp.linalg.inv(a)
        return fn(a), jnp.sum((inverse.T if is_transposed else inverse) * t)

    return fn, jnp.array([[2.0, 1.0], [1.0, 3.0]])


def _variance(factor):
    @eqg.custom_vjp
    def fn(x):
        return jnp.var(x)

    fn.def_fwd(lambda x: (fn(x), x))
    fn.def_bwd(lambda x, ct: (factor * ct * (x - jnp.mean(x)) / x.size,))
    return fn, jnp.ones(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "right", "wrong"),
    [(_sum_of_squares, 2.0, 10.0), (_log_determinant, True, False), (_variance, 2.0, 0.0)],
)
def test_a_rule_that_is_right_to_first_order_at_these_arguments_only(make, right, wrong):
    """They are zero, symmetric or equal, and the rule's second derivative belongs to its own
    gradient."""
    without_rule = make(right)[0].__wrapped__
    for reference in (None, without_rule):
        assert eqgt.check_rule(*make(right), reference=reference).passed
        report = eqgt.check_rule(*make(wrong), reference=reference, raises=False)
        assert {f.check for f in report.failures} == {"order"}


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
EPS = float(jnp.finfo(jnp.result_type(float)).eps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "failing"),
    [
        (lambda t: t, set()),
        (lambda t: 1.1 * t, {"forward"}),
        (lambda t: t * jnp.inf, {"forward", "linear", "finite"}),
        (lambda t: KEPT_TANGENTS.append(t) or t, {"leaks"}),
        # Noise of a few rounding errors, which only a comparison of the bits can notice.
        (lambda t: t * (1 + 8 * EPS * np.random.default_rng().normal()), {"deterministic"}),
    ],
)
def test_a_function_with_forward_mode_only(rule, failing):
    fn, x = _with_loop(rule), jnp.array([1.0, 0.5])
    with pytest.raises(eqgt.RuleCheckError, match=re.escape('skip=("reverse",)')):
        eqgt.check_rule(fn, x)
    report = eqgt.check_rule(fn, x, skip=("reverse",), raises=False)
    found = {f.check for f in report.failures}
    assert found == failing
    KEPT_TANGENTS.clear()
