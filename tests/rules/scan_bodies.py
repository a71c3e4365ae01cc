"""Bodies of scans, `body(weights, carry, x)`, of every kind that a backward pass may meet."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from ..ops import sin_times_jvp, sin_times_vjp


STEPS, WIDTH = 21, 3  # in chunks of 16: the last is shorter


def numbers(*shape, seed=0, dtype=None):
    return 0.5 * jr.normal(jr.key(seed + sum(shape)), shape, dtype or jnp.zeros(()).dtype)


WEIGHTS = {"w": numbers(WIDTH, WIDTH), "u": numbers(WIDTH, WIDTH, seed=1), "b": numbers(WIDTH)}
H, XS = numbers(WIDTH, seed=2), numbers(STEPS, WIDTH, seed=3)
CASES = {}


def step(case):
    CASES[case.__name__] = case
    return case


@step
def tanh(p, h, x):
    h = jnp.tanh(p["w"] @ h + p["u"] @ x + p["b"])
    return h, h


@step
def output_of_its_own(p, h, x):
    return jnp.tanh(p["w"] @ h + x), (p["u"] @ h, jnp.sum(x * h))


@step
def deep(p, h, x):
    hidden = jax.nn.gelu(p["u"] @ (p["w"] @ h + x))
    return jnp.tanh(p["w"] @ hidden + p["b"]), hidden


@step
def weight_in_a_nonlinear_place(p, h, x):
    h = jnp.tanh(jax.nn.softmax(p["w"]) @ h + jnp.exp(p["b"]) * x)
    return h, h * p["b"]


@step
def inner_jit_and_checkpoint(p, h, x):
    product = jax.jit(lambda w, h: jnp.sin(w @ h))
    h = jax.checkpoint(lambda h: jnp.tanh(product(p["w"], h) + p["u"] @ x))(h)
    return h, h


@step
def inner_scan(p, h, _):
    inner = lambda h, row: (jnp.tanh(p["u"] @ h + row), None)
    h, _ = jax.lax.scan(inner, h, p["w"])
    return h, h


@step
def inner_filter_scan(p, h, x):
    inner = lambda h, row: (jnp.tanh(p["u"] @ h + row + x), None)
    h, _ = eqg.filter_scan(inner, h, p["w"], checkpoint="replay")
    return h, h


@step
def branches(p, h, x):
    h = jax.lax.cond(x[0] > 0, lambda: jnp.tanh(p["w"] @ h), lambda: jnp.sin(p["u"] @ h + x))
    return h, h


@step
def rules_inside(p, h, x):
    h = sin_times_vjp(p["w"] @ h, sin_times_jvp(p["b"], x))
    return h, h


@step
def made_up_rules_inside(p, h, x):
    weight = eqg.ste.clip(p["w"], -0.5, 0.5)
    h = jnp.tanh(eqg.clip_gradient(weight @ h, -0.1, 0.1) + eqg.scale_gradient(x, 2.0))
    return h, h


@step
def nonlinear_rule_on_a_weight(p, h, x):
    # Clipped at every step, and so not a matrix product of all steps.
    h = jnp.tanh(eqg.clip_gradient(p["w"], -0.05, 0.05) @ h + p["u"] @ x)
    return h, h


@step
def no_recurrence(p, h, x):
    return h, jnp.tanh(p["w"] @ x + p["b"])


@step
def input_in_the_state(p, h, x):
    return x, p["w"] @ h


@step
def gathered(p, h, x):
    row = p["u"][jnp.argmax(x)]  # an embedding
    return jnp.tanh(p["w"] @ h + row), row


@step
def weak_and_constant(p, h, x):
    return h * 0.9, (1.0, jnp.zeros(2), x)


def loss(scan, case, options):
    def value(p, h, xs):
        h, ys = scan(lambda h, x: case(p, h, x), h, xs, **options)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves((h, ys)))

    return value


def with_plain_inner(p, h, x):
    inner = lambda h, row: (jnp.tanh(p["u"] @ h + row + x), None)
    h, _ = jax.lax.scan(inner, h, p["w"])
    return h, h


# To second order, a clipped gradient is the sum of two when it is replayed, each of which is
# clipped: see "Sharp edges".
MADE_UP = ("made_up_rules_inside", "nonlinear_rule_on_a_weight")
