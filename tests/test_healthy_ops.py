"""Of no public op, `explain_nan` finds a fault, and `zero_safe` changes a number."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .cases import CASES


pytestmark = pytest.mark.conformance


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.clear_caches()


def _loss(fn_and_args):
    """The sum of the outputs."""
    fn, args = fn_and_args
    leaves = [x for x in jax.tree.leaves(fn(*args)) if eqx.is_inexact_array(x)]
    return sum((jnp.sum(x.real.astype(jnp.float32)) for x in leaves), jnp.zeros(()))


@pytest.mark.parametrize("name", [name for name in CASES if name != "nondifferentiable"])
def test_op(name):
    model = CASES[name].make()
    report = eqg.explain_nan(_loss, model)
    assert not report, str(report)
    expected = eqx.filter_jit(eqx.filter_value_and_grad(_loss))(model)
    got = eqx.filter_jit(eqx.filter_value_and_grad(eqg.zero_safe(_loss)))(model)
    # Up to the order of sums, which XLA chooses.
    assert eqx.tree_equal(got, expected, rtol=1e-6)
