"""Backward rules with a wrong number in them."""

from typing import NamedTuple

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from ..rules.arguments import complex_sample, sample
from ..rules.formulas import (
    abs_squared,
    abs_squared_cotangents,
    cumulative_sum,
    cumulative_sum_cotangents,
    dropout,
    dropout_cotangents,
    matvec,
    matvec_cotangents,
    multiply,
    multiply_cotangents,
    shift,
    shift_cotangents,
    sort,
    sort_cotangents,
    to_circle,
    to_circle_cotangents,
)
from ..rules.ways import eqg_vjp, eqx_vjp, jax_vjp
from .registry import fault


# A constant factor


@fault("reverse", "5 times(?s:.)*a sum and a mean over 5")
def mean_not_divided_by_n(bug):
    def mean_square(x):
        return jnp.mean(x**2)

    cotangents = lambda x, ct: (2 * x * ct / (1 if bug else x.size),)
    return jax_vjp(mean_square, cotangents), (sample(5),)


@fault("reverse", r"0\.2 times(?s:.)*a sum and a mean over 5")
def sum_divided_by_n(bug):
    def sum_square(x):
        return jnp.sum(x**2)

    cotangents = lambda x, ct: (2 * x * ct / (x.size if bug else 1),)
    return eqg_vjp(sum_square, cotangents), (sample(5),)


@fault("reverse", "sign is wrong")
def reversal_not_reversed(bug):
    """A gradient reversal, told by its reference."""
    reverse = eqx_vjp(lambda x: x, lambda x, ct: ct if bug else -ct)
    return reverse, (sample(4),), {"reference": lambda x: -x}


@fault("reverse", "zero everywhere: the term of `x`")
def nothing_at_1000(bug):
    cotangents = lambda x, ct: (jnp.zeros_like(x) if bug else jnp.cos(x) * ct,)
    return jax_vjp(jnp.sin, cotangents), (sample(1000),)


@fault("reverse", r"at `x`: relative error 0\.5,")
def dropout_not_rescaled(bug):
    def not_rescaled(x, key, ct):
        return jnp.where(jr.bernoulli(key, 0.5, x.shape), ct, 0), None

    return eqg_vjp(dropout, not_rescaled if bug else dropout_cotangents), (sample(8), jr.key(0))


@fault("reverse", "at `x`(?s:.)*entries are wrong")
def dropout_of_another_key(bug):
    of_another = lambda x, key, ct: dropout_cotangents(x, jr.split(key)[0], ct)
    return eqg_vjp(dropout, of_another if bug else dropout_cotangents), (sample(8), jr.key(0))


# Transposes and conjugates


@fault("reverse", "at `x`(?s:.)*transposed")
def not_transposed(bug):
    not_transposed = lambda w, x, ct: (jnp.outer(ct, x), w @ ct)
    return jax_vjp(matvec, not_transposed if bug else matvec_cotangents), (
        sample(4, 4),
        sample(4, seed=1),
    )


@fault("reverse", "at `w`(?s:.)*transposed")
def outer_product_transposed(bug):
    transposed = lambda w, x, ct: (jnp.outer(x, ct), w.T @ ct)
    return eqg_vjp(matvec, transposed if bug else matvec_cotangents), (
        sample(4, 4),
        sample(4, seed=1),
    )


@fault("reverse", "transposed")
def inverse_not_transposed(bug):
    def cotangents(x, ct):
        inverse = jnp.linalg.inv(x)
        return (ct * jnp.linalg.det(x) * (inverse if bug else inverse.T),)

    return jax_vjp(jnp.linalg.det, cotangents), (sample(3, 3),)


@fault("reverse", "at `a`(?s:.)*sign is wrong")
def sign_of_the_matrix_of_a_solve(bug):
    def cotangents(a, b, ct):
        ct_b = jnp.linalg.solve(a.T, ct)
        ct_a = jnp.outer(ct_b, jnp.linalg.solve(a, b))
        return ct_a if bug else -ct_a, ct_b

    a = sample(3, 3) + 3 * jnp.eye(3)
    return eqg_vjp(jnp.linalg.solve, cotangents), (a, sample(3, seed=1))


@fault("reverse", "complex conjugate")
def not_conjugated(bug):
    """PyTorch's convention is the conjugate of JAX's."""

    not_conjugated = lambda z, ct: (2 * z * ct.astype(z.dtype),)
    return jax_vjp(abs_squared, not_conjugated if bug else abs_squared_cotangents), (
        complex_sample(3),
    )


@fault("reverse", "at `x`(?s:.)*transposed")
def cumulative_sum_not_reversed(bug):
    bwd = (lambda _, ct: (jnp.cumsum(ct),)) if bug else cumulative_sum_cotangents
    return jax_vjp(cumulative_sum, bwd, lambda x: (jnp.cumsum(x), None)), (sample(5),)


@fault("reverse", "at `x`(?s:.)*transposed")
def rolled_the_same_way(bug):
    the_same_way = lambda x, ct: (jnp.roll(ct, 1),)
    return eqg_vjp(shift, the_same_way if bug else shift_cotangents), (sample(5),)


@fault("reverse", "at `x`")
def reversed_along_time(bug):
    @eqg.custom_gradient
    def discount(x):
        weights = 0.5 ** jnp.arange(x.size, dtype=x.dtype)
        return weights * x, lambda ct: (weights[::-1] if bug else weights) * ct

    return discount, (sample(5),)


@fault("reverse", "at `x`(?s:.)*transposed")
def kernel_not_flipped(bug):
    def smooth(x, kernel):
        return jnp.convolve(x, kernel, mode="same")

    def cotangents(x, kernel, ct):
        ct_x = jnp.convolve(ct, kernel if bug else kernel[::-1], mode="same")
        ct_kernel = jax.vjp(smooth, x, kernel)[1](ct)[1]
        return ct_x, ct_kernel

    return jax_vjp(smooth, cotangents), (sample(6), sample(3, seed=1))


@fault("reverse", "at `x`(?s:.)*transposed")
def sort_not_undone(bug):
    not_undone = lambda x, ct: (ct[jnp.argsort(x)],)
    return jax_vjp(sort, not_undone if bug else sort_cotangents), (sample(6),)


@fault("reverse", "at `x`")
def recurrence_without_decay(bug):
    """Adjoint of a leaky integrator, scanned backwards in time."""

    def integrate(x):
        step = lambda v, x: (0.9 * v + x, 0.9 * v + x)
        return jax.lax.scan(step, jnp.zeros((), x.dtype), x)[1]

    def bwd(_, ct):
        decay = 1.0 if bug else 0.9
        step = lambda adjoint, ct: (decay * adjoint + ct, decay * adjoint + ct)
        return (jax.lax.scan(step, jnp.zeros((), ct.dtype), ct, reverse=True)[1],)

    return eqg_vjp(integrate, bwd, lambda x: (integrate(x), None)), (sample(6),)


# The wrong argument, leaf, axis or place


@fault("reverse", "term of `y` is missing")
def cotangent_of_y(bug):
    cotangents = lambda x, y, ct: (y * ct, jnp.zeros_like(y) if bug else x * ct)
    return jax_vjp(multiply, cotangents), (sample(3), sample(3, seed=1))


@fault("reverse", "belongs to `[xy]`")
def cotangents_swapped(bug):
    cotangents = lambda x, y, ct: (x * ct, y * ct) if bug else (y * ct, x * ct)
    return jax_vjp(multiply, cotangents), (sample(3), sample(3, seed=1))


class Linear(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    name: str = eqx.field(static=True, default="linear")

    def __call__(self, x):
        return self.weight @ x + self.bias


def _apply(layer, x):
    return layer(x)


def _linear_args():
    return Linear(sample(3, 3), sample(3, seed=2)), sample(3, seed=1)


@fault("reverse", r"term of `layer\.bias` is missing")
def bias_of_a_module(bug):
    def cotangents(layer, x, ct):
        bias = None if bug else ct
        ct_layer = eqg.tangents.of(layer, weight=jnp.outer(ct, x), bias=bias)
        return ct_layer, layer.weight.T @ ct

    return eqg_vjp(_apply, cotangents), _linear_args()


@fault("reverse", "weight`(?s:.)*transposed")
def weight_of_a_module(bug):
    def cotangent(pair, ct):
        layer, x = pair
        outer = jnp.outer(x, ct) if bug else jnp.outer(ct, x)
        return eqg.tangents.of(layer, weight=outer, bias=ct), layer.weight.T @ ct

    return eqx_vjp(lambda pair: _apply(*pair), cotangent), (_linear_args(),)


class LeakyLinear(eqx.Module):
    """A method's rule, with a field forgotten."""

    weight: jax.Array
    leak: jax.Array
    bug: bool = eqx.field(static=True)

    @eqg.custom_vjp
    def step(self, v, x):
        return self.leak * v + self.weight @ x

    @step.def_fwd
    def _step_fwd(self, v, x):
        return self.step(v, x), (self, v, x)

    @step.def_bwd
    def _step_bwd(residuals, ct):
        self, v, x = residuals
        leak = None if self.bug else jnp.dot(ct, v)
        ct_self = eqg.tangents.of(self, weight=jnp.outer(ct, x), leak=leak)
        return ct_self, self.leak * ct, self.weight.T @ ct


@fault("reverse", r"term of `self\.leak` is missing")
def field_of_self(bug):
    cell = LeakyLinear(sample(3, 2), jnp.array(0.9), bug)
    return LeakyLinear.step, (cell, sample(3, seed=1), sample(2, seed=2))


@fault("reverse", "at `bias`")
def summed_over_the_wrong_axis(bug):
    def add_bias(x, bias):
        return x + bias[None, :]

    bwd = lambda _, ct: (ct, jnp.sum(ct, axis=1 if bug else 0))
    fwd = lambda x, bias: (add_bias(x, bias), None)
    return jax_vjp(add_bias, bwd, fwd), (sample(3, 3), sample(3, seed=1))


class State(NamedTuple):
    position: jax.Array
    velocity: jax.Array


@fault("reverse", r"at `state\.velocity`(?s:.)*what belongs to `state\.position`")
def leaf_of_a_named_tuple(bug):
    def drift(state):
        return state.position + 0.1 * state.velocity

    bwd = lambda _, ct: (State(ct, (1.0 if bug else 0.1) * ct),)
    fwd = lambda state: (drift(state), None)
    return eqg_vjp(drift, bwd, fwd), (State(sample(3), sample(3, seed=1)),)


@fault("reverse", "at `x`(?s:.)*off by one")
def index_off_by_one(bug):
    """The cotangent of `x[i]`, with an integer argument."""

    def cotangents(x, i, ct):
        return jnp.zeros_like(x).at[i + 1 if bug else i].set(ct), None

    return eqg_vjp(lambda x, i: x[i], cotangents), (sample(5), jnp.array(0))


@fault("reverse", "at `table`(?s:.)*entries are wrong")
def repeated_indices(bug):
    """Cotangents of a row that was taken twice are added."""

    def take(table, indices):
        return table[indices]

    def cotangents(table, indices, ct):
        rows = jnp.zeros_like(table).at[indices]
        return rows.set(ct) if bug else rows.add(ct), None

    return eqg_vjp(take, cotangents), (sample(4, 2), jnp.array([2, 0, 2]))


@fault("reverse", "at `logits`")
def cross_entropy_of_the_wrong_label(bug):
    def cross_entropy(logits, label):
        return jax.nn.logsumexp(logits) - logits[label]

    def cotangents(logits, label, ct):
        hot = jax.nn.one_hot(label - 1 if bug else label, logits.size, dtype=logits.dtype)
        return ct * (jax.nn.softmax(logits) - hot), None

    return eqg_vjp(cross_entropy, cotangents), (sample(5), jnp.array(2))


@fault("reverse", r"2\.068 times")
def softmax_not_normalized(bug):
    def logsumexp(x):
        shift = jax.lax.stop_gradient(jnp.max(x))
        return shift + jnp.log(jnp.sum(jnp.exp(x - shift)))

    def cotangents(x, ct):
        exp = jnp.exp(x - jnp.max(x))
        return (ct * (exp if bug else exp / jnp.sum(exp)),)

    return jax_vjp(logsumexp, cotangents), (sample(5),)


@fault("reverse", "at `x`")
def reverse_half_wrong_inside_scan(bug):
    """A cell with a wrong rule, inside a model without a rule."""
    tanh = jax_vjp(jnp.tanh, lambda x, ct: (ct if bug else (1 - jnp.tanh(x) ** 2) * ct,))

    def model(x):
        step = lambda h, x: (tanh(0.5 * h + x), None)
        return jax.lax.scan(step, jnp.zeros((), x.dtype), x)[0]

    return model, (sample(4),)


# Rules that are wrong on purpose, and then wrong


@fault("reverse", "at `x`")
def clipped_elsewhere(bug):
    clipped = lambda k: eqg_vjp(lambda x: x, lambda x, ct: (jnp.clip(ct, -k, k),))
    rule = clipped(0.12 if bug else 0.1)
    return rule, (sample(5),), {"nonlinear": True, "reference": clipped(0.1)}


@fault("reverse", "at `x`")
def clipped_by_value_not_norm(bug):
    def by_norm(ct):
        return ct * jnp.minimum(1, 0.1 / jnp.sqrt(jnp.sum(ct**2)))

    by_value = lambda ct: jnp.clip(ct, -0.1, 0.1)
    of = lambda clip: eqg_vjp(lambda x: x, lambda x, ct: (clip(ct),))
    rule = of(by_value if bug else by_norm)
    return rule, (sample(5),), {"nonlinear": True, "reference": of(by_norm)}


# Types and errors


@fault("reverse", "float16")
def cotangent_in_half_precision(bug):
    def cotangents(x, ct):
        ct_x = 2 * x * ct
        return (ct_x.astype("float16") if bug else ct_x,)

    return jax_vjp(lambda x: x**2, cotangents), (jnp.array([0.5, 1.0, -2.0]),)


@fault("reverse", "has dtype float32")
def cotangent_in_single_precision(bug):
    """Nothing is lost, but a scan and a second use of the argument will fail."""

    def cotangents(x, ct):
        ct_x = 2 * x.astype("float32") * ct.astype("float32")
        return (ct_x if bug else ct_x.astype(x.dtype),)

    return jax_vjp(lambda x: x**2, cotangents), (sample(3).astype("bfloat16"),)


@fault("reverse", "complex")
def complex_cotangent_of_a_real_array(bug):
    def of_complex_dtype(angle, ct):
        return (jax.lax.complex(-jnp.sin(angle), jnp.cos(angle)) * ct,)

    return jax_vjp(to_circle, of_complex_dtype if bug else to_circle_cotangents), (sample(3),)


@fault("reverse", "RuleError: .*a cotangent that does not fit")
def cotangent_of_the_wrong_shape(bug):
    """`eqx_grads` sees this by itself."""
    cotangents = lambda w, x, ct: (jnp.outer(ct, x), ct if bug else w.T @ ct)
    return eqg_vjp(matvec, cotangents), (sample(3, 2), sample(2, seed=1))


@fault("reverse", "TypeError: .*bwd rule")
def one_cotangent_too_few(bug):
    """JAX sees this by itself."""
    too_few = lambda x, y, ct: (y * ct,)
    return jax_vjp(multiply, too_few if bug else multiply_cotangents), (
        sample(3),
        sample(3, seed=1),
    )
