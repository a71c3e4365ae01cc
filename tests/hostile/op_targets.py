"""Functions of arrays: gradient ops, `ste`, surrogates, `safe` and tangents."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from .domains import (
    anything,
    at_least,
    axes,
    axis,
    between,
    bools,
    broadcasting,
    broadcasting_to,
    dtype,
    either,
    ending,
    flag,
    float_dtype,
    float_tree,
    floats,
    function,
    inexact,
    integer,
    integers,
    key,
    no_floats,
    not_negative,
    number,
    numbers,
    one_of,
    optional,
    positive,
    reals,
    scalar,
    shaped,
    sine,
    text,
    tree_of,
)
from .targets import arrays, target


safe, ste, surrogates = eqg.safe, eqg.ste, eqg.surrogates
X = jnp.array([0.5, -1.2, 2.0])
UNIT = jnp.array([0.2, 0.5, 0.9])
MATRIX = jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]])
KEY = jr.key(0)
TREE = (X, anything)
FLOATS = (X, float_tree)
REALS = (X, reals)
BITS = (4, integer(2, 24))
AXIS = (-1, axis(1))
AXES = (-1, axes(1))
MASK = (None, optional(broadcasting_to(bools, 3)))
FLAG = (False, flag)
REAL = either(reals, bools)  # a bool is zero or one


def fits(domain):
    """An argument for each element of `x`, which has to broadcast to it."""
    return broadcasting_to(domain, 3)


def nothing(x):
    return x is None or isinstance(x, jax.ShapeDtypeStruct)  # its values are ignored


FACTOR = fits(REAL)


# ---------------------------------------------------------------- gradient ops


def graded(op):
    """The gradient of an op, if its argument has one: some options only matter there."""

    def run(x, **options):
        out = op(x, **options)
        if not floats(x):
            return out
        return jax.grad(lambda x: jnp.sum(op(x, **options)))(x)

    return run


target("scale_gradient", graded(eqg.scale_gradient), x=TREE, s=(3.0, FACTOR))
target("reverse_gradient", graded(eqg.reverse_gradient), x=TREE, strength=(0.5, FACTOR))
target("mask_gradient", graded(eqg.mask_gradient), x=TREE, mask=(True, fits(bools)))
target(
    "clip_gradient",
    graded(eqg.clip_gradient),
    x=TREE,
    min=(-0.5, optional(fits(between(-jnp.inf, 1.0, REAL)))),
    max=(1.0, optional(fits(between(-0.5, jnp.inf, REAL)))),
)
target(
    "clip_gradient_norm",
    graded(eqg.clip_gradient_norm),
    x=TREE,
    max_norm=(0.7, scalar(not_negative)),
    axis=AXES,
)
target(
    "normalize_gradient",
    graded(eqg.normalize_gradient),
    x=TREE,
    axis=AXES,
    eps=(0.1, scalar(not_negative)),
)
target("zero_nonfinite_gradient", graded(eqg.zero_nonfinite_gradient), x=TREE)
target(
    "noise_gradient",
    graded(eqg.noise_gradient),
    x=TREE,
    key=(KEY, key),
    stddev=(0.5, fits(not_negative)),
)
target(
    "cast_gradient", graded(eqg.cast_gradient), x=TREE, dtype=("float16", dtype(jnp.floating))
)
target("on_backward", graded(eqg.on_backward), x=TREE, fn=(jnp.tanh, function))
target("nondifferentiable", eqg.nondifferentiable, x=TREE, name=("x", text))
target(
    "probe",
    graded(eqg.probe),
    called="slot",
    x=(X, either(shaped(floats, 3), no_floats)),
    slot=(jnp.zeros(3), either(shaped(floats, 3), nothing)),
)
target(
    "tap_gradient", graded(eqg.tap_gradient), x=TREE, callback=(jnp.sin, function), ordered=FLAG
)
target(
    "watch_gradient",
    graded(eqg.watch_gradient),
    x=TREE,
    name=("x", text),
    step=(3, optional(scalar(integers))),
)
target(
    "replace_gradient",
    eqg.replace_gradient,
    value=(X, shaped(numbers, 3)),
    surrogate=(X, shaped(inexact, 3)),
)
target(
    "reversal_schedule",
    eqg.reversal_schedule,
    progress=(0.5, reals),
    low=(0.0, reals),
    high=(1.0, reals),
    gamma=(10.0, reals),
)


def _psum_gradient(x, axis_name):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    fn = lambda: arrays(eqg.psum_gradient(x, axis_name))
    return jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)()


target(
    "psum_gradient",
    _psum_gradient,
    x=TREE,
    axis_name=("i", lambda x: isinstance(x, str | tuple) and x in ("i", ())),
)


def _zero_safe(fn, policy):
    return eqg.zero_safe(fn, policy=policy)(X)


target(
    "zero_safe",
    _zero_safe,
    fn=(jnp.sin, sine),
    policy=("selected", one_of("selected", "zero")),
)

# ---------------------------------------------------------------- straight-through functions

for _name in ("round", "floor", "ceil", "trunc"):
    target(f"ste.{_name}", getattr(ste, _name), x=FLOATS)
for _name in ("sign", "binary_sign", "hard_tanh", "approx_sign", "swish_sign"):
    target(f"ste.{_name}", getattr(ste, _name), x=FLOATS)
target(
    "ste.ternary",
    ste.ternary,
    x=FLOATS,
    threshold=(0.05, either(one_of("mean"), fits(not_negative))),
)
target("ste.heaviside", ste.heaviside, x=FLOATS, at_zero=(1.0, fits(reals)))
target(
    "ste.clip",
    ste.clip,
    x=FLOATS,
    min=(-0.5, optional(fits(reals))),
    max=(1.0, optional(fits(reals))),
)
TEMPERATURE = (1.0, fits(positive))
target(
    "ste.one_hot_argmax", ste.one_hot_argmax, x=(X, floats), axis=AXIS, temperature=TEMPERATURE
)
target(
    "ste.top_k",
    ste.top_k,
    x=(X, floats),
    k=(2, integer(1, 3)),
    axis=AXIS,
    temperature=TEMPERATURE,
)
target(
    "ste.gumbel_softmax",
    ste.gumbel_softmax,
    logits=(X, at_least(floats, 1)),
    key=(KEY, key),
    temperature=TEMPERATURE,
    hard=FLAG,
    axis=AXIS,
)
target(
    "ste.gumbel_sigmoid",
    ste.gumbel_sigmoid,
    logits=(X, floats),
    key=(KEY, key),
    temperature=TEMPERATURE,
    hard=FLAG,
)
target("ste.bernoulli", ste.bernoulli, p=(UNIT, floats), key=(KEY, key))
target(
    "ste.reinmax",
    ste.reinmax,
    logits=(X, at_least(floats, 1)),
    key=(KEY, key),
    temperature=TEMPERATURE,
    axis=AXIS,
)
target(
    "ste.fake_quantize",
    ste.fake_quantize,
    x=(X, floats),
    scale=(0.31, fits(positive)),
    zero_point=(0.0, fits(reals)),
    bits=(4, optional(integer(2, 24))),
    signed=(True, flag),
    narrow=FLAG,
)
target(
    "ste.absmax_scale",
    ste.absmax_scale,
    x=(X, floats),
    bits=BITS,
    signed=(True, flag),
    axis=AXES,
)
target(
    "ste.lsq",
    ste.lsq,
    x=(X, floats),
    step=(0.31, fits(positive)),
    bits=BITS,
    signed=(True, flag),
    gradient_scale=(0.5, optional(scalar(not_negative))),
)
target("ste.fsq", ste.fsq, z=(X, ending(floats, 3)), levels=((5, 5, 5), (5, 5, 5).__eq__))
target(
    "ste.fsq_codebook",
    ste.fsq_codebook,
    levels=((5, 5, 5), (5, 5, 5).__eq__),
    dtype=("float32", float_dtype),
)
target(
    "ste.vector_quantize",
    ste.vector_quantize,
    z=(X, ending(floats, 3)),
    codebook=(MATRIX, shaped(floats, None, 3)),
)

# ---------------------------------------------------------------- surrogates


def _spike_of(surrogate):
    """The derivative of a spike, as a function of the fields of its surrogate."""

    def run(**fields):
        return jax.grad(lambda v: jnp.sum(surrogates.spike(v, surrogate(**fields))))(X)

    return run


POSITIVE = {"slope", "sigma", "width", "spread"}
for _name, _parameters in {
    "atan": {"slope": 2.0},
    "gaussian": {"sigma": 0.5},
    "leaky": {"leak": 0.1},
    "multi_gaussian": {"sigma": 0.5, "height": 0.15, "spread": 6.0},
    "rectangle": {"width": 1.0, "peak": 1.0},
    "sigmoid": {"slope": 4.0},
    "superspike": {"slope": 25.0},
    "triangle": {"width": 1.0, "peak": 1.0},
}.items():
    target(
        f"surrogates.{_name}",
        _spike_of(getattr(surrogates, _name)),
        **{
            name: (value, fits(positive if name in POSITIVE else reals))
            for name, value in _parameters.items()
        },
    )
target(
    "surrogates.spike",
    surrogates.spike,
    v=(X, floats),
    surrogate=(surrogates.atan(), lambda x: isinstance(x, surrogates.AbstractSurrogate)),
)

# ---------------------------------------------------------------- safe mathematics

for _name in (
    *("arccos", "arcsin", "expm1_ratio", "log", "log1p_ratio", "log_cosh", "log_expm1"),
    *("log_ndtr", "sinhc", "sqrt"),
):
    target(f"safe.{_name}", getattr(safe, _name), x=REALS)
_OTHER = (X, broadcasting(reals, 3))
for _name in ("divide", "hypot", "log_sub_exp", "logaddexp", "power", "xlog1py", "xlogy"):
    target(f"safe.{_name}", getattr(safe, _name), x=_OTHER, y=_OTHER)
target("safe.arctan2", safe.arctan2, y=_OTHER, x=_OTHER)
target("safe.cosine_similarity", safe.cosine_similarity, x=_OTHER, y=_OTHER, axis=AXES)
target(
    "safe.cumlogsumexp", safe.cumlogsumexp, x=(X, at_least(reals, 1)), axis=AXIS, reverse=FLAG
)
target("safe.entropy", safe.entropy, p=(UNIT, at_least(reals, 1)), axis=AXES, where=MASK)
for _name in ("softmax", "log_softmax"):
    target(
        f"safe.{_name}", getattr(safe, _name), x=(X, at_least(reals, 1)), axis=AXES, where=MASK
    )
target(
    "safe.logsumexp",
    safe.logsumexp,
    a=_OTHER,
    axis=AXES,
    b=(X, optional(broadcasting(reals, 3))),
    keepdims=FLAG,
    return_sign=FLAG,
    where=MASK,
)
ORD = (2, optional(number()))
target("safe.norm", safe.norm, x=(X, at_least(numbers, 1)), ord=ORD, axis=AXES, keepdims=FLAG)
target("safe.normalize", safe.normalize, x=(X, at_least(numbers, 1)), axis=AXES)
target(
    "safe.std",
    safe.std,
    x=(X, at_least(numbers, 1)),
    axis=AXES,
    ddof=(0, number(-1e300, 1e300)),
    keepdims=FLAG,
    where=MASK,
)
target(
    "safe.pairwise_distance",
    safe.pairwise_distance,
    x=(MATRIX, lambda x: at_least(numbers, 2)(x) and ending(numbers, x.shape[-2], 3)(x)),
    y=(MATRIX, optional(lambda x: at_least(numbers, 2)(x) and x.shape[-1] == 3)),
    ord=ORD,
)
_SQUARE = (
    MATRIX,
    lambda x: at_least(numbers, 2)(x) and x.shape[-1] == x.shape[-2],
)
TOLERANCE = (1e-3, optional(number(0.0, 1e300)))
target("safe.eigh", safe.eigh, a=_SQUARE, symmetrize_input=FLAG, tolerance=TOLERANCE)
target("safe.svd", safe.svd, a=(MATRIX, at_least(numbers, 2)), tolerance=TOLERANCE)
target(
    "safe.where",
    lambda cond, fn, **options: safe.where(cond, fn, X, **options),
    cond=(X > 0, fits(bools)),
    fn=(jnp.sin, sine),
    otherwise=(0.0, fits(numbers)),
    substitute=(0.5, fits(either(reals, bools))),
)

# ---------------------------------------------------------------- tangents

TANGENT = (X, optional(shaped(numbers, 3)))
_tangent = tree_of(numbers)


def _pair(fn):
    return lambda a, b: fn(a, b)


for _name in ("add", "dot"):
    target(
        f"tangents.{_name}",
        _pair(getattr(eqg.tangents, _name)),
        called="tangent",
        a=TANGENT,
        b=TANGENT,
    )
target("tangents.is_zero", eqg.tangents.is_zero, t=TREE)
target("tangents.neg", eqg.tangents.neg, called="tangent", t=(X, _tangent))
target(
    "tangents.scale",
    eqg.tangents.scale,
    called="tangent",
    t=(X, tree_of(inexact)),
    s=(2.0, fits(numbers)),
)
target(
    "tangents.where",
    eqg.tangents.where,
    called="tangent",
    condition=(X > 0, fits(bools)),
    a=TANGENT,
    b=TANGENT,
)
target(
    "tangents.linear",
    lambda fn, t: eqg.tangents.linear(fn, t),
    called="tangent",
    fn=(jnp.sin, sine),
    t=(X, _tangent),
)
target(
    "tangents.materialize",
    eqg.tangents.materialize,
    called="tangent",
    primal=(X, shaped(inexact, 3)),
    t=TANGENT,
)
target(
    "tangents.project",
    eqg.tangents.project,
    called="tangent",
    ct=(X, optional(lambda x: ending(inexact, 3)(x))),
    primal=(X, either(fits(inexact), no_floats)),
)
target("tangents.zeros_like", eqg.tangents.zeros_like, primal=TREE)
target(
    "tangents.of",
    lambda module, weight: eqg.tangents.of(module, weight=weight),
    module=(eqx.nn.Linear(2, 3, key=KEY), lambda x: isinstance(x, eqx.nn.Linear)),
    weight=(jnp.ones((3, 2)), anything),
)
