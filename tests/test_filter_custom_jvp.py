"""`eqg.filter_custom_jvp`: what works with Equinox's works, and what fails there does too.

A test that takes `filter_custom_jvp` runs with both decorators. The others are of what
Equinox's does not have.
"""

import math

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest

from .helpers import assert_close, checking_leaks


pytestmark = [pytest.mark.versions, pytest.mark.x64]


X, Y = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.5, 0.4, -0.7])


@pytest.fixture(params=[eqx, eqg], ids=["equinox", "eqx_grads"])
def filter_custom_jvp(request):
    return request.param.filter_custom_jvp


def with_rule(decorator, fn, rule):
    decorated = decorator(fn)
    decorated.def_jvp(rule)
    return decorated


def test_python_numbers_are_static_under_jit(filter_custom_jvp):
    """T5: a Python float that is passed by position reaches the function as one."""

    @filter_custom_jvp
    def f(x, p, numbers, *, scale):
        assert type(p) is float
        assert type(numbers["a"]) is complex
        assert type(scale) is float
        return x * math.floor(p) * scale if p == 2.5 else x

    @f.def_jvp
    def f_jvp(primals, tangents, *, scale):
        x, p, numbers = primals
        assert tangents[1] is None
        assert tangents[2] == {"a": None}
        return f(x, p, numbers, scale=scale), tangents[0] * math.floor(p) * scale

    call = lambda x: f(x, 2.5, {"a": 1j}, scale=0.5)
    assert jax.jit(call)(3.0) == 3.0
    assert jax.jit(jax.value_and_grad(call))(3.0) == (3.0, 1.0)
    assert jax.grad(jax.jit(call))(3.0) == 1.0
    scan = lambda x: jax.lax.scan(lambda c, _: (call(c), None), x, length=2)[0]
    assert jax.grad(scan)(3.0) == 1.0


def test_jvp_of_python_numbers_returns_python_numbers():
    """As with Equinox's, without JAX's switch `jax_custom_jvp3`. Equinox's tests ask for it."""
    rule = lambda primals, tangents: (primals[0] * primals[1], 7 * tangents[0])
    f = with_rule(eqg.filter_custom_jvp, lambda x, p: x * p, rule)
    out, t_out = jax.jvp(lambda x: f(x, 3.0), (2.0,), (1.0,))
    assert (out, t_out) == (6.0, 7.0)
    assert isinstance(out, float)
    assert isinstance(t_out, float)


def test_a_rule_that_is_not_linear_is_let_through(filter_custom_jvp):
    """T6."""
    rule = lambda primals, tangents: (primals[0] * primals[1], tangents[0] ** 2 + 1)
    f = with_rule(filter_custom_jvp, lambda x, y: x * y, rule)
    t_out = jax.jvp(lambda x: f(x, Y), (X,), (3 * jnp.ones(3),))[1]
    assert_close(t_out, jnp.full(3, 10.0))
    t_out = jax.jit(lambda x, t: jax.jvp(lambda x: f(x, Y), (x,), (t,))[1])(X, X)
    assert_close(t_out, X**2 + 1)


# What does not work with Equinox's.


def test_equinox_745_module_in_scan_under_jit():
    """https://github.com/patrick-kidger/equinox/issues/745, and with respect to the Module."""

    class Fun(eqx.Module):
        param: jax.Array

        def __call__(self, x):
            return self.param * jnp.sin(x)

    @eqg.filter_custom_jvp
    def f(x, y, *, fun):
        return fun(x) * y

    @f.def_jvp
    def f_jvp(primals, tangents, *, fun):
        (x, y), (t_x, t_y) = primals, tangents
        out, t_out = jax.jvp(lambda x: fun(x) * y, (x,), (t_x,))
        return out, t_out if t_y is None else t_out + fun(x) * t_y

    def loss(x, fun):
        step = lambda y, _: (f(x, y, fun=fun), None)
        return jax.lax.scan(step, jnp.ones_like(x), None, length=3)[0]

    x, fun = jnp.array(0.5), Fun(jnp.array(2.0))
    slope = 3 * fun(x) ** 2 * 2 * jnp.cos(x)
    with checking_leaks():
        assert_close(jax.grad(eqx.filter_jit(loss))(x, fun), slope)
        assert_close(eqx.filter_jit(jax.grad(loss))(x, fun), slope)
        # A closure over a tracer of `jit`, differentiated from outside.
        closing = lambda x, param: loss(x, lambda z: param * jnp.sin(z))
        assert_close(jax.grad(jax.jit(closing))(x, fun.param), slope)
    with pytest.raises(eqg.RuleError, match=r"passed by keyword.\n.*`fun.param`"):
        eqx.filter_grad(lambda fun: loss(x, fun))(fun)


def test_equinox_962_module_with_a_string_in_and_out():
    """https://github.com/patrick-kidger/equinox/issues/962"""

    class Named(eqx.Module):
        a: jax.Array
        b: jax.Array
        name: str

    @eqg.filter_custom_jvp
    def call(model):
        return Named(model.a * 2, model.b * 3, model.name)

    @call.def_jvp
    def call_jvp(primals, tangents):
        return call(*primals), tangents[0]

    model = Named(jnp.array(2.0), jnp.array(3.0), "name")
    out = jax.jit(lambda a: call(Named(a, model.b, "name")).a)(2.0)
    assert out == 4.0
    assert call(model).name == "name"
    out, t_out = eqx.filter_jvp(call, (model,), (eqx.filter(model, eqx.is_array),))
    assert (out.a, out.b, out.name) == (4.0, 9.0, "name")
    assert (t_out.a, t_out.b, t_out.name) == (2.0, 3.0, None)
    grad = eqx.filter_grad(lambda model: call(model).a + call(model).b)(model)
    assert (grad.a, grad.b, grad.name) == (1.0, 1.0, None)
