"""The value of one thing to the bit, the derivative of another."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close


pytestmark = pytest.mark.x64


VALUES = [0.0, -0.0, 1e-45, 1e30, -1e30, np.inf, -np.inf, np.nan, 0.1]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
def test_the_value_is_exact(wrap):
    """Also where the usual `s + stop_gradient(v - s)` is NaN or rounds."""
    value = jnp.array(VALUES, "float32")
    surrogate = jnp.array(VALUES[::-1], "float32")
    out = wrap(eqg.replace_gradient)(value, surrogate)
    assert np.array_equal(np.asarray(out).view("int32"), np.asarray(value).view("int32"))
    grad = jax.grad(lambda s: eqg.replace_gradient(value, s)[8])(surrogate)
    assert jnp.array_equal(grad, jnp.zeros(9, "float32").at[8].set(1.0))


class TestWithGradientOf:
    def test_the_function_is_never_differentiated(self):
        host = lambda x: jax.pure_callback(np.round, jax.ShapeDtypeStruct((), x.dtype), x)
        f = eqg.with_gradient_of(host, lambda x: 3 * x)
        for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd):
            assert transform(f)(jnp.array(0.7)) == 3.0
            assert transform(f)(0.7) == 3.0

    def test_parameters_of_modules(self):
        hard, soft = (
            eqx.nn.Linear("scalar", "scalar", key=jax.random.key(i)) for i in range(2)
        )
        f = eqg.with_gradient_of(hard, soft)
        x = jnp.array(2.0)
        assert f(x) == hard(x)
        grad = eqx.filter_jit(eqx.filter_grad(lambda f, x: f(x)))(f, x)
        assert grad.surrogate_fn.weight == 2.0
        assert grad.fn.weight == 0.0


def test_methods_in_the_body_of_a_class():
    class Step(eqx.Module):
        slope: jax.Array

        def hard(self, x):
            return jnp.heaviside(x, 0.0)

        def smooth(self, x):
            return jax.nn.sigmoid(self.slope * x)

        __call__ = eqg.with_gradient_of(hard, smooth)
        apply = eqg.with_gradient_of(hard, smooth)

    step, x = Step(jnp.array(2.0)), jnp.array(0.5)
    for call in (lambda args: args[0](args[1]), lambda args: args[0].apply(args[1])):
        assert call((step, x)) == 1.0
        got = eqx.filter_grad(call)((step, x))
        expected = eqx.filter_grad(lambda args: args[0].smooth(args[1]))((step, x))
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected))


def test_a_number_in_a_module_is_static():
    """The surrogate may branch on it, under `jit` too."""

    class Leaky(eqx.Module):
        weight: jax.Array
        slope: float = 0.1

        def smooth(self, x):
            return self.weight * x if self.slope > 0 else x

        __call__ = eqg.with_gradient_of(lambda self, x: jnp.round(self.weight * x), smooth)

    loss = lambda leaky, x: jnp.sum(leaky(x))
    leaky, x = Leaky(jnp.array(2.0)), jnp.array([0.3, 0.4])
    grad = eqx.filter_jit(eqx.filter_grad(loss))(leaky, x)
    assert_close(grad.weight, jnp.sum(x))
    assert jax.jit(loss, static_argnums=0)(Leaky(2.0), x) == 2.0
