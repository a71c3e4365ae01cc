"""Straight-through estimators: the value of one function, the derivative of another."""

from ._codebooks import (
    fsq as fsq,
    fsq_codebook as fsq_codebook,
    vector_quantize as vector_quantize,
)
from ._rounding import ceil as ceil, floor as floor, round as round, trunc as trunc
from ._sampling import (
    bernoulli as bernoulli,
    gumbel_sigmoid as gumbel_sigmoid,
    gumbel_softmax as gumbel_softmax,
    reinmax as reinmax,
)
from ._sign_and_step import (
    binary_sign as binary_sign,
    clip as clip,
    heaviside as heaviside,
    one_hot_argmax as one_hot_argmax,
    sign as sign,
    ternary as ternary,
)
from ._straight_through import (
    approx_sign as approx_sign,
    hard_tanh as hard_tanh,
    swish_sign as swish_sign,
)
from ._top_k import top_k as top_k
from ._uniform import (
    absmax_scale as absmax_scale,
    fake_quantize as fake_quantize,
    lsq as lsq,
)
