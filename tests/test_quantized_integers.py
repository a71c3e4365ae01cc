"""`to_integers`: what is stored of a trained weight gives the layer's weight to the bit."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest


QUANTIZERS = [
    eqg.nn.FakeQuantize(4),
    eqg.nn.FakeQuantize(8, channel_axis=0),
    eqg.nn.FakeQuantize(3, scale=0.25, narrow=True),
    eqg.nn.FakeQuantize(5, scale=np.full((6, 1), 0.1), signed=False),
    eqg.nn.FakeQuantize(24, learn_scale=True),
    eqg.nn.FakeQuantize(1, signed=False),
    eqg.nn.LSQ(2),
    eqg.nn.LSQ(12, channel_axis=-1),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=range(len(QUANTIZERS)))
def test_the_product_is_the_output_of_the_quantizer(quantizer, dtype, getkey):
    x = jr.normal(getkey(), (6, 40)).astype(dtype)
    quantizer = quantizer.fit(x)
    integers, scale = quantizer.to_integers(x)
    assert jnp.array_equal((integers.astype(scale.dtype) * scale).astype(dtype), quantizer(x))
    kind, bits = ("i" if quantizer.signed else "u"), quantizer.bits
    assert integers.dtype.kind == kind
    assert integers.dtype.itemsize == (1 if bits <= 8 else 2 if bits <= 16 else 4)
    low = -(2 ** (bits - 1)) if quantizer.signed else 0
    assert low <= int(integers.min())
    assert int(integers.max()) < low + 2**bits


def test_a_negative_scale_and_an_ensemble(getkey):
    x = jr.normal(getkey(), (5, 7))
    negative = eqx.tree_at(lambda q: q.scale, eqg.nn.LSQ(4, scale=0.2), jnp.array(-0.2))
    integers, scale = negative.to_integers(x)
    assert scale > 0
    assert jnp.array_equal(integers.astype(scale.dtype) * scale, negative(x))

    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 2, key=key))(jr.split(getkey(), 4))
    layers = eqg.nn.QuantizedLinear.from_layer(layers, weight_quantizer=eqg.nn.LSQ(4))
    store = eqx.filter_vmap(lambda layer: layer.weight_quantizer.to_integers(layer.weight))
    integers, scale = store(layers)
    assert integers.shape == (4, 2, 3)
    weight = eqx.filter_vmap(lambda layer: layer.quantized_weight())(layers)
    assert jnp.array_equal(integers.astype(scale.dtype) * scale[:, None, None], weight)


def test_errors_of_to_integers():
    with pytest.raises(eqg.RuleError, match=r"`LSQ` has no scale yet"):
        eqg.nn.LSQ(4).to_integers(jnp.ones(3))
    with pytest.raises(eqg.RuleError, match=r"`FakeQuantize.to_integers` was given .* NaN"):
        eqg.nn.FakeQuantize(4).to_integers(jnp.array([1.0, jnp.nan]))
    with pytest.raises(eqg.RuleError, match=r"scale of `LSQ.to_integers` does not broadcast"):
        eqg.nn.LSQ(4, scale=jnp.ones((4, 1))).to_integers(jnp.ones(3))
    assert jax.eval_shape(eqg.nn.FakeQuantize(9).to_integers, jnp.ones(3))[0].dtype == np.int16
