"""Arguments of a function with a rule, and how to pass them: calls, leaves and outputs."""

import collections

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close


pytestmark = pytest.mark.x64


def jvp_of(fn):
    """`fn` with the forward rule that autodiff would have, and a mark that it was used."""
    decorated = eqg.custom_jvp(fn)

    @decorated.def_jvp
    def rule(primals, tans, **kwargs):
        floats = eqx.filter(primals, eqx.is_inexact_array)
        rest = eqx.filter(primals, eqx.is_inexact_array, inverse=True)
        call = lambda floats: fn(*eqx.combine(floats, rest), **kwargs)
        out, t_out = eqx.filter_jvp(call, (floats,), (tans,))
        return out, eqx.filter(t_out, eqx.is_inexact_array)

    return decorated


def vjp_of(fn):
    decorated = eqg.custom_vjp(fn)

    @decorated.def_fwd
    def fwd(*args, **kwargs):
        return decorated(*args, **kwargs), (args, kwargs)

    @decorated.def_bwd
    def bwd(residuals, ct):
        args, kwargs = residuals
        floats = eqx.filter(args, eqx.is_inexact_array)
        rest = eqx.filter(args, eqx.is_inexact_array, inverse=True)
        _, pull_back = eqx.filter_vjp(lambda f: fn(*eqx.combine(f, rest), **kwargs), floats)
        return pull_back(ct)[0]

    return decorated


WITH_RULE = pytest.mark.parametrize("with_rule", [jvp_of, vjp_of])


@WITH_RULE
def test_positional_or_keyword(with_rule):
    f = with_rule(lambda x, y, z=3.0: x * y + jnp.sin(z))
    x, y = jnp.array(2.0), jnp.array(5.0)
    for call in (
        lambda x, y: f(x, y),
        lambda x, y: f(x, y=y),
        lambda x, y: f(y=y, x=x),
        lambda x, y: f(x, y, 3.0),
        lambda x, y: f(y=y, z=3.0, x=x),
    ):
        assert jax.grad(call, (0, 1))(x, y) == (5.0, 2.0)
    assert jnp.allclose(jax.grad(lambda z: f(x, y, z=z))(3.0), jnp.cos(3.0))


class Affine(eqx.Module):
    @eqg.custom_vjp
    @staticmethod
    def double(x):
        return 2 * x

    @double.def_fwd
    @staticmethod
    def _double_fwd(x):
        return 2 * x, None

    @double.def_bwd
    @staticmethod
    def _double_bwd(residuals, ct):
        return (7 * ct,)

    @eqg.custom_vjp
    @classmethod
    def named(cls, x):
        return len(cls.__name__) * x

    @named.def_fwd
    def _named_fwd(cls, x):
        return cls.named(x), None

    @named.def_bwd
    def _named_bwd(residuals, ct):
        return None, 8 * ct


class TestMethods:
    module = Affine()

    def test_static_and_class_methods(self):
        for owner in (Affine, self.module):
            assert owner.double(3.0) == 6.0
            assert jax.grad(owner.double)(3.0) == 7.0
            assert owner.named(3.0) == 18.0
            assert jax.grad(owner.named)(3.0) == 8.0

    def test_outside_decorators(self):
        class Plain:
            @staticmethod
            @eqg.custom_jvp
            def cube(x):
                return x**3

            @classmethod
            @eqg.custom_jvp
            def square(cls, x):
                return x**2

        Plain.cube.def_jvp(lambda p, t: (p[0] ** 3, 5 * t[0]))
        Plain.__dict__["square"].__func__.def_jvp(lambda p, t: (p[1] ** 2, 6 * t[1]))
        assert jax.grad(Plain.cube)(1.0) == 5.0
        assert jax.grad(Plain.square)(1.0) == 6.0


Pair = collections.namedtuple("Pair", ["first", "second"])


def trees():
    x = jnp.array([1.0, 2.0])
    yield {"a": x, "b": [x, (x, None)], "c": "text", "d": jnp.tanh}
    yield Pair(x, {"deep": [[[x]]]})
    yield [x, 3, True, jnp.array(4), jnp.array([True, False]), jax.random.key(0), None, b"b"]
    yield eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(1))
    yield collections.OrderedDict(z=x, a=2 * x)
    yield (x, jnp.zeros((0, 3)), {})


@WITH_RULE
@pytest.mark.parametrize("tree", list(trees()), ids=lambda t: type(t).__name__)
def test_trees(with_rule, tree):
    def loss(tree, weight):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
        return sum(jnp.sum(jnp.sin(leaf) * weight) for leaf in leaves)

    f = with_rule(loss)
    for transform in (
        lambda f: eqx.filter_grad(f),
        lambda f: eqx.filter_jit(eqx.filter_grad(f)),
        lambda f: eqx.filter_grad(eqx.filter_jit(f)),
    ):
        expected, got = transform(loss)(tree, 2.0), transform(f)(tree, 2.0)
        assert eqx.tree_equal(got, expected, rtol=1e-6)
    assert jnp.allclose(jax.grad(f, 1)(tree, 2.0), jax.grad(loss, 1)(tree, 2.0))


SCALARS = [3.0, np.float32(3.0), np.array(3.0, np.float32), jnp.array(3.0), jnp.float32(3.0)]


@WITH_RULE
@pytest.mark.parametrize("x", SCALARS, ids=lambda x: type(x).__name__)
def test_python_and_numpy_numbers(with_rule, x):
    """A Python number is a number: Equinox's `filter_custom_vjp` returns zero here."""
    f = with_rule(lambda x: x * x)
    assert f(x) == 9.0
    assert isinstance(f(x), jax.Array)
    assert jax.grad(f)(x) == 6.0
    assert jax.jit(jax.grad(f))(x) == 6.0
    assert jax.grad(jax.jit(f))(x) == 6.0
    one = {float: 1.0, np.float32: np.float32(1.0), np.ndarray: np.ones_like(x)}
    assert jax.jvp(f, (x,), (one.get(type(x), jnp.ones_like(x)),))[1] == 6.0
    assert jax.hessian(f)(x) == 2.0
    assert jax.grad(lambda y: f(y) * f(x))(2.0) == 36.0


@WITH_RULE
def test_weak_types_stay_weak(with_rule):
    f = with_rule(lambda x: 2 * x)
    assert f(1.0).weak_type
    assert jax.grad(f)(1.0).weak_type == jax.grad(lambda x: 2 * x)(1.0).weak_type
    half = jnp.array(1.0, "bfloat16")
    assert (f(1.0) * half).dtype == half.dtype


@WITH_RULE
def test_integers_and_keys_go_in_and_out(with_rule):
    """The state of a loop: a counter and a key come out, and go in again."""

    def step(state):
        key, _ = jax.random.split(state["key"])
        return {"x": jnp.sin(state["x"]), "count": state["count"] + 1, "key": key}

    f = with_rule(step)
    init = lambda x: {"x": x, "count": jnp.array(0), "key": jax.random.key(0)}
    twice = lambda f: lambda x: f(f(init(x)))["x"]
    assert jnp.allclose(jax.grad(twice(f))(0.5), jax.grad(twice(step))(0.5))
    looped = lambda f: lambda x: jax.lax.scan(lambda s, _: (f(s), s["count"]), init(x), None, 3)
    loss = lambda f: lambda x: looped(f)(x)[0]["x"]
    for transform in (jax.grad, lambda l: jax.jit(jax.grad(l)), lambda l: jax.grad(jax.jit(l))):
        assert jnp.allclose(transform(loss(f))(0.5), transform(loss(step))(0.5))
    assert looped(f)(0.5)[0]["count"] == 3


def test_a_python_float_as_output_is_an_array():
    f = eqg.custom_vjp(lambda x: (x, 2.5))
    f.def_fwd(lambda x: ((x, 2.5), None))
    f.def_bwd(lambda _, cts: (cts[0] + 3 * cts[1],))
    assert isinstance(f(1.0)[1], jax.Array)
    assert jax.grad(lambda x: sum(f(x)))(1.0) == 4.0


def test_backward_rule_may_ask_for_configuration():
    f = eqg.custom_vjp(lambda x, *, limit, name: x)
    f.def_fwd(lambda x, *, limit, name: (x, None))
    f.def_bwd(lambda residuals, ct, *, limit: (jnp.minimum(ct, limit),))
    assert jax.grad(lambda x: 10 * f(x, limit=2.0, name="f"))(1.0) == 2.0
    assert jax.jit(lambda l: jax.grad(lambda x: 10 * f(x, limit=l, name="f"))(1.0))(3.0) == 3.0


# Other classes than `jax.Array` that JAX takes for numbers and arrays.

X = jnp.linspace(0.25, 2.0, 6).reshape(2, 3)


class Variable:
    """An object that JAX converts to an array, as the variables of several libraries."""

    def __init__(self, value):
        self.value = value
        self.shape, self.dtype = value.shape, value.dtype
        self.ndim, self.size = value.ndim, value.size

    def __jax_array__(self):
        return self.value


FUNCTIONS = {
    "add": lambda x: eqg.tangents.add(x, x),
    "scale": lambda x: eqg.tangents.scale(X, x),
    "norm": eqg.safe.norm,
    "ste.ternary": lambda x: eqg.ste.ternary(X, threshold=x),
    "linear_recurrence": lambda x: eqg.linear_recurrence(x, x),
    "scale_gradient": lambda x: jax.grad(lambda y: jnp.sum(eqg.scale_gradient(y, x)))(X),
    "substitute": lambda x: eqg.safe.where(X > 1, jnp.sqrt, X, 0.0, substitute=x),
}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_object_that_jax_converts(name):
    assert_close(FUNCTIONS[name](Variable(X)), FUNCTIONS[name](X))
