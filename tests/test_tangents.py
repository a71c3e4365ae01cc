"""Arithmetic in which `None` is zero: a vector space, leaf by leaf and on whole trees."""

import collections
import dataclasses

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError
from hypothesis import given, HealthCheck, settings
from jax.custom_derivatives import SymbolicZero


# Small integers, so that sums and products are exact in every order.
NUMBERS = st.integers(-8, 8).map(float)
LEAVES = st.one_of(st.none(), st.lists(NUMBERS, min_size=2, max_size=2).map(jnp.array))
PAIRS = st.one_of(st.none(), st.tuples(LEAVES, LEAVES))
# All of one space: a dict of an array and a pair, with `None` for any part.
TREES = st.one_of(st.none(), st.fixed_dictionaries({"a": LEAVES, "b": PAIRS}))
PRIMAL = {"a": jnp.zeros(2), "b": (jnp.zeros(2), jnp.zeros(2))}
# How long an example takes to make depends on what else the machine does.
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def dense(t):
    return tangents.materialize(PRIMAL, t)


def same(a, b):
    """Equal as elements of the space, in which `None` and zeros are one."""
    return all(jax.tree.leaves(jax.tree.map(jnp.array_equal, dense(a), dense(b))))


class TestVectorSpace:
    @few
    @given(TREES, TREES, TREES)
    def test_addition(self, a, b, c):
        assert same(tangents.add(a, b), tangents.add(b, a))
        assert same(tangents.add(tangents.add(a, b), c), tangents.add(a, tangents.add(b, c)))
        assert same(tangents.add(a, b, c), tangents.add(a, tangents.add(b, c)))
        assert same(tangents.add(a, None), a)
        assert same(tangents.add(a, tangents.neg(a)), None)
        assert same(tangents.add(a), a)

    @pytest.mark.thorough
    @few
    @given(TREES, TREES, NUMBERS, NUMBERS)
    def test_scaling(self, a, b, s, r):
        scale, add = tangents.scale, tangents.add
        assert same(scale(a, 1.0), a)
        assert same(scale(a, 0.0), None)
        assert same(scale(scale(a, s), r), scale(a, r * s))
        assert same(scale(a, s + r), add(scale(a, s), scale(a, r)))
        assert same(scale(add(a, b), s), add(scale(a, s), scale(b, s)))
        assert same(tangents.neg(a), scale(a, -1.0))

    @few
    @given(TREES, TREES, TREES, NUMBERS)
    def test_inner_product(self, a, b, c, s):
        dot = lambda a, b: 0.0 if tangents.dot(a, b) is None else tangents.dot(a, b)
        assert dot(a, b) == dot(b, a)
        assert dot(tangents.add(a, b), c) == dot(a, c) + dot(b, c)
        assert dot(tangents.scale(a, s), b) == s * dot(a, b)
        assert dot(a, a) >= 0
        assert (dot(a, a) == 0) == same(a, None)

    @pytest.mark.thorough
    @few
    @given(TREES, TREES)
    def test_against_the_dense_answer(self, a, b):
        plus = jax.tree.map(lambda x, y: x + y, dense(a), dense(b))
        assert same(tangents.add(a, b), plus)
        leaves = zip(jax.tree.leaves(dense(a)), jax.tree.leaves(dense(b)), strict=True)
        inner = tangents.dot(a, b)
        assert sum(jnp.vdot(x, y) for x, y in leaves) == (0.0 if inner is None else inner)
        mask = jnp.array([True, False])
        where = jax.tree.map(lambda x, y: jnp.where(mask, x, y), dense(a), dense(b))
        assert same(tangents.where(mask, a, b), where)
        twice = tangents.linear(lambda x, y: 2 * x - 3 * y, a, b)
        assert same(twice, jax.tree.map(lambda x, y: 2 * x - 3 * y, dense(a), dense(b)))

    @few
    @given(TREES, TREES)
    def test_zeros_stay_none(self, a, b):
        """No array is made where the structure says that the answer is zero."""
        zero = {"a": None, "b": (None, None)}
        for t in (
            tangents.add(zero, None),
            tangents.scale(zero, 3.0),
            tangents.neg(zero),
            tangents.where(True, zero, None),
            tangents.linear(jnp.sin, zero),
        ):
            assert tangents.is_zero(t)
        total = tangents.add(a, b)
        assert tangents.is_zero(total) == (tangents.is_zero(a) and tangents.is_zero(b))


def test_is_zero():
    assert tangents.is_zero(None)
    assert tangents.is_zero(())
    assert tangents.is_zero(np.zeros(3, jax.dtypes.float0))
    assert tangents.is_zero(SymbolicZero(jax.typeof(jnp.ones(2))))
    assert not tangents.is_zero(jnp.zeros(2))
    assert not tangents.is_zero(0.0)
    jax.jit(lambda t: None if type(tangents.is_zero(t)) is bool else 1 / 0)(1.0)


@pytest.mark.parametrize("s", [2, 2.0, np.float64(2), jnp.array(2.0), jnp.array(2, "int8")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_scale_keeps_the_dtype(s, dtype):
    t = tangents.scale(jnp.ones(3, dtype), s)
    assert t.dtype == dtype
    assert jnp.array_equal(t, jnp.full(3, 2, dtype))
    assert tangents.scale(jnp.ones(3), jnp.arange(3.0))[2] == 2.0
    assert tangents.scale(None, jnp.inf) is None


def test_add_promotes():
    t = tangents.add(jnp.ones(2, "bfloat16"), jnp.ones(2, "float32"), 0.5 * jnp.ones(2))
    assert t.dtype in ("float32", "float64")
    assert jnp.array_equal(t, jnp.full(2, 2.5, t.dtype))


def test_dot_of_complex_leaves():
    a, b = jnp.array([1 + 2j, 3j]), jnp.array([2 - 1j, 1 + 0j])
    assert tangents.dot(a, b) == np.real(np.vdot(np.asarray(a), np.asarray(b)))
    assert tangents.dot(a, a) == 14.0


class TestLinear:
    def test_shapes_change(self):
        weight = jnp.arange(6.0).reshape(2, 3)
        out = tangents.linear(lambda t: weight @ t, (jnp.ones(3), None))
        assert jnp.array_equal(out[0], weight @ jnp.ones(3))
        assert out[1] is None

    def test_dead_terms_are_dropped(self):
        combine = lambda a, b: 2 * a + jnp.inf * b
        assert tangents.linear(combine, jnp.array(1.0), None) == 2.0
        assert tangents.linear(combine, None, None) is None
        assert tangents.linear(lambda a, b: jnp.nan * a + b, None, jnp.array(5.0)) == 5.0

    def test_not_called_for_zero(self):
        def fail(*_):
            raise AssertionError

        assert tangents.linear(fail, None) is None
        assert tangents.linear(fail, {"a": None}, None) == {"a": None}


def test_materialize():
    primal = {
        "float": 1.0,
        "numpy": np.ones(2, np.float16),
        "jax": jnp.ones((2, 3), "bfloat16"),
        "complex": 1j,
        "int": 3,
        "bool": jnp.array([True]),
        "key": jax.random.key(0),
        "text": "text",
        "none": None,
    }
    t = tangents.materialize(primal, {**dict.fromkeys(primal), "float": 5.0})
    assert t["float"] == 5.0
    assert t["numpy"].dtype == np.float16
    assert (t["jax"].shape, t["jax"].dtype) == ((2, 3), "bfloat16")
    assert jnp.iscomplexobj(t["complex"])
    for name in ("int", "bool", "key"):
        assert t[name].dtype == jax.dtypes.float0
    assert t["text"] is None
    assert t["none"] is None
    # What `jax.jvp` wants.
    primal = {"x": jnp.ones(2), "count": jnp.array(1), "key": jax.random.key(0)}
    jax.jvp(lambda p: p["x"] * p["count"], (primal,), (tangents.materialize(primal, None),))


class TestSwappedArguments:
    """What a tangent and its value, or a tangent and its factor, tell about their order."""

    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))

    @pytest.mark.parametrize(
        ("primal", "t"),
        [
            (linear, tangents.of(linear, bias=jnp.ones(3))),
            ({"x": jnp.ones(2), "n": 3}, {"x": jnp.ones(2), "n": None}),
            ({"x": jnp.ones(2), "n": 3}, None),
            ((jnp.ones(2), jnp.tanh), (None, None)),
            ([jnp.ones(2), jax.random.key(0)], [jnp.ones(2), None]),
            ([jnp.ones(2), np.arange(2)], [jnp.ones(2), np.zeros(2, jax.dtypes.float0)]),
            ((jnp.ones(2), {"a": jnp.ones(3)}), (jnp.ones(2), None)),
        ],
    )
    def test_materialize(self, primal, t):
        dense = tangents.materialize(primal, t)
        assert jax.tree.leaves(dense)
        with pytest.raises(RuleError, match="A tangent does not fit its value"):
            tangents.materialize(t, primal)

    def test_materialize_names_the_leaf_and_the_order(self):
        t = tangents.of(self.linear, bias=jnp.ones(3))
        with pytest.raises(
            RuleError, match=r"at primal.weight(.|\n)*`materialize\(primal, t\)`"
        ):
            tangents.materialize(t, self.linear)

    def test_the_dtype_is_that_of_the_value(self):
        t = tangents.materialize(jnp.ones(2, "bfloat16"), jnp.ones(2))
        assert t.dtype == "bfloat16"

    def test_project(self):
        ct = tangents.of(self.linear, bias=jnp.ones(3))
        assert tangents.project(ct, self.linear).bias.shape == (3,)
        with pytest.raises(RuleError, match=r"at \.weight"):
            tangents.project(self.linear, ct)
        with pytest.raises(RuleError, match="does not fit"):
            tangents.project(self.linear, None)

    @pytest.mark.parametrize(
        ("call", "match"),
        [
            (lambda t: tangents.scale(2, jnp.array(0.5)), "was an integer"),  # it was 0
            (lambda t: tangents.scale(jnp.array(2), jnp.ones(3)), "was an integer"),
            (lambda t: tangents.scale(2.0, t), "The factor `s` of a tangent is not"),
            (lambda t: tangents.scale(2.0, None), "The factor `s` of a tangent is not"),
            (lambda t: tangents.where(t, jnp.array(True), t), "."),
            (lambda t: tangents.where(t, t, jnp.array(True)), "."),
            (lambda t: tangents.linear(t, jnp.sum), "The `fn` of `tangents.linear` is not"),
        ],
    )
    def test_others(self, call, match):
        with pytest.raises(RuleError, match=match):
            call({"x": jnp.array(0.5)})


def test_zeros_like():
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    zeros = tangents.zeros_like((linear, {"a": 1, "b": [None, "x"]}))
    assert zeros[0].weight is None
    assert zeros[0].in_features == 2
    assert zeros[1] == {"a": None, "b": [None, None]}


Point = collections.namedtuple("Point", ["x", "y"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    value: jax.Array
    label: str = dataclasses.field(metadata={"static": True}, default="r")


class TestOf:
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))

    def test_fields(self):
        ct = tangents.of(self.linear, weight=jnp.ones((3, 2)))
        assert type(ct) is eqx.nn.Linear
        assert ct.bias is None
        assert ct.in_features == 2
        structure = jax.tree.structure(
            tangents.zeros_like(self.linear), is_leaf=lambda x: x is None
        )
        assert jax.tree.structure(ct, is_leaf=lambda x: x is None) == structure
        assert tangents.is_zero(tangents.of(self.linear))

    def test_nested(self):
        mlp = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
        ct = tangents.of(mlp, layers=(tangents.of(mlp.layers[0], bias=jnp.ones(2)), None))
        total = tangents.add(ct, ct)
        assert jnp.array_equal(total.layers[0].bias, jnp.full(2, 2.0))

    def test_other_records(self):
        assert tangents.of(Point(1.0, 2.0), y=3.0) == Point(None, 3.0)
        assert tangents.of(Record(jnp.ones(2)), value=1.0) == Record(1.0)

    def test_errors(self):
        with pytest.raises(
            RuleError, match=r"`wieght`, which is not a field of `Linear`.\n.*weight"
        ):
            tangents.of(self.linear, wieght=1.0)
        with pytest.raises(
            RuleError, match="`in_features`, which is a static field of `Linear`"
        ):
            tangents.of(self.linear, in_features=1.0)
        with pytest.raises(RuleError, match=r"something that has no fields.\n.*`dict`"):
            tangents.of({"a": 1}, a=2)


class TestProject:
    def test_dtype_and_real_part(self):
        ct = tangents.project(jnp.ones(3, "float32"), jnp.zeros(3, "bfloat16"))
        assert ct.dtype == jnp.bfloat16
        ct = tangents.project(jnp.array([1 + 2j]), jnp.zeros(1, "float32"))
        assert (ct.dtype, ct[0]) == (np.float32, 1.0)
        ct = tangents.project(jnp.ones(1), jnp.zeros(1, "complex64"))
        assert ct.dtype == np.complex64

    @pytest.mark.parametrize("shape", [(), (3,), (1, 3), (5, 1), (1, 1), (5, 3), (1,)])
    def test_broadcasting(self, shape):
        """The witness: autodiff of the broadcast."""
        primal, ct = jnp.zeros(shape), jnp.arange(15.0).reshape(5, 3)
        (expected,) = jax.vjp(lambda x: jnp.broadcast_to(x, (5, 3)), primal)[1](ct)
        assert jnp.array_equal(tangents.project(ct, primal), expected)

    def test_trees(self):
        primal = {"a": jnp.zeros(3), "b": [jnp.zeros(()), "text", 3], "c": jax.random.key(0)}
        ct = tangents.project({"a": jnp.ones((2, 3)), "b": None, "c": None}, primal)
        assert jnp.array_equal(ct["a"], jnp.full(3, 2.0))
        assert ct["b"] == [None, None, None]
        assert tangents.project(None, primal) == {"a": None, "b": [None] * 3, "c": None}
        # Zeros for integers, as `jnp.zeros_like` or JAX make them, are let through.
        for zero in (jnp.array(0), np.zeros((), jax.dtypes.float0)):
            assert tangents.project([zero], [jnp.array(3)]) == [None]

    def test_idempotent_and_traced(self):
        primal, ct = jnp.zeros((1, 3), "float16"), jnp.ones((4, 3))
        once = jax.jit(tangents.project)(ct, primal)
        assert jnp.array_equal(tangents.project(once, primal), once)
        assert tangents.project(2.0, 3.0) == 2.0

    @pytest.mark.parametrize(
        ("ct", "primal", "match"),
        [
            (jnp.ones(4), jnp.ones(3), r"at the only leaf: the value is \w+\[3\].*\[4\]"),
            (jnp.ones(()), jnp.ones(3), r"Did a sum drop an axis"),
            (jnp.ones((3, 2)), jnp.ones((2, 3)), "is a transpose missing"),
            (
                {"a": jnp.ones(3, int)},
                {"a": jnp.ones(3)},
                r"at \['a'\]: (?s:.)*array of floats",
            ),
            ({"a": 1.0}, {"b": 1.0}, r"at the root: the value is \{'b'"),
            ([1.0, "x"], [1.0, 2.0], r"at \[1\]: (?s:.)*Return an array, or `None`"),
            (1.0, "text", "can't be differentiated"),
            (jnp.ones(2), jnp.array(3), "can't be differentiated"),
        ],
    )
    def test_errors(self, ct, primal, match):
        with pytest.raises(RuleError, match=match):
            tangents.project(ct, primal)


def test_errors():
    with pytest.raises(RuleError, match="different structure"):
        tangents.add({"a": 1.0}, {"b": 1.0})
    with pytest.raises(
        RuleError, match=r"different shape were combined.\n  \w+\[2\]\n  \w+\[3\]"
    ):
        tangents.add(jnp.ones(2), jnp.ones(3))
    with pytest.raises(RuleError, match="different shape"):
        tangents.dot(jnp.ones(2), jnp.ones(3))
    with pytest.raises(RuleError, match="real tangent was scaled by a complex number"):
        tangents.scale(jnp.ones(2), 1j)
    with pytest.raises(RuleError, match="would change its shape"):
        tangents.scale(jnp.ones(2), jnp.ones((3, 1)))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd])
def test_inside_a_rule_of_equinox(transform):
    @eqx.filter_custom_jvp
    def f(x, y):
        return x["a"] * y

    @f.def_jvp
    def f_jvp(primals, ts):
        (x, y), (t_x, t_y) = primals, ts
        t_a = tangents.scale(t_x, y)["a"]
        return f(x, y), tangents.add(t_a, tangents.scale(t_y, x["a"]))

    assert transform(lambda a: f({"a": a}, 3.0 * jnp.ones(())))(2.0) == 3.0
    assert transform(lambda y: f({"a": 2.0 * jnp.ones(())}, y))(5.0) == 2.0


def test_inside_our_rules():
    f = eqg.custom_jvp(lambda x, y: x * y)

    @f.def_jvp(symbolic_zeros=True)
    def rule(primals, ts):
        (x, y), (t_x, t_y) = primals, ts
        return x * y, tangents.add(tangents.scale(t_x, y), tangents.scale(t_y, x))

    assert jax.grad(f, (0, 1))(2.0, 3.0) == (3.0, 2.0)
    assert jax.grad(f)(2.0, jnp.inf) == jnp.inf
    assert jax.jvp(lambda x: f(x, jnp.inf), (2.0,), (1.0,))[1] == jnp.inf
