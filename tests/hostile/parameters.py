"""A good value and a domain for each argument of the public functions, by its name."""

import itertools
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optimistix as optx

from . import domains as d


DEFAULT: Any = object()  # the good value is the default in the signature
PARAMETERS: dict[str, tuple[Any, d.Domain]] = {}


def of(places: str, names: str, good: Any, domain: d.Domain) -> None:
    """Arguments with these names: everywhere, or of these namespaces or functions alone."""
    for place, name in itertools.product(places.split() or [""], names.split()):
        name = f"{place}.{name}".lstrip(".")
        assert name not in PARAMETERS, name
        PARAMETERS[name] = good, domain


def only(places: str, names: str, good: Any) -> None:
    """The argument has to be this: no other kind will do."""
    of(places, names, good, lambda x: x is good)


def fits(domain: d.Domain) -> d.Domain:
    """An argument for each element of `X`, which has to broadcast to it."""
    return d.broadcasting_to(domain, 3)


X, UNIT, KEY = jnp.array([0.5, -1.2, 2.0]), jnp.array([0.2, 0.5, 0.9]), jr.key(0)
MATRIX = jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.2], [0.1, 0.2, 3.0]])
XS, BATCH, Z = (jr.normal(KEY, shape) for shape in ((4, 2), (5, 4, 2), (6, 3)))
LINEAR = eqx.nn.Linear(3, 2, key=KEY)
REAL = d.either(d.reals, d.bools)  # a bool is zero or one
ANY_SIZE, ANY_INTEGER = d.integer(0, 10**40), d.integer(-(10**40), 10**40)
NUMBER = d.number(0, 1e300)

# ---------------------------------------------------------------- options

of("", "key", KEY, d.key)
of("", "dtype", "float32", d.float_dtype)
of("cast_gradient", "dtype", "float16", d.dtype(jnp.floating))
of("", "throw use_bias bidirectional learn_initial_state reverse time_major", True, d.flag)
of("", "recurrent detach_reset", True, d.flag)
of("", "axis", -1, d.axes(1))
of("ste safe.cumlogsumexp", "axis", -1, d.axis(1))
of("ste.absmax_scale", "axis", -1, d.axes(1))
of("nn", "axis", -1, d.integer(-(2**31), -1))
of("", "method", "auto", d.one_of("auto", "scan", "associative"))
of("", "where", None, d.optional(fits(d.bools)))
of("", "ord", 2, d.optional(d.number()))
of("", "ddof", 0, d.number(-1e300, 1e300))
of("", "tolerance", 1e-3, d.optional(d.number(0)))
of("safe", "tolerance", 1e-3, d.optional(NUMBER))
of("", "bits", 4, d.integer(2, 24))
of("", "levels", (5, 5, 5), d.equal((5, 5, 5)))
of("", "chunk", 2, d.optional(d.size))
of("gated_delta_rule", "chunk", 2, d.optional(d.integer(1, 2**31 - 1)))
of("losses.chunked", "chunk", 2, d.size)
of("", "name", "x", d.anything)
of("", "max_steps", 256, d.optional(d.integer(1)))
of("filter_while_loop", "max_steps", None, d.optional(d.integer(0)))
of("", "solver linear_solver calibrate", None, d.is_none)
_DERIVATIVES = ("implicit", "fixed_point", "neumann", "phantom", "one_step")
of("", "backward", "implicit", d.one_of(*_DERIVATIVES))
of("", "tags skip nondifferentiable", (), d.empty)
of("", "seed", 0, d.either(ANY_SIZE, lambda x: d.some_of(ANY_SIZE)(x) and not d.empty(x)))
of("testing.check_gradients testing.random_tangent", "seed", 0, ANY_SIZE)

# ---------------------------------------------------------------- gradient ops

of("", "x", X, d.anything)
of("scale_gradient", "s", 3.0, fits(REAL))
of("", "strength", 0.5, fits(REAL))
of("", "mask", True, fits(d.bools))
of("", "min", -0.5, d.optional(fits(d.between(-jnp.inf, 1.0, REAL))))
of("", "max", 1.0, d.optional(fits(d.between(-0.5, jnp.inf, REAL))))
of("ste", "min max", 0.4, d.optional(fits(d.reals)))
of("", "max_norm eps", 0.7, d.scalar(d.not_negative))
of("", "stddev", 0.5, fits(d.not_negative))
of("", "fn callback", jnp.sin, d.function)
of("probe nn.GradientProbe", "x", X, d.either(d.shaped(d.floats, 3), d.no_floats))
_IGNORED = d.optional(d.of_type(jax.ShapeDtypeStruct))  # its values are ignored
of("probe", "slot", jnp.zeros(3), d.either(d.shaped(d.floats, 3), _IGNORED))
of("nn.GradientProbe", "slot", jnp.zeros(3), d.either(d.shaped(d.numbers, 3), _IGNORED))
of("watch_gradient", "step", 3, d.optional(d.scalar(d.integers)))
of("", "value", X, d.shaped(d.numbers, 3))
of("replace_gradient", "surrogate", X, d.shaped(d.inexact, 3))
of("", "progress", 0.5, d.reals)
of("", "low high gamma", DEFAULT, d.reals)
of("psum_gradient", "axis_name", "i", lambda x: isinstance(x, str | tuple) and x in ("i", ()))
of("filter_checkpoint", "policy", None, d.optional(callable))
of("zero_safe", "policy", "selected", d.one_of("selected", "zero"))

# ---------------------------------------------------------------- straight-through functions

of("ste", "x", X, d.float_tree)
_OF_ARRAYS = "ste.one_hot_argmax ste.top_k ste.fake_quantize ste.absmax_scale ste.lsq"
of(_OF_ARRAYS, "x", X, d.floats)
of("ste", "threshold", 0.05, d.either(d.one_of("mean"), fits(d.not_negative)))
of("", "at_zero zero_point", DEFAULT, fits(d.reals))
of("", "temperature", 1.0, fits(d.positive))
of("ste.top_k", "k", 2, d.integer(1, 3))
of("", "logits", X, d.at_least(d.floats, 1))
of("ste.gumbel_sigmoid", "logits", X, d.floats)
of("ste", "p", UNIT, d.floats)
of("ste", "scale step", 0.31, fits(d.positive))
of("ste", "gradient_scale", 0.5, d.optional(d.scalar(d.not_negative)))
of("", "z", Z, d.ending(d.floats, 3))
of("", "codebook", MATRIX, d.shaped(d.floats, None, 3))
of("surrogates", "slope sigma width spread", DEFAULT, fits(d.positive))
of("surrogates", "leak height peak", DEFAULT, fits(d.reals))
of("surrogates.leaky", "slope", DEFAULT, fits(d.reals))
of("", "v", X, d.floats)
of("", "surrogate", eqg.surrogates.atan(), d.of_type(eqg.surrogates.AbstractSurrogate))

# ---------------------------------------------------------------- safe mathematics

of("safe", "x", X, d.reals)
_OF_TWO = "divide hypot log_sub_exp logaddexp power xlog1py xlogy arctan2 cosine_similarity"
_OF_TWO = " ".join(f"safe.{name}" for name in _OF_TWO.split())
of(_OF_TWO, "x y", X, d.broadcasting(d.reals, 3))
of("safe.logsumexp", "a", X, d.broadcasting(d.reals, 3))
of("safe.logsumexp", "b", X, d.optional(d.broadcasting(d.reals, 3)))
of("safe.cumlogsumexp safe.softmax safe.log_softmax", "x", X, d.at_least(d.reals, 1))
of("safe.norm safe.normalize safe.std", "x", X, d.at_least(d.numbers, 1))
of("safe", "p", UNIT, d.at_least(d.reals, 1))
_ROWS = lambda x: d.at_least(d.numbers, 2)(x) and np.shape(x)[-1] == 3
of("safe.pairwise_distance", "x y", MATRIX, lambda x: x is None or _ROWS(x))
_SQUARE = lambda x: d.at_least(d.numbers, 2)(x) and np.shape(x)[-1] == np.shape(x)[-2]
of("safe.eigh", "a", MATRIX, _SQUARE)
of("safe.svd", "a", MATRIX, d.at_least(d.numbers, 2))
of("", "cond condition", X > 0, fits(d.bools))
of("safe.where tangents.linear zero_safe filter_map", "fn f", jnp.sin, d.sine)
of("", "otherwise", 0.0, fits(d.numbers))
of("", "substitute", 0.5, fits(REAL))

# ---------------------------------------------------------------- tangents

of("tangents", "a b t", X, d.optional(d.shaped(d.numbers, 3)))
of("tangents.is_zero", "t", X, d.anything)
of("tangents.neg tangents.linear", "t", X, d.tree_of(d.numbers))
of("tangents.scale", "t", X, d.tree_of(d.inexact))
of("tangents", "s", 2.0, fits(d.numbers))
of("tangents", "ct", X, d.optional(d.ending(d.inexact, 3)))
of("", "primal", X, d.anything)
of("tangents.materialize", "primal", X, d.shaped(d.inexact, 3))
of("tangents.project", "primal", X, d.either(fits(d.inexact), d.no_floats))
of("", "module", eqx.nn.Linear(2, 3, key=KEY), d.of_type(eqx.nn.Linear))
of("", "weight", jnp.ones((3, 2)), d.anything)

# ---------------------------------------------------------------- control flow

_WHOLE_OR_SIZE = d.either(d.one_of(None, "auto", "sqrt", "replay"), d.size)
only("filter_scan", "f", lambda carry, x: (carry, None))
of("", "init initial_state", jnp.ones(3), d.anything)
of("filter_scan", "xs", jnp.ones((4, 2)), d.sliced(4))
of("", "length", 4, d.optional(d.integer(4, 4)))
of("", "unroll", 1, d.either(d.flag, ANY_SIZE))
of("", "checkpoint", None, _WHOLE_OR_SIZE)
of(
    "filter_while_loop-bounded",
    "checkpoint",
    "sqrt",
    d.optional(d.either(d.size, d.one_of("sqrt"))),
)
of("", "truncate", None, d.optional(d.size))
of("", "online", False, d.either(d.flag, d.one_of("e-prop")))
of("", "carry_gradient", None, d.is_none)
only("filter_while_loop", "cond_fun", lambda x: jnp.sum(x) < 3.0)
only("filter_while_loop", "body_fun", lambda x: 2 * x)
of("", "pred", True, d.scalar(REAL))
of("", "true_fun false_fun surrogate_fn", jnp.sin, d.sine)


def _one_axis_more(b):
    """`a` is `(4, 2)`, and `h0` is `(2,)`."""
    fits = d.broadcasting(d.numbers, 4, 2)(b)
    return fits and (np.broadcast_shapes(np.shape(b), (4, 2))[1:] == (2,) or np.ndim(b) > 2)


def _rows(x):
    """`(time, ..., 2)`, where time is 4 or broadcasts to 4."""
    fits = REAL(x) and np.ndim(x) > 0 and np.shape(x)[-1] == 2
    return fits and d.broadcasting(REAL, 4)(np.ones(np.shape(x)[:-1]))


of("linear_recurrence", "a", jnp.full((4, 2), 0.5), d.broadcasting(d.numbers, 4, 2))
of("linear_recurrence", "b", jnp.ones((4, 2)), _one_axis_more)
of("", "h0", jnp.ones(2), d.optional(d.broadcasting_to(d.numbers, 2)))
of("", "lengths", None, d.optional(d.scalar(d.between(0, 4, d.integers))))
of("", "q k", jnp.full((4, 2), 0.5), _rows)
of("gated_delta_rule", "v", jnp.full((4, 2), 0.5), _rows)
of("", "beta", jnp.full(4, 0.5), d.broadcasting(REAL, 4))
of("", "decay", jnp.full(4, -0.5), d.optional(d.broadcasting(REAL, 4)))
of("", "state", jnp.ones((2, 2)), d.optional(d.broadcasting_to(REAL, 2, 2)))
of("gated_delta_rule", "scale", 0.5, d.optional(d.scalar(REAL)))
of("selective_scan", "x step", jnp.ones((4, 2)), d.shaped(REAL, 4, 2))
of("selective_scan", "a", -jnp.ones((2, 3)), d.shaped(d.numbers, 2, 3))
of("selective_scan", "b c", jnp.ones((4, 3)), d.shaped(d.numbers, 4, 3))
_STATE = d.optional(d.either(d.scalar(d.numbers), d.shaped(d.numbers, 2, 3)))
of("selective_scan", "state", jnp.ones((2, 3)), _STATE)

# ---------------------------------------------------------------- layers over time

of("", "num_layers input_size", 2, d.size)
of("nn.LIF nn.LI nn.LIFCell", "input_size", 2, d.optional(d.size))
of("", "hidden_size output_size heads key_size conv_size channels", 3, d.size)
of("", "value_size", 3, d.optional(d.size))
of("", "state_size", 4, d.size)
of("nn.S5", "state_size", 4, lambda x: d.size(x) and int(x) % 2 == 0)
of("", "dropout label_smoothing", 0.1, d.number(0, 1))
of("nn.Recurrent", "dropout", 0.0, d.number(0, 0))
of("", "proj_size", 2, d.optional(d.size))
of("", "keep", "gates", d.one_of("auto", "gates", "states"))
of("", "activation", "tanh", d.one_of("tanh", "relu"))
of("nn.LRU nn.S5", "activation", None, d.optional(d.sine))
of("", "output", None, d.optional(d.sine))
of("", "r_min", 0.1, d.number(0, 0.9))
of("", "r_max", 0.9, d.number(0.1, 1))
of("", "max_phase", 6.0, d.number(1e-30, 1e38))
of("", "blocks", 1, d.integer(1, 2))
of("", "min_step", 0.01, d.number(1e-30, 0.1))
of("", "max_step", 0.1, d.number(0.01, 1e30))
_CELL = d.of_type(eqg.nn.RNNCell)
of("nn.Recurrent", "cell", eqg.nn.RNNCell(2, 3, key=KEY), d.either(_CELL, d.some_of(_CELL)))
of("nn.Outputs", "layer", eqg.nn.GRU(2, 3, key=KEY), d.of_type(eqg.nn.GRU))
of("()", "xs", BATCH, d.shaped(REAL, None, None, 2))
of("nn.Recurrent()", "xs", BATCH, d.shaped(d.numbers, None, None, 2))  # any cell
of("nn.Outputs()", "xs", XS, lambda x: d.ranked(REAL, 2, 3)(x) and np.shape(x)[-1] == 2)
of("()", "state", None, d.is_none)
_LENGTHS = lambda x: d.between(0, 4, d.integers)(x) and np.shape(x) in ((), (5,))
of("()", "lengths", jnp.array([4, 2, 3, 1, 0]), d.optional(_LENGTHS))
of("()", "key", KEY, d.anything)
of("()", "inference", None, d.optional(d.flag))
of("nn.GRU-from-state", "xs", XS, d.shaped(REAL, None, 2))
of("nn.GRU-from-state", "state", jnp.zeros(3), d.optional(d.shaped(d.reals, 3)))
of("nn.RNNCell()", "x", jnp.ones(2), d.shaped(d.numbers, 2))
of("nn.RNNCell()", "h", jnp.ones(3), d.shaped(d.numbers, 3))


def _neurons(x):
    """One real number for all of three neurons or one for each; a list becomes an array."""
    if isinstance(x, list | tuple):
        try:
            x = np.asarray(x)
        except ValueError:
            return False
    # Of an array of JAX, only the shape and the dtype are checked.
    is_real = d.reals(x) if isinstance(x, jax.Array) else d.number()(x) or d.not_nan(x)
    return is_real and np.shape(x) in ((), (3,), (1,))


def _decay(x):
    in_range = lambda x: d.between(0, 1)(np.asarray(x) if isinstance(x, list | tuple) else x)
    return _neurons(x) and (isinstance(x, jax.Array) or in_range(x))


_SIZES = lambda x: isinstance(x, tuple | list | range) and all(map(d.size, x))
_SPIKING = "nn.LIF nn.LI nn.LIFCell"
of(_SPIKING, "beta", 0.9, _decay)
of("nn.LIFCell-shape", "beta", 0.9, _decay)
of("nn.LIFCell-shape", "hidden_size", 3, lambda x: d.size(x) or (_SIZES(x) and len(x) > 0))
of(_SPIKING, "alpha rho", 0.9, d.optional(_decay))
of(_SPIKING, "strength threshold", 1.0, _neurons)
of("", "reset", "subtract", d.one_of("subtract", "zero", "none"))
of("", "learn", ("beta",), lambda x: isinstance(x, tuple | list) and {*x} <= {"beta"})
_SPIKES = d.optional(d.either(d.function, d.of_type(eqg.surrogates.AbstractSurrogate)))
of("nn", "surrogate", eqg.surrogates.atan(), _SPIKES)
of("nn.LIFCell() nn.LIFCell-all()", "x", X, d.shaped(REAL, 3))
_STATES = d.of_type(eqg.nn.LIFState)
of("nn.LIFCell()", "state", eqg.nn.LIFCell(3, 0.9).initial_state(), _STATES)
of(
    "nn.LIFCell-all()",
    "state",
    eqg.nn.LIFCell(3, 0.9, alpha=0.5, rho=0.8).initial_state(),
    _STATES,
)

# ---------------------------------------------------------------- quantization

_SCALE = d.optional(d.either(d.finite_positive, d.number(1e-30, 1e38)))
of("nn.FakeQuantize nn.LSQ", "scale", 0.2, _SCALE)
of("", "channel_axis", None, d.optional(ANY_INTEGER))
of("", "group_size", None, d.optional(d.integer(1, 10**40)))
of("nn", "gradient_scale", None, d.optional(NUMBER))
of("()", "x", X, d.floats)
_FITTED = lambda x: d.floats(x) and np.size(x) > 0 and d.between(-1e38, 1e38)(x)
of("nn.FakeQuantize.fit nn.LSQ.fit", "x", X, _FITTED)
of("", "indices", jnp.array([1, 2]), d.integers)
of("", "num_entries size", 3, d.size)
of("", "commitment dead_below", DEFAULT, NUMBER)
of("nn.VectorQuantizer", "decay", 0.99, d.number(0, 1))
of("nn.VectorQuantizer.updated nn.VectorQuantizer.fit", "key", KEY, d.optional(d.key))
of("nn.Ternary", "threshold", "mean", d.either(d.one_of("mean"), NUMBER))
of("nn.Quantized", "layer", LINEAR, d.of_type(eqx.nn.Linear))
of("", "weight_quantizer", eqg.nn.FakeQuantize(4), d.optional(d.function))
of("", "input_quantizer call", None, d.optional(d.function))
of("nn.quantize_model", "model", {"a": LINEAR}, d.anything)
_RULES = lambda x: isinstance(x, dict | list | tuple) and (not len(x) or eqx.nn.Linear in x)
of("", "rules", {eqx.nn.Linear: eqg.nn.FakeQuantize(4)}, _RULES)
_QUANTIZED = d.of_type(eqg.nn.Quantized)
_HAS_QUANTIZED = lambda x: any(map(_QUANTIZED, jax.tree.leaves(x, is_leaf=_QUANTIZED)))
of(
    "nn.to_integers",
    "model",
    [eqg.nn.Quantized(LINEAR, eqg.nn.FakeQuantize(4))],
    _HAS_QUANTIZED,
)

# ---------------------------------------------------------------- losses

_LOSS = "losses.linear_cross_entropy"
of(_LOSS, "x", Z[:5, :2], d.shaped(d.floats, 5, 2))
of(_LOSS, "weight", Z[:4, 1:], d.shaped(d.floats, None, 2))
# Also out of range: the loss is NaN.
_LABELS = d.either(d.shaped(d.integers, 5), d.shaped(d.floats, 5, 4))
of(_LOSS, "labels", jnp.array([0, 3, -100, 1, 2]), _LABELS)
of(_LOSS, "bias class_weight", jnp.ones(4), d.optional(d.shaped(d.floats, 4)))
of("", "ignore_index", -100, d.optional(ANY_INTEGER))
of("", "z_loss", 0.01, d.number(0))
of("", "soft_cap", 2.0, d.optional(d.number(1e-300)))
of("", "reduction", "mean", d.one_of("mean", "sum", "none"))
of("losses.chunked", "reduction", "sum", d.one_of("mean", "sum"))
of("losses.chunked", "axis", 0, d.integer(0, 0))

# ---------------------------------------------------------------- solvers and the host

of("", "norm", optx.max_norm, d.function)
of("", "rtol atol mixing ridge", 1e-3, d.scalar(d.not_negative))
of("", "history", 5, d.size)
of("solvers.NeumannAdjoint", "k", 5, ANY_SIZE)
of("solvers.PhantomAdjoint", "k", 5, d.size)
of("", "tau", 0.5, d.number(1e-30, 1))
of("event_time", "y", jnp.array([0.0, -2.0]), d.anything)
of("", "t", 1.0, d.scalar(d.reals))
of("event_time", "where", True, d.scalar(d.bools))
of("", "y0", jnp.zeros(3), lambda x: d.tree_of(d.inexact)(x) and len(jax.tree.leaves(x)) > 0)
of("", "options", None, d.optional(d.of_type(dict)))
of("nn.FixedPoint", "shape", 3, lambda x: d.size(x) or _SIZES(x))
of("", "finite_difference", "central", d.one_of("central", "complex", None))
_STEP = lambda x: all(
    map(d.number(1e-300, 1e300), jax.tree.leaves(x))
)  # one, or a tree of them
of("host_function", "step", 1e-3, _STEP)
of("", "max_rule_calls", 256, ANY_SIZE)
_VMAP = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all")
of("", "vmap_method", "sequential", d.one_of(*_VMAP))
of("", "argnum", 0, d.optional(d.integer(0, 0)))

# ---------------------------------------------------------------- rules and checks

of("elementwise with_gradient_of", "fn", jnp.sin, d.sine)
of("", "setup", None, d.is_none)
of("", "tangents cotangents", None, d.anything)  # not used by the check of the value
of("", "jvp fwd bwd", jnp.sin, d.function)
_NUMBERS = lambda x: isinstance(x, tuple) and all(map(d.integer(0), x))
of("", "n", 3, d.either(d.integer(0, 10**6), _NUMBERS))
of("", "threshold", None, d.optional(d.number(0)))
of("", "seconds", 60.0, d.number(0))
of("gradient_flow", "where", None, d.is_none)
of("testing", "scale", 0.0, d.scalar(d.not_negative))
of("testing.numerical_jacobian", "fn", jnp.sin, d.sine)
of("", "checks", ("primal",), d.optional(d.equal(("primal",))))
of("", "at", (), lambda x: isinstance(x, tuple | list) and all(map(d.of_type(tuple, list), x)))
of("", "reference", None, d.is_none)
of("", "order", 2, d.size)
of("testing.check_gradients", "order", 1, d.integer(1, 2))
of("", "max_residual_bytes", None, d.optional(ANY_SIZE))
# A position of one of two arguments, from the end if negative.
_POSITION = d.integer(-2, 10**40)
of("", "nondiff_argnums", (1,), d.either(_POSITION, d.some_of(_POSITION)))
_NAME = lambda x: isinstance(x, str) and x == "y"
of("", "nondiff_argnames", ("y",), d.either(_NAME, d.some_of(_NAME)))
