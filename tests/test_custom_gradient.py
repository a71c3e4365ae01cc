"""A function that returns its value and its backward rule, a closure."""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from eqx_grads import RuleError


X = jnp.arange(1.0, 4.0)


@eqg.custom_gradient
def scaled_product(x, y, *, scale=1.0):
    """The product; its gradient is `scale` times too large."""
    return x * y, lambda ct: (scale * ct * y, scale * ct * x)


TRANSFORMS = [
    lambda f, n=0: jax.grad(f, n),
    lambda f, n=0: jax.jit(jax.grad(f, n)),
    lambda f, n=0: jax.grad(jax.jit(f), n),
    lambda f, n=0: jax.grad(jax.checkpoint(f), n),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients(transform):
    assert transform(scaled_product, (0, 1))(2.0, 3.0) == (3.0, 2.0)
    assert transform(lambda x: scaled_product(x, 3.0, scale=5.0))(2.0) == 15.0
    assert transform(lambda y: scaled_product(y=y, x=2.0))(3.0) == 2.0


def test_metadata():
    assert scaled_product.__name__ == "scaled_product"
    assert scaled_product.__doc__.startswith("The product")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_traced_values_anywhere(transform):
    def loss(x, scale):
        @eqg.custom_gradient
        def f(y):
            intermediate = jnp.exp(y) * scale

            def gradient(ct):
                return ct * intermediate * scale

            return jnp.sin(y), gradient

        return f(x)

    expected = jnp.exp(0.5) * 9.0
    assert jnp.allclose(transform(loss)(0.5, 3.0), expected)
    assert jnp.allclose(jax.vmap(transform(loss), (None, 0))(0.5, jnp.array([3.0])), expected)
    body = lambda c, s: (loss(c, s), None)
    scanned = lambda x: jax.lax.scan(body, x, jnp.array([3.0]))[0]
    assert jnp.allclose(transform(scanned)(0.5), expected)


def test_forward_mode_and_second_order():
    f = eqg.custom_gradient(lambda x: (jnp.sin(x), lambda ct: ct * jnp.cos(x)))
    assert jnp.allclose(jax.jvp(f, (0.5,), (1.0,))[1], jnp.cos(0.5))
    assert jnp.allclose(jax.hessian(f)(0.5), -jnp.sin(0.5))
    assert jnp.allclose(jax.grad(jax.grad(f))(0.5), -jnp.sin(0.5))


def test_trees():
    @eqg.custom_gradient
    def f(tree):
        return {"out": tree["a"] * tree["b"]}, lambda ct: {"a": ct["out"], "b": None, "c": None}

    tree = {"a": 2.0, "b": 3.0, "c": "text"}
    grad = eqx.filter_grad(lambda t: f(t)["out"])
    assert grad({**tree, "a": jnp.array(2.0), "b": jnp.array(3.0)})["a"] == 1.0
    pair = eqg.custom_gradient(lambda p: (p[0] * p[1], lambda ct: (ct, 2 * ct)))
    assert jax.grad(pair)((3.0, 4.0)) == (1.0, 2.0)


def test_errors():
    def f(x):
        return x

    with pytest.raises(RuleError, match=r"`f` did not return a value and a function"):
        jax.grad(eqg.custom_gradient(f))(1.0)
    wrong = eqg.custom_gradient(lambda x, y: (x * y, lambda ct: (ct,)))
    with pytest.raises(
        RuleError, match=r"did not return one cotangent for each(?s:.)*`x`, `y`"
    ):
        jax.grad(wrong)(1.0, 2.0)


class TestErrorsNameTheUsersLine:
    """And never a file of this library."""

    @staticmethod
    def _scaled(k):
        @eqg.custom_gradient
        def scaled(x):
            return x * k, lambda ct: ct * k

        return scaled

    @pytest.mark.parametrize(
        "loss",
        [
            lambda k: TestErrorsNameTheUsersLine._scaled(k)(X).sum(),
            lambda k: eqg.elementwise(lambda x: x * k, lambda out, x: k)(X).sum(),
            lambda k: eqg.custom_gradient(lambda x, *, k: (x * k, lambda ct: ct))(X, k=k).sum(),
        ],
    )
    @pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
    def test_what_is_closed_over(self, loss, compile):
        with pytest.raises(RuleError, match="was differentiated with respect to") as caught:
            compile(jax.grad(loss))(2.0)
        files = re.findall(r'file "(.*)"', str(caught.value))
        assert files
        assert set(files) == {__file__}

    def test_jax_names_the_function_too(self):
        @eqg.custom_gradient
        def positive(x):
            return x if x[0] > 0 else -x, lambda ct: ct

        match = rf"tracing the function positive at {re.escape(__file__)}:\d+ for"
        with pytest.raises(jax.errors.TracerBoolConversionError, match=match):
            jax.jit(positive)(X)

        def of_traced(k):
            f = eqg.custom_gradient(lambda x: (x if x[0] > k else -x, lambda ct: ct))
            return f(X)

        with pytest.raises(
            jax.errors.TracerBoolConversionError, match=rf"<lambda> at {re.escape(__file__)}:"
        ):
            jax.jit(of_traced)(2.0)
