"""Calibration by `nn.quantize_model`: of several models, and warnings."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import nn


RULES = {eqx.nn.Linear: (nn.LSQ(4), nn.LSQ(4))}


class Energy(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return jax.grad(lambda x: jnp.sum(jnp.tanh(self.layer(x))))(x)


def test_calibration_of_a_model_that_differentiates(getkey):
    model = Energy(eqx.nn.Linear(2, 3, key=getkey()))
    batch = jr.normal(getkey(), (7, 2))
    got, _ = nn.quantize_model(model, RULES, calibrate=batch)
    want = 2 * jnp.mean(jnp.abs(batch)) / 7**0.5
    np.testing.assert_allclose(got.layer.input_quantizer.scale, want, rtol=1e-5)
    # A function of the weight may stand for a pair.
    new, _ = nn.quantize_model([model.layer], {eqx.nn.Linear: jnp.abs})
    np.testing.assert_array_equal(new[0].quantized_weight(), jnp.abs(model.layer.weight))


def test_negative_inputs_of_an_unsigned_quantizer():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jr.key(0))
    rules = {eqx.nn.Linear: (nn.LSQ(bits=4), nn.LSQ(bits=4, signed=False))}
    batch = jr.normal(jr.key(1), (200, 4)) + 1.6
    with pytest.warns(UserWarning, match=r"`layers\[0\]` is unsigned, and \d% of") as found:
        nn.quantize_model(model, rules, calibrate=batch)
    assert len(found) == 1  # not of the layer behind the `relu`
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.quantize_model(model, rules, calibrate=jnp.abs(batch).at[0, 0].set(-1.0))
        # A zero point represents negative inputs.
        inputs = nn.FakeQuantize(4, signed=False, asymmetric=True, learn_scale=True)
        nn.quantize_model(model, {"*": (None, inputs)}, calibrate=batch)
