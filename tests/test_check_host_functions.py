"""What `check_rule` says of host functions: which output is wrong, one cause once."""

import re

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads.testing._report import PASSED


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
    assert "every entry is 3 times the expected one" in ahead.text
    assert "output['sin']" not in ahead.text
    assert back.where == ahead.where
    assert eqgt.check_rule(_two_outputs(1.0), X, checks=MODES).passed


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


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_a_rule_that_is_wrong_in_single_precision_only(factor):
    """Its values are compared with the values of the function for float64 arguments."""
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


# ---------------------------------------------------------------- `check_gradients`


def _host_sine(**options):
    def sine(x):
        return np.sin(x)

    return eqg.host_function(sine, out=lambda x: x, **options)


def _elementwise(sine, factor):
    return eqg.elementwise(lambda x: sine(x), lambda out, x: factor * jnp.cos(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cure"),
    [
        (
            {},
            "The rule of `<lambda>` at test_check_host_functions.py:.* can't be removed",
        ),
        ({"finite_difference": "central"}, "right without the rule of `<lambda>`"),
    ],
)
def test_a_wrong_rule_around_a_host_function(options, cure):
    sine, make = _host_sine(**options), _elementwise
    check = lambda fn: eqgt.check_gradients(
        lambda w, x: jnp.sum(fn(w * x) ** 2), jnp.array(0.7), jnp.arange(3.0), raises=False
    )
    assert check(make(sine, 1.0)).passed
    (fault,) = check(make(sine, 2.0)).found
    assert re.search(cure, fault.cure)


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


# ---------------------------------------------------------------- batches


ONE = jnp.ones((), "float32")


def host_function(fn, bwd):
    decorated = eqg.host_function(fn, out=lambda x: x, vmap_method="broadcast_all")
    decorated.def_bwd(bwd)
    return decorated


def failures(fn, *args):
    report = eqgt.check_rule(fn, *args, checks=("transforms",), raises=False)
    return [finding.where for finding in report["transforms"] if finding.verdict != PASSED]


def of_batch(x, mixed):
    return np.broadcast_to(mixed(x), x.shape).astype(x.dtype) if x.ndim else x


MIXED = {
    "right": lambda x: x,
    "rolled": lambda x: np.roll(x, 1, axis=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("width", [0.0, 1.0])
def test_cotangents_are_mixed(mixed, width):
    """Each example has its own cotangent, even if the function is defined at one argument
    only."""

    def square(x):
        if np.any(np.abs(x - 1) > width):
            raise ValueError("outside of the domain")
        return np.asarray(x**2)

    fn = host_function(square, lambda r, ct: (of_batch(2 * r[0] * ct, MIXED[mixed]),))
    found = failures(fn, ONE)
    assert bool(found) == (mixed != "right"), found
    assert all(("equal examples" in where) == (width == 0) for where in found)


@pytest.mark.slow
def test_a_rule_that_raises_at_other_arguments():
    def bwd(residuals, ct):
        if residuals[0] != 1:
            raise ValueError("not this one")
        return (2 * residuals[0] * ct,)

    report = eqgt.check_rule(
        host_function(lambda x: np.asarray(x**2), bwd),
        ONE,
        checks=("transforms",),
        raises=False,
    )
    assert any("vmap" in f.where and f.raised for f in report.failures), report


# ---------------------------------------------------------------- solvers


def _residual(y, a):
    return y**3 + y - a


_KEPT = []


def _newton(a, is_kept=False):
    if is_kept:
        _KEPT.append(a + 1)
    step = lambda _, y: y - _residual(y, a) / (3 * y**2 + 1)
    return jax.lax.fori_loop(0, 40, step, jnp.ones_like(a))


def _pair(y, a):
    return jnp.stack([y[0] ** 3 + y[0] - a[0] + 0.1 * y[1], y[1] ** 3 + 2 * y[1] - a[1]])


@eqg.implicit(_pair)
def _newton_of_pair(a):
    a = jax.lax.stop_gradient(a)
    y = jnp.zeros_like(a)
    for _ in range(8):
        y = y - jnp.linalg.solve(jax.jacfwd(_pair)(y, a), _pair(y, a))
    return y


@pytest.mark.slow
def test_tracers_of_lineax_beside_a_solve_of_jax():
    eqgt.check_rule(_newton_of_pair, jnp.array([2.0, 1.0]), checks=("leaks",))


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_tracer_that_a_solver_keeps(is_kept):
    root = eqg.implicit(_residual)(lambda a: _newton(a, is_kept))
    with jax.check_tracer_leaks(False):
        report = eqgt.check_rule(root, jnp.array([2.0, 1.0]), checks=("leaks",), raises=False)
    _KEPT.clear()
    assert report.passed == (not is_kept)
    if is_kept:
        assert "keeps a tracer" in str(report)
