"""Layers: how they are made, and how they are called."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .domains import (
    anything,
    between,
    broadcasting_to,
    either,
    ending,
    finite_positive,
    flag,
    float_dtype,
    floats,
    function,
    integer,
    integers,
    is_none,
    key,
    no_floats,
    not_nan,
    number,
    numbers,
    one_of,
    optional,
    ranked,
    reals,
    shaped,
    sine,
    size,
)
from .op_targets import BITS, FLAG, nothing, REAL, TREE, X
from .targets import target


nn = eqg.nn
KEY = jr.key(0)
YES = (True, flag)
SIZE = (3, size)
MAKE = {"key": (KEY, key)}
DTYPE = {"dtype": ("float32", float_dtype)}
XS = jr.normal(KEY, (4, 2))
BATCH = jr.normal(KEY, (5, 4, 2))
LINEAR = eqx.nn.Linear(3, 2, key=KEY)


def of_type(*types):
    return lambda x: isinstance(x, types)


# ---------------------------------------------------------------- recurrent layers

STACK = {
    "num_layers": (2, size),
    "bidirectional": FLAG,
    "dropout": (0.1, number(0, 1)),
    "learn_initial_state": FLAG,
    "reverse": FLAG,
    "time_major": FLAG,
}
SIZES = {"input_size": (2, size), "hidden_size": SIZE}
OUTPUT_SIZES = {"input_size": (2, size), "output_size": SIZE, "state_size": (4, size)}
METHOD = {"method": ("auto", one_of("auto", "scan", "associative"))}
KEEP = {"keep": ("gates", one_of("auto", "gates", "states"))}
BIAS = {"use_bias": YES}
ACTIVATION = ("tanh", one_of("tanh", "relu"))
FUNCTION = (None, optional(sine))
MADE = {**STACK, **DTYPE, **MAKE}

target("nn.GRU", nn.GRU, **SIZES, **BIAS, **KEEP, **MADE)
target(
    "nn.LSTM", nn.LSTM, **SIZES, proj_size=(2, optional(integer(1, 2))), **BIAS, **KEEP, **MADE
)
target("nn.RNN", nn.RNN, **SIZES, activation=ACTIVATION, **BIAS, **MADE)
target("nn.RNNCell", nn.RNNCell, **SIZES, activation=ACTIVATION, **BIAS, **DTYPE, **MAKE)
target("nn.MinGRU", nn.MinGRU, **SIZES, **BIAS, **METHOD, **MADE)
target("nn.MinLSTM", nn.MinLSTM, **SIZES, **BIAS, **METHOD, **MADE)
target(
    "nn.LRU",
    nn.LRU,
    **OUTPUT_SIZES,
    r_min=(0.1, number(0, 0.9)),
    r_max=(0.9, number(0.1, 1)),
    max_phase=(6.0, number(1e-30, 1e38)),
    activation=FUNCTION,
    **METHOD,
    **MADE,
)
target(
    "nn.GatedDeltaNet",
    nn.GatedDeltaNet,
    input_size=(2, size),
    output_size=SIZE,
    heads=SIZE,
    key_size=SIZE,
    value_size=(3, optional(size)),
    conv_size=SIZE,
    chunk=(4, optional(size)),
    **MADE,
)
target(
    "nn.SelectiveSSM",
    nn.SelectiveSSM,
    input_size=(2, size),
    output_size=SIZE,
    channels=SIZE,
    state_size=SIZE,
    conv_size=SIZE,
    **METHOD,
    **MADE,
)
target(
    "nn.S5",
    nn.S5,
    input_size=(2, size),
    output_size=SIZE,
    state_size=(4, lambda x: size(x) and x % 2 == 0),
    blocks=(1, integer(1, 2)),
    min_step=(0.01, number(1e-30, 0.1)),
    max_step=(0.1, number(0.01, 1e30)),
    activation=FUNCTION,
    **METHOD,
    **MADE,
)
target(
    "nn.Recurrent",
    nn.Recurrent,
    cell=(nn.RNNCell(2, 3, key=KEY), of_type(nn.RNNCell)),
    learn_initial_state=FLAG,
    initial_state=(jnp.zeros(3), anything),
    output=FUNCTION,
    checkpoint=(
        "auto",
        either(one_of(None, "auto", "sqrt", "replay"), size),
    ),
    reverse=FLAG,
    time_major=FLAG,
)
target("nn.Outputs", nn.Outputs, layer=(nn.GRU(2, 3, key=KEY), of_type(nn.GRU)), last=FLAG)

LENGTHS = (
    jnp.array([4, 2, 3, 1, 0]),
    optional(
        lambda x: integers(x) and np.shape(x) in ((), (5,)) and between(0, 4, integers)(x)
    ),
)
CALLED = {
    "xs": (BATCH, shaped(REAL, None, None, 2)),
    "state": (None, is_none),
    "lengths": LENGTHS,
    "key": (KEY, anything),
    "inference": (None, optional(flag)),
}
LAYERS = {
    "GRU": nn.GRU(2, 3, num_layers=2, dropout=0.5, key=KEY),
    "LSTM": nn.LSTM(2, 3, key=KEY),
    "RNN": nn.RNN(2, 3, key=KEY),
    "Recurrent": nn.Recurrent(nn.RNNCell(2, 3, key=KEY)),
    "LRU": nn.LRU(2, 2, 3, key=KEY),
    "S5": nn.S5(2, 1, 4, key=KEY),
    "GatedDeltaNet": nn.GatedDeltaNet(2, 3, heads=2, key_size=2, key=KEY),
    "SelectiveSSM": nn.SelectiveSSM(2, 3, 4, state_size=2, key=KEY),
    "MinGRU": nn.MinGRU(2, 3, key=KEY),
    "MinLSTM": nn.MinLSTM(2, 3, key=KEY),
    "LIF": nn.LIF(2, 3, 0.9, key=KEY),
    "LIF with all": nn.LIF(2, 3, 0.9, alpha=0.5, rho=0.8, recurrent=True, key=KEY),
    "LI": nn.LI(2, 3, 0.9, key=KEY),
}
for _name, _layer in LAYERS.items():
    # Any cell, also one of complex numbers.
    xs = {"xs": (BATCH, shaped(numbers, None, None, 2))} if _name == "Recurrent" else {}
    target(f"nn.{_name}()", _layer, **{**CALLED, **xs})


def _from_state(layer, xs, state):
    return layer(xs, state)


target(
    "nn.GRU() from a state",
    lambda xs, state: nn.GRU(2, 3, key=KEY)(xs, state),
    called="`state`",
    xs=(XS, shaped(REAL, None, 2)),
    state=(jnp.zeros(3), optional(shaped(reals, 3))),  # bools are a mask
)
target(
    "nn.Outputs()",
    nn.Outputs(nn.GRU(2, 3, key=KEY)),
    xs=(XS, lambda x: ranked(REAL, 2, 3)(x) and np.shape(x)[-1] == 2),
    key=(KEY, anything),
)
target(
    "nn.RNNCell()",
    nn.RNNCell(2, 3, key=KEY),
    x=(jnp.ones(2), shaped(numbers, 2)),
    h=(jnp.ones(3), shaped(numbers, 3)),
)
# ---------------------------------------------------------------- spiking

DECAY = (0.9, lambda x: _neurons(x) and (isinstance(x, jax.Array) or _is_decay(x)))
PARAMETER = (1.0, lambda x: _neurons(x))


def _is_decay(x):
    return between(0, 1)(np.asarray(x) if isinstance(x, list | tuple) else x)


def _neurons(x):
    """One real number for all of three neurons or one for each; a list becomes an array."""
    if isinstance(x, list | tuple):
        try:
            x = np.asarray(x)
        except ValueError:
            return False
    # Of an array of JAX, only the shape and the dtype are checked.
    is_real = reals(x) if isinstance(x, jax.Array) else number()(x) or not_nan(x)
    return is_real and np.shape(x) in ((), (3,), (1,))


SHAPE = (
    3,
    lambda x: size(x) or (isinstance(x, tuple) and len(x) > 0 and all(size(n) for n in x)),
)
OPTIONAL = (DECAY[0], optional(DECAY[1]))
NEURONS = {
    "beta": DECAY,
    "alpha": OPTIONAL,
    "rho": OPTIONAL,
    "strength": PARAMETER,
    "threshold": PARAMETER,
    "reset": ("subtract", one_of("subtract", "zero", "none")),
    "detach_reset": YES,
    "recurrent": YES,
    "learn": (("beta",), lambda x: isinstance(x, tuple | list) and [*x] in ([], ["beta"])),
    "surrogate": (
        eqg.surrogates.atan(),
        optional(either(function, of_type(eqg.surrogates.AbstractSurrogate))),
    ),
}
SIZES = {**SIZES, "input_size": (SIZES["input_size"][0], optional(size))}
target("nn.LIFCell", nn.LIFCell, **SIZES, **NEURONS, **BIAS, **DTYPE, **MAKE)
target("nn.LIFCell of a shape", nn.LIFCell, hidden_size=SHAPE, beta=DECAY, **DTYPE)
target("nn.LIF", nn.LIF, **SIZES, **NEURONS, **BIAS, **MADE)
target("nn.LI", nn.LI, **SIZES, beta=DECAY, learn=NEURONS["learn"], **BIAS, **MADE)
for _name, _cell in {
    "LIFCell": nn.LIFCell(3, 0.9),
    "LIFCell with all": nn.LIFCell(3, 0.9, alpha=0.5, rho=0.8, recurrent=True, key=KEY),
}.items():
    _state = (_cell.initial_state(), of_type(nn.LIFState))
    target(f"nn.{_name}()", _cell, x=(X, shaped(REAL, 3)), state=_state)

# ---------------------------------------------------------------- gradient layers

_fits = lambda domain: broadcasting_to(domain, 3)


def _gradient_layer(name, **args):
    """Made, and called at once: a layer checks some arguments when it is called."""

    def run(x, **args):
        return getattr(nn, name)(**args)(x)

    target(f"nn.{name}", run, called="`s`", x=TREE, **args)


_gradient_layer("GradientReversal", strength=(0.5, _fits(REAL)))


def _gradient_probe(x, slot):
    return nn.GradientProbe(slot)(x)


target(
    "nn.GradientProbe",
    _gradient_probe,
    called="slot",
    x=(X, either(shaped(floats, 3), no_floats)),
    slot=(jnp.zeros(3), either(shaped(numbers, 3), nothing)),
)

# ---------------------------------------------------------------- quantization

SCALE = (0.2, optional(either(finite_positive, number(1e-30, 1e38))))
ANY_INTEGER = integer(-(10**40), 10**40)
BACK_AXIS = (-1, integer(-(2**31), -1))
NO_QUANTIZER = (None, optional(function))
LEVELS = ((5, 5, 5), (5, 5, 5).__eq__)
target(
    "nn.FakeQuantize",
    nn.FakeQuantize,
    bits=BITS,
    scale=SCALE,
    learn_scale=FLAG,
    signed=YES,
    narrow=FLAG,
    asymmetric=FLAG,
    channel_axis=(None, optional(ANY_INTEGER)),
    group_size=(None, optional(integer(1, 10**40))),
)
target(
    "nn.LSQ",
    nn.LSQ,
    bits=BITS,
    scale=SCALE,
    signed=YES,
    channel_axis=(None, optional(ANY_INTEGER)),
    group_size=(None, optional(integer(1, 10**40))),
    gradient_scale=(None, optional(number(0, 1e300))),
)
target("nn.FSQ", nn.FSQ, levels=LEVELS, axis=BACK_AXIS)
for _name, _layer in {
    "FakeQuantize": nn.FakeQuantize(4),
    "LSQ": nn.LSQ(4, scale=0.2),
    "FSQ": nn.FSQ((5, 5, 5)),
}.items():
    _x = {"z": (X, ending(floats, 3))} if _name == "FSQ" else {"x": (X, floats)}
    target(f"nn.{_name}()", _layer, **_x, key=(None, anything))
    if hasattr(_layer, "fit"):
        _pending = nn.LSQ(4) if _name == "LSQ" else nn.FakeQuantize(4, learn_scale=True)
        target(
            f"nn.{_name}.fit",
            _pending.fit,
            x=(X, lambda x: floats(x) and np.size(x) > 0 and between(-1e38, 1e38)(x)),
        )
target("nn.FSQ.decode", nn.FSQ((5, 5, 5)).decode, indices=(jnp.array(7), integers))
target(
    "nn.VectorQuantizer",
    nn.VectorQuantizer,
    num_entries=(4, size),
    size=SIZE,
    commitment=(0.25, number(0, 1e300)),
    ema=YES,
    decay=(0.99, number(0, 1)),
    dead_below=(0.1, number(0, 1e300)),
    axis=BACK_AXIS,
    **DTYPE,
    **MAKE,
)
_VQ = nn.VectorQuantizer(4, 3, key=KEY)
_Z = jr.normal(KEY, (6, 3))
_z = (_Z, ending(floats, 3))
target("nn.VectorQuantizer()", _VQ, z=_z, key=(None, anything))
target("nn.VectorQuantizer.quantize", _VQ.quantize, z=_z)
target("nn.VectorQuantizer.updated", _VQ.updated, z=_z, key=(KEY, optional(key)))
target("nn.VectorQuantizer.decode", _VQ.decode, indices=(jnp.array([1, 2]), integers))
target(
    "nn.VectorQuantizer.fit",
    _VQ.fit,
    z=_z,
    key=(KEY, optional(key)),
)
target("nn.Binary", nn.Binary, scale=YES)
target(
    "nn.Ternary",
    nn.Ternary,
    threshold=("mean", either(one_of("mean"), number(0, 1e300))),
    scale=YES,
)
for _quantizer in (nn.Binary(), nn.Ternary()):
    _name = f"nn.{type(_quantizer).__name__}()"
    target(_name, _quantizer, x=(X, floats), key=(None, anything))
target(
    "nn.Quantized",
    nn.Quantized,
    layer=(LINEAR, of_type(eqx.nn.Linear)),
    weight_quantizer=(nn.FakeQuantize(4), optional(function)),
    input_quantizer=NO_QUANTIZER,
)
target(
    "nn.quantize_model",
    nn.quantize_model,
    model=({"a": LINEAR}, anything),
    rules=(
        {eqx.nn.Linear: nn.FakeQuantize(4)},
        lambda x: isinstance(x, dict | list | tuple) and (not len(x) or eqx.nn.Linear in x),
    ),
    calibrate=(None, is_none),
    call=(None, optional(function)),
)
target(
    "nn.to_integers",
    nn.to_integers,
    model=(
        {"a": nn.Quantized(LINEAR, nn.FakeQuantize(4))},
        lambda x: any(
            isinstance(leaf, nn.Quantized)
            for leaf in jax.tree.leaves(x, is_leaf=lambda leaf: isinstance(leaf, nn.Quantized))
        ),
    ),
)

# ---------------------------------------------------------------- losses and other layers

LOSS = {
    "chunk": (2, optional(size)),
    "ignore_index": (-100, optional(ANY_INTEGER)),
    "label_smoothing": (0.1, number(0, 1)),
    "z_loss": (0.01, number(0)),
    "soft_cap": (2.0, optional(number(1e-300))),
    "return_z_loss": (False, flag),
    "reduction": ("mean", one_of("mean", "sum", "none")),
}
_LABELS = jnp.array([0, 3, -100, 1, 2])
_FIVE = jr.normal(KEY, (5, 2))
target(
    "losses.linear_cross_entropy",
    eqg.losses.linear_cross_entropy,
    x=(_FIVE, shaped(floats, 5, 2)),
    weight=(jr.normal(KEY, (4, 2)), shaped(floats, None, 2)),
    # Also out of range: the loss is NaN.
    labels=(_LABELS, either(shaped(integers, 5), shaped(floats, 5, 4))),
    bias=(jnp.ones(4), optional(shaped(floats, 4))),
    class_weight=(jnp.ones(4), optional(shaped(floats, 4))),
    **LOSS,
)


def _squares(weight, xs, ys):
    return jnp.sum(jnp.tanh(xs @ weight - ys) ** 2)


def _chunked(loss, axis, chunk, reduction):
    fn = eqg.losses.chunked(loss, axis, chunk, reduction=reduction)
    return fn(jnp.ones(2), _FIVE, jnp.ones(5))


target(
    "losses.chunked",
    _chunked,
    loss=(_squares, lambda x: x is _squares),
    axis=(0, integer(0, 0)),
    chunk=(2, size),
    reduction=("sum", one_of("sum", "mean")),
)
