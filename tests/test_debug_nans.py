"""At finite arguments, no op makes a NaN on the way to its value or its gradient: with
`jax.debug_nans` and `jax.disable_jit` together, JAX looks at every operation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import safe, ste

from .cases import CASES


def _run(fn, args):
    """The value, and the cotangents of all arguments that are not integers."""
    with jax.debug_nans(True), jax.disable_jit():
        out, pull_back = eqx.filter_vjp(fn, *args)
        ones = lambda x: jnp.ones_like(x) if eqx.is_inexact_array(x) else None
        return out, pull_back(jax.tree.map(ones, out))


# One raises when it is differentiated; the other differentiates a branch that makes a NaN.
NOT_HERE = ("nondifferentiable", "zero_safe")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_HERE])
def test_no_op_makes_a_nan(name):
    fn, args = CASES[name].make()
    _run(fn, args)


X = jnp.array([0.5, 1.0, 2.0])
ZERO = jnp.zeros(2)
QUICK = {
    "logsumexp": (safe.logsumexp, X),
    "logsumexp, b": (lambda x: safe.logsumexp(x, b=x), X),
    "std": (safe.std, X),
    "log_expm1": (safe.log_expm1, X),
    "log_sub_exp": (safe.log_sub_exp, X + 1, X),
    "entropy": (safe.entropy, X),
    "one_hot_argmax": (ste.one_hot_argmax, X),
    "top_k": (lambda x: ste.top_k(x, 1), X),
    "vector_quantize": (lambda x: ste.vector_quantize(x, jnp.eye(3))[0], X),
}
# Where the derivative is a convention.
AT_CORNERS = {
    "norm": (safe.norm, ZERO),
    "norm, 1": (lambda x: safe.norm(x, 1), ZERO),
    "norm, inf": (lambda x: safe.norm(x, jnp.inf), ZERO),
    "norm, 3": (lambda x: safe.norm(x, 3), ZERO),
    "norm, -1": (lambda x: safe.norm(x, -1), ZERO),
    "normalize": (safe.normalize, ZERO),
    "std": (safe.std, ZERO),
    "cosine_similarity": (safe.cosine_similarity, ZERO, ZERO),
    "pairwise_distance": (safe.pairwise_distance, jnp.zeros((2, 2))),
    "entropy": (safe.entropy, ZERO),
    "softmax": (safe.softmax, jnp.full(2, -jnp.inf)),
    "logsumexp": (safe.logsumexp, jnp.full(2, -jnp.inf)),
    "hypot": (safe.hypot, ZERO, ZERO),
    "arctan2": (safe.arctan2, ZERO, ZERO),
    "sqrt": (safe.sqrt, ZERO),
    "log": (safe.log, ZERO),
    "xlogy": (safe.xlogy, ZERO, ZERO),
    "xlog1py": (safe.xlog1py, ZERO, ZERO - 1),
    "power": (safe.power, ZERO, jnp.array([0.5, 2.0])),
    "divide": (safe.divide, ZERO + 1, ZERO),
    "arccos": (safe.arccos, ZERO + 1),
    "log_expm1": (safe.log_expm1, ZERO),
    "log_sub_exp": (safe.log_sub_exp, ZERO, ZERO),
    "log1p_ratio": (safe.log1p_ratio, ZERO - 1),
    "log1p_ratio at zero": (safe.log1p_ratio, ZERO),
    "expm1_ratio": (safe.expm1_ratio, ZERO),
    "sinhc": (safe.sinhc, ZERO),
    "log_cosh": (safe.log_cosh, ZERO),
}


@pytest.mark.parametrize("name", QUICK)
def test_no_nan_at_ordinary_points(name):
    fn, *args = QUICK[name]
    _run(fn, args)


@pytest.mark.thorough
@pytest.mark.parametrize("name", AT_CORNERS)
def test_no_nan_at_corners(name):
    fn, *args = AT_CORNERS[name]
    _run(fn, args)


def test_a_nan_still_comes_out():
    """As before: what is outside of the domain, and what a NaN went into."""
    nan = jnp.array([1.0, jnp.nan, 2.0])
    assert jnp.isnan(safe.std(nan))
    assert jnp.isnan(safe.std(X, where=X > 5))
    assert jnp.isnan(safe.logsumexp(X, b=-X))
    assert jnp.isnan(safe.log_expm1(-1.0))
    assert jnp.isnan(safe.log_sub_exp(0.0, 1.0))
    assert jnp.isnan(ste.one_hot_argmax(nan)).all()
    assert jnp.isnan(ste.top_k(nan, 1)).all()
    assert jnp.isnan(ste.vector_quantize(nan, jnp.eye(3))[0]).all()
    np.testing.assert_array_equal(jax.grad(lambda x: safe.std(x, where=x > 5))(X), 0.0)
    stops = pytest.raises(FloatingPointError, match="nan")
    with jax.debug_nans(True), jax.disable_jit(), stops:
        safe.log_expm1(-1.0)
