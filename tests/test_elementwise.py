"""Rules written as a line of partial derivatives."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def test_out_is_differentiated_by_the_rule_itself():
    exp = eqg.elementwise(jnp.exp, lambda out, x: out)
    third = jax.grad(jax.grad(jax.grad(exp)))
    assert jnp.allclose(third(0.5), jnp.exp(0.5))
    assert jnp.allclose(jax.jacfwd(jax.jacrev(exp))(0.5), jnp.exp(0.5))


def test_only_the_partials_that_are_needed():
    def fail(*_):
        raise AssertionError("called")

    f = eqg.elementwise(lambda x, y: x * y, (lambda out, x, y: y, fail))
    assert jax.grad(f)(2.0, 3.0) == 3.0
    with pytest.raises(AssertionError, match="called"):
        jax.grad(f, 1)(2.0, 3.0)


def test_defaults_of_keyword_only_arguments():
    power = eqg.elementwise(lambda x, *, k=2.0: x**k, lambda out, x, *, k: k * x ** (k - 1))
    assert jax.grad(power)(3.0) == 6.0
    assert jax.grad(lambda x: power(x, k=3.0))(2.0) == 12.0


def test_dtypes():
    f = eqg.elementwise(jnp.tanh, lambda out, x: 1 - out**2)
    for dtype in ("float16", "bfloat16", "float32", "complex64"):
        x = jnp.array([0.5, 1.5], dtype)
        _, t = jax.jvp(f, (x,), (x,))
        assert t.dtype == dtype
    mixed = eqg.elementwise(
        lambda x, y: x.astype("float32") * y, lambda out, x, y: (y, x.astype("float32"))
    )
    grads = jax.grad(mixed, (0, 1))(jnp.array(2.0, "bfloat16"), jnp.array(3.0, "float32"))
    assert [g.dtype for g in grads] == ["bfloat16", "float32"]
    assert eqg.elementwise(jnp.abs, lambda out, x: 3)(jnp.array(-1.0)) == 1.0
    assert jax.grad(eqg.elementwise(jnp.abs, lambda out, x: 3))(1.0) == 3.0


def test_arguments_left_to_their_defaults():
    f = eqg.elementwise(
        jax.nn.leaky_relu, lambda out, x, slope=0.01: (jnp.where(x > 0, 1.0, slope), None)[:1]
    )
    assert jax.grad(f)(-2.0) == jax.grad(jax.nn.leaky_relu)(-2.0)
    with pytest.raises(RuleError, match="`leaky_relu` has 2 arguments, and was given 1"):
        jax.grad(f)(-2.0, 0.5)
    gelu = eqg.elementwise(jax.nn.gelu, lambda out, x: jax.nn.sigmoid(1.702 * x))
    assert jnp.allclose(jax.grad(gelu)(1.0), jax.nn.sigmoid(1.702))


class TestErrors:
    def test_numpy(self):
        """It runs eagerly, and in the derivative of an eager call."""
        f = eqg.elementwise(np.sin, lambda out, x: jnp.cos(x))
        assert jnp.allclose(jax.grad(f)(1.0), jnp.cos(1.0))
        error = jax.errors.TracerArrayConversionError
        with pytest.raises(error, match="traced array") as caught:
            jax.jit(f)(1.0)
        notes = caught.value.__notes__
        assert sum("`eqx_grads.host_function`" in note for note in notes) == 1
