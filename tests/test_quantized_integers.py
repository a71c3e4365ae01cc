"""A trained model that is stored and read again has its weights and outputs to the bit."""

import functools as ft
import io

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest


pytestmark = pytest.mark.x64


QUANTIZERS = [
    eqg.nn.FakeQuantize(4),
    eqg.nn.FakeQuantize(8, channel_axis=0),
    eqg.nn.FakeQuantize(3, scale=0.25, narrow=True),
    eqg.nn.FakeQuantize(5, scale=np.full((6, 1), 0.1), signed=False),
    eqg.nn.FakeQuantize(24, learn_scale=True),
    eqg.nn.FakeQuantize(1, signed=False),
    eqg.nn.LSQ(2),
    eqg.nn.LSQ(12, channel_axis=-1),
    eqg.nn.LSQ(4, group_size=8),
    eqg.nn.FakeQuantize(4, asymmetric=True, group_size=8, signed=False),
    eqg.nn.FakeQuantize(8, asymmetric=True, learn_scale=True, channel_axis=0),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=range(len(QUANTIZERS)))
def test_the_product_is_the_output_of_the_quantizer(quantizer, dtype, getkey):
    x = jr.normal(getkey(), (6, 40)).astype(dtype)
    quantizer = quantizer.fit(x)
    integers, scale, *zero = quantizer.encode(x)
    if quantizer.group_size:
        assert scale.shape == (6, 5)
        scale, *zero = (jnp.repeat(a, 8, axis=1) for a in (scale, *zero))
    levels = integers.astype(scale.dtype) - (zero[0].astype(scale.dtype) if zero else 0)
    assert jnp.array_equal((levels * scale).astype(dtype), quantizer(x))
    kind, bits = ("i" if quantizer.signed else "u"), quantizer.bits
    assert integers.dtype.kind == kind
    assert integers.dtype.itemsize == (1 if bits <= 8 else 2 if bits <= 16 else 4)
    low = -(2 ** (bits - 1)) if quantizer.signed else 0
    assert low <= int(integers.min())
    assert int(integers.max()) < low + 2**bits


# ---------------------------------------------------------------- whole models


def saved(model, like):
    """A model written to a file, and read into another one."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


def equal_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    return got.dtype == want.dtype and got.tobytes() == want.tobytes()


def make_network(key, dtype=None):
    """One layer of each kind, with inputs of 6 by 6 pixels; and what quantizes it."""
    keys = jr.split(key, 6)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 3, 3, dtype=dtype, key=keys[0]),
            eqx.nn.Lambda(lambda x: jax.nn.softplus(jnp.ravel(x))),
            eqx.nn.Linear(48, 7, dtype=dtype, key=keys[1]),
            eqx.nn.Linear(7, 6, use_bias=False, dtype=dtype, key=keys[2]),
            eqx.nn.Linear(6, 6, dtype=dtype, key=keys[3]),
            eqx.nn.Linear(6, 5, dtype=dtype, key=keys[4]),
            eqx.nn.Linear(5, 4, dtype=dtype, key=keys[5]),
        ]
    )


NETWORK_RULES = {
    "layers[0]": (eqg.nn.LSQ(4, channel_axis=0), eqg.ste.round),
    "layers[2]": (eqg.nn.FakeQuantize(12, signed=False, scale=0.01), eqg.nn.FakeQuantize(8)),
    "layers[3]": eqg.nn.Binary(),
    "layers[4]": eqg.nn.Ternary(),
    "layers[5]": eqg.nn.Ternary(scale=False),
    "layers[6]": eqg.nn.FakeQuantize(3),
}


def make_quantized(key, dtype=None):
    return eqg.nn.quantize_model(make_network(key, dtype), NETWORK_RULES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_model_of_integers_has_the_outputs_of_the_model(dtype, getkey):
    model = make_quantized(getkey(), dtype)
    stored, report = eqg.nn.to_integers(model)
    xs = jr.normal(getkey(), (4, 1, 6, 6)).astype(model[0].weight.dtype)
    assert equal_bits(jax.vmap(stored)(xs), jax.vmap(model)(xs))
    for i in (0, 2, 3, 4, 5, 6):
        assert equal_bits(stored[i].quantized_weight(), model[i].quantized_weight())
        assert jnp.issubdtype(stored[i].weight.dtype, jnp.integer)
    # If one is compiled, the other is too.
    compiled, same_report = eqx.filter_jit(eqg.nn.to_integers)(model)
    run = eqx.filter_jit(lambda model: jax.vmap(model)(xs))
    assert equal_bits(run(compiled), run(model))
    assert same_report == report
    # The biases and the quantizers of inputs are those of the model, the gradient of a weight
    # is none.
    assert stored[0].bias is model[0].bias
    both = [[m[i].input_quantizer for i in (0, 2)] for m in (stored, model)]
    assert eqx.tree_equal(*both)
    grads = eqx.filter_grad(lambda model: jnp.sum(model(xs[0])))(stored)
    assert grads[2].weight is None
    assert jnp.any(grads[6].bias != 0)


@pytest.mark.slow
def test_the_report_of_to_integers(getkey):
    linear = eqx.nn.Linear(3, 2, dtype="float32", key=getkey())
    conv = eqx.nn.Conv1d(1, 2, 3, dtype="float32", key=getkey())
    model = {
        "a": [linear, linear],
        "b": conv,
        "c": eqx.nn.Linear(4, 5, dtype="float32", key=getkey()),
        "d": eqx.nn.LayerNorm(3, use_bias=False, dtype="float32"),
        "e": eqx.nn.Linear(1, 1, key=getkey()),
        "f": eqx.nn.Linear(1, 1, key=getkey()),
    }
    rules = {
        "['a']": eqg.nn.LSQ(4),
        "['b']": (eqg.nn.FakeQuantize(9, channel_axis=0), eqg.nn.FakeQuantize(4)),
        "['e']": (None, eqg.nn.FakeQuantize(8)),
        "['f']": (eqg.ste.binary_sign, None),
    }
    model, _ = eqg.nn.quantize_model(model, rules)
    stored, report = eqg.nn.to_integers(model)
    assert stored["a"][0] is stored["a"][1]
    assert stored["c"] is model["c"]
    lines = str(report).splitlines()
    assert lines == [
        "swapped: 3",
        f"  ['a'][0]  Linear  weights 4 bits signed  {'':20}  (2, 3)     "
        f"uint8, {3 + stored['a'][0].weight_quantizer.scale.nbytes} bytes",
        f"  ['a'][1]  Linear  weights 4 bits signed  {'':20}  (2, 3)     shared with ['a'][0]",
        "  ['b']     Conv1d  weights 9 bits signed  inputs 4 bits signed  (2, 1, 3)  "
        "int16, 20 bytes",
        "left: 4",
        "  ['c']         Linear   (5, 4)  not quantized",
        "  ['d'].weight  float32  (3,)    of no layer",
        "  ['e']         Linear   (1, 1)  its weight is not quantized",
        "  ['f']         Linear   (1, 1)  `binary_sign` has no `encode`",
        f"all arrays: {_nbytes(stored):,} bytes, {_nbytes(model):,} before",
    ]
    assert report.sizes == (_nbytes(stored), _nbytes(model))
    assert report.sizes[1] < sum(x.nbytes for x in jax.tree.leaves(model) if eqx.is_array(x))


def _nbytes(model):
    """A layer in several places counts once."""
    model = {**model, "a": model["a"][0]}
    return sum(x.nbytes for x in jax.tree.leaves(model) if eqx.is_array(x))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_integers_of_ensembles_and_scans(scan, getkey):
    mlp = eqx.nn.MLP(3, 2, 4, 3, scan=scan, key=getkey())
    rules = {"*": (eqg.nn.FakeQuantize(4, scale=0.1), eqg.nn.LSQ(4, scale=0.2))}
    model, _ = eqg.nn.quantize_model(mlp, rules)
    stored, _ = eqg.nn.to_integers(model)
    x = jr.normal(getkey(), (3,))
    assert equal_bits(stored(x), model(x))

    make = eqx.filter_vmap(lambda key: eqx.nn.Conv1d(1, 2, 3, key=key))
    members = make(jr.split(getkey(), 3))
    model, _ = eqg.nn.quantize_model(members, {"*": eqg.nn.LSQ(3, channel_axis=0)})
    stored, _ = eqg.nn.to_integers(model)
    assert stored.weight_quantizer.scale.shape == (3, 2, 1, 1)
    run = eqx.filter_vmap(lambda conv: conv(jnp.ones((1, 4))))
    assert equal_bits(run(stored), run(model))


def test_a_shared_weight_is_left(getkey):
    linear, other = (eqx.nn.Linear(2, 2, key=getkey()) for _ in range(2))
    model, _ = eqg.nn.quantize_model([linear, other], {"*": eqg.nn.LSQ(2, scale=0.1)})
    shared = eqx.nn.Shared(model, lambda model: model[1].weight, lambda model: model[0].weight)
    _, report = eqg.nn.to_integers(shared)
    assert [row.path for row in report.swapped] == ["pytree[0]"]
    assert report.left[0].note == "its weight is a `SharedNode`"
    # In a call, both are arrays.
    stored, report = eqg.nn.to_integers(shared())
    assert len(report.swapped) == 2
    x = jnp.ones(2)
    assert equal_bits(stored[1](x), shared()[1](x))


# ---------------------------------------------------------------- reading a calibrated model


@pytest.mark.parametrize(
    "quantizer",
    [
        eqg.nn.LSQ,
        ft.partial(eqg.nn.FakeQuantize, learn_scale=True),
        ft.partial(eqg.nn.LSQ, signed=False, gradient_scale=0.1),
        ft.partial(eqg.nn.FakeQuantize, learn_scale=True, narrow=True),
    ],
    ids=["LSQ", "FakeQuantize", "unsigned", "narrow"],
)
@pytest.mark.parametrize(("skeleton", "scan"), [(False, True), (True, False)])
def test_a_calibrated_model_is_read_without_a_batch(quantizer, skeleton, scan, getkey):
    rules = lambda scale=None: {"*": (quantizer(4), quantizer(4, scale=scale))}
    network = lambda key: eqx.nn.MLP(3, 2, 4, 3, jax.nn.softplus, scan=scan, key=key)
    batch = jr.uniform(getkey(), (10, 3))
    model, _ = eqg.nn.quantize_model(network(getkey()), rules(), calibrate=batch)
    make = lambda: eqg.nn.quantize_model(network(jr.key(0)), rules(scale=1.0))[0]
    read = saved(model, eqx.filter_eval_shape(make) if skeleton else make())
    assert eqx.tree_equal(read, model)
    assert equal_bits(read(batch[0]), model(batch[0]))


def test_calibration_while_tracing(getkey):
    model, rules = eqx.nn.Linear(3, 2, key=getkey()), {"*": 2 * (eqg.nn.LSQ(4),)}
    batch = jr.uniform(getkey(), (5, 3))
    make = lambda model: eqg.nn.quantize_model(model, rules, calibrate=batch)[0]
    match = r"can't calibrate while JAX traces(?s:.)*outside of it(?s:.)*`scale=1.0`: the file"
    for run in (
        lambda: eqx.filter_eval_shape(make, model),
        lambda: eqx.filter_eval_shape(lambda: make(model)),
        lambda: eqx.filter_jit(make)(model),
    ):
        with pytest.raises(eqg.RuleError, match=match):
            run()
    with pytest.raises(eqg.RuleError, match=r"has no scale(?s:.)*from a file(?s:.)*=1.0`"):
        eqg.nn.quantize_model(model, rules)


@pytest.mark.parametrize("shape", [(4, 6, 3, 3), (6, 5), (5, 8), (3, 5)])
@pytest.mark.parametrize("quantizer", [eqg.nn.FakeQuantize(4), eqg.nn.Binary(), eqg.nn.LSQ(2)])
def test_integers_of_four_bits_are_two_in_a_byte(quantizer, shape, getkey):
    """The halves of the last axis of even size, by NumPy."""

    class Weighted(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight * x

    weight = jr.normal(getkey(), shape)
    layer = eqg.nn.Quantized(Weighted(weight), quantizer)
    stored, _ = eqg.nn.to_integers([layer])
    codes = np.asarray(layer.weight_quantizer.encode(weight)[0]).astype(int)
    even = [i for i, size in enumerate(shape) if size % 2 == 0]
    if even:
        low, high = np.split(codes % 16, 2, even[-1])
        codes = (low + 16 * high).astype(np.uint8)
        assert codes.size == weight.size / 2
    np.testing.assert_array_equal(stored[0].layer.weight, codes)
    assert equal_bits(stored[0].quantized_weight(), layer.quantized_weight())
    for options in ({"signed": False}, {"asymmetric": True}):
        other = eqg.nn.Quantized(Weighted(weight + 3), eqg.nn.FakeQuantize(4, **options))
        stored, _ = eqg.nn.to_integers([other])
        assert equal_bits(stored[0].quantized_weight(), other.quantized_weight())


def test_a_quantizer_of_your_own_that_claims_too_few_bits(getkey):
    class Own(eqg.nn.AbstractQuantizer):
        bits: int

        def fit(self, x):
            return self

        def encode(self, x):
            return jnp.round(4 * x).astype("uint8"), jnp.array(0.25)

        def __call__(self, x, *, key=None):
            return eqg.ste.round(4 * x) / 4

    linear = eqx.tree_at(
        lambda layer: layer.weight, eqx.nn.Linear(2, 1, key=getkey()), jnp.array([[3.75, 5.0]])
    )
    with pytest.raises(eqg.RuleError, match=r"`Own.encode` returned(?s:.)*from 15 to 20"):
        eqg.nn.to_integers([eqg.nn.Quantized(linear, Own(4))])
    linear = eqx.tree_at(lambda layer: layer.weight, linear, jnp.array([[3.75, 0.5]]))
    for bits in (4, 5):
        layer = eqg.nn.Quantized(linear, Own(bits))
        stored, _ = eqg.nn.to_integers([layer])
        assert stored[0].weight.size == bits - 3
        assert equal_bits(stored[0].quantized_weight(), layer.quantized_weight())
