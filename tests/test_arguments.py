"""What may be passed to a function with a rule, and how: calls, leaves and outputs."""

import collections
import dataclasses
import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array


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


@WITH_RULE
def test_variadic(with_rule):
    f = with_rule(lambda x, *others, power=2: sum((o**power for o in others), x))
    grads = jax.grad(lambda *args: f(*args), (0, 1, 2))(1.0, 2.0, 3.0)
    assert grads == (1.0, 4.0, 6.0)
    assert jax.grad(lambda x: f(x, x, power=3))(2.0) == 13.0


@WITH_RULE
def test_keyword_only_is_configuration(with_rule):
    f = with_rule(lambda x, *, fn=jnp.sin, table=None, **more: fn(x) * len(more))
    assert jnp.allclose(
        jax.grad(lambda x: f(x, fn=jnp.cos, a=1, b="b"))(1.0), -2 * jnp.sin(1.0)
    )
    table = jnp.arange(3)  # an array that nobody differentiates
    jax.jit(jax.grad(lambda x: f(x, table=table, a=1)))(1.0)


@WITH_RULE
def test_rules_may_leave_out_defaults(with_rule):
    del with_rule

    @eqg.custom_jvp
    def f(x, *, scale=2.0, verbose=False):
        return scale * x

    @f.def_jvp
    def rule(primals, tans, *, scale=2.0):
        return f(*primals, scale=scale), scale * tans[0]

    assert jax.grad(f)(1.0) == 2.0
    assert jax.grad(lambda x: f(x, scale=3.0))(1.0) == 3.0
    with pytest.raises(TypeError, match="verbose"):
        jax.grad(lambda x: f(x, verbose=True))(1.0)


class Affine(eqx.Module):
    weight: Array
    shift: Array
    power: int = eqx.field(static=True, default=2)

    @eqg.custom_jvp
    def forward(self, x):
        return self.weight * x**self.power + self.shift

    @forward.def_jvp
    def _forward_jvp(primals, tans):
        (self, x), (t_self, t_x) = primals, tans
        slope = self.power * self.weight * x ** (self.power - 1)
        return self.forward(x), t_self.weight * x**self.power + t_self.shift + slope * t_x

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
    module = Affine(jnp.array(3.0), jnp.array(1.0))

    def test_self_and_argument(self):
        loss = lambda module, x: module.forward(x)
        grad = jax.grad(loss)(self.module, 2.0)
        assert (grad.weight, grad.shift, grad.power) == (4.0, 1.0, 2)
        assert jax.grad(loss, 1)(self.module, 2.0) == 12.0

    def test_bound_and_unbound(self):
        bound = self.module.forward
        assert bound(2.0) == Affine.forward(self.module, 2.0) == 13.0
        assert jax.grad(bound)(2.0) == 12.0
        assert eqx.filter_jit(bound)(2.0) == 13.0
        assert jax.grad(eqx.Partial(Affine.forward, self.module))(2.0) == 12.0
        assert jax.grad(ft.partial(Affine.forward, self.module))(2.0) == 12.0
        grad = eqx.filter_grad(lambda method: method(2.0))(bound)
        assert grad.__self__.weight == 4.0

    def test_under_filter_transforms(self):
        loss = eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x: m.forward(x)))
        value, grad = loss(self.module, jnp.array(2.0))
        assert (value, grad.weight) == (13.0, 4.0)
        ensemble = eqx.filter_vmap(lambda s: Affine(s, s))(jnp.array([1.0, 2.0]))
        out = eqx.filter_vmap(lambda m, x: m.forward(x), in_axes=(eqx.if_array(0), None))
        assert jnp.array_equal(out(ensemble, jnp.array(2.0)), jnp.array([5.0, 10.0]))

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

    def test_callable_module(self):
        mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
        f = eqg.custom_jvp(mlp)
        f.def_jvp(lambda p, t: (f(*p), 2 * jnp.sum(t[0])))
        assert jnp.array_equal(jax.grad(f)(jnp.ones(2)), jnp.full(2, 2.0))


Pair = collections.namedtuple("Pair", ["first", "second"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    value: Array
    label: str = dataclasses.field(metadata={"static": True}, default="r")


def trees():
    x = jnp.array([1.0, 2.0])
    yield {"a": x, "b": [x, (x, None)], "c": "text", "d": jnp.tanh}
    yield Pair(x, {"deep": [[[x]]]})
    yield Record(x)
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
def test_python_number_beside_the_one_differentiated(with_rule):
    f = with_rule(lambda x, y: x.astype(y.dtype) * y)
    assert jax.grad(f)(2.0, 3.0) == 3.0
    assert jax.grad(lambda x: f(x, 3.0))(jnp.array(2.0)) == 3.0


@WITH_RULE
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes(with_rule, dtype):
    f = with_rule(lambda x: jnp.sum(x * x))
    x = jnp.array([1.0, 2.0], dtype)
    grad = jax.grad(f, holomorphic=dtype == "complex64")(x)
    assert grad.dtype == x.dtype
    assert jnp.array_equal(grad, 2 * x)
    assert f(x).dtype == x.dtype


@WITH_RULE
def test_float64(with_rule):
    f = with_rule(lambda x: jnp.sum(jnp.sin(x)))
    with jax.enable_x64(True):
        x = jnp.array([0.5, 1.5], "float64")
        assert jax.grad(f)(x).dtype == np.float64
        np.testing.assert_allclose(jax.grad(f)(x), np.cos(x), rtol=1e-15)
        assert jax.grad(f)(0.5).dtype == np.float64


@WITH_RULE
def test_real_function_of_a_complex_argument(with_rule):
    plain = lambda x: jnp.sum(jnp.real(x) ** 3 + jnp.imag(x) ** 2)
    x = jnp.array([1 + 2j, -3 + 0.5j], "complex64")
    assert jnp.allclose(jax.grad(with_rule(plain))(x), jax.grad(plain)(x))


@WITH_RULE
def test_weak_types_stay_weak(with_rule):
    f = with_rule(lambda x: 2 * x)
    assert f(1.0).weak_type
    assert jax.grad(f)(1.0).weak_type == jax.grad(lambda x: 2 * x)(1.0).weak_type
    half = jnp.array(1.0, "bfloat16")
    assert (f(1.0) * half).dtype == half.dtype


@WITH_RULE
def test_empty_arrays(with_rule):
    f = with_rule(lambda x: jnp.sum(x**2))
    assert jax.grad(f)(jnp.zeros((0, 3))).shape == (0, 3)
    assert jax.jit(jax.grad(f))(jnp.zeros(0)).shape == (0,)


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


@WITH_RULE
def test_integer_arguments_have_no_gradient(with_rule):
    f = with_rule(lambda x, i: x[i] ** 2)
    x = jnp.arange(3.0)
    assert jnp.array_equal(jax.grad(f)(x, 2), jnp.array([0.0, 0.0, 4.0]))
    assert jnp.array_equal(jax.grad(f)(x, jnp.array(2)), jnp.array([0.0, 0.0, 4.0]))
    _, ct = jax.grad(f, (0, 1), allow_int=True)(x, jnp.array(2))
    assert ct.dtype == jax.dtypes.float0


@WITH_RULE
def test_outputs_of_any_kind(with_rule):
    def make(x):
        module = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
        module = eqx.tree_at(lambda m: m.weight, module, x.reshape(1, 1))
        return {
            "module": module,
            "name": "made",
            "count": 3,
            "fn": jnp.tanh,
            "none": None,
            "float": jnp.array(2.5),
            "int": jnp.array(1),
        }

    f = with_rule(make)
    loss = lambda f: lambda x: jnp.sum(f(x)["module"](x.reshape(1)) ** 2) * f(x)["float"]
    x = jnp.array(3.0)
    for transform in (jax.grad, lambda l: jax.jit(jax.grad(l)), lambda l: jax.grad(jax.jit(l))):
        assert jnp.allclose(transform(loss(f))(x), transform(loss(make))(x))
    out = f(x)
    assert (out["name"], out["count"], out["fn"], out["none"]) == ("made", 3, jnp.tanh, None)
    out = jax.vmap(lambda x: f(x)["module"].weight)(jnp.ones(4))
    assert out.shape == (4, 1, 1)


def test_a_python_float_as_output_is_an_array():
    f = eqg.custom_vjp(lambda x: (x, 2.5))
    f.def_fwd(lambda x: ((x, 2.5), None))
    f.def_bwd(lambda _, cts: (cts[0] + 3 * cts[1],))
    assert isinstance(f(1.0)[1], jax.Array)
    assert jax.grad(lambda x: sum(f(x)))(1.0) == 4.0


@WITH_RULE
def test_no_outputs_and_no_arguments(with_rule):
    assert with_rule(lambda x: None)(1.0) is None
    assert with_rule(lambda x: ())(1.0) == ()
    assert with_rule(lambda: jnp.array(2.0))() == 2.0
    assert jax.grad(lambda x: x * (with_rule(lambda y: (y, ()))(x)[0]))(3.0) == 6.0


@WITH_RULE
def test_functions_as_arguments(with_rule):
    f = with_rule(lambda fn, x, *, other: fn(x) + other(x))
    grad = jax.grad(lambda x: f(jnp.sin, x, other=lambda z: z**2))(1.0)
    assert jnp.allclose(grad, jnp.cos(1.0) + 2.0)


def test_perturbed_tells_which_leaves_are_differentiated():
    seen = []
    f = eqg.custom_vjp(lambda tree, y, n: tree["a"] * y * n)

    @f.def_fwd
    def fwd(tree, y, n, *, perturbed):
        seen.append(perturbed)
        return f(tree, y, n), (tree["a"], y, n)

    @f.def_bwd
    def bwd(residuals, ct, *, perturbed):
        seen.append(perturbed)
        a, y, n = residuals
        return {"a": ct * y * n, "name": None}, ct * a * n, None

    tree = {"a": jnp.array(2.0), "name": "x"}
    loss = lambda a, y: f({**tree, "a": a}, y, 3)
    expected = ({"a": True, "name": False}, False, False)
    for transform in (
        lambda l: jax.grad(l)(2.0, 5.0),
        lambda l: jax.jit(jax.grad(l))(2.0, 5.0),
        lambda l: jax.vmap(jax.grad(l), (0, None))(jnp.ones(2), 5.0),
        lambda l: jax.grad(jax.checkpoint(l))(2.0, 5.0),
        lambda l: jax.grad(
            lambda a: jax.lax.scan(lambda c, _: (l(c, 5.0), None), a, None, 2)[0]
        )(2.0),
    ):
        seen.clear()
        transform(loss)
        assert seen
        assert all(flags == expected for flags in seen)
        assert all(type(leaf) is bool for leaf in jax.tree.leaves(seen))


def test_backward_rule_may_ask_for_configuration():
    f = eqg.custom_vjp(lambda x, *, limit, name: x)
    f.def_fwd(lambda x, *, limit, name: (x, None))
    f.def_bwd(lambda residuals, ct, *, limit: (jnp.minimum(ct, limit),))
    assert jax.grad(lambda x: 10 * f(x, limit=2.0, name="f"))(1.0) == 2.0
    assert jax.jit(lambda l: jax.grad(lambda x: 10 * f(x, limit=l, name="f"))(1.0))(3.0) == 3.0


def test_residuals_of_any_kind():
    f = eqg.custom_vjp(lambda x: jnp.sin(x))
    mlp = eqx.nn.MLP("scalar", "scalar", 3, 1, key=jax.random.key(0))
    f.def_fwd(
        lambda x: (f(x), {"mlp": mlp, "slope": jnp.cos, "x": x, "name": "r", "none": None})
    )

    @f.def_bwd
    def bwd(residuals, ct):
        assert residuals["name"] == "r"
        assert residuals["none"] is None
        residuals["mlp"](residuals["x"])
        return (ct * residuals["slope"](residuals["x"]),)

    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        assert jnp.allclose(transform(f)(1.0), jnp.cos(1.0))


def test_a_module_as_cotangent():
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    f = eqg.custom_vjp(lambda module, x: module(x))
    f.def_fwd(lambda module, x: (f(module, x), (module, x)))
    f.def_bwd(
        lambda r, ct: (
            tangents.of(r[0], weight=jnp.outer(ct, r[1]), bias=ct),
            r[0].weight.T @ ct,
        )
    )
    x = jnp.array([1.0, 2.0])
    loss = lambda apply: lambda module: jnp.sum(jnp.sin(apply(module, x)))
    expected = eqx.filter_grad(loss(lambda m, x: m(x)))(linear)
    assert eqx.tree_equal(eqx.filter_grad(loss(f))(linear), expected, rtol=1e-6)
    frozen = eqx.filter_grad(lambda w: loss(f)(eqx.tree_at(lambda m: m.weight, linear, w)))
    assert jnp.allclose(frozen(linear.weight), expected.weight)


def test_a_reference_as_an_argument():
    """The error names the leaf, and not a line of the library."""

    @eqg.custom_jvp
    def read(refs, x):
        return refs["a"][...] * x

    read.def_jvp(lambda primals, tangents: (read(*primals), tangents[1]))
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(read({"a": jax.new_ref(x)}, x), x * x)  # not traced
    loss = lambda x: jnp.sum(read({"a": jax.new_ref(x * x)}, x))
    for transform in (jax.jit, jax.grad):
        with pytest.raises(eqg.RuleError, match=r"reference.\n  `refs\['a'\]` is Ref"):
            transform(loss)(x)
