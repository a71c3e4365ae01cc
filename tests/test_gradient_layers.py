"""Gradient layers in networks: a strength that changes, and probes."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError


pytestmark = pytest.mark.x64


def network(layer, key):
    key1, key2 = jr.split(key)
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(2, 3, key=key1),
            layer,
            eqx.nn.Lambda(jnp.tanh),
            eqx.nn.Linear(3, 1, key=key2),
        ]
    )


def loss(model, x):
    return jnp.sum(jnp.sin(model(x)))


def test_a_strength_can_change_without_compiling_again():
    model = network(nn.GradientReversal(jnp.array(0.0)), jr.key(0))
    traced = []

    @eqx.filter_jit
    def grad(model):
        traced.append(1)
        return eqx.filter_grad(loss)(model, jnp.ones(2))

    weights = []
    for progress in (0.1, 0.5):
        strength = eqg.reversal_schedule(progress)
        model = eqx.tree_at(lambda m: m.layers[1].strength, model, strength)
        grads = grad(model)
        assert grads.layers[1].strength == 0.0  # the value does not depend on it
        weights.append(grads.layers[0].weight / strength)
    assert len(traced) == 1
    np.testing.assert_allclose(*weights, rtol=1e-5)


def expansive(steps):
    """A loss of a state that expands threefold at each step, with something around it."""

    def of_state(layer, h):
        step = lambda h, _: (layer(jnp.tanh(3 * h)), None)
        return jnp.sum(jax.lax.scan(step, h, None, steps)[0])

    return jax.checkpoint(of_state)


class TestProbe:
    def test_statistics_of_every_step(self):
        probe = nn.GradientProbe()
        found = jax.jit(jax.grad(expansive(3)))(probe, jnp.zeros(4)).slot
        assert found.steps == 3
        assert jnp.allclose(found.norm, 2 * (1 + 3 + 9))
        assert jnp.allclose(found.mean_max, (1 + 3 + 9) / 3)

    def test_in_the_gradient_flow(self, getkey):
        x = jr.normal(getkey(), (2,))
        model = network(nn.GradientProbe(), getkey())
        flow = eqg.gradient_flow(loss, model, x)
        assert list(flow) == ["layers[0]", "layers[1]", "layers[3]"]
        norm = eqx.filter_grad(loss)(model, x).layers[1].slot.norm
        np.testing.assert_allclose(flow["layers[1]"], [norm], rtol=1e-6)
        only = eqg.gradient_flow(loss, model, x, where=lambda m: m.layers[1])
        assert list(only) == ["layers[1]"]

    def test_a_slot_of_another_shape(self, getkey):
        with pytest.raises(RuleError, match=r"slot that does not fit(?s:.)*float..\[3\]"):
            network(nn.GradientProbe(jnp.zeros(4)), getkey())(jnp.ones(2))
