"""A function that returns its value and its backward rule, a closure."""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from eqx_grads import RuleError


pytestmark = [pytest.mark.versions, pytest.mark.x64]


X = jnp.arange(1.0, 4.0)


TRANSFORMS = [
    lambda f, n=0: jax.grad(f, n),
    lambda f, n=0: jax.jit(jax.grad(f, n)),
    lambda f, n=0: jax.grad(jax.jit(f), n),
    lambda f, n=0: jax.grad(jax.checkpoint(f), n),
]


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


def test_trees():
    @eqg.custom_gradient
    def f(tree):
        return {"out": tree["a"] * tree["b"]}, lambda ct: {"a": ct["out"], "b": None, "c": None}

    tree = {"a": 2.0, "b": 3.0, "c": "text"}
    grad = eqx.filter_grad(lambda t: f(t)["out"])
    assert grad({**tree, "a": jnp.array(2.0), "b": jnp.array(3.0)})["a"] == 1.0
    pair = eqg.custom_gradient(lambda p: (p[0] * p[1], lambda ct: (ct, 2 * ct)))
    assert jax.grad(pair)((3.0, 4.0)) == (1.0, 2.0)


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
