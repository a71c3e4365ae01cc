"""`explain_nan` names a function of the library only where it is the same function."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest


ZEROS, ONES = jnp.zeros(2), jnp.ones((2, 2))
MATRIX = jnp.zeros((2, 2))
LARGE = jnp.array([9e3, 0.0])
EMPTY = jnp.full(2, -jnp.inf)


def _root_of_mean(x, axis=None):
    return jnp.sqrt(jnp.mean(x**2, axis))


def _over(x, y):
    return jnp.exp(x) / jnp.sum(jnp.exp(y))


def _shift(x):
    return x - jnp.max(x)


# For each a loss, the point, what the cure names, and what it does not.
LOOK_ALIKES = {
    "rms": (_root_of_mean, ZEROS, "safe.sqrt(jnp.mean(x**2))", "safe.std"),
    "rmse": (lambda x: _root_of_mean(x - 1.0), ZEROS + 1, "safe.sqrt(jnp.mean", "safe.std"),
    "rms of residuals in a dead branch": (
        lambda x: jnp.maximum(_root_of_mean(x - 1.0), 0.1),
        ZEROS + 1,
        "safe.sqrt(jnp.mean",
        "safe.std",
    ),
    "mean of the other axis": (
        lambda x: jnp.sum(_root_of_mean(x - jnp.mean(x, 0)[None], 1)),
        ONES,
        "safe.sqrt(",
        "safe.std",
    ),
    "means of rows for columns": (
        lambda x: jnp.sum(_root_of_mean(x - jnp.mean(x, 1)[None], 1)),
        ONES,
        "safe.sqrt(",
        "safe.std",
    ),
    "half of the mean": (
        lambda x: _root_of_mean(x - jnp.sum(x) / 4),
        ZEROS,
        "safe.sqrt(",
        "safe.std",
    ),
    "norm of a product with the transpose": (
        lambda x: jnp.sqrt(jnp.sum(x * x.T)),
        MATRIX,
        "safe.sqrt",
        "safe.norm",
    ),
    "outer product": (
        lambda x: jnp.sqrt(jnp.sum(x[:, None] * x[None])),
        ZEROS,
        "safe.sqrt",
        "safe.norm",
    ),
    "matrix product": (lambda x: jnp.sum(jnp.sqrt(x @ x)), MATRIX, "safe.sqrt", "safe.norm"),
    "half of a gradient": (
        lambda x: jnp.sqrt(jnp.sum(x * jax.lax.stop_gradient(x))),
        ZEROS,
        "safe.sqrt",
        "safe.norm",
    ),
    "norms of rows for columns": (
        lambda x: jnp.sum(x / jnp.linalg.norm(x, axis=1)[None]),
        MATRIX,
        "",
        "safe.normalize",
    ),
    "length": (lambda x: jnp.sum(jnp.sqrt(x * x.T + x**2)), MATRIX, "safe.sqrt", "hypot"),
    "sign": (lambda x: jnp.sum(x.T / jnp.abs(x)), MATRIX, "", "jnp.sign"),
    "softmax": (lambda x: jnp.sum(_over(x, x / 2)), LARGE, "", "softmax"),
    "a sum below": (lambda x: jnp.sum(x / jnp.sum(jnp.exp(x))), LARGE, "", "softmax"),
    "log of a quotient": (lambda x: jnp.sum(jnp.log(jnp.exp(x) / 3)), -LARGE, "", "softmax"),
    "log of another quotient": (
        lambda x: jnp.sum(jnp.log(_over(x, 2 * x))),
        -LARGE,
        "",
        "softmax",
    ),
    "sigmoid": (
        lambda x: jnp.sum(jnp.exp(x / 2) / (1 + jnp.exp(x))),
        LARGE,
        "",
        "nn.sigmoid",
    ),
    "shifted": (lambda x: jnp.sum(jnp.exp(_shift(x)) / 2), EMPTY, "", "softmax"),
    "shifted twice": (
        lambda x: (lambda y: jnp.sum(y - jnp.exp(y)))(_shift(x)),
        EMPTY,
        "",
        "softmax",
    ),
    "ratio": (lambda x: jnp.sum(jnp.expm1(x) / x.T), MATRIX, "", "expm1_ratio"),
    "log of cosh": (lambda x: jnp.sum(jnp.log(jnp.cosh(x) + 1)), LARGE, "", "log_cosh"),
    "log of expm1": (lambda x: jnp.sum(jnp.log(2 * jnp.expm1(x))), LARGE, "", "log_expm1"),
}
# These are the functions, in other forms.
THE_SAME = {
    "columns": (
        lambda x: jnp.sum(_root_of_mean(x - jnp.mean(x, 0)[None], 0)),
        ONES,
        "safe.std",
    ),
    "rows": (
        lambda x: jnp.sum(_root_of_mean(x - jnp.mean(x, 1, keepdims=True), 1)),
        ONES,
        "safe.std",
    ),
    "std of rows": (lambda x: jnp.sum(jnp.std(x, axis=1)), ONES, "safe.std"),
    "vmap": (lambda x: jnp.sum(jax.vmap(jnp.std)(x)), ONES, "safe.std"),
    "variance": (lambda x: jnp.sum(jnp.sqrt(jnp.var(x, 0, ddof=1))), ONES, "safe.std"),
    "products of rows": (
        lambda x: jnp.sum(jnp.sqrt(jnp.einsum("ij,ij->i", x, x))),
        MATRIX,
        "safe.norm",
    ),
    "directions": (
        lambda x: jnp.sum(x / jnp.linalg.norm(x, axis=1, keepdims=True)),
        MATRIX,
        "safe.normalize",
    ),
    "vmap of a direction": (
        lambda x: jnp.sum(jax.vmap(lambda x: x / jnp.linalg.norm(x))(x)),
        MATRIX,
        "safe.normalize",
    ),
    "attention": (
        lambda x: (jnp.exp(x) @ jnp.arange(2.0)) / jnp.sum(jnp.exp(x)),
        LARGE,
        "nn.softmax",
    ),
    "sigmoid of -x": (lambda x: jnp.sum(1 / (1 + jnp.exp(x))), LARGE, "nn.sigmoid(-x)"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_looks_alike_is_not_named(name):
    """The function that was named is another one: `safe.std` subtracts the mean, and so an
    RMSE that followed the cure was another loss."""
    loss, x, named, other = LOOK_ALIKES[name]
    report = eqg.explain_nan(loss, x)
    assert report.found
    cures = " ".join(record.cure for record in report.found)
    assert named in cures, str(report)
    assert other not in cures, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("name", THE_SAME)
def test_other_forms_are_named(name):
    loss, x, named = THE_SAME[name]
    report = eqg.explain_nan(loss, x)
    assert any(named in record.cure for record in report.found), str(report)


@pytest.mark.parametrize("x", [[0.0, 0.0, 0.0], [1.0, -2.0, 3.0]])
def test_the_cure_of_a_root_mean_square(x):
    x = jnp.array(x)
    cured = lambda x: eqg.safe.sqrt(jnp.mean(x**2))
    np.testing.assert_allclose(cured(x), _root_of_mean(x))
    expected = jax.grad(_root_of_mean)(x) if jnp.any(x) else jnp.zeros(3)
    np.testing.assert_allclose(jax.grad(cured)(x), expected, rtol=1e-6)


# ---------------------------------------------------------------- infinities of a mask

LEGAL = jnp.array([True, True, False])
LOGITS = jnp.array([1.0, 2.0, 3.0])


def _log_p(x):
    return jax.nn.log_softmax(jnp.where(LEGAL, x, -jnp.inf))


def _entropy(x):
    p = jax.nn.softmax(x[:2])
    return -jnp.sum(p * jnp.log(p))


def test_the_product_of_a_masked_entropy():
    """It was the line of the mask that was named, where there is nothing to mend."""

    def loss(x):
        logp = _log_p(x)
        return -jnp.sum(jnp.where(jnp.isfinite(logp), jnp.exp(logp) * logp, 0.0))

    (record,) = eqg.explain_nan(loss, LOGITS).found
    assert (record.kind, record.primitive, record.mask) == ("dead branch", "mul", "where")
    assert "jnp.exp(logp) * logp" in record.code
    assert "`eqg.safe.entropy(jnp.exp(x))`" in record.cure
    expected = jax.grad(_entropy)(LOGITS)
    for cured in (
        eqg.zero_safe(loss),
        lambda x: eqg.safe.entropy(jnp.exp(_log_p(x))),
        lambda x: (lambda y: -jnp.sum(jnp.exp(y) * jnp.where(jnp.isfinite(y), y, 0.0)))(
            _log_p(x)
        ),
    ):
        np.testing.assert_allclose(jax.grad(cured)(LOGITS), expected, atol=1e-6)


def _masked(x):
    return jnp.where(LEGAL, x, -jnp.inf)


# Of products that are NaN, what they are with another infinite factor.
PRODUCTS = {
    "probabilities": (lambda x, y: jnp.sum(jax.nn.softmax(_masked(x)) * y(_masked(x)))),
    "log-probabilities": (lambda x, y: jnp.sum(jnp.exp(_log_p(x)) * y(_log_p(x)))),
    "of the model": (lambda x, y: jnp.sum(x * (x - 3) * y(_masked(x)))),
    "dot": (lambda x, y: jnp.array([1.0, 0.5, 0.0]) @ y(_masked(x))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_gradient_is_finite_with_the_cure_of_a_product(name):
    """A `where` on the product mends the loss, but not the gradient."""
    loss = PRODUCTS[name]
    report = eqg.explain_nan(lambda x: loss(x, lambda y: y), LOGITS)
    assert report.found[0].is_forward
    assert "too late for the gradient" in report.found[0].cure
    cured = lambda x: loss(x, lambda y: jnp.where(LEGAL, y, 0.0))
    assert jnp.isfinite(cured(LOGITS))
    assert jnp.all(jnp.isfinite(jax.grad(cured)(LOGITS)))


# ---------------------------------------------------------------- forces


def _forces(q, x, divide, norm, around=lambda energy: energy):
    def energy(q, x):
        r = norm(x[:, None] - x[None])
        pair = divide(q[:, None] * q[None], r)  # HERE
        return jnp.sum(jnp.where(jnp.eye(len(x)) > 0, 0.0, pair))

    return jnp.sum(jax.grad(around(energy), 1)(q, x) ** 2)


@pytest.mark.slow
def test_a_quotient_in_forces():
    """Its cure was that of the norm below it, which does not help."""
    safe = lambda x: eqg.safe.norm(x, axis=-1)
    plain = lambda x: jnp.sqrt(jnp.sum(x**2, -1))
    x = jax.random.normal(jax.random.key(0), (3, 3))
    divide = lambda x, y: x / y
    by_zero = lambda energy: eqg.zero_safe(energy, policy="zero")
    (record,) = eqg.explain_nan(_forces, LOGITS, x, divide, safe).found
    assert (record.primitive, record.derivative_of) == ("integer_pow", "div")
    assert "`eqg.safe.divide(x, y)`" in record.cure
    assert "its second ones NaN" in record.cure
    assert "safe.norm" not in record.cure
    assert 'eqg.zero_safe(f, policy="zero")' in record.cure
    report = eqg.explain_nan(_forces, LOGITS, x, divide, plain)
    found = [(r.primitive, r.derivative_of) for r in report.found]
    assert found == [("div", "sqrt"), ("integer_pow", "div")]
    (table, _) = report.tables()
    assert "div, in the derivative of sqrt" in table.rows[0]
    # A second derivative of `safe.divide` at zero: NaN, and its cure is the mask.
    (record,) = eqg.explain_nan(_forces, LOGITS, x, eqg.safe.divide, safe).found
    assert "`safe.divide` has a kink or a pole there" in record.cure
    assert "eqg.safe.where(ok, f, x, other)" in record.cure
    masked = lambda x: jnp.sqrt(jnp.where(x.any(-1), jnp.sum(x**2, -1), 1.0))
    expected = jax.grad(_forces)(LOGITS, x, divide, masked)
    assert jnp.all(jnp.isfinite(expected))
    for norm in (safe, plain):
        gradient = jax.grad(_forces)(LOGITS, x, divide, norm, by_zero)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4)


# ---------------------------------------------------------------- `zero_safe` that is no cure


@pytest.mark.parametrize("is_nan", [False, True])
def test_it_is_said_that_zero_safe_alone_does_not_help(is_nan):
    """The cure of the dead branch begins with it."""

    def loss(x):
        other = jnp.sum(x * jnp.log(x)) if is_nan else jnp.linalg.norm(x)
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0)) + other

    x = jnp.zeros(2)
    assert jnp.any(jnp.isnan(jax.grad(eqg.zero_safe(loss))(x)))
    report = eqg.explain_nan(loss, x)
    assert any("`eqg.zero_safe(loss)` alone does not" in text for text in report.remarks)
