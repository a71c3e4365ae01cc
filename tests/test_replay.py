"""`filter_scan(checkpoint="replay")` and what `"auto"` chooses, against `jax.lax.scan`."""

import functools as ft
import re

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads import RuleError
from eqx_grads._control_flow import replay

from .helpers import assert_close, checking_leaks


pytestmark = [pytest.mark.versions, pytest.mark.x64]

STEPS, WIDTH = 21, 3  # in chunks of 16: the last is shorter
numbers = lambda *shape, seed: 0.5 * jr.normal(jr.key(seed), shape, jnp.zeros(()).dtype)
WEIGHTS = {"w": numbers(3, 3, seed=0), "u": numbers(3, 3, seed=1), "b": numbers(3, seed=4)}
H, XS = numbers(WIDTH, seed=2), numbers(STEPS, WIDTH, seed=3)


def tanh(p, h, x):
    h = jnp.tanh(p["w"] @ h + p["u"] @ x + p["b"])
    return h, h


def weights_in_nonlinear_places(p, h, x):
    hidden = jax.nn.gelu(p["u"] @ (jax.nn.softmax(p["w"]) @ h + x))
    return jnp.tanh(p["w"] @ hidden + jnp.exp(p["b"]) * x), (hidden * p["b"], jnp.sum(x * h))


def inner_loops(p, h, x):
    inner = lambda h, row: (jnp.tanh(p["u"] @ h + row), None)
    h = jax.checkpoint(lambda h: jax.lax.scan(inner, h, p["w"])[0])(h)
    h = jax.lax.cond(x[0] > 0, lambda: jnp.tanh(p["w"] @ h), lambda: jnp.sin(p["u"] @ h + x))
    return h, eqg.filter_scan(inner, h, p["w"], checkpoint="replay")[0]


def rules_inside(p, h, x):
    weight = eqg.ste.clip(p["w"], -0.5, 0.5)
    hidden = eqg.clip_gradient(weight @ h, -0.1, 0.1) + eqg.scale_gradient(x, 2.0)
    # Clipped at every step, and so not a matrix product of all steps.
    h = jnp.tanh(eqg.clip_gradient(p["u"], -0.05, 0.05) @ h + hidden)
    return h, h


def other_carries(p, h, x):
    row = p["u"][jnp.argmax(x)]  # an embedding
    return x, (jnp.tanh(p["w"] @ h + row), 1.0, jnp.zeros(2))


def loss(scan, step, **options):
    def value(p, h, xs):
        h, ys = scan(lambda h, x: step(p, h, x), h, xs, **options)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves((h, ys)))

    return value


BODIES = [weights_in_nonlinear_places, inner_loops, rules_inside, other_carries]


@pytest.mark.parametrize("step", BODIES, ids=lambda step: step.__name__)
def test_gradients(step):
    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2)))(WEIGHTS, H, XS)
    for reverse in (False, True) if step is other_carries else (False,):
        options = {"reverse": reverse}
        with checking_leaks():
            got = grad(loss(eqg.filter_scan, step, checkpoint="replay", **options))
        plain = step if step is not inner_loops else inner_loops_plain
        assert_close(got, grad(loss(jax.lax.scan, plain, **options)), eps=500)


def inner_loops_plain(p, h, x):
    inner = lambda h, row: (jnp.tanh(p["u"] @ h + row), None)
    h = jax.lax.scan(inner, h, p["w"])[0]
    h = jnp.where(x[0] > 0, jnp.tanh(p["w"] @ h), jnp.sin(p["u"] @ h + x))
    return h, jax.lax.scan(inner, h, p["w"])[0]


def test_products():
    """A frozen weight costs nothing. Gradients of weights are one product, and not one for each
    step or each example, with `vmap` outside as well."""

    def products(*wanted):
        def value(wanted):
            step = lambda h, x: tanh({**WEIGHTS, **wanted}, h, x)
            return jnp.sum(eqg.filter_scan(step, H, XS, checkpoint="replay")[0])

        wanted = {name: WEIGHTS[name] for name in wanted}
        return jax.jit(jax.grad(value)).lower(wanted).as_text().count("stablehlo.dot_general")

    # The product with the cotangent of the carry is needed by all; the other is not.
    assert products("b") < products("w") < products("w", "u")

    def value(w, xs):
        step = lambda h, x: (jnp.tanh(w @ h + x), None)
        run = lambda xs: eqg.filter_scan(step, jnp.zeros(5), xs, checkpoint="replay")[0]
        return jnp.sum(jax.vmap(run, 1)(xs))

    text = str(jax.make_jaxpr(jax.grad(value))(jnp.eye(5), jnp.ones((32, 7, 5))))
    assert "f32[5,5] = dot_general" in text.replace("f64", "f32")
    for summed_late in ("[7,5,5]", "[16,5,5]", "[16,7,5,5]"):
        assert summed_late not in text


def test_effects_of_the_backward_pass_happen_once_a_step():
    seen = []

    def value(w):
        step = lambda h, x: (jnp.tanh(w @ eqg.tap_gradient(h, seen.append) + x), None)
        return jnp.sum(eqg.filter_scan(step, H, XS, checkpoint="auto")[0])

    jax.grad(value)(WEIGHTS["w"])
    jax.effects_barrier()
    assert len(seen) == STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", ["replay", "auto"])
@pytest.mark.parametrize("steps", [2, 100])
def test_a_carry_in_no_result_has_no_backward_pass(checkpoint, steps):
    """The second of two layers, whose state nothing reads but itself: for a plain scan, which
    is what `"auto"` is for two steps, and for a replay."""
    weights = {"first": jnp.eye(4), "second": 2 * jnp.eye(4)}

    def value(weights, last, scan):
        def step(carry, x):
            first = jnp.tanh(weights["first"] @ carry[0] + x)
            second = jnp.tanh(weights["second"] @ carry[1] + first)
            return (first, second), first

        carry, ys = scan(step, (jnp.ones(4), jnp.ones(4)), jnp.ones((steps, 4)))
        return jnp.sum(carry[1] if last else ys)

    scan = ft.partial(eqg.filter_scan, checkpoint=checkpoint)

    def products(last):
        gradient = jax.jit(jax.grad(value), static_argnums=(1, 2))
        return gradient.lower(weights, last, scan).as_text().count("stablehlo.dot_general")

    assert products(last=False) <= products(last=True) - 2
    for last in (False, True):
        got, expected = (jax.grad(value)(weights, last, s) for s in (scan, jax.lax.scan))
        assert_close(got, expected, eps=500)
        assert got["second"].any() == last


# ---------------------------------------------------------------- what differs in a batch


@jax.custom_jvp
def noisy_slope(x, key):
    return jnp.tanh(x)


@noisy_slope.defjvp
def _noisy_slope_jvp(primals, tangents):
    x, key = primals
    return jnp.tanh(x), tangents[0] * (1 + jr.normal(key, x.shape, x.dtype))


@jax.custom_jvp
def noisy_second(x, key):
    """The second derivative is noisy."""
    return jnp.sin(x)


noisy_second.defjvp(lambda p, t: (noisy_second(*p), t[0] * noisy_slope(*p)))


def halvings(x):
    """How often `x` can be doubled below one, which never ends for zero and less."""
    step = lambda s: (2 * s[0], s[1] + 1)
    return jax.lax.while_loop(lambda s: s[0] < 1, step, (x, 0))[1]


def guarded_loop(h, key):
    """It ends for positive numbers only."""
    x = jax.lax.stop_gradient(h[0])
    return h * (1 + jax.lax.cond(x > 0, halvings, lambda x: 0, x))


@jax.custom_jvp
def loop_in_rule(x, key):
    return jnp.maximum(x, 0) ** 2


@loop_in_rule.defjvp
def _loop_in_rule_jvp(primals, tangents):
    slope = lambda x: 1 + jax.lax.cond(x > 0, halvings, lambda x: 0, x)
    return loop_in_rule(*primals), tangents[0] * jax.lax.map(slope, primals[0])


def nested_loops(x, key):
    """The greatest common divisor. The outer loop ends with `b == 0`, for which the inner one
    does not."""
    rest = lambda a, b: jax.lax.while_loop(lambda a: a >= b, lambda a: a - b, a)
    a = jnp.abs(jr.key_data(key)[-1].astype(jnp.int32) % 40) + 1
    gcd = jax.lax.while_loop(lambda s: s[1] != 0, lambda s: (s[1], rest(*s)), (a, 12))[0]
    return x * gcd.astype(x.dtype)


def ragged(x, key):
    weights = 0.1 * jnp.ones((2, x.size, x.size), x.dtype)
    return x + jax.lax.ragged_dot(x[None], weights, jnp.array([1, 0]))[0]


def printing(h, key):
    jax.debug.callback(lambda: None)
    return h


@jax.custom_vjp
def printing_backward(h, key):
    return h


printing_backward.defvjp(lambda h, key: (h, None), lambda _, ct: (printing(ct, None), None))
# The implementation of the keys, and what `"replay"` says.
DIFFER = {
    printing: ("threefry2x32", "a step has side effects"),
    printing_backward: ("threefry2x32", "the backward pass of a step has side effects"),
    guarded_loop: ("threefry2x32", "a step has a `while_loop` in a branch"),
    noisy_slope: ("rbg", "a step draws random bits"),
    loop_in_rule: ("threefry2x32", "the backward pass of a step has a `while_loop` in a br"),
    nested_loops: ("threefry2x32", "a step has a `while_loop` in another"),
    ragged: ("threefry2x32", "a step has an operation that JAX can't vectorize"),
}


def keyed_loss(fn, keys, scan, **options):
    step = lambda p, h, x: (jnp.tanh(p["w"] @ fn(h, x[1]) + x[0]), None)
    value = loss(scan, step, **options)
    return lambda w: value({"w": w}, H, (XS, keys))


@pytest.mark.parametrize("fn", DIFFER, ids=lambda fn: fn.__name__)
def test_what_a_batch_computes_otherwise(fn, monkeypatch):
    """The random bits and the loops of a rule are not in the program of the steps; nor are the
    bits that an equation draws when it is compiled. `jax.lax.scan` is the reference."""
    # `"auto"` would replay all of these.
    monkeypatch.setattr(replay, "why_not_better", lambda *args: None)
    impl, reason = DIFFER[fn]
    keys = jr.split(jr.key(3, impl=impl), STEPS)
    grad = lambda *args, **options: jax.jit(jax.grad(keyed_loss(fn, keys, *args, **options)))(
        WEIGHTS["w"]
    )
    assert_close(grad(eqg.filter_scan, checkpoint="auto"), grad(jax.lax.scan), eps=500)
    with pytest.raises(RuleError, match=rf"can't replay these steps.*\n  {reason}"):
        grad(eqg.filter_scan, checkpoint="replay")


def test_bits_of_a_batch_without_a_key():
    draws = lambda bits, _: jax.lax.rng_bit_generator(bits, (3,))
    with pytest.raises(RuleError, match="\n  a step draws random bits"):
        eqg.filter_scan(draws, jnp.ones(4, "uint32"), length=3, checkpoint="replay")


def test_bits_of_the_second_derivative():
    """The rule of a rule draws them, when a replay is differentiated once more."""
    keys = jr.split(jr.key(3, impl="rbg"), STEPS)

    def second(*args, **options):
        grad = jax.grad(keyed_loss(noisy_second, keys, *args, **options))
        return jax.grad(lambda w: jnp.sum(grad(w) ** 2))(WEIGHTS["w"])

    expected = second(jax.lax.scan)
    assert_close(second(eqg.filter_scan, checkpoint="auto"), expected, eps=5000)
    with pytest.raises(RuleError, match=r"can't replay these steps.*\n  a step draws"):
        second(eqg.filter_scan, checkpoint="replay")


# ---------------------------------------------------------------- the choice of "auto"


def of_sum(w, h, x):
    return h + x * w[0, 0]


def of_product(w, h, x):
    return jnp.tanh(w @ h + x)


def of_elements(w, h, x):
    return jnp.tanh(jnp.sin(w[0] * h) + x)


def of_branches(w, h, x):
    return jax.lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.sin, w @ h + x)


CHOICES = [
    (of_product, "cpu", r"500 steps.*float\d\d\[64\]: a replay, of \d\d steps at"),
    (of_elements, "cpu", r": plain scan, as it is estimated to be as fast\.$"),
    (of_branches, "cpu", r": plain scan, as a step has branches, or is rematerialized\.$"),
    # On an accelerator a replay is faster wherever it saves bytes.
    (of_product, "gpu", "a replay, of"),
    (of_elements, "gpu", "a replay, of"),
    (of_sum, "gpu", r": plain scan, as replaying needs as much memory\.$"),
]


@pytest.mark.parametrize(("fn", "platform", "match"), CHOICES)
def test_the_logger_says_what_auto_chose(fn, platform, match, caplog, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)

    def messages(checkpoint):
        def value(w):
            run, h, xs = lambda h, x: (fn(w, h, x),) * 2, jnp.zeros(64), jnp.ones((500, 64))
            return jnp.sum(eqg.filter_scan(run, h, xs, checkpoint=checkpoint)[1])

        caplog.clear()
        with caplog.at_level("DEBUG", logger="eqx_grads"):
            jax.make_jaxpr(jax.grad(value))(0.1 * jnp.ones((64, 64)))
        return {r.getMessage() for r in caplog.records if r.name == "eqx_grads"}

    (message,) = messages("auto")
    assert re.search(match, message)
    if fn is of_product:
        assert not any(map(messages, (None, "replay", "sqrt")))


def test_a_frozen_weight_is_not_replayed(cpu):
    """On a CPU, a replay pays off by the gradients of weights."""

    def loss(b, w, checkpoint):
        step = lambda h, x: (jnp.tanh(jnp.sin(w @ h) + b * x),) * 2
        xs = jnp.ones((500, 64))
        return jnp.sum(eqg.filter_scan(step, jnp.zeros(64), xs, checkpoint=checkpoint)[1])

    def flops_and_gradient(checkpoint):
        gradient = jax.jit(jax.grad(lambda *args: loss(*args, checkpoint)))
        args = jnp.ones(64), 0.1 * jnp.ones((64, 64))
        return gradient.lower(*args).compile().cost_analysis()["flops"], gradient(*args)

    (auto, got), (plain, want) = map(flops_and_gradient, ("auto", None))
    assert auto < 1.03 * plain
    assert_close(got, want)


def test_plain_where_that_is_faster(caplog, cpu):
    """A large batch: `"auto"` decides when it sees the batch, which may be outside."""

    def value(w, xs, batch_outside):
        step = lambda h, x: 2 * (jnp.tanh(h @ w + x),)
        run = lambda h, xs: eqg.filter_scan(step, h, xs, checkpoint="auto")[1]
        h = jnp.zeros(xs.shape[1:], xs.dtype)
        return jnp.sum(jax.vmap(run, (0, 1))(h, xs) if batch_outside else run(h, xs))

    for outside in (False, True):
        for batch, is_replayed in ((4, True), (256, False)):
            args = jnp.zeros((32, 32), "float32"), jnp.zeros((300, batch, 32), "float32")
            with caplog.at_level("DEBUG", logger="eqx_grads"):
                jax.make_jaxpr(jax.grad(value), static_argnums=2)(*args, outside)
            assert (" a replay, " in caplog.messages[-1]) == is_replayed
