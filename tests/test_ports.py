"""The rules of other systems, written here: functions of one number.

`docs/coming-from.md` shows both versions side by side; `test_ports_trees.py` has the rest.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .ports import assert_close, FORWARD, PORTS, REVERSE, softplus


# The others have a slope of their own, on purpose.
HONEST = ["jax.custom_gradient sin", "jax.custom_gradient log_exp", "jax.custom_vjp softplus"]


def _scalars(port):
    for x in port.xs:
        yield x, jnp.array(x, float)


@pytest.mark.parametrize("port", PORTS.values(), ids=PORTS)
@pytest.mark.parametrize("transform", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
def test_values(port, transform):
    for x, array in _scalars(port):
        assert_close(transform(port.ours)(array), port.value(x))


@pytest.mark.parametrize("port", PORTS.values(), ids=PORTS)
@pytest.mark.parametrize("mode", REVERSE)
def test_reverse_mode(port, mode):
    derivative = REVERSE[mode](port.ours)
    for x, array in _scalars(port):
        assert_close(derivative(array), port.slope(x))


@pytest.mark.parametrize("port", PORTS.values(), ids=PORTS)
@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode(port, mode):
    derivative = FORWARD[mode](port.ours)
    slope = port.forward_slope or port.slope
    for x, array in _scalars(port):
        assert_close(derivative(array), slope(x))


@pytest.mark.parametrize("name", [name for name, port in PORTS.items() if port.theirs])
@pytest.mark.parametrize("mode", REVERSE)
def test_same_as_the_original(name, mode):
    port = PORTS[name]
    ours, theirs = REVERSE[mode](port.ours), REVERSE[mode](port.theirs)
    for _, array in _scalars(port):
        assert_close(port.ours(array), port.theirs(array))
        assert_close(ours(array), theirs(array))


@pytest.mark.parametrize("port", PORTS.values(), ids=PORTS)
def test_three_steps_of_scan_are_three_calls(port):
    fn = port.ours
    in_scan = lambda x: jax.lax.scan(lambda x, _: (fn(x), None), x, None, length=3)[0]
    scanned = jax.jit(jax.value_and_grad(in_scan))
    unrolled = jax.jit(jax.value_and_grad(lambda x: fn(fn(fn(x)))))
    for _, array in _scalars(port):
        for ours, plain in zip(scanned(array), unrolled(array), strict=True):
            assert_close(ours, plain)


@pytest.mark.parametrize("name", HONEST)
def test_finite_differences(name):
    port, step = PORTS[name], 1e-6
    with jax.enable_x64(True):
        for x in (-3.0, -0.5, 0.0, 0.25, 2.0):
            x = jnp.array(x, jnp.float64)
            difference = (port.ours(x + step) - port.ours(x - step)) / (2 * step)
            np.testing.assert_allclose(jax.grad(port.ours)(x), difference, rtol=1e-8)


def test_the_naive_softplus_is_the_reason():
    naive = lambda x: jnp.log1p(jnp.exp(x))
    assert jnp.isnan(jax.grad(naive)(1e4))
    assert jax.grad(softplus)(1e4) == 1.0
