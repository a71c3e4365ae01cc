"""The rules of other systems, written here: functions of one number or two.

`docs/coming-from/` shows both versions side by side; `test_ports_trees.py` has the rest.
"""

import eqx_grads as eqg
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
    assert port.theirs is not None
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


# HIPS autograd: a NumPy function that autodiff can't see into, with `defvjp`.


def _host_hypot(x, y):
    shape = jax.ShapeDtypeStruct(jnp.broadcast_shapes(x.shape, y.shape), x.dtype)
    return jax.pure_callback(np.hypot, shape, x, y, vmap_method="expand_dims")


hypot = eqg.elementwise(_host_hypot, (lambda out, x, y: x / out, lambda out, x, y: y / out))


def test_autograd_defvjp():
    x, y = jnp.array(3.0), jnp.array(4.0)
    assert_close(hypot(x, y), 5)
    assert_close(jax.grad(hypot, argnums=(0, 1))(x, y), (0.6, 0.8))
    assert_close(jax.jit(jax.grad(hypot, argnums=1))(x, y), 0.8)
    assert_close(jax.vmap(jax.grad(hypot))(jnp.stack([x, y]), jnp.stack([y, x])), [0.6, 0.8])
    assert_close(jax.jvp(hypot, (x, y), (jnp.ones(()), jnp.ones(())))[1], 1.4)
    assert_close(jax.grad(jax.grad(hypot))(x, y), 16 / 125)


# ChainRules: `@scalar_rule atan(y, x) @setup(u = x^2 + y^2) (x / u, -y / u)`.


def _atan(called):
    def d_y(out, y, x, u):
        called.append("y")
        return x / u

    def d_x(out, y, x, u):
        called.append("x")
        return -y / u

    return eqg.elementwise(jnp.arctan2, (d_y, d_x), setup=lambda out, y, x: x**2 + y**2)


@pytest.mark.parametrize("mode", REVERSE)
def test_scalar_rule(mode):
    called = []
    atan = _atan(called)
    y, x = jnp.array(1.0), jnp.array(-2.0)
    assert_close(atan(y, x), np.arctan2(1, -2))
    assert_close(REVERSE[mode](lambda y: atan(y, x))(y), -2 / 5)
    assert set(called) == {"y"}  # the partial that nobody asked for is not computed
    assert_close(REVERSE[mode](lambda x: atan(y, x))(x), -1 / 5)
    assert set(called) == {"y", "x"}


def test_scalar_rule_broadcasts():
    atan = _atan([])
    y, x = jnp.array([1.0, 2.0, -1.0]), jnp.array(-2.0)
    g_y, g_x = jax.grad(lambda y, x: jnp.sum(atan(y, x)), argnums=(0, 1))(y, x)
    u = np.asarray(x) ** 2 + np.asarray(y) ** 2
    assert_close(g_y, np.asarray(x) / u)
    assert_close(g_x, np.sum(-np.asarray(y) / u))
    t_y, t_x = jnp.array([1.0, 0.0, 2.0]), jnp.array(3.0)
    _, t_out = jax.jvp(atan, (y, x), (t_y, t_x))
    assert_close(t_out, (np.asarray(x) * t_y - np.asarray(y) * 3) / u)
