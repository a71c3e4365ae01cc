"""`eqg.filter_custom_jvp`: what works with Equinox's works, and what fails there does too.

A test that takes `filter_custom_jvp` runs with both decorators. The others are of what
Equinox's does not have.
"""

import copy
import math
import pickle

import equinox as eqx
import equinox.internal as eqxi  # noqa: TID251, equinox#964 is about its scan
import eqx_grads as eqg
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from .helpers import assert_close, checking_leaks, skip_without_checkpointed_loops


X, Y = jnp.array([0.3, -1.2, 2.0]), jnp.array([1.5, 0.4, -0.7])


@pytest.fixture(params=[eqx, eqg], ids=["equinox", "eqx_grads"])
def filter_custom_jvp(request):
    return request.param.filter_custom_jvp


def with_rule(decorator, fn, rule):
    decorated = decorator(fn)
    decorated.def_jvp(rule)
    return decorated


def _product(x, y):
    return jnp.sin(x) * y


def _product_jvp(primals, tangents):
    x, y = primals
    t_x, t_y = tangents
    t_out = jnp.zeros_like(jnp.sin(x) * y)
    if t_x is not None:
        t_out += jnp.cos(x) * y * t_x
    if t_y is not None:
        t_out += jnp.sin(x) * t_y
    return jnp.sin(x) * y, t_out


def test_both_modes_and_second_order_agree_with_autodiff(filter_custom_jvp):
    f = with_rule(filter_custom_jvp, _product, _product_jvp)
    check_grads(f, (X, Y), order=1, modes=("fwd", "rev"), rtol=2e-2)
    total = lambda f: lambda x, y: jnp.sum(f(x, y) ** 2)
    assert_close(jax.hessian(total(f))(X, Y), jax.hessian(total(_product))(X, Y))


def test_transformations_in_each_other(filter_custom_jvp):
    f = with_rule(filter_custom_jvp, _product, _product_jvp)

    def loss(f, x, y):
        step = lambda x, y: (jax.checkpoint(f)(x, y), None)
        return jnp.sum(jax.vmap(lambda x: jax.lax.scan(step, x, y)[0])(x))

    grad = lambda f: jax.jit(jax.grad(lambda *args: loss(f, *args), (0, 1)))(X, Y)
    assert_close(grad(f), grad(_product))
    outside = jax.grad(jax.jit(lambda *args: loss(f, *args)), (0, 1))(X, Y)
    assert_close(outside, grad(_product))


def test_tangents_are_none_where_nothing_is_differentiated(filter_custom_jvp):
    seen = []

    @filter_custom_jvp
    def call(fn, x, y, n, name):
        return fn(x) * y

    @call.def_jvp
    def call_jvp(primals, tangents):
        fn, x, y, n, name = primals
        assert (n, name) == (3, "a")
        seen.append([t is None for t in tangents])
        return fn(x) * y, tangents[1] * y

    grad = jax.grad(lambda x: call(jnp.sin, x, jnp.array(2.0), 3, "a"))(jnp.array(1.0))
    assert grad == 2.0
    assert seen == [[True, False, True, True, True]]


def test_integers_have_no_tangent(filter_custom_jvp):
    """jax#16000: JAX has tangents of integers in places."""

    @filter_custom_jvp
    def step(i, x):
        return i + 1, x * i

    @step.def_jvp
    def step_jvp(primals, tangents):
        i, x = primals
        t_i, t_x = tangents
        assert t_i is None
        return (i + 1, x * i), (None, t_x * i)

    def loss(x):
        carry = jax.lax.fori_loop(0, 3, lambda _, carry: step(*carry), (jnp.array(1), x))
        return carry[1]

    assert jax.jacfwd(loss)(jnp.array(2.0)) == 6.0
    assert jax.grad(lambda x: step(*step(jnp.array(2), x))[1])(jnp.array(2.0)) == 6.0


def test_keyword_arguments_stay_keyword_arguments(filter_custom_jvp):
    @filter_custom_jvp
    def f(x, y=3.0, *, fn):
        return fn(x) * y

    @f.def_jvp
    def f_jvp(primals, tangents, **kwargs):
        (x,), (t_x,) = primals, tangents
        assert "fn" in kwargs
        y = kwargs.get("y", 3.0)
        return f(x, **kwargs), 10 * y * t_x

    one = jnp.array(1.0)
    assert jax.grad(lambda x: f(x, fn=jnp.sin))(one) == 30.0
    assert jax.jit(jax.grad(lambda x: f(x, fn=jnp.sin, y=2.0)))(one) == 20.0


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


def test_python_numbers_without_a_transformation(filter_custom_jvp):
    f = with_rule(filter_custom_jvp, lambda x, p: x * p, lambda p, t: (p[0] * p[1], 7 * t[0]))
    is_equinox = filter_custom_jvp is eqx.filter_custom_jvp
    if is_equinox and getattr(jax.config, "jax_custom_jvp3", False):
        pytest.skip("Equinox's returns a `TypedFloat` with this switch (docs/versions.md)")
    assert type(f(2.0, 3.0)) is float
    assert isinstance(f(np.float32(2.0), 3.0), np.floating)


def test_jvp_of_python_numbers_returns_python_numbers():
    """As with Equinox's, without JAX's switch `jax_custom_jvp3`. Equinox's tests ask for it."""
    rule = lambda primals, tangents: (primals[0] * primals[1], 7 * tangents[0])
    f = with_rule(eqg.filter_custom_jvp, lambda x, p: x * p, rule)
    out, t_out = jax.jvp(lambda x: f(x, 3.0), (2.0,), (1.0,))
    assert (out, t_out) == (6.0, 7.0)
    assert isinstance(out, float)
    assert isinstance(t_out, float)


def test_numpy_arrays_are_arrays(filter_custom_jvp):
    @filter_custom_jvp
    def f(x, table, *, index):
        return x * table[index]

    @f.def_jvp
    def f_jvp(primals, tangents, *, index):
        x, table = primals
        t_x, _t_table = tangents
        return f(x, table, index=index), t_x * jnp.asarray(table)[index]

    table, index = np.arange(3.0, dtype=np.float32), np.array(2)
    assert jax.jit(jax.grad(lambda x: f(x, table, index=index)))(3.0) == 2.0
    traced = jax.jit(lambda x, index: f(x, table, index=index))
    assert traced(3.0, index) == 6.0


def test_a_rule_that_is_not_linear_is_let_through(filter_custom_jvp):
    """T6."""
    rule = lambda primals, tangents: (primals[0] * primals[1], tangents[0] ** 2 + 1)
    f = with_rule(filter_custom_jvp, lambda x, y: x * y, rule)
    t_out = jax.jvp(lambda x: f(x, Y), (X,), (3 * jnp.ones(3),))[1]
    assert_close(t_out, jnp.full(3, 10.0))
    t_out = jax.jit(lambda x, t: jax.jvp(lambda x: f(x, Y), (x,), (t,))[1])(X, X)
    assert_close(t_out, X**2 + 1)


def test_the_value_may_be_that_of_the_rule(filter_custom_jvp):
    f = with_rule(filter_custom_jvp, lambda x: x, lambda p, t: (2 * p[0], t[0]))
    assert jax.value_and_grad(f)(jnp.array(3.0)) == (6.0, 1.0)


def test_parts_of_the_tangent_may_be_none(filter_custom_jvp):
    rule = lambda p, t: ({"a": p[0], "b": 2 * p[0]}, {"a": t[0], "b": None})
    f = with_rule(filter_custom_jvp, lambda x: {"a": x, "b": 2 * x}, rule)
    out, t_out = jax.jvp(f, (X,), (Y,))
    assert_close((out["b"], t_out["a"], t_out["b"]), (2 * X, Y, jnp.zeros(3)))


def test_closure_converted_functions_are_differentiated(filter_custom_jvp):
    call = with_rule(
        filter_custom_jvp,
        lambda fn, x: fn(x),
        lambda p, t: eqx.filter_jvp(lambda fn, x: fn(x), p, t),
    )

    @jax.grad
    def grad(x):
        fn = eqx.filter_closure_convert(lambda y: x[0] * y + x[1], 3.0)
        return call(fn, 3.0)

    assert grad((2.0, 4.0)) == (3.0, 1.0)


def test_defjvp_is_deprecated_and_gets_arrays(filter_custom_jvp):
    f = filter_custom_jvp(lambda x, y, n: x * y)

    def f_jvp(primals, tangents):
        x, y, _n = primals
        t_x, t_y, t_n = tangents
        assert t_n is None
        return x * y, t_x * y + x * t_y

    with pytest.warns(UserWarning, match="deprecated"):
        f.defjvp(f_jvp)
    assert_close(jax.grad(lambda x: jnp.sum(f(x, Y, 2)))(X), Y)
    assert_close(jax.jit(jax.jacfwd(lambda y: jnp.sum(f(X, y, jnp.array(2)))))(Y), X)


def test_a_keyword_argument_is_not_differentiated(filter_custom_jvp):
    f = with_rule(filter_custom_jvp, _product, lambda p, t, y: (p[0] * y, t[0]))
    with pytest.raises(ValueError, match=r"[Kk]eyword"):
        jax.grad(lambda y: jnp.sum(f(X, y=y)))(Y)


def test_no_rule(filter_custom_jvp):
    with pytest.raises((AttributeError, eqg.RuleError), match=r"def_?jvp"):
        filter_custom_jvp(_product)(X, Y)


def test_defjvps(filter_custom_jvp):
    with pytest.raises(RuntimeError, match="defjvps"):
        filter_custom_jvp(_product).defjvps(None, None)


def test_a_decorated_function_can_be_jitted_and_mapped(filter_custom_jvp):
    f = with_rule(filter_custom_jvp, _product, _product_jvp)
    for jitted in (jax.jit(f), eqx.filter_jit(f)):
        grad = jax.vmap(jax.grad(jitted))(X, Y)
        assert_close(grad, jnp.cos(X) * Y)
    weights = eqx.filter_vmap(jax.grad(f), in_axes=(0, None))(X, jnp.array(2.0))
    assert_close(weights, 2 * jnp.cos(X))


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


@pytest.mark.parametrize("zeros", [lambda x: None, jnp.zeros_like], ids=["none", "zeros_like"])
@jax.numpy_dtype_promotion("standard")  # which `optax.adam` needs
def test_equinox_964_state_of_an_optimizer(zeros):
    """https://github.com/patrick-kidger/equinox/issues/964: the rule of an inner optimization,
    whose state has an integer, and whose losses have more outputs. With Equinox the tangent of
    the integer must not be an integer."""
    skip_without_checkpointed_loops()
    optimizer = optax.adam(0.1)

    def loss(params):
        flat = jax.flatten_util.ravel_pytree(params)[0]
        return jnp.sum(flat**2), {"params": flat}

    @eqg.filter_custom_jvp
    def optimize(params, state, n_steps):
        def step(carry, _):
            params, state = carry
            grads, aux = eqx.filter_grad(loss, has_aux=True)(params)
            updates, state = optimizer.update(grads, state)
            return (eqx.apply_updates(params, updates), state), aux

        return eqxi.scan(step, (params, state), None, length=n_steps, kind="checkpointed")

    @optimize.def_jvp
    def optimize_jvp(primals, tangents):
        out = optimize(*primals)
        (_params, state), aux = out
        t_params = jax.tree.map(lambda t: 0.5 * t, tangents[0])
        return out, ((t_params, jax.tree.map(zeros, state)), jax.tree.map(zeros, aux))

    def outer(params):
        (params, _), aux = optimize(params, optimizer.init(params), 3)
        return loss(params)[0], aux

    params = {"w": jnp.array([1.0, 2.0])}
    (_, aux), grads = eqx.filter_value_and_grad(outer, has_aux=True)(params)
    (final, _), _ = optimize(params, optimizer.init(params), 3)
    assert aux["params"].shape == (3, 2)
    assert_close(grads["w"], 0.5 * 2 * final["w"])
    jitted = eqx.filter_jit(eqx.filter_grad(outer, has_aux=True))(params)[0]
    assert_close(jitted["w"], grads["w"])


class Wave(eqx.Module):
    amplitude: jax.Array
    name: str = "wave"

    @eqg.filter_custom_jvp
    def __call__(self, x):
        """The amplitude times the sine of `x`."""
        return self.amplitude * jnp.sin(x)

    @__call__.def_jvp
    def _call_jvp(primals, tangents):
        self, x = primals
        t_self, t_x = tangents
        t_out = jnp.zeros_like(x)
        if t_self is not None and t_self.amplitude is not None:
            t_out += 2 * t_self.amplitude * jnp.sin(x)
        if t_x is not None:
            t_out += 2 * self.amplitude * jnp.cos(x) * t_x
        return self(x), t_out


def test_methods():
    wave = Wave(jnp.array(3.0))
    assert_close(jax.grad(wave)(0.5), 6 * jnp.cos(0.5))
    grads = eqx.filter_jit(eqx.filter_grad(lambda wave: wave(0.5)))(wave)
    assert_close(grads.amplitude, 2 * jnp.sin(0.5))
    assert Wave.__call__.__doc__ == "The amplitude times the sine of `x`."


def test_typed_keys_and_static_leaves_go_through():
    @eqg.filter_custom_jvp
    def noisy(x, key, options):
        key, draw = jax.random.split(key)
        return x + jax.random.normal(draw), key, options

    @noisy.def_jvp
    def noisy_jvp(primals, tangents):
        out = noisy(*primals)
        return out, (2 * tangents[0], None, None)

    def loss(x, key):
        x, key, options = noisy(x, key, ["a", {"b": len}])
        x, key, options = noisy(x, key, options)
        assert options == ["a", {"b": len}]
        return x

    assert jax.jit(jax.grad(loss))(1.0, jax.random.key(0)) == 4.0

    def scanned(x, key):
        step = lambda carry, _: (noisy(*carry, None)[:2], None)
        return jax.lax.scan(step, (x, key), length=3)[0][0]

    assert jax.grad(scanned)(1.0, jax.random.key(0)) == 8.0


@eqg.filter_custom_jvp
def doubled(x):
    """Twice `x`."""
    return 2 * x


@doubled.def_jvp
def doubled_jvp(primals, tangents):
    return doubled(*primals), 2 * tangents[0]


def test_a_decorated_function_is_a_good_citizen():
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Twice `x`."
    assert repr(doubled) == "<eqx_grads.filter_custom_jvp of doubled>"
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert copy.deepcopy(doubled)(1.0) == 2.0
    assert callable(doubled_jvp)  # Equinox's `def_jvp` returns `None`
