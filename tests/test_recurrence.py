"""Linear recurrences against a loop written out, and its autodiff."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.signal
from eqx_grads import RuleError

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


METHODS = ("scan", "associative")


def loop(a, b, h0, *, reverse=False):
    """The definition, written out."""
    a = jnp.broadcast_to(a, b.shape)
    out, h = [], h0
    times = range(len(b))
    for t in reversed(times) if reverse else times:
        h = a[t] * h + b[t]
        out.append(h)
    return jnp.stack(out[::-1] if reverse else out)


def arguments(getkey, dtype, steps=7, constant=False):
    a = 0.6 * jr.normal(getkey(), (1 if constant else steps, 3), dtype)
    return a, jr.normal(getkey(), (steps, 3), dtype), jr.normal(getkey(), (3,), dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_values_are_those_of_a_filter(method):
    b = np.linspace(-1.0, 2.0, 40, dtype="float32")
    expected = scipy.signal.lfilter([1.0], [1.0, -0.9], b.astype("float64"))
    got = eqg.linear_recurrence(0.9, b, method=method)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_no_step_and_one_step(method):
    f = lambda a, b, h0: eqg.linear_recurrence(a, b, h0, method=method)
    empty = jnp.zeros((0, 2))
    assert f(empty, empty, jnp.ones(2)).shape == (0, 2)
    grads = jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2))(empty, empty, jnp.ones(2))
    assert [g.shape for g in grads] == [(0, 2), (0, 2), (2,)]
    assert not grads[2].any()
    one = (jnp.full((1, 2), 3.0), jnp.ones((1, 2)), jnp.full(2, 5.0))
    assert_close(f(*one), jnp.full((1, 2), 16.0))
    grads = jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2))(*one)
    assert_close(grads, (jnp.full((1, 2), 5.0), jnp.ones((1, 2)), jnp.full(2, 3.0)))


@pytest.mark.cost
def test_the_backward_pass_keeps_only_the_states():
    b = jnp.ones((512, 64))
    f = lambda b: jnp.sum(jnp.sin(eqg.linear_recurrence(0.5, b, method="scan")))
    temp = jax.jit(jax.grad(f)).lower(b).compile().memory_analysis().temp_size_in_bytes
    assert temp < 2.5 * b.nbytes


@pytest.mark.parametrize("steps", [29, 100])  # a prime, and chunks of 20
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_chunks_of_unrolled_steps(steps, reverse, constant, getkey):
    with jax.enable_x64(True):
        a, b, h0 = arguments(getkey, "float64", steps, constant)
        a = 0.9 * jnp.tanh(a)

        def all_of(f):
            value = lambda a, b, h0: jnp.sum(jnp.sin(f(a, b, h0, reverse=reverse)))
            return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(a, b, h0)

        by_scan = lambda a, b, h0, reverse: jax.lax.scan(
            lambda h, x: 2 * (x[0] * h + x[1],),
            h0,
            (jnp.broadcast_to(a, b.shape), b),
            reverse=reverse,
        )[1]
        got = all_of(ft.partial(eqg.linear_recurrence, method="associative"))
        assert_close(got, all_of(by_scan), tolerance=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axes", [(None, 0, None), (0, None, None), (None, None, 0), (1, 2, 0)])
def test_vmap(method, axes, getkey):
    args = arguments(getkey, "float32", 4)
    stack = lambda x, axis: x if axis is None else jnp.stack([x, -x], axis)
    args = tuple(map(stack, args, axes))

    def all_of(f):
        total = lambda *args: jnp.sum(jnp.sin(jax.vmap(f, axes)(*args)))
        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*args)

    assert_close(all_of(ft.partial(eqg.linear_recurrence, method=method)), all_of(loop))


@pytest.mark.parametrize("steps", [1, 3])
def test_an_infinite_last_state_that_does_not_count(steps):
    """A gradient that is shared by examples or steps meets it, and must not."""
    b = jnp.array([[1.0, 3.0], [2.0, 5.0], [jnp.inf, jnp.nan]])
    total = lambda a: jnp.sum(eqg.linear_recurrence(a, b, method="scan")[:2])
    got = jax.grad(total)(jnp.full((steps, 1), 0.5))
    assert_close(got, jnp.array([[4.0]] if steps == 1 else [[0.0], [4.0], [0.0]]))


@pytest.mark.cost
@pytest.mark.parametrize("shape", [(512, 64), (1, 64)])
def test_the_gradient_of_shared_factors_is_summed_in_the_loop(shape):
    a, b = jnp.ones(shape), jnp.ones((16, 512, 64))
    by_scan = lambda a, b: jax.lax.scan(
        lambda h, x: 2 * (x[0] * h + x[1],), jnp.zeros(64), (jnp.broadcast_to(a, b.shape), b)
    )[1]

    def temporary_bytes(f):
        total = lambda a: jnp.sum(jnp.sin(jax.vmap(f, (None, 0))(a, b)))
        return jax.jit(jax.grad(total)).lower(a).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(eqg.linear_recurrence) < 0.76 * temporary_bytes(by_scan)


class TestErrors:
    def test_method(self):
        with pytest.raises(RuleError, match=r"`method` of .* is not known\.\n  it is 'fast'"):
            eqg.linear_recurrence(0.5, jnp.ones(3), method="fast")
