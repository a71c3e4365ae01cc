"""Rules that are right until something happens: a transformation, an edge, a second call."""

import itertools
from functools import partial

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ..rules.arguments import sample
from ..rules.formulas import multiply, multiply_cotangents
from ..rules.ways import eqg_jvp, eqg_vjp, eqx_jvp, eqx_vjp, jax_jvp, jax_vjp
from .registry import fault


# transforms


@fault("transforms", "right eagerly, wrong under jit")
def wrong_when_traced(bug):
    def tangent(x, t):
        factor = 1.5 if bug and isinstance(x, Tracer) else 1.0
        return factor * jnp.cos(x) * t

    return jax_jvp(jnp.sin, tangent), (sample(4),)


@fault("transforms", "fails under jit")
def looks_at_values(bug):
    """Python's `if` on an array: fine eagerly."""

    def cotangents(x, ct):
        if bug and jnp.all(x == 0):
            return (jnp.zeros_like(x),)
        return (jnp.cos(x) * ct,)

    return jax_vjp(jnp.sin, cotangents), (sample(4),)


@fault("transforms", "fails under jit")
def goes_through_numpy(bug):
    cos = (lambda x: jnp.asarray(np.cos(np.asarray(x)))) if bug else jnp.cos
    return eqx_vjp(jnp.sin, lambda x, ct: cos(x) * ct), (sample(4),)


@fault("transforms", "wrong under vmap")
def batching_rule_of_jax(bug):
    """A softmax whose batching rule normalizes the whole batch together."""

    def plain_softmax(x):
        exp = jnp.exp(x)
        return exp / jnp.sum(exp)

    @custom_vmap
    def softmax(x):
        return plain_softmax(x)

    @softmax.def_vmap
    def batched(axis_size, in_batched, x):
        return plain_softmax(x) if bug else jax.vmap(plain_softmax)(x), True

    def fwd(x):
        p = plain_softmax(x)
        return p, p

    bwd = lambda p, ct: (p * (ct - jnp.dot(p, ct)),)
    return jax_vjp(softmax, bwd, fwd), (sample(4),)


@fault("transforms", "wrong under (.* of )?vmap, over `y`")
def batching_rule_of_eqx_grads(bug):
    rule = eqg_vjp(multiply, multiply_cotangents)

    @rule.def_vmap
    def batched(axis_size, is_batched, x, y):
        if is_batched != (False, True):
            return NotImplemented
        return rule(jnp.broadcast_to(x, y.shape), y[::-1] if bug else y), True

    return rule, (sample(3), sample(3, seed=1))


@fault("transforms", "wrong under derivative of vmap(?s:.)*zero everywhere")
def derivative_lost_by_batching(bug):
    """The value is right under `vmap`; its derivative is zero."""

    rule = eqg_jvp(jnp.sin, lambda x, t: jnp.cos(x) * t)

    @rule.def_vmap
    def batched(axis_size, is_batched, x):
        out = rule(x)
        return jax.lax.stop_gradient(out) if bug else out, True

    return rule, (sample(4),)


@fault("transforms", "wrong under (.* of )?vmap")
def host_function_of_a_batch(bug):
    """On the host, the first axis may be a batch axis."""

    @jax.custom_vjp
    def flip(x):
        host = lambda x: np.flip(np.asarray(x), 0 if bug else -1)
        return jax.pure_callback(host, x, x, vmap_method="broadcast_all")

    flip.defvjp(lambda x: (flip(x), None), lambda _, ct: (flip(ct),))
    return flip, (sample(4),)


@fault("transforms", "fails under (jit|scan)")
def residual_in_a_python_variable(bug):
    """Right for one call after the other; under `scan` the variable holds a tracer."""
    saved = {}

    def fwd(x):
        if not bug:
            return jnp.sin(x), jnp.cos(x)
        saved["cos"] = jnp.cos(x)
        return jnp.sin(x), None

    def bwd(cos, ct):
        return ((saved["cos"] if bug else cos) * ct,)

    return jax_vjp(jnp.sin, bwd, fwd), (sample(4),)


@fault("transforms", "fails under jit")
def float_of_an_array(bug):
    to_number = float if bug else (lambda x: x)
    return jax_jvp(jnp.sin, lambda x, t: jnp.cos(to_number(x)) * t), (jnp.array(0.5),)


# leaks


@fault("leaks", "keeps a tracer")
def appends_to_a_list(bug):
    history = []

    def tangent(x, t):
        if bug:
            history.append(x)
        return jnp.cos(x) * t

    return jax_jvp(jnp.sin, tangent), (sample(4),)


@fault("leaks", "keeps a tracer")
def appends_residuals_to_a_list(bug):
    history = []

    def fwd(x):
        cos = jnp.cos(x)
        if bug:
            history.append(cos)
        return jnp.sin(x), cos

    return eqg_vjp(jnp.sin, lambda cos, ct: (cos * ct,), fwd), (sample(4),)


@fault("leaks", "keeps a tracer")
def remembered_from_the_last_trace(bug):
    """A cache by shape, filled while tracing and used while tracing again."""
    cache = {}

    def tangent(x, t):
        cos = jnp.cos(x)
        if bug and isinstance(x, Tracer):
            cos = cache.setdefault(x.shape, cos)
        return cos * t

    return jax_jvp(jnp.sin, tangent), (sample(4),)


@fault("leaks", "compilation(?s:.)*in each call")
def compiles_every_time(bug):
    once = jax.jit(jnp.cos)

    def tangent(x, t):
        cos = jax.jit(lambda x: jnp.cos(x)) if bug else once
        return cos(x) * t

    return jax_jvp(jnp.sin, tangent), (sample(4),)


@partial(jax.jit, static_argnums=0)
def _apply(fn, x):
    return fn(x)


@fault("leaks", "compilation(?s:.)*in each call")
def another_static_argument_every_time(bug):
    def cotangents(x, ct):
        return (_apply((lambda x: jnp.cos(x)) if bug else jnp.cos, x) * ct,)

    return jax_vjp(jnp.sin, cotangents), (sample(4),)


# residuals


@fault("residuals", "never read")
def residual_never_read(bug):
    def fwd(x):
        sin, cos = jnp.sin(x), jnp.cos(x)
        return sin, (cos, sin) if bug else (cos,)

    return jax_vjp(jnp.sin, lambda saved, ct: (saved[0] * ct,), fwd), (sample(100),)


@fault("residuals", "never read")
def input_never_read(bug):
    def fwd(x):
        out = jnp.exp(x)
        return out, {"out": out, "x": x} if bug else {"out": out}

    return jax_vjp(jnp.exp, lambda saved, ct: (saved["out"] * ct,), fwd), (sample(100),)


@fault("residuals", "never read")
def intermediate_never_read(bug):
    """Of a rule of `eqx_grads`."""

    def fwd(x):
        shifted = x - jnp.max(x)
        p = jnp.exp(shifted) / jnp.sum(jnp.exp(shifted))
        return p, (p, shifted) if bug else (p,)

    def bwd(saved, ct):
        p = saved[0]
        return (p * (ct - jnp.dot(p, ct)),)

    return eqg_vjp(lambda x: fwd(x)[0], bwd, fwd), (sample(100),)


@fault("residuals", "10000 bytes are kept|20000 bytes are kept")
def jacobian_kept(bug):
    """All of a Jacobian where a vector would do."""

    def softmax(x):
        return jax.nn.softmax(x)

    def fwd(x):
        p = softmax(x)
        return p, jnp.diag(p) - jnp.outer(p, p) if bug else p

    def bwd(saved, ct):
        return (saved @ ct if bug else saved * (ct - jnp.dot(saved, ct)),)

    return jax_vjp(softmax, bwd, fwd), (sample(50),), {"max_residual_bytes": 50 * 8}


@fault("residuals", "400 bytes are kept|800 bytes are kept")
def mask_kept_as_floats(bug):
    """A mask is a byte for each entry."""

    def fwd(x):
        positive = x > 0
        return jax.nn.relu(x), positive.astype(x.dtype) if bug else positive

    bwd = lambda positive, ct: (jnp.where(positive.astype(bool), ct, 0),)
    return eqg_vjp(jax.nn.relu, bwd, fwd), (sample(100),), {"max_residual_bytes": 100}


# finite


def _sinc(x):
    near = jnp.abs(x) < 0.1
    safe = jnp.where(near, 1, x)
    return jnp.where(near, 1 - x**2 / 6 + x**4 / 120, jnp.sin(safe) / safe)


def _sinc_slope(x, masked_once=False):
    near = jnp.abs(x) < 0.1
    safe = x if masked_once else jnp.where(near, 1, x)
    far = (jnp.cos(safe) - jnp.sin(safe) / safe) / safe
    return jnp.where(near, -x / 3 + x**3 / 30 - x**5 / 840, far)


@fault("finite", r"at\[0\].*(cotangent|tangent)(?s:.)*nan")
def norm_at_zero(bug):
    @eqg.custom_jvp
    def norm(x):
        return jnp.sqrt(jnp.sum(x**2))

    @norm.def_jvp
    def jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        length = norm(x)
        return length, jnp.dot(x, t) / (length if bug else jnp.where(length == 0, 1, length))

    return norm, (sample(3),), {"at": [(jnp.zeros(3),)]}


@fault("finite", r"at\[0\].*value(?s:.)*nan")
def value_at_zero(bug):
    value = (lambda x: jnp.sin(x) / x) if bug else _sinc
    slope = lambda out, x: _sinc_slope(x)
    return eqg.elementwise(value, slope), (sample(4),), {"at": [(jnp.zeros(2),)]}


@fault("finite", r"at\[0\].*cotangent(?s:.)*nan")
def slope_of_a_large_number(bug):
    """inf / inf."""

    def softplus(x):
        return jnp.logaddexp(x, 0.0)

    slope = lambda x: jnp.exp(x) / (1 + jnp.exp(x)) if bug else jax.nn.sigmoid(x)
    rule = jax_vjp(softplus, lambda x, ct: (slope(x) * ct,))
    return rule, (sample(4),), {"at": [(jnp.array([1000.0, -1000.0]),)]}


@fault("finite", r"at\[0\].*value(?s:.)*inf")
def value_of_a_large_number(bug):
    def softplus(x):
        return jnp.log1p(jnp.exp(x)) if bug else jnp.logaddexp(x, 0.0)

    rule = jax_jvp(softplus, lambda x, t: jax.nn.sigmoid(x) * t)
    return rule, (sample(4),), {"at": [(jnp.array([1000.0, -1000.0]),)]}


@fault("finite", r"at\[0\].*(cotangent|tangent)(?s:.)*inf")
def slope_below_the_floor(bug):
    """The value has a floor, and its slope none."""

    def floored_log(x):
        return jnp.log(jnp.maximum(x, 1e-6))

    def slope(out, x):
        above = x > 1e-6
        return 1 / x if bug else jnp.where(above, 1 / jnp.where(above, x, 1), 0)

    rule = eqg.elementwise(floored_log, slope)
    return rule, (sample(4, low=0.5),), {"at": [(jnp.zeros(2),)]}


@fault("finite", r"at\[0\].*(debug_nans|second)(?s:.)*nan")
def second_order_at_zero(bug):
    """The slope of sin(x) / x: masked where it is 0 / 0, and so only once differentiable."""

    rule = jax_jvp(_sinc, lambda x, t: _sinc_slope(x, masked_once=bug) * t)
    return rule, (sample(4),), {"at": [(jnp.zeros(2),)]}


@fault("finite", r"at\[0\].*second(?s:.)*nan")
def second_order_of_a_backward_rule(bug):
    """The slope 3 x |x| of |x|^3, by way of a root: once differentiable."""

    def cotangents(x, ct):
        magnitude = jnp.sqrt(x**4) if bug else x**2
        return (3 * jnp.sign(x) * magnitude * ct,)

    rule = jax_vjp(lambda x: jnp.abs(x) ** 3, cotangents)
    return rule, (sample(4),), {"at": [(jnp.zeros(2),)]}


@fault("finite", "debug_nans")
def nan_behind_a_mask(bug):
    """Masked by `where`, so only `jax.debug_nans` sees it."""

    def distance_from_one(x):
        return jnp.where(x > 0, jnp.abs(x - 1), 0)

    def cotangents(x, ct):
        side = jnp.sign(jnp.log(x) if bug else x - 1)
        return (jnp.where(x > 0, side, 0) * ct,)

    rule = jax_vjp(distance_from_one, cotangents)
    return rule, (sample(4, low=0.5),), {"at": [(jnp.array([-1.0, 2.0]),)]}


@fault("finite", r"at\[0\].*tangent(?s:.)*nan")
def dead_term(bug):
    """The slope in `y` is infinite, and `y` does not move: 0 * inf."""

    def weigh(x, y):
        return x * jnp.sqrt(y)

    f = jax.custom_jvp(weigh)

    def rule(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        t = jnp.zeros_like(x) if isinstance(t_x, SymbolicZero) else t_x * jnp.sqrt(y)
        if not isinstance(t_y, SymbolicZero):
            t = t + x * t_y / (2 * jnp.sqrt(y))
        elif bug:
            t = t + x * jnp.zeros_like(y) / (2 * jnp.sqrt(y))
        return weigh(x, y), t

    f.defjvp(rule, symbolic_zeros=True)
    options = {"nondifferentiable": ("y",), "at": [(sample(3), jnp.zeros(3))]}
    return f, (sample(3), sample(3, low=0.5)), options


# deterministic


@fault("deterministic", "differs: call 2")
def noise_of_numpy(bug):
    def tangent(x, t):
        noise = np.random.default_rng().normal() if bug else 0.0
        return (1 + 0.01 * float(noise)) * jnp.cos(x) * t

    return eqx_jvp(jnp.sin, tangent), (sample(4),)


@fault("deterministic", "differs: call 2")
def noise_in_the_value(bug):
    def noisy_sin(x):
        noise = np.random.default_rng().normal() if bug else 0.0
        return jnp.sin(x) + 0.001 * float(noise)

    return jax_jvp(noisy_sin, lambda x, t: jnp.cos(x) * t), (sample(4),)


@fault("deterministic", "differs: call 2")
def every_call_a_little_more(bug):
    calls = itertools.count()

    def cotangents(x, ct):
        factor = 1 + 0.01 * next(calls) if bug else 1.0
        return (factor * jnp.cos(x) * ct,)

    return jax_vjp(jnp.sin, cotangents), (sample(4),)


@fault("deterministic", "differs: call 2")
def every_second_call(bug):
    factors = itertools.cycle([1.0, 1.5 if bug else 1.0])
    return eqx_vjp(jnp.sin, lambda x, ct: next(factors) * jnp.cos(x) * ct), (sample(4),)


@fault("deterministic", "differs: call 2")
def counter_of_steps(bug):
    """An optimizer's bias correction, with the step counted in Python: frozen by `scan`."""
    steps = itertools.count(1)

    def tangent(x, t):
        return t / (1 - 0.9 ** next(steps)) if bug else t

    return jax_jvp(lambda x: x, tangent), (sample(4),)
