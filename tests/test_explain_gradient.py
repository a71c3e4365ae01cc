"""`explain_gradient`: one call says what is wrong, or that nothing is."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest


KEY = jax.random.key(0)
XS = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)))


def mean_square(model, xs):
    return jnp.mean(jax.vmap(model)(xs) ** 2)


def mlp(activation=jnp.tanh):
    return eqx.nn.MLP(4, 2, 8, 2, activation=activation, key=KEY)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu])
def test_nothing_is_wrong(activation):
    """And the norms are the norms of the gradient."""
    report = eqg.explain_gradient(mean_square, mlp(activation), XS)
    assert not report
    layer = eqg.nn.LI(4, 2, beta=0.9, key=KEY)  # a library's field may hold a number
    assert not eqg.explain_gradient(lambda m, xs: jnp.sum(m(xs)[0] ** 2), layer, XS)
    value, grads = eqx.filter_value_and_grad(mean_square)(mlp(activation), XS)
    np.testing.assert_allclose(report.loss, value, rtol=1e-5)
    for i, layer in enumerate(grads.layers):
        norm = jnp.sqrt(jnp.sum(layer.weight**2) + jnp.sum(layer.bias**2))
        np.testing.assert_allclose(report.norms[f"layers[{i}]"], norm, rtol=1e-4)


def test_rounding_in_half_precision_is_no_kink():
    """The slopes of a loss in half precision are rounding errors, and differ on the sides."""
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x

    def loss(model, xs):
        hidden = jax.vmap(jax.tree.map(cast, model))(cast(xs))
        return jnp.mean(hidden.astype(jnp.float32) ** 2)

    for i in range(6):
        model = eqx.nn.MLP(4, 3, 8, 2, jnp.tanh, key=jax.random.key(i))
        assert not eqg.explain_gradient(loss, model, XS[:6])


def test_rounding_of_a_nearly_stationary_loss_is_no_kink():
    """In the first step of PPO, the ratio is one: the loss changes by units of rounding."""
    advantages = jax.random.normal(jax.random.key(4), (16,))
    actions = jnp.arange(16)[:, None] % 2

    def loss(model):
        log_p = jax.nn.log_softmax(jax.vmap(model)(XS))
        chosen = jnp.take_along_axis(log_p, actions, -1)[:, 0]
        ratio = jnp.exp(chosen - jax.lax.stop_gradient(chosen))
        clipped = jnp.clip(ratio, 0.8, 1.2) * advantages
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return -jnp.mean(jnp.minimum(ratio * advantages, clipped)) - 0.01 * jnp.mean(entropy)

    assert not eqg.explain_gradient(loss, eqx.nn.MLP(4, 2, 8, 1, key=KEY)).found


@pytest.mark.parametrize("tool", ["explain_gradient", "explain_zero", "explain_nan"])
def test_a_loss_that_raises(tool):
    """It has a derivative, and the error says what the check says."""
    loss = lambda w: eqx.error_if(jnp.sum(w), jnp.any(w < 0), "a negative weight")
    with pytest.raises(eqg.RuleError, match="a negative weight"):
        getattr(eqg, tool)(loss, jnp.array([-1.0, 1.0]))


def test_a_check_that_a_nan_fails():
    """As the check of a linear solver: the NaN is the cause, and not the check."""

    def loss(w):
        root = jnp.sqrt(w)
        return jnp.sum(eqx.error_if(root, jnp.any(jnp.isnan(root)), "a solver was given a NaN"))

    (symptom,) = eqg.explain_gradient(loss, jnp.array([-1.0, 1.0])).found
    assert (symptom.detail, symptom.primitive) == ("outside of the domain", "sqrt")


def test_the_layer_before_dead_units():
    """The operation is in the call of an MLP, which has several layers."""
    dead = eqx.tree_at(lambda m: m.layers[1].bias, mlp(jax.nn.relu), jnp.full(8, -100.0))
    found = eqg.explain_zero(mean_square, dead, XS).found
    details = {record.detail for record in found if record.kind == "dead units"}
    assert details == {"after `layers[1]`"}
