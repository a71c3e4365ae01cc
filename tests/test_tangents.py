"""Arithmetic in which `None` is zero: a vector space, leaf by leaf and on whole trees."""

import equinox as eqx
import eqx_grads.tangents as tangents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError


pytestmark = [pytest.mark.versions, pytest.mark.x64]


PRIMAL = {"a": jnp.zeros(2), "b": (jnp.zeros(2), jnp.zeros(2))}


def dense(t):
    return tangents.materialize(PRIMAL, t)


class TestSwappedArguments:
    """A tangent and its value, or a tangent and its factor, in the wrong order."""

    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))

    @pytest.mark.parametrize(
        ("primal", "t"),
        [
            (linear, tangents.of(linear, bias=jnp.ones(3))),
            ({"x": jnp.ones(2), "n": 3}, {"x": jnp.ones(2), "n": None}),
            ({"x": jnp.ones(2), "n": 3}, None),
            ((jnp.ones(2), jnp.tanh), (None, None)),
            ([jnp.ones(2), jax.random.key(0)], [jnp.ones(2), None]),
            ([jnp.ones(2), np.arange(2)], [jnp.ones(2), np.zeros(2, jax.dtypes.float0)]),
            ((jnp.ones(2), {"a": jnp.ones(3)}), (jnp.ones(2), None)),
        ],
    )
    def test_materialize(self, primal, t):
        dense = tangents.materialize(primal, t)
        assert jax.tree.leaves(dense)
        with pytest.raises(RuleError, match="A tangent does not fit its value"):
            tangents.materialize(t, primal)

    def test_materialize_names_the_leaf_and_the_order(self):
        t = tangents.of(self.linear, bias=jnp.ones(3))
        with pytest.raises(
            RuleError, match=r"at primal.weight(.|\n)*`materialize\(primal, t\)`"
        ):
            tangents.materialize(t, self.linear)

    def test_the_dtype_is_that_of_the_value(self):
        t = tangents.materialize(jnp.ones(2, "bfloat16"), jnp.ones(2))
        assert t.dtype == "bfloat16"

    def test_project(self):
        ct = tangents.of(self.linear, bias=jnp.ones(3))
        assert tangents.project(ct, self.linear).bias.shape == (3,)
        with pytest.raises(RuleError, match=r"at \.weight"):
            tangents.project(self.linear, ct)
        with pytest.raises(RuleError, match="does not fit"):
            tangents.project(self.linear, None)

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (lambda t: tangents.scale(2, jnp.array(0.5)), "was an integer"),  # it was 0
            (lambda t: tangents.scale(jnp.array(2), jnp.ones(3)), "was an integer"),
            (lambda t: tangents.scale(2.0, t), "The factor `s` of a tangent is not"),
            (lambda t: tangents.scale(2.0, None), "The factor `s` of a tangent is not"),
            (lambda t: tangents.where(t, jnp.array(True), t), "."),
            (lambda t: tangents.where(t, t, jnp.array(True)), "."),
            (lambda t: tangents.linear(t, jnp.sum), "The `fn` of `tangents.linear` is not"),
        ],
    )
    def test_others(self, call, match):
        with pytest.raises(RuleError, match=match):
            call({"x": jnp.array(0.5)})


class TestProject:
    @pytest.mark.parametrize("shape", [(), (3,), (1, 3), (5, 1), (1, 1), (5, 3), (1,)])
    def test_broadcasting(self, shape):
        """The witness: autodiff of the broadcast."""
        primal, ct = jnp.zeros(shape), jnp.arange(15.0).reshape(5, 3)
        (expected,) = jax.vjp(lambda x: jnp.broadcast_to(x, (5, 3)), primal)[1](ct)
        assert jnp.array_equal(tangents.project(ct, primal), expected)
