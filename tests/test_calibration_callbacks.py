"""Calibration: one callback for all that a `vmap` runs at once; a warning."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import nn


class _Tokens(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, tokens):
        return jax.vmap(jax.vmap(self.layer))(tokens)


@pytest.mark.slow
def test_a_vmap_inside_of_a_model_is_one_callback(getkey, monkeypatch):
    calls, callback = [], jax.pure_callback

    def spy(fn, shape, *args, **options):
        def counted(*args):
            calls.append(np.shape(args[1]))
            return fn(*args)

        return callback(counted, shape, *args, **options)

    monkeypatch.setattr(jax, "pure_callback", spy)
    model = _Tokens(eqx.nn.Linear(2, 3, key=getkey()))
    rules = {eqx.nn.Linear: (nn.LSQ(4), nn.LSQ(4, channel_axis=-1))}
    batch = jr.normal(getkey(), (4, 5, 6, 2))
    want = 2 * jnp.mean(jnp.abs(batch), (0, 1, 2)) / 7**0.5

    got, _ = nn.quantize_model(model, rules, calibrate=batch)
    np.testing.assert_allclose(got.layer.input_quantizer.scale, want, rtol=1e-5)
    assert calls == [(5, 6, 2)] * 4
    calls.clear()
    call = lambda model, batch: jax.vmap(model)(batch)
    got, _ = nn.quantize_model(model, rules, calibrate=batch, call=call)
    np.testing.assert_allclose(got.layer.input_quantizer.scale, want, rtol=1e-5)
    assert calls == [(4, 5, 6, 2)]


class _Energy(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        energy = lambda x: jnp.sum(jnp.tanh(self.layer(x)))
        return jax.grad(energy)(x)


def test_calibration_of_a_model_that_differentiates(getkey):
    model = _Energy(eqx.nn.Linear(2, 3, key=getkey()))
    rules = {eqx.nn.Linear: (nn.LSQ(4), nn.LSQ(4))}
    batch = jr.normal(getkey(), (7, 2))
    got, _ = nn.quantize_model(model, rules, calibrate=batch)
    want = 2 * jnp.mean(jnp.abs(batch)) / 7**0.5
    np.testing.assert_allclose(got.layer.input_quantizer.scale, want, rtol=1e-5)


def test_negative_inputs_of_an_unsigned_quantizer():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jr.key(0))
    unsigned = nn.LSQ(bits=4, signed=False)
    rules = {eqx.nn.Linear: (nn.LSQ(bits=4), unsigned)}
    batch = jr.normal(jr.key(1), (20, 4))
    with pytest.warns(UserWarning, match=r"become zero, in `layers\[0\]` \(\d\d%\)\.") as found:
        nn.quantize_model(model, rules, calibrate=batch)
    assert len(found) == 1  # not of the layer behind the `relu`
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.quantize_model(model, rules, calibrate=jnp.abs(batch))
        # A zero point represents negative inputs.
        inputs = nn.FakeQuantize(4, signed=False, asymmetric=True, learn_scale=True)
        nn.quantize_model(model, {"*": (None, inputs)}, calibrate=batch)


def test_calibration_of_a_model_with_more_arguments():
    class Stateful(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x, state):
            return self.layer(x), state

    model = Stateful(eqx.nn.Linear(4, 2, key=jr.key(0)))
    rules = {eqx.nn.Linear: (nn.LSQ(bits=4), nn.LSQ(bits=4))}
    with pytest.raises(TypeError, match="'state'") as error:
        nn.quantize_model(model, rules, calibrate=jnp.ones((3, 4)))
    assert "`call=lambda model, batch: ...`" in "".join(error.value.__notes__)
