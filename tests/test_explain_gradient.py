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


ONES = jnp.asarray(np.ones(4))


def normalized(linear, xs):
    h = jax.vmap(linear)(xs)
    return jnp.mean(((h - h.mean(1, keepdims=True)) / h.std(1, keepdims=True) - 0.3) ** 2)


# A loss, what makes a model, an argument, and the kind, the detail and what is named.
SYMPTOMS = {
    "NaN": (lambda m, xs: jnp.mean(jnp.sqrt(0.0 * jax.vmap(m)(xs))), mlp, XS,
        "not finite", "true singularity", ""),
    "noise": (normalized, lambda: eqx.nn.Linear(4, 2, key=KEY), XS, "rounding noise", "", ""),
    "number in a layer of Equinox": (mean_square,
        lambda: eqx.tree_at(lambda m: m.layers[1].bias, mlp(), 0.5), XS,
        "no array", "the Python number 0.5", "layers[1].bias"),
    "kink": (lambda w, x: jnp.sum(jnp.abs(w - x) + w), lambda: ONES, ONES, "kink",
        "along a random direction, the slope is ", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SYMPTOMS)
def test_symptoms(name):
    loss, make, x, kind, detail, named = SYMPTOMS[name]
    report = eqg.explain_gradient(loss, make(), x)
    assert {s.kind for s in report.found} == {kind}
    assert all(s.detail.startswith(detail) for s in report.found)
    text = " ".join(str(report).split())
    assert named in text
    assert text.startswith(f"What may keep the model from learning: {kind}.")
    assert all(s.cure in text for s in report.found)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu])
def test_nothing_is_wrong(activation):
    """And the norms are the norms of the gradient."""
    report = eqg.explain_gradient(mean_square, mlp(activation), XS)
    assert not report
    layer = eqg.nn.LI(4, 2, beta=0.9, key=KEY)  # a library's field may hold a number
    assert not eqg.explain_gradient(lambda m, xs: jnp.sum(m(xs)[0] ** 2), layer, XS)
    value, grads = eqx.filter_value_and_grad(mean_square)(mlp(activation), XS)
    assert str(report).startswith("Nothing is wrong with the gradient")
    np.testing.assert_allclose(report.loss, value, rtol=1e-5)
    for i, layer in enumerate(grads.layers):
        norm = jnp.sqrt(jnp.sum(layer.weight**2) + jnp.sum(layer.bias**2))
        np.testing.assert_allclose(report.norms[f"layers[{i}]"], norm, rtol=1e-4)


def test_what_is_said_beside_symptoms():
    bias = jnp.full(8, -30.0).at[0].set(0.0)
    model = eqx.tree_at(lambda m: m.layers[0].bias, mlp(), bias)
    report = eqg.explain_gradient(mean_square, model, XS)
    assert not report
    assert "layers[0].bias is zero for 7 of 8 units" in str(report)
    report = str(eqg.explain_gradient(lambda t: jnp.floor(100 * t), jnp.array(0.1234)))
    assert "flat here, but changes over longer steps" in " ".join(report.split())
    straight = lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)
    for rounded, is_said in ((jnp.round, True), (eqg.ste.round, False), (straight, False)):
        report = eqg.explain_gradient(lambda w, f=rounded: jnp.sum((w + f(3 * w)) ** 2), ONES)
        assert ("No gradient passes through `round`" in str(report)) == is_said
    loss = lambda w: jax.lax.while_loop(lambda s: s < 9, lambda s: s * w, jnp.array(1.0))
    report = eqg.explain_gradient(loss, jnp.array(2.0))
    assert [s.kind for s in report.found] == ["no reverse mode"]
    assert any("forward mode" in remark for remark in report.remarks)
    safe = eqg.zero_safe(lambda w: jnp.sum(jnp.where(w > 0, jnp.sqrt(w), 0.0)))
    report = eqg.explain_gradient(safe, jnp.array([0.0, 4.0]))
    assert (bool(report), report.norms, report.remarks) == (False, {"model": 0.25}, [])


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


def test_the_norm_of_a_gradient_whose_square_overflows():
    loss = lambda w, x: jnp.sum(w * x)
    report = eqg.explain_gradient(loss, jnp.ones(2), jnp.array([3e25, 4e25]))
    assert [symptom.kind for symptom in report.found] == ["exploding"]
    np.testing.assert_allclose(report.norms["model"], 5e25, rtol=1e-6)
    with jax.enable_x64(True):
        large = eqg.explain_gradient(loss, jnp.ones(2), jnp.array([3e200, 4e200]))
    np.testing.assert_allclose(large.norms["model"], 5e200)


@pytest.mark.parametrize("tool", ["explain_gradient", "explain_zero", "explain_nan"])
def test_a_loss_that_raises(tool):
    """It has a derivative, and the error says what the check says."""
    loss = lambda w: eqx.error_if(jnp.sum(w), jnp.any(w < 0), "a negative weight")
    with pytest.raises(eqg.RuleError, match="raises an error") as error:
        getattr(eqg, tool)(loss, jnp.array([-1.0, 1.0]))
    assert "a negative weight" in str(error.value)
    assert "no derivative" not in str(error.value)


def test_a_check_that_a_nan_fails():
    """As the check of a linear solver: the NaN is the cause, and not the check."""

    def loss(w):
        root = jnp.sqrt(w)
        return jnp.sum(eqx.error_if(root, jnp.any(jnp.isnan(root)), "a solver was given a NaN"))

    report = eqg.explain_gradient(loss, jnp.array([-1.0, 1.0]))
    (symptom,) = report.found
    assert (symptom.kind, symptom.detail) == ("not finite", "outside of the domain")
    assert symptom.primitive == "sqrt"
    assert any("a solver was given a NaN" in remark for remark in report.remarks)


def test_the_layer_before_dead_units():
    """The operation is in the call of an MLP, which has several layers."""
    dead = eqx.tree_at(lambda m: m.layers[1].bias, mlp(jax.nn.relu), jnp.full(8, -100.0))
    found = eqg.explain_zero(mean_square, dead, XS).found
    details = {record.detail for record in found if record.kind == "dead units"}
    assert details == {"after `layers[1]`"}
