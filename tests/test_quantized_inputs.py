"""`quantize_model` of layers whose weights are quantized already: quantizers for inputs."""

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import nn, RuleError


@pytest.mark.slow
def test_inputs_of_a_model_with_quantized_weights(getkey):
    """Training goes on with quantized inputs: the weights and their scales stay."""
    model = eqx.nn.MLP(4, 2, 8, 1, key=getkey())
    weights = nn.LSQ(bits=3, channel_axis=0)
    inputs = nn.FakeQuantize(4, learn_scale=True)
    batch = jr.normal(getkey(), (20, 4))
    first, _ = nn.quantize_model(model, {eqx.nn.Linear: weights})
    trained = jax.tree.map(lambda x: 1.5 * x if eqx.is_inexact_array(x) else x, first)
    for which in (eqx.nn.Linear, nn.Quantized, "layers[*]", eqx.nn.MLP):
        got, report = nn.quantize_model(trained, {which: (None, inputs)}, calibrate=batch)
        assert [row.note for row in report.swapped] == 2 * ["weights as they were"]
        assert [row.weights for row in report.swapped] == 2 * ["3 bits signed"]
        assert [row.inputs for row in report.swapped] == 2 * ["4 bits signed"]
        for new, old in zip(got.layers, trained.layers, strict=True):
            assert new.weight is old.weight
            assert new.weight_quantizer.scale is old.weight_quantizer.scale
        # The inputs are those of the layers with quantized weights.
        hidden = jax.nn.relu(jax.vmap(trained.layers[0])(batch))
        for layer, x in zip(got.layers, (batch, hidden), strict=True):
            want = inputs.fit(x).scale
            np.testing.assert_allclose(layer.input_quantizer.scale, want, rtol=1e-5)
    assert trained.layers[0].input_quantizer is None


@pytest.mark.thorough
def test_inputs_of_some_quantized_layers(getkey):
    keys = jr.split(getkey(), 4)
    layers = [eqx.nn.Linear(4, 4, key=key) for key in keys]
    weights, inputs = nn.LSQ(bits=3), nn.LSQ(bits=4, scale=0.5)
    rules = {"[0]": (weights, inputs), "[1]": nn.Ternary(), "[2]": weights}
    layers, _ = nn.quantize_model(layers, rules)
    # A rule with a quantizer for weights passes over layers that have one.
    rules = {"[2]": None, eqx.nn.Linear: (weights, None), "*": (None, inputs)}
    got, report = nn.quantize_model(layers, rules)
    assert [(row.path, row.weights) for row in report.swapped] == [
        ("[1]", "1.58 bits"),
        ("[3]", "3 bits signed"),
    ]
    notes = [(row.path, row.note) for row in report.left]
    assert notes == [("[0]", "quantized already"), ("[2]", "rule 0, '[2]'")]
    assert got[0] is layers[0]
    _, report = nn.quantize_model(layers, {"[0]": None, "*": (None, inputs)})
    assert report.left[0].note == "rule 0, '[0]'"
    assert got[2] is layers[2]
    x = jr.normal(getkey(), (4,))
    want = layers[1](got[1].input_quantizer(x))
    np.testing.assert_array_equal(got[1](x), want)
    with pytest.raises(RuleError, match=r"has no scale(?s:.)*about `\[2\]`"):
        nn.quantize_model(layers, {"[2]": (None, nn.LSQ(4))})
    with pytest.raises(RuleError, match=r"only layers(?s:.)*Write `\(None, quantizer\)`"):
        nn.quantize_model(layers, {"[2]": (weights, inputs)})
    with pytest.raises(RuleError, match=r"only layers that are quantized already"):
        nn.quantize_model(layers, {"[0]": (None, inputs)})


@pytest.mark.slow
def test_inputs_of_an_ensemble_with_quantized_weights(getkey):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))
    layers, _ = nn.quantize_model(make(jr.split(getkey(), 3)), {"*": nn.LSQ(4)})
    got, _ = nn.quantize_model(layers, {"*": (None, nn.LSQ(4, scale=0.5))})
    assert got.input_quantizer.scale.shape == (3,)
    xs = jr.normal(getkey(), (3, 2))
    want = eqx.filter_vmap(lambda layer, x: layer(nn.LSQ(4, scale=0.5)(x)))(layers, xs)
    np.testing.assert_allclose(eqx.filter_vmap(lambda f, x: f(x))(got, xs), want, rtol=1e-5)
