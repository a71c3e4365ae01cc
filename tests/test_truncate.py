"""`filter_scan(truncate=...)`: every kind of step, against windows cut by hand."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import assert_close, checking_leaks, temp_bytes
from .rules.scan_bodies import (
    CASES,
    H,
    loss,
    numbers,
    STEPS,
    WEIGHTS,
    with_plain_inner,
    XS,
)


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def by_hand(window, reverse=False):
    """JAX's own scan, of a step that cuts the carry at the start of each window."""

    def scan(f, h, xs):
        done = jnp.arange(len(xs))
        done = done[::-1] if reverse else done

        def step(h, x):
            x, done = x
            cut = (done % window == 0) & (done > 0)
            return f(jnp.where(cut, jax.lax.stop_gradient(h), h), x)

        return jax.lax.scan(step, h, (xs, done), reverse=reverse)

    return scan


def reference(name, window, reverse=False):
    case = with_plain_inner if name == "inner_filter_scan" else CASES[name]
    return loss(by_hand(window, reverse), case, {})


# The last window is shorter, or it is not.
@pytest.mark.parametrize(("window", "reverse"), [(6, False), (7, True), (6, True)])
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("tanh", "output_of_its_own", "input_in_the_state")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_gradients(name, window, reverse):
    f = loss(eqg.filter_scan, CASES[name], {"truncate": window, "reverse": reverse})
    with checking_leaks():
        got = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(WEIGHTS, H, XS)
    plain = jax.jit(jax.value_and_grad(reference(name, window, reverse), (0, 1, 2)))
    assert_close(got, plain(WEIGHTS, H, XS), eps=500)


@pytest.mark.parametrize("checkpoint", [None, 2, 4, 100, "sqrt", "replay", "auto"])
def test_what_is_kept_in_a_window(checkpoint):
    f = loss(eqg.filter_scan, CASES["tanh"], {"truncate": 7, "checkpoint": checkpoint})
    got = jax.jit(jax.grad(f, (0, 1, 2)))(WEIGHTS, H, XS)
    assert_close(got, jax.grad(reference("tanh", 7), (0, 1, 2))(WEIGHTS, H, XS), eps=500)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [6, 7])
@pytest.mark.parametrize("part", ["last", "outputs"])
def test_cotangents_of_one_part_only(part, window):
    def of_part(scan, options):
        def value(p, h, xs):
            last, ys = scan(lambda h, x: CASES["tanh"](p, h, x), h, xs, **options)
            return jnp.sum(jnp.sin(last if part == "last" else ys))

        return jax.grad(value, (0, 1, 2))(WEIGHTS, H, XS)

    got = of_part(eqg.filter_scan, {"truncate": window})
    assert_close(got, of_part(by_hand(window), {}), eps=500)
    if part == "last":
        weights, h, xs = got
        assert not h.any()
        last_window = STEPS % window or window
        assert not xs[:-last_window].any()
        assert xs[-last_window:].all()
        assert weights["w"].any()


@pytest.mark.thorough
@pytest.mark.parametrize("strange", ["effect", "callback"])
def test_steps_that_may_run_once_only(strange):
    """They are cut just the same."""

    def disturb(h):
        if strange == "effect":
            jax.debug.callback(lambda: None)
            return 0.0
        return jax.pure_callback(lambda h: h, h[0], jax.lax.stop_gradient(h[0]))

    def step(p, h, x):
        h = jnp.tanh(p["w"] @ h + x + 0 * disturb(h))
        return h, h

    got = jax.grad(loss(eqg.filter_scan, step, {"truncate": 6}))(WEIGHTS, H, XS)
    plain = jax.grad(loss(by_hand(6), step, {}))(WEIGHTS, H, XS)
    assert_close(got, plain, eps=500)


@pytest.mark.cost
@pytest.mark.parametrize("checkpoint", [None, "sqrt", "auto"])
def test_constant_memory(checkpoint):
    """A hundred thousand steps need what a thousand need."""

    def needed(steps):
        def value(weight, xs):
            step = lambda total, x: _tanh_step(weight, total, x)
            options = {"truncate": 50, "checkpoint": checkpoint}
            return jnp.sum(eqg.filter_scan(step, jnp.zeros(32), xs, **options)[0])

        return temp_bytes(jax.grad(value), jnp.eye(32), jnp.ones(steps))

    # But for the number of each step, and four bytes to hand it out in windows.
    assert needed(100_000) - needed(1000) <= 2 * 4 * 99_000


def _tanh_step(weight, h, x):
    return jnp.tanh(weight @ h + x), None


def test_effects_happen_once_a_step():
    seen = []

    def step(h, x):
        jax.debug.callback(seen.append, x[0])
        return jnp.tanh(h + x), None

    jax.grad(lambda h: jnp.sum(eqg.filter_scan(step, h, XS, truncate=6)[0]))(H)
    jax.effects_barrier()
    assert len(seen) == STEPS


@pytest.mark.parametrize("options", [{"truncate": 6}, {"checkpoint": "auto"}])
def test_a_step_that_writes(options):
    count = jax.new_ref(jnp.zeros(2, int))

    def step(h, x):
        count[...] = count[...] + 1
        return jnp.tanh(h + x), None

    eqg.filter_scan(step, H, XS, **options)
    assert (count[...] == STEPS).all()


@pytest.mark.parametrize(
    "options", [{"truncate": 2}, {"checkpoint": 2}, {"checkpoint": "replay"}]
)
def test_explicit_sharding(options):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((len(devices),), ("b",), (AxisType.Explicit,), devices=devices)
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh, Spec(*spec)))
    h, xs = numbers(4, 1), numbers(6, 4, 1)

    def gradient(options):
        step = lambda h, x: (jnp.tanh(h + x), h)
        return jax.jit(
            jax.grad(lambda h, xs: jnp.sum(eqg.filter_scan(step, h, xs, **options)[0]))
        )

    with jax.set_mesh(mesh):
        got = gradient(options)(put(h, "b"), put(xs, None, "b"))
    window = options.get("truncate")
    assert_close(
        got, gradient({"truncate": window, "checkpoint": 1} if window else {})(h, xs), eps=500
    )
