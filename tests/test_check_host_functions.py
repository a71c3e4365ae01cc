"""What `check_rule` says of host functions: which output is wrong, one cause once."""

import re

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


X = jnp.array([0.3, 0.8])
MODES = ("forward", "reverse")


def _sine_and_cosine(x):
    return {"cos": np.cos(x), "sin": np.sin(x)}


def _two_outputs(factor):
    two = eqg.host_function(_sine_and_cosine, out=lambda x: {"cos": x, "sin": x})

    @two.def_bwd
    def two_bwd(x, ct):
        return (ct["sin"] * np.cos(x) - factor * ct["cos"] * np.sin(x),)

    return two


@pytest.mark.slow
def test_the_output_that_is_wrong_is_named():
    report = eqgt.check_rule(_two_outputs(3.0), X, checks=MODES, raises=False)
    (ahead,), (back,) = report["forward"], report["reverse"]
    assert ahead.where == "`x` (in output['cos'])"
    assert "every entry is three times the expected one" in ahead.text
    assert "output['sin']" not in ahead.text
    assert back.where == ahead.where
    assert "every entry is three times the expected one" in back.text
    assert eqgt.check_rule(_two_outputs(1.0), X, checks=MODES).passed


@pytest.mark.slow
def test_more_outputs_than_are_told_apart():
    many = eqg.host_function(
        lambda x: [np.sin(x * k) for k in range(14)],
        out=lambda x: [x] * 14,
        finite_difference="complex",
    )
    assert eqgt.check_rule(many, X, checks=MODES).passed


@pytest.mark.slow
def test_one_cause_under_vmap_is_told_once():
    """A function that sums over the batch."""
    fn = lambda x: np.cumsum(np.sin(x)).reshape(x.shape)
    sums = eqg.host_function(
        fn, out=lambda x: x, vmap_method="expand_dims", finite_difference="complex"
    )
    report = eqgt.check_rule(sums, X, checks=("transforms",), raises=False)
    failures = [f.where.partition(",")[0] for f in report.failures]
    assert failures[:3] == ["vmap", "vmap of the derivative", "derivative of vmap"]
    assert "\n2. " not in str(report)
    assert "value of output" in report.failures[0].where
    assert "with `vmap_method='expand_dims'` the host function gets the whole" in str(report)


@pytest.mark.slow
def test_a_derivative_that_is_wrong_under_vmap_is_its_own_failure():
    batched = eqg.host_function(
        np.sin, out=lambda x: x, vmap_method="expand_dims", finite_difference="complex"
    )

    @eqg.custom_vjp
    def fn(x):
        return batched(x)

    fn.def_fwd(lambda x: (fn(x), x))
    slope = eqg.host_function(
        lambda x: np.cos(np.sort(x, 0)), out=lambda x: x, vmap_method="expand_dims"
    )
    fn.def_bwd(lambda x, ct: (ct * slope(x),))
    x = jnp.array([-0.3, -0.8])  # of smaller absolute value in the later examples
    report = eqgt.check_rule(fn, x, checks=("transforms",), raises=False)
    where = [f.where for f in report.failures]
    assert where
    assert all("derivative" in w or "sharding" in w for w in where)
    assert "vmap_method=" not in str(report)


@pytest.mark.slow
def test_more_calls_of_the_backward_rule_than_are_allowed():
    sine = eqg.host_function(np.sin, out=lambda x: x, max_rule_calls=1)
    sine.def_bwd(lambda x, ct: (ct * np.cos(x),))
    report = eqgt.check_rule(sine, X, order=1)
    assert report.passed
    (ahead,) = report["forward"]
    assert ahead.verdict == "skipped"
    assert "`max_rule_calls`" in ahead.text


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_rule_that_is_wrong_in_single_precision_only(factor):
    """Its values are compared with those of the function with float64 arguments."""
    sine = eqg.host_function(np.sin, out=lambda x: x)
    scale = lambda x: np.asarray(factor if x.dtype == np.float32 else 1.0, x.dtype)
    sine.def_bwd(lambda r, ct: (ct * np.cos(r[0]) * scale(r[0]),))
    report = eqgt.check_rule(sine, X.astype("float32"), checks=MODES, order=1, raises=False)
    assert report.passed == (factor == 1.0)


# ---------------------------------------------------------------- solvers


def _cube_root(a, b):
    return np.cbrt(a * b)


def _root_of(residual):
    return eqg.implicit(residual)(eqg.host_function(_cube_root, out=lambda a, b: a))


A, B = jnp.array(3.0), jnp.array(2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("residual", "cause"),
    [
        (
            lambda y, a, b: y**3 - a * jax.lax.stop_gradient(b),
            "likely cause: zero everywhere: the term of `b` is missing",
        ),
        (
            lambda y, a, b: y**3 - (a + jax.lax.stop_gradient(a)) / 2 * b,
            "the residual of `eqg.implicit` is\n  another equation",
        ),
        (
            lambda y, a, b: y**3 - a * b * (1 + 3e-4 * jnp.log(b / 2.0)),
            "a solver that stops at a tolerance",
        ),
    ],
)
def test_the_likely_cause_of_a_wrong_residual(residual, cause):
    report = eqgt.check_rule(_root_of(residual), A, B, checks=MODES, raises=False)
    text = report.failures[0].text
    assert cause in text
    assert not any(part in text for part in ("a cast to", "; every", "`step=`"))
    assert eqgt.check_rule(_root_of(lambda y, a, b: y**3 - a * b), A, B, checks=MODES).passed


@pytest.mark.slow
def test_an_equation_that_is_not_solved_is_told_once():
    report = eqgt.check_rule(
        _root_of(lambda y, a, b: y**3 - 2 * a * b), A, B,
        checks=("primal", "forward", "reverse", "adjoint"), raises=False,
    )  # fmt: skip
    assert len(report.failures) > 3
    assert "\n2. " not in str(report)
    assert str(report).count("is not small at the solution") == 1
    assert "EQX_ON_ERROR" not in str(report)
    assert "filter_jit" not in str(report)


# ---------------------------------------------------------------- `check_gradients`


def _host_sine(**options):
    def sine(x):
        return np.sin(x)

    return eqg.host_function(sine, out=lambda x: x, **options)


def _elementwise(sine, factor):
    return eqg.elementwise(lambda x: sine(x), lambda out, x: factor * jnp.cos(x))


def _custom_jvp(sine, factor):
    fn = eqg.custom_jvp(lambda x: sine(x))
    fn.def_jvp(lambda p, t: (fn(*p), factor * jnp.cos(p[0]) * t[0]))
    return fn


@pytest.mark.slow
@pytest.mark.parametrize("make", [_elementwise, _custom_jvp])
@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (
            {},
            "JAX can't differentiate what is beneath the rule of `<lambda>` at "
            "test_check_host_functions.py:.*, so this rule can't be removed",
        ),
        ({"finite_difference": "central"}, "right without the rule of `<lambda>`"),
    ],
)
def test_a_wrong_rule_around_a_host_function(make, options, cure):
    sine = _host_sine(**options)
    check = lambda fn: eqgt.check_gradients(
        lambda w, x: jnp.sum(fn(w * x) ** 2), jnp.array(0.7), jnp.arange(3.0), raises=False
    )
    assert check(make(sine, 1.0)).passed
    (fault,) = check(make(sine, 2.0)).found
    assert re.search(cure, fault.cure)


def test_a_wrong_rule_of_a_host_function_has_its_name():
    sine = _host_sine()
    sine.def_bwd(lambda residuals, ct: (2 * ct * np.cos(residuals[0]),))
    loss = lambda w, x: jnp.sum(sine(w * x) ** 2)
    report = eqgt.check_gradients(loss, jnp.array(0.7), jnp.arange(3.0), raises=False)
    assert "beneath the rule of `sine` at" in report.found[0].cure


# ---------------------------------------------------------------- callbacks beside each other


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, 64])
def test_many_callbacks_of_large_arrays(n):
    """All transformations in one program wait for ever in JAX 0.10.2, with two cores."""
    sine = _host_sine()
    sine.def_bwd(lambda residuals, ct: (ct * np.cos(residuals[0]),))

    def loss(w, x):
        a = sine(w * jnp.outer(x, x))
        return jnp.sum(jnp.linalg.cholesky(a @ a.T + jnp.eye(n)))

    args = jnp.array(0.7), jnp.linspace(0.0, 1.0, n)
    assert eqgt.check_rule(loss, *args, checks="transforms").passed
