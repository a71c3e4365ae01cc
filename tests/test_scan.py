"""`filter_scan` against loops written out and `jax.lax.scan`."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close, temp_bytes


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def cell(weight, h, x):
    return jnp.tanh(weight @ h + x)


def x_scale(x):
    return 1 + 0.1 * x


def scanned(weight, h, xs, **options):
    def step(h, x):
        h = cell(weight, h, x)
        return h, h * x_scale(x)

    return eqg.filter_scan(step, h, xs, **options)


def arguments(getkey, steps=7):
    dtype = jnp.zeros(()).dtype
    return (
        jr.normal(getkey(), (3, 3), dtype),
        jr.normal(getkey(), (3,), dtype),
        jr.normal(getkey(), (steps, 3), dtype),
    )


def loss(f):
    def value(*args):
        h, ys = f(*args)
        return jnp.sum(jnp.sin(h)) + jnp.sum(ys**2)

    return value


def test_an_integer_that_the_steps_leave_alone_is_static():
    def step(carry, x):
        h, power = carry
        assert isinstance(power, int)
        return (h * x**power, power), None

    (h, power), _ = eqg.filter_scan(step, (1.0, 2), jnp.array([2.0, 3.0]))
    assert h == 36.0
    assert power == 2


@pytest.mark.parametrize("checkpoint", [None, 3])
@pytest.mark.parametrize("steps", [0, 1])
def test_no_step_and_one_step(steps, checkpoint, getkey):
    weight, h, xs = arguments(getkey, steps)
    last, ys = scanned(weight, h, xs, checkpoint=checkpoint)
    assert ys.shape == (steps, 3)
    assert_close(last, cell(weight, h, xs[0]) if steps else h)
    grad = jax.grad(lambda *args: jnp.sum(scanned(*args, checkpoint=checkpoint)[0]), 1)
    plain = lambda h: jnp.sum(cell(weight, h, xs[0]) if steps else h)
    assert_close(grad(weight, h, xs), jax.grad(plain)(h))


def test_truncation_stops_what_is_not_finite():
    def step(h, x):
        return h * x, h

    xs = jnp.array([2.0, 1.0, jnp.inf, 1.0])
    last = lambda x: eqg.filter_scan(step, x, xs, truncate=2)[0]
    assert jax.grad(last)(1.0) == 0.0


def test_dtypes_and_weak_types():
    for dtype in ("float16", "bfloat16", "float32"):
        last, ys = eqg.filter_scan(lambda c, x: (c + x, x), 0.0, jnp.ones(3, dtype))
        assert last.dtype == ys.dtype == dtype
        assert last == 3.0
    grad = jax.grad(lambda x: eqg.filter_scan(lambda c, _: (2 * c, None), x, length=3)[0])
    assert grad(1.0) == 8.0
    assert eqg.filter_scan(lambda c, x: (c + x, x), np.zeros(()), np.ones(3))[0] == 3.0


@pytest.mark.parametrize("checkpoint", [3, 5, "sqrt"])
def test_chunks_of_a_loop_without_xs(checkpoint):
    """Each chunk is as long as its share of `length`, though nothing is sliced."""

    def last(x):
        step = lambda c, _: (2 * c, c)
        return eqg.filter_scan(step, x, length=12, checkpoint=checkpoint)

    carry, ys = jax.jit(last)(1.0)
    assert carry == 2.0**12
    assert ys.tolist() == [2.0**i for i in range(12)]
    assert jax.grad(lambda x: last(x)[0])(1.0) == 2.0**12


@pytest.mark.cost
def test_memory():
    h, xs = jnp.zeros((8, 16)), jnp.ones((1024, 8, 16))
    last = lambda **options: jax.grad(
        lambda w: jnp.sum(
            eqg.filter_scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs, **options)[0]
        )
    )
    weight = jnp.eye(16)
    plain = temp_bytes(last(), weight)
    assert temp_bytes(last(checkpoint="sqrt"), weight) < plain / 8
    assert temp_bytes(last(truncate=32), weight) < plain / 8
    assert temp_bytes(last(checkpoint="replay"), weight) < 0.6 * plain
    assert temp_bytes(last(checkpoint="auto"), weight) < 0.6 * plain


@pytest.mark.cost
def test_chunks_of_one_step_copy_nothing():
    """XLA copied `xs`, as it gave the axis of length one another layout."""
    xs = jnp.ones((200, 4096))
    step = lambda w, c, x: (c + jnp.sum(jnp.tanh(jnp.tanh(w * x))), jnp.tanh(w * x))

    def last(w):
        return eqg.filter_scan(ft.partial(step, w), jnp.array(0.0), xs, checkpoint=1)[0]

    assert temp_bytes(jax.grad(last), jnp.array(0.5)) < 2 * xs[0].nbytes


class TestErrors:
    def test_static_field(self):
        class WithStatic(eqx.Module):
            x: jax.Array
            n: int = eqx.field(static=True)

        step = lambda c, x: (WithStatic(c.x, c.n + 1), None)
        with pytest.raises(RuleError, match=r"(?s)containers differ: .*n=1.*n=2"):
            eqg.filter_scan(step, WithStatic(jnp.ones(2), 1), length=3)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"length": -1},
                r"`length` of `filter_scan` is not an integer.*\n  it is -1",
            ),
            (
                {"length": 3, "checkpoint": 0},
                r"a `checkpoint` that it does not know(?s:.)*is 0",
            ),
            ({"length": 3, "checkpoint": "log"}, r"does not know\.\n  it is 'log'"),
            ({"length": 3, "truncate": 0}, r"`truncate` of `filter_scan` is not an integer"),
            ({"length": 3, "truncate": True}, r"`truncate` of(?s:.)*it is True"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(RuleError, match=message):
            eqg.filter_scan(lambda c, x: (c, None), 0.0, **options)


@pytest.mark.parametrize("unroll", [0, True, False, np.int32(0), np.int64(2)])
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": 1}, {"checkpoint": "sqrt"}, {"truncate": 5}, {"online": True}],
)
def test_unroll_is_as_for_jax(unroll, options):
    w, xs = jnp.linspace(0.1, 0.9, 3), jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)

    def loss(w, scan, **options):
        step = lambda h, x: (jnp.tanh(h * w + x), h)
        h, hs = scan(step, jnp.zeros(3), xs, **options)
        return jnp.sum(h) + jnp.sum(hs**2)

    expected = jax.grad(loss)(w, jax.lax.scan)
    got = jax.grad(loss)(w, eqg.filter_scan, unroll=unroll, **options)
    assert_close(got, expected)
