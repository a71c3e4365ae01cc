"""`filter_scan(checkpoint="replay")`: every kind of step, against `jax.lax.scan`."""

import functools as ft
import re

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads import RuleError
from eqx_grads._control_flow import replay
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

from .helpers import assert_close, checking_leaks, temp_bytes
from .rules.scan_bodies import (
    CASES,
    H,
    loss,
    numbers,
    STEPS,
    tanh,
    WEIGHTS,
    WIDTH,
    with_plain_inner,
    XS,
)


pytestmark = [pytest.mark.versions, pytest.mark.x64]


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, reverse):
    options = {"reverse": reverse}
    replayed = loss(eqg.filter_scan, CASES[name], {**options, "checkpoint": "replay"})
    plain = loss(jax.lax.scan, CASES[name], options)
    if name == "inner_filter_scan":
        plain = loss(jax.lax.scan, with_plain_inner, options)
    grad = lambda f: jax.jit(jax.value_and_grad(f, (0, 1, 2)))(WEIGHTS, H, XS)
    with checking_leaks():
        got = grad(replayed)
    assert_close(got, grad(plain), eps=500)


def test_a_frozen_weight_costs_nothing():
    def products(*wanted):
        def value(wanted):
            p = {**WEIGHTS, **wanted}
            return jnp.sum(
                eqg.filter_scan(lambda h, x: tanh(p, h, x), H, XS, checkpoint="replay")[0]
            )

        wanted = {name: WEIGHTS[name] for name in wanted}
        text = jax.jit(jax.grad(value)).lower(wanted).as_text()
        return text.count("stablehlo.dot_general")

    # The product with the cotangent of the carry is needed by all; the other is not.
    both, one, none = products("w", "u"), products("w"), products("b")
    assert none < one < both


def test_gradients_of_weights_are_one_product():
    """And not one for each step or each example, with `vmap` outside as well."""

    def value(w, xs):
        run = lambda xs: eqg.filter_scan(
            lambda h, x: (jnp.tanh(w @ h + x), None), jnp.zeros(5), xs, checkpoint="replay"
        )[0]
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


def test_a_product_of_nothing():
    empty = jnp.zeros((0, WIDTH), H.dtype)

    def value(w, with_empty):
        more = lambda h: empty.T @ (empty @ h) if with_empty else 0
        step = lambda h, x: (jnp.tanh(w @ h + more(h) + x), None)
        return jnp.sum(eqg.filter_scan(step, H, XS, checkpoint="replay")[0])

    assert_close(
        jax.grad(value)(WEIGHTS["w"], True), jax.grad(value)(WEIGHTS["w"], False), eps=500
    )


@pytest.mark.cost
def test_auto_leaves_alone_what_it_would_make_worse():
    """Branches, what the user rematerializes, and steps that compute more than they keep."""
    w = jnp.zeros((256, 256))
    steps = {
        "branches": lambda h, x: jax.lax.cond(x[0] > 0, lambda: w @ h, lambda: jnp.sin(h)),
        "checkpoint": lambda h, x: jax.checkpoint(lambda h: jnp.tanh(w @ h))(h),
        "large": lambda h, x: jnp.sum(w * h[None], 1) + x,
    }

    def value(step, checkpoint):
        run, xs = lambda h, x: (step(h, x), None), jnp.ones((64, 256))
        return lambda h: jnp.sum(eqg.filter_scan(run, h, xs, checkpoint=checkpoint)[0])

    h = jnp.ones(256)
    for name, step in steps.items():
        plain, auto = value(step, None), value(step, "auto")
        assert temp_bytes(jax.grad(auto), h) <= 1.1 * temp_bytes(jax.grad(plain), h), name
        if name != "large":  # for this one, it decides when it is differentiated
            costs = [
                jax.jit(lambda h, f=f: jax.jvp(f, (h,), (h,))).lower(h).compile()
                for f in (auto, plain)
            ]
            flops, expected = (cost.cost_analysis()["flops"] for cost in costs)
            assert flops == expected, name


@pytest.mark.thorough
def test_collectives_are_not_replayed():
    """The sum over the batch at every step: `"auto"` leaves that to plain scan."""

    def value(p, h, xs, checkpoint):
        def step(h, x):
            return jnp.tanh(p["w"] @ jax.lax.pmean(h, "i") + x), None

        run = lambda h: eqg.filter_scan(step, h, xs, checkpoint=checkpoint)[0]
        return jnp.sum(jax.vmap(run, axis_name="i")(h))

    h = jnp.stack([H, -H])
    grad = jax.grad(value)
    assert_close(grad(WEIGHTS, h, XS, "auto"), grad(WEIGHTS, h, XS, None), eps=500)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["jit", "shard_map"])
def test_sharded(where):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    xs = numbers(STEPS, 8, WIDTH)

    def value(p, xs, checkpoint):
        step = lambda h, x: jax.vmap(lambda h, x: tanh(p, h, x))(h, x)
        h, ys = eqg.filter_scan(step, jnp.zeros_like(xs[0]), xs, checkpoint=checkpoint)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(h)

    expected = jax.grad(value)(WEIGHTS, xs, None)
    if where == "jit":
        sharded = jax.device_put(xs, NamedSharding(mesh, Spec(None, "i")))
        got = jax.jit(jax.grad(value), static_argnums=2)(WEIGHTS, sharded, "replay")
    else:
        local = lambda p, xs: jax.lax.psum(value(p, xs, "replay"), "i")
        total = jax.shard_map(
            local, mesh=mesh, in_specs=(Spec(), Spec(None, "i")), out_specs=Spec()
        )
        got = jax.jit(jax.grad(total))(WEIGHTS, xs)
    assert_close(got, expected, eps=500)


def test_plain_where_that_is_faster(caplog):
    """A large batch: `"auto"` decides when it sees the batch, which may be outside."""

    def value(w, xs, batch_outside):
        def step(h, x):
            h = jnp.tanh(h @ w + x)
            return h, h

        run = lambda h, xs: eqg.filter_scan(step, h, xs, checkpoint="auto")[1]
        h = jnp.zeros(xs.shape[1:], xs.dtype)
        return jnp.sum(jax.vmap(run, (0, 1))(h, xs) if batch_outside else run(h, xs))

    def replays(batch, outside):
        args = jnp.zeros((32, 32), "float32"), jnp.zeros((300, batch, 32), "float32")
        with caplog.at_level("DEBUG", logger="eqx_grads"):
            jax.make_jaxpr(jax.grad(value), static_argnums=2)(*args, outside)
        return " a replay, " in caplog.messages[-1]

    for outside in (False, True):
        assert replays(4, outside)
        assert not replays(256, outside)


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


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["replay", "auto"])
@pytest.mark.parametrize("truncate", [None, 4])
def test_derivatives_of_little(truncate, checkpoint):
    """The same at every step, of no output, or none at all."""
    options = {"truncate": truncate, "checkpoint": checkpoint}

    def gradients(options):
        scan = lambda step, init: eqg.filter_scan(step, init, XS, **options)
        decay = lambda h: jnp.sum(scan(lambda h, x: (0.9 * h, None), h)[0])
        matrix = lambda w: jnp.sum(scan(lambda h, x: (w @ h + x, None), H)[0])
        readout = lambda v: jnp.sum(
            scan(lambda h, x: (jnp.tanh(WEIGHTS["w"] @ h + x), v @ h), H)[0]
        )
        unused = lambda xs: jnp.sum(
            eqg.filter_scan(lambda h, x: (0.9 * h, h), H[0], xs, **options)[1]
        )
        ignored = lambda w: jnp.sum(scan(lambda h, x: (w @ x, None), H)[0])
        return (
            jax.grad(decay)(H),
            jax.grad(matrix)(WEIGHTS["w"]),
            jax.grad(readout)(WEIGHTS["u"]),
            jax.grad(unused)(XS),
            jax.grad(ignored)(WEIGHTS["w"]),
        )

    assert_close(
        gradients(options), gradients({"truncate": truncate, "checkpoint": 1}), eps=500
    )


# ---------------------------------------------------------------- what differs in a batch


@jax.custom_jvp
def noisy_slope(x, key):
    return jnp.tanh(x)


@noisy_slope.defjvp
def _noisy_slope_jvp(primals, tangents):
    x, key = primals
    return jnp.tanh(x), tangents[0] * (1 + jr.normal(key, x.shape, x.dtype))


def noise_gradient(x, key):
    return eqg.noise_gradient(x, stddev=1.0, key=key)


@jax.custom_jvp
def keyless(x, bits):
    return jnp.tanh(x)


@keyless.defjvp
def _keyless_jvp(primals, tangents):
    x, bits = primals
    key = jr.wrap_key_data(bits, impl="rbg")
    return jnp.tanh(x), tangents[0] * (1 + jr.normal(key, x.shape, x.dtype))


def keyless_noise(x, key):
    """It passes the data of the key."""
    return keyless(x, jr.key_data(key))


def halvings(x):
    """How often `x` can be doubled below one, which never ends for zero and less."""
    step = lambda s: (2 * s[0], s[1] + 1)
    return jax.lax.while_loop(lambda s: s[0] < 1, step, (x, 0))[1]


def of_positive(x):
    return jax.lax.cond(x > 0, halvings, lambda x: 0, x)


@jax.custom_jvp
def loop_in_rule(x, key):
    return jnp.maximum(x, 0) ** 2


@loop_in_rule.defjvp
def _loop_in_rule_jvp(primals, tangents):
    x = primals[0]
    return loop_in_rule(*primals), tangents[0] * jax.lax.map(lambda x: 1 + of_positive(x), x)


@jax.custom_vjp
def host_in_rule(x, key):
    return jnp.sin(x)


def _host_cos(x, ct):
    return ct * jax.pure_callback(lambda x: jnp.cos(x), x, x), None


host_in_rule.defvjp(lambda x, key: (jnp.sin(x), x), _host_cos)


def ragged(x, key):
    del key
    weights = 0.1 * jnp.ones((2, x.size, x.size), x.dtype)
    return x + jax.lax.ragged_dot(x[None], weights, jnp.array([1, 0]))[0]


def gcd(a, b):
    """By subtraction. The outer loop ends with `b == 0`, for which the inner one does not."""
    rest = lambda a, b: jax.lax.while_loop(lambda a: a >= b, lambda a: a - b, a)
    return jax.lax.while_loop(lambda s: s[1] != 0, lambda s: (s[1], rest(*s)), (a, b))[0]


def nested_loops(x, key):
    count = jr.key_data(key)[-1].astype(jnp.int32) % 40
    return x * gcd(jnp.abs(count) + 1, 12).astype(x.dtype)


def gamma(x, key):
    return x * jr.gamma(key, jnp.full(x.shape, 0.7, x.dtype))


def printing(h, key):
    jax.debug.callback(lambda: None)
    return h


def asking_the_host(h, key):
    h = jax.lax.stop_gradient(h)
    return jax.pure_callback(lambda h: h, h, h, vmap_method="expand_dims")


@jax.custom_vjp
def printing_backward(h, key):
    return h


printing_backward.defvjp(lambda h, key: (h, None), lambda _, ct: (printing(ct, None), None))


def guarded_loop(h, key):
    """It ends for positive numbers only."""
    x = jax.lax.stop_gradient(h[0])
    return h * (1 + jax.lax.cond(x > 0, halvings, lambda x: 0, x))


# The implementation of the keys, and what `"replay"` says.
DIFFER = {
    printing: ("threefry2x32", "a step has side effects"),
    asking_the_host: ("threefry2x32", "a step calls the host"),
    printing_backward: ("threefry2x32", "the backward pass of a step has side effects"),
    guarded_loop: ("threefry2x32", "a step has a `while_loop` in a branch"),
    noisy_slope: ("rbg", "a step draws random bits"),
    noise_gradient: ("rbg", "a step draws random bits"),
    keyless_noise: ("rbg", "a step draws random bits"),
    gamma: ("unsafe_rbg", "a step draws random bits"),
    loop_in_rule: (
        "threefry2x32",
        "the backward pass of a step has a `while_loop` in a branch",
    ),
    nested_loops: ("threefry2x32", "a step has a `while_loop` in another"),
    host_in_rule: ("threefry2x32", "the backward pass of a step calls the host"),
    ragged: ("threefry2x32", "the backward pass of a step has an operation that JAX can't vec"),
}


@pytest.mark.parametrize("fn", DIFFER, ids=lambda fn: fn.__name__)
def test_what_a_batch_computes_otherwise(fn, monkeypatch):
    """The random bits and the loops of a rule are not in the program of the steps; nor are the
    bits that an equation draws when it is compiled. The witness is `jax.lax.scan`."""
    # `"auto"` would replay all of these.
    monkeypatch.setattr(replay, "why_not_better", lambda *args: None)
    impl, reason = DIFFER[fn]
    keys = jr.split(jr.key(3, impl=impl), STEPS)

    def value(w, scan, **options):
        step = lambda h, x: (jnp.tanh(w @ fn(h, x[1]) + x[0]), None)
        return jnp.sum(scan(step, H, (XS, keys), **options)[0])

    grad = lambda *args, **options: jax.jit(jax.grad(lambda w: value(w, *args, **options)))(
        WEIGHTS["w"]
    )
    expected = grad(jax.lax.scan)
    for checkpoint in ("auto", "sqrt"):
        assert_close(grad(eqg.filter_scan, checkpoint=checkpoint), expected, eps=500)
    with pytest.raises(RuleError, match=rf"can't replay these steps.*\n  {reason}"):
        grad(eqg.filter_scan, checkpoint="replay")


@jax.custom_jvp
def noisy_second(x, key):
    """The second derivative is noisy."""
    return jnp.sin(x)


noisy_second.defjvp(lambda p, t: (noisy_second(*p), t[0] * noisy_slope(*p)))


def test_bits_of_the_second_derivative():
    """The rule of a rule draws them, when a replay is differentiated once more."""
    keys = jr.split(jr.key(3, impl="rbg"), STEPS)

    def value(w, scan, **options):
        step = lambda h, x: (jnp.tanh(w @ noisy_second(h, x[1]) + x[0]), None)
        return jnp.sum(scan(step, H, (XS, keys), **options)[0])

    def second(*args, **options):
        grad = jax.grad(lambda w: value(w, *args, **options))
        return jax.grad(lambda w: jnp.sum(grad(w) ** 2))(WEIGHTS["w"])

    expected = second(jax.lax.scan)
    assert_close(second(eqg.filter_scan, checkpoint="auto"), expected, eps=5000)
    with pytest.raises(RuleError, match=r"can't replay these steps.*\n  a step draws"):
        second(eqg.filter_scan, checkpoint="replay")


def test_auto_asks_about_the_batch_that_it_replays(monkeypatch):
    """What `jax.vmap` puts in the place of a call may draw other bits."""
    monkeypatch.setattr(replay, "why_not_better", lambda *args: None)
    keys = jr.split(jr.key(3, impl="rbg"), STEPS)

    @eqg.custom_jvp
    def scaled(h, bits):
        return h

    @scaled.def_jvp
    def _scaled_jvp(primals, tangents):
        return scaled(*primals), tangents[0]

    @scaled.def_vmap
    def _scaled_vmap(size, batched, h, bits):
        key = jr.wrap_key_data(bits, impl="rbg")
        return h * jr.normal(key, h.shape, h.dtype), True

    def value(w, h, scan, **options):
        step = lambda h, x: (jnp.tanh(w @ scaled(h, x[1]) + x[0]), None)
        return jnp.sum(scan(step, h, (XS, jr.key_data(keys)), **options)[0])

    def batched(*args, **options):
        one = lambda w, h: value(w, h, *args, **options)
        loss = lambda w: jnp.sum(jax.vmap(one, (None, 0))(w, jnp.stack([H, -H])))
        return jax.jit(jax.grad(loss))(WEIGHTS["w"])

    expected = batched(jax.lax.scan)
    assert_close(batched(eqg.filter_scan, checkpoint="auto"), expected, eps=500)


def test_references_are_no_named_axis():
    """A step that writes to a `jax.new_ref` has a side effect."""

    def value(w, **options):
        total = jax.new_ref(jnp.zeros_like(H[0]))

        def step(h, x):
            total[...] = total[...] + jax.lax.stop_gradient(jnp.sum(x))
            return jnp.tanh(w @ h + x), None

        h = eqg.filter_scan(step, H, XS, **options)[0]
        return jnp.sum(h), total[...]

    with pytest.raises(
        RuleError, match=r"can't replay these steps.*\n  a step has side effects"
    ):
        value(WEIGHTS["w"], checkpoint="replay")
    _, expected = jax.grad(value, has_aux=True)(WEIGHTS["w"])
    _, total = jax.grad(value, has_aux=True)(WEIGHTS["w"], checkpoint="auto")
    assert_close(expected, jnp.sum(XS), eps=500)
    assert_close(total, expected, eps=500)


class TestTheChoiceOfAuto:
    """The logger says what `"auto"` chose, and why it is plain scan."""

    def messages(self, caplog, fn, **options):
        def loss(w):
            run = lambda h, x: (fn(w, h, x),) * 2
            return jnp.sum(
                eqg.filter_scan(run, jnp.zeros(64), jnp.ones((500, 64)), **options)[1]
            )

        with caplog.at_level("DEBUG", logger="eqx_grads"):
            jax.make_jaxpr(jax.grad(loss))(0.1 * jnp.ones((64, 64)))
        return [r.getMessage() for r in caplog.records if r.name == "eqx_grads"]

    @staticmethod
    def step(w, h, x):
        return jnp.tanh(w @ h + x)

    @staticmethod
    def elementwise(w, h, x):
        return jnp.tanh(jnp.sin(w[0] * h) + x)

    @staticmethod
    def sum(w, h, x):
        return h + x * w[0, 0]

    @staticmethod
    def branches(w, h, x):
        return jax.lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.sin, w @ h + x)

    def test_replay(self, caplog):
        (message,) = set(self.messages(caplog, self.step, checkpoint="auto"))
        assert "500 steps with the carry float" in message
        assert re.search(r"\[64\]: a replay, of \d\d steps at once\.$", message)

    def test_the_estimate(self, caplog):
        (message,) = set(self.messages(caplog, self.elementwise, checkpoint="auto"))
        assert message.endswith("plain scan, as it is estimated to be as fast.")

    def test_a_reason(self, caplog):
        (message,) = set(self.messages(caplog, self.branches, checkpoint="auto"))
        assert message.endswith("plain scan, as a step has branches, or is rematerialized.")

    def test_another_platform(self, caplog, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        """On an accelerator a replay is faster wherever it saves bytes."""
        for step in (self.step, self.elementwise):
            caplog.clear()
            (message,) = set(self.messages(caplog, step, checkpoint="auto"))
            assert "a replay, of" in message
        caplog.clear()
        (message,) = set(self.messages(caplog, self.sum, checkpoint="auto"))
        assert message.endswith("plain scan, as replaying needs as much memory.")

    @pytest.mark.parametrize("checkpoint", [None, "replay", "sqrt"])
    def test_nothing_is_chosen(self, caplog, checkpoint):
        assert self.messages(caplog, self.step, checkpoint=checkpoint) == []
