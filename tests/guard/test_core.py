"""The core as users see it: the arithmetic of tangents, the conventions of JAX's and Equinox's
decorators, users' classes, what an eager loop compiles, carries, and named axes.

The references are NumPy, plain JAX, Python loops, and JAX's and Equinox's own decorators.
"""

import contextlib
import copy
import dataclasses
import functools as ft
import inspect
import pickle
from typing import Any, NamedTuple

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, PartitionSpec as P

from ..helpers import compilations


def assert_same(got: Any, want: Any, name: str = "") -> None:
    """Trees of one structure, `None` being a leaf, with the same arrays and dtypes."""
    pairs = [jax.tree.flatten(tree, is_leaf=lambda x: x is None) for tree in (got, want)]
    assert pairs[0][1] == pairs[1][1], f"{name}: {got} instead of {want}"
    for x, y in zip(pairs[0][0], pairs[1][0], strict=True):
        if not eqx.is_array(y):
            assert x is y or x == y, f"{name}: {x} instead of {y}"
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{name}: {x!r} instead of {y!r}"
        if x.dtype != jax.dtypes.float0:
            wide = lambda x: np.asarray(x).astype(np.result_type(x.dtype, np.float32))
            np.testing.assert_allclose(wide(x), wide(y), rtol=1e-6, atol=1e-7, err_msg=name)


def array(*xs: Any, dtype: str = "float32") -> np.ndarray:
    return np.asarray(xs, jnp.dtype(dtype))


# ---------------------------------------------------------------- arithmetic of tangents

F, G = array(1.0, -2.0), array(3.0, 5.0)
H = jnp.array([0.5, 4.0], jnp.bfloat16)
C, D = array(1 + 2j, -3j, dtype="complex64"), array(2 - 1j, 4 + 1j, dtype="complex64")
NO_TANGENT = np.zeros(2, jax.dtypes.float0)
SYMBOLIC = SymbolicZero(jax.core.ShapedArray((2,), jnp.dtype("float32")))
INF = array(np.inf, np.nan)
AsArray = type("AsArray", (), {"__jax_array__": lambda self: jnp.asarray(G)})
MIXED = {"a": (F, None), "b": [None, H], "c": C}
PRIMAL = {"a": (G, 3.5), "b": [np.array([1, 2]), H], "c": D, "d": "static", "e": None}


class Pair(NamedTuple):
    first: Any
    second: Any


class Layer(eqx.Module):
    weight: Any
    bias: Any
    inner: Any
    name: str = eqx.field(static=True)


class Plain:
    """A class of users that computes when it is made."""

    def __init__(self, mean, rest):
        self.mean, self.rest = mean, rest
        self.double = mean if mean is None or type(mean) is object else 2 * mean


class Keyed(Plain):
    """The same with the names of its parts."""


_flatten = lambda p: ((p.mean, p.rest), None)
_keys = [jax.tree_util.GetAttrKey("mean"), jax.tree_util.DictKey("rest")]
jax.tree_util.register_pytree_node(Plain, _flatten, lambda _, parts: Plain(*parts))
jax.tree_util.register_pytree_with_keys(
    Keyed, lambda p: (list(zip(_keys, _flatten(p)[0], strict=True)), None),
    lambda _, parts: Keyed(*parts),
)  # fmt: skip
LAYER = Layer(jnp.ones((2, 2)), jnp.ones(2), Pair(jnp.ones(2), jnp.array(1)), "name")
bf16 = lambda *xs: jnp.array(xs, jnp.bfloat16)

MESH = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
sharded = lambda fn: jax.shard_map(fn, mesh=MESH, in_specs=(P("i"), P()), out_specs=P())

# What a function of `tangents` returns, and what it should.
ARITHMETIC = {
    "add": lambda t: [
        (t.add(), None), (t.add(None, None), None), (t.add(F), F), (t.add(F, G, F), F + G + F),
        (t.add(F, H), F + np.asarray(H, "float32")), (t.add(H, H).dtype, jnp.bfloat16),
        (t.add(F, C), F + C), (t.add(AsArray(), F), G + F), (t.add(NO_TANGENT, F, SYMBOLIC), F),
        (t.add(NO_TANGENT, SYMBOLIC), None), (t.add(2.0, np.float32(1)), np.float32(3)),
        (t.add(MIXED, None, {"a": (G, F), "b": None, "c": None}),
         {"a": (F + G, F), "b": [None, H], "c": C}),
        (t.add({"x": (None, F)}, {"x": None}), {"x": (None, F)}),
        (t.add(Pair(F, None), Pair(None, (G, None))), Pair(F, (G, None))), (t.add([], []), []),
    ], "neg": lambda t: [
        (t.neg(None), None), (t.neg(MIXED), {"a": (-F, None), "b": [None, -H], "c": -C}),
        (t.neg((NO_TANGENT, SYMBOLIC, 1.5)), (None, None, np.float32(-1.5))),
    ], "scale": lambda t: [
        (t.scale(MIXED, 2), {"a": (2 * F, None), "b": [None, 2 * H], "c": 2 * C}),
        (t.scale(None, np.inf), None),
        (t.scale((None, SYMBOLIC, NO_TANGENT), INF), (None, None, None)),
        (t.scale(F, INF), F * INF), (t.scale(H, G), bf16(1.5, 20.0)), (t.scale(C, 1j), 1j * C),
        (t.scale(C, D), C * D),
        (t.scale(np.ones((3, 2), "float32"), F), np.broadcast_to(F, (3, 2))),
        (t.scale(np.ones((3, 2), "float32"), np.ones((3, 1))), np.ones((3, 2), "float32")),
        (t.scale(F, np.array(True)), F), (t.scale(F, AsArray()), F * G),
    ], "linear": lambda t: [
        (t.linear(jnp.sum, MIXED), {"a": (F.sum(), None), "b": [None, H.sum()], "c": C.sum()}),
        (t.linear(jnp.sum, None), None), (t.linear(lambda a, b: a + np.inf * b, F, None), F),
        (t.linear(lambda a, b: np.inf * a + 2 * b, SYMBOLIC, F), 2 * F),
        (t.linear(lambda a, b: 3 * a - b, F, G), 3 * F - G),
        (t.linear(lambda a, b, c: a + 2 * b + 3 * c, (F, None), None, (G, None)),
         (F + 3 * G, None)),
    ], "dot": lambda t: [
        (t.dot(None, F), None), (t.dot((F, None), (None, G)), None),
        (t.dot(F, G), np.float32(F @ G)),
        (t.dot((F, (C, None)), (G, (D, F))), np.float32(F @ G + np.vdot(C, D).real)),
        (t.dot((F, C), None), None), (t.dot(F, H), np.float32(F @ np.asarray(H, "float32"))),
        (t.dot(F, C), np.float32((F @ C).real)), (t.dot(C, 1j * C), np.float32(0)),
    ], "where": lambda t: [
        (t.where(F > 0, None, None), None), (t.where(F > 0, INF, None), array(np.inf, 0)),
        (t.where(F > 0, None, F), array(0, -2)),
        (t.where(F > 0, (F, None), (G, H)), (array(1, 5), bf16(0, 4))),
        (t.where(True, F, C), F.astype("complex64")),
        (t.where(False, C, F), F.astype("complex64")), (t.where(False, F, C), C),
        (t.where(np.array([[True], [False]]), np.eye(2), np.ones((2, 2))),
         array([1, 0], [1, 1])),
    ], "materialize": lambda t: [
        (t.materialize(PRIMAL, None), {"a": (0 * G, np.float32(0)), "b": [NO_TANGENT, 0 * H],
                                       "c": 0 * D, "d": None, "e": None}),
        (t.materialize((G, 1, "s"), (H, None, None)), (array(0.5, 4), NO_TANGENT[0], None)),
        (t.materialize((D, True), (F, np.zeros((), jax.dtypes.float0))),
         (F.astype("complex64"), NO_TANGENT[0])),
        (t.materialize(jax.random.key(0), None), np.zeros((), jax.dtypes.float0)),
        (t.materialize(Pair(H, (G,)), Pair(None, (2 * F,))), Pair(0 * H, (2 * F,))),
        (t.materialize(np.array([1, 2]), np.array([0, 0])), NO_TANGENT),
        (t.materialize([np.array(["s"]), np.ma.masked_array([1.0])], None), [None, None]),
    ], "zeros_like": lambda t: [
        (t.zeros_like(PRIMAL), jax.tree.map(lambda _: None, PRIMAL)),
        (t.zeros_like(None), None),
    ], "is_zero": lambda t: [
        (t.is_zero(None), True), (t.is_zero((None, [SYMBOLIC, NO_TANGENT])), True),
        (t.is_zero(()), True), (t.is_zero((None, 0 * F)), False), (t.is_zero([F, None]), False),
        (jax.jit(lambda x: jnp.array(t.is_zero(x)))(F), np.array(False)),
    ], "project": lambda t: [
        (t.project(None, PRIMAL), jax.tree.map(lambda _: None, PRIMAL)),
        (t.project(np.ones((3, 2), "float32"), F), array(3, 3)),
        (t.project(np.ones((3, 2), "float32"), np.float32(1)), np.float32(6)),
        (t.project(np.ones((3, 2), "float32"), F[None]), array([3, 3])),
        (t.project(np.arange(6.0).reshape(1, 2, 3), np.ones((2, 1), "float32")),
         array([3], [12])), (t.project(C, F), C.real), (t.project(F, C), F.astype("complex64")),
        (t.project(F, H), bf16(1, -2)),
        (t.project((np.array([0, 0]), "s", False), (np.array([1, 2]), "s", True)),
         (None, None, None)),
        (t.project({"a": SYMBOLIC, "b": (F, None)}, {"a": G, "b": (G, 2)}),
         {"a": None, "b": (F, None)}), (t.project(2.0, 1.0), np.float32(2)),
        (t.project(("t", jnp.cos), ("s", jnp.sin)), (None, None)),
        (t.project(F, jax.ShapeDtypeStruct((), jnp.float32)), np.float32(-1)),
        (sharded(t.project)(np.arange(4.0, dtype="float32"), F), array(2, 4)),
    ], "of": lambda t: [
        (t.of(LAYER, bias=F), Layer(None, F, Pair(None, None), "name")),
        (t.of(LAYER, weight=None, inner={"first": F}),
         Layer(None, None, Pair(F, None), "name")),
        (t.of(LAYER, inner=Pair(F, NO_TANGENT), bias=2.0),
         Layer(None, jnp.array(2.0), Pair(F, None), "name")),
        (t.of(Pair((F, G), F), second=G), Pair((None, None), G)),
        (t.of(Pair((F,), F), first=G), Pair((G,), None)),
        (t.of(Pair({"a": F}, F), first={"a": G}), Pair({"a": G}, None)),
        (t.of(Keyed(F, (G, 1)), mean=G).double, 2 * G),
        (t.of(Keyed(F, G)).mean, None),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name):
    with jax.numpy_rank_promotion("allow"):
        pairs = ARITHMETIC[name](tangents)
    for i, (got, want) in enumerate(pairs):
        assert_same(got, want, name=f"{name} {i}")


# ---------------------------------------------------------------- users' classes in rules


@dataclasses.dataclass
class Data:
    mean: Any
    rest: Any
    kind: str = "kind"


jax.tree_util.register_dataclass(Data, ["mean", "rest"], ["kind"])

FLAGS = {
    "tuple": (lambda a, b: (a, b), lambda p: (p[0], p[1]), "(True, (False, True))"),
    "named tuple": (Pair, lambda p: (p.first, p.second),
     "Pair(first=True, second=(False, True))"),
    "with keys": (Keyed, lambda p: (p.mean, p["rest"]), "Keyed(mean=True, rest=(False, True))"),
    "without keys": (Plain, lambda p: (p[0], p[1]), "Plain(0=True, 1=(False, True))"),
    "dataclass": (Data, lambda p: (p.mean, p.rest),
     "Data(mean=True, rest=(False, True), kind='kind')"),
    "module": (lambda a, b: Layer(a, b, None, "name"), lambda p: (p.weight, p.bias),
     "Layer(weight=True, bias=(False, True), inner=None, name='name')"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FLAGS)
def test_perturbed_looks_like_the_argument(kind):
    """And can be compared, copied and mapped, whatever the class."""
    make, children, shown = FLAGS[kind]
    seen = []
    f = eqg.custom_vjp(lambda p: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)))

    @f.def_fwd
    def f_fwd(p, *, perturbed):
        seen.append(perturbed[0])
        return f(p), p

    f.def_bwd(lambda p, ct: (jax.tree.map(lambda leaf: 2 * ct * jnp.ones_like(leaf), p),))
    at = lambda a, b, c: f(make(a, (b, c)))
    some, every = jax.grad(at, (0, 2)), jax.grad(at, (0, 1, 2))
    assert_same(some(F.sum(), G, G), (jnp.array(2.0), jnp.array([2.0, 2.0])))
    flags = seen[-1]
    assert (children(flags), repr(flags)) == ((True, (False, True)), shown)
    assert jax.tree.leaves(flags) == [True, False, True]
    assert not hasattr(flags, "nothing")
    assert copy.deepcopy(flags) == flags
    assert children(jax.tree.map(lambda flag: not flag, flags)) == (False, (True, False))
    every(F.sum(), G, G)
    assert seen[-1] != flags


T, X, Y = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 1.5]), jnp.array([2.0, -1.0])
# ---------------------------------------------------------------- good citizens


def cube(x, y=1.0):
    """The cube."""
    return x**3 * y


def give_rules(f, rule):
    """A tangent and a cotangent of the first argument: `rule` of the other."""
    run, name = f.__wrapped__, type(f).__name__
    if "jvp" in name:
        define = f.defjvp if name.startswith("jax") else f.def_jvp
        define(lambda primals, ts: (run(*primals), rule(ts[0])))
    elif name == "jax_custom_vjp":
        f.defvjp(
            lambda *args: (run(*args), args[1:]), lambda y, ct: (rule(ct), *(0.0 for _ in y))
        )
    elif name == "filter_custom_vjp":
        f.def_fwd(lambda perturbed, *args: (run(*args), None))
        f.def_bwd(lambda _, ct, *args: rule(ct))
    else:
        f.def_fwd(lambda *args: (run(*args), args[1:]))
        f.def_bwd(lambda y, ct: (rule(ct), *(None for _ in y)))
    return f


DECORATORS = [eqg.jax_custom_jvp, eqg.jax_custom_vjp, eqg.filter_custom_jvp]
DECORATORS += [eqg.filter_custom_vjp, eqg.custom_jvp, eqg.custom_vjp]
CUBES = {of.__name__: give_rules(of(cube), lambda t: 5 * t) for of in DECORATORS}


@pytest.mark.parametrize("name", CUBES)
def test_a_decorated_function_is_a_good_citizen(name, monkeypatch):
    f = CUBES[name]
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("cube", "The cube.", cube)
    assert (f.__module__, [*inspect.signature(f).parameters]) == (__name__, ["x", "y"])
    assert "cube" in repr(f)
    assert {f: 1}[f] == 1
    monkeypatch.setitem(globals(), "cube", f)  # what a pickle finds by name
    copies = copy.copy(f), copy.deepcopy(f), pickle.loads(pickle.dumps(f))
    for other in (f, *copies, jax.jit(f), eqx.filter_jit(f)):
        assert jax.grad(other)(2.0) == 5.0
        assert other(2.0) == 8.0
    assert jax.vmap(jax.grad(f))(X).tolist() == [5.0, 5.0]
    assert f(2.0, 3.0) == 24.0
    # The rules that are in force when the function is called.
    g = type(f)(f.__wrapped__)
    for factor in (7, 11):
        give_rules(g, lambda t, factor=factor: factor * t)
        assert jax.grad(g)(2.0) == factor
        assert jax.jit(lambda x: jax.grad(g)(x))(2.0) == factor
    assert jax.grad(f)(2.0) == 5.0


def test_the_deprecated_form_of_equinox_warns():
    with pytest.warns(UserWarning, match="deprecated"):
        eqg.filter_custom_jvp(cube).defjvp(lambda primals, ts: (primals[0], ts[0]))
    with pytest.warns(UserWarning, match="deprecated"):
        eqg.filter_custom_vjp(cube).defvjp(lambda x: (x, None), lambda residuals, ct, x: ct)


# ---------------------------------------------------------------- what is compiled once


class Step(eqx.Module):
    weight: Any
    power: int = eqx.field(static=True)

    def __call__(self, h, x):
        return h * self.weight**self.power + x, h


def test_an_eager_loop_knows_a_function_by_its_identity():
    """As `jax.lax.scan` does: the same function has the numbers of its first call, and a new
    function has the present numbers. A Module is its parts."""
    scale, array = 2.0, np.array(2.0, np.float32)
    step, by_default = (
        lambda h, x: (h * scale * array + x, h), lambda h, x, s=2.0: (h * s + x, h),
    )  # fmt: skip
    for to in (2.0, 3.0, 2.0):
        scale, array[...], by_default.__defaults__ = to, to / 2, (to,)
        for f in (step, by_default, Step(jnp.asarray(to), 1), ft.partial(step)):
            is_module = isinstance(f, eqx.Module)
            same = (lambda *a: f(*a)) if is_module else f  # noqa: B023
            expected = jax.lax.scan(same, jnp.array(1.0), T)
            assert_same(eqg.filter_scan(f, jnp.array(1.0), T), expected, name=f"{f} {to}")
            present = jax.lax.scan(lambda *a: f(*a), jnp.array(1.0), T)  # noqa: B023
            assert_same(eqg.filter_scan(lambda *a: f(*a), jnp.array(1.0), T), present)  # noqa: B023


def test_an_eager_loop_is_compiled_once():
    """With other arrays; other shapes, structures and static numbers are other programs."""
    step, is_small, double = (lambda h, s: (h * s, None)), (lambda h: h < 9), lambda h: 2 * h
    first, second = (lambda x: x[0] * 3), lambda x: x[1]
    scan = lambda *args, **options: eqg.filter_scan(*args, **options)[0]
    calls = [
        lambda x: scan(step, x[1], x), lambda x: scan(Step(x[0], 2), x[1], x),
        lambda x: eqg.filter_cond(x[0] > 1, first, second, x),
        lambda x: eqg.filter_while_loop(is_small, double, x[0]),
    ]  # fmt: skip
    inputs = [T + float(i) for i in range(3)]
    got = [[call(inputs[0]) for call in calls]]
    with compilations() as found:
        got += [[call(x) for call in calls] for x in inputs[1:]]
    assert not found
    np.testing.assert_allclose(got, [[12, 8, 2, 16], [72, 240, 6, 16], [240, 3200, 9, 12]])
    assert [scan(step, T[1], T[:2]), scan(step, T[1], T, reverse=True)] == [4, 12]
    assert scan(step, jnp.array(2), jnp.array([1, 2, 3])).dtype == jnp.int32
    assert [scan(Step(T[1], n), T[1], T) for n in (2, 3, 2)] == [155, 1107, 155]
    branches = (lambda x: x["a"], lambda x: x["b"]), {"a": 1.0, "b": 2.0}
    assert eqg.filter_cond(False, *branches[0], branches[1]) == 2.0
    assert eqg.filter_cond(T[0] > 1, lambda: (1, 2), lambda: (1, 3)) == (1, 3)
    assert eqg.filter_cond(True, first, second, [3.0, 2.0]) == 9.0
    numbers = [eqg.filter_cond(T[0] > 0, first, second, [x, 2.0]) for x in (0.0, -0.0)]
    assert np.signbit(numbers).tolist() == [False, True]
    # A function that the step makes can not be part of a compiled program.
    assert eqg.filter_scan(lambda h, x: (h, lambda: 3), T[0], T)[1]() == 3


# ---------------------------------------------------------------- a check of each kind of call


class Name(str):
    """Equal to a string, and of another type."""


# What `push` perturbs, and its arguments: in the first call, and in the second.
CALLS = {
    "as before": lambda push: (push(0, F, "a"), push(0, F, "a")),
    "shape": lambda push: (push(0, F), push(0, F[:1])),
    "dtype": lambda push: (push(0, F), push(0, F.astype("float16"))),
    "weak dtype": lambda push: (push(0, jnp.float32(2)), push(0, 2.0)),
    "what is perturbed": lambda push: (push(0, F, G), push(1, F, G)),
    "structure": lambda push: (push(0, F, {"a": G}), push(0, F, {"b": G})),
    "keyword": lambda push: (push(0, F, a=G), push(0, F, b=G)),
    "static argument": lambda push: (push(0, F, "a"), push(0, F, "b")),
    "static keyword": lambda push: (push(0, F, a="a"), push(0, F, a="b")),
    "type": lambda push: (push(0, F, "a"), push(0, F, Name("a"))),
    "place": lambda push: (push(0, F, "a", G), push(0, F, G, "a")),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_kind_of_call_is_checked_once(name):
    """A rule that is linear in the first call only."""
    calls = []
    f = eqg.custom_jvp(lambda x, *args, **kwargs: 2 * x)

    @f.def_jvp(symbolic_zeros=True)
    def rule(primals, ts, **kwargs):
        return f(*primals, **kwargs), 2 * jax.tree.leaves(ts)[0] ** (1 + len(calls))

    def push(i, *args, **kwargs):
        of_one = lambda x: f(*args[:i], x, *args[i + 1 :], **kwargs)
        jax.jvp(of_one, args[i : i + 1], args[i : i + 1])
        calls.append(name)

    is_known, error = name == "as before", pytest.raises(eqg.RuleError, match="to the power 2")
    with contextlib.nullcontext() if is_known else error:
        CALLS[name](push)
    assert len(calls) == 1 + is_known


def test_a_zero_is_allowed_for_each_argument():
    """What the function may say of one argument, and not of another."""
    f = eqg.custom_jvp(lambda x, y: x * eqg.nondifferentiable(y))
    f.def_jvp(lambda primals, ts: (f(*primals), None))
    assert jax.grad(f)(2.0, 3.0) == 0
    with pytest.raises(eqg.RuleError, match="was differentiated"):
        jax.grad(f, 1)(2.0, 3.0)
    # It is used, if only in one of the outputs of an equation.
    f.def_jvp(lambda primals, ts: (f(*primals), jax.jit(lambda t: (t, 2 * t))(ts[1])[1]))
    assert jax.grad(f, 1)(2.0, 3.0) == 2


# ---------------------------------------------------------------- two precisions in one call

single = lambda x: x.astype("float32")
product = eqg.elementwise(lambda h, x: single(h) * x, lambda out, h, x: (x, h))
OPS = [
    lambda t: eqg.clip_gradient(t, np.float32(-1), array(0.5, 0.75)),
    lambda t: eqg.clip_gradient_norm(t, np.float32(0.7)),
    lambda t: eqg.normalize_gradient(t, eps=np.float32(0.7)),
    lambda t: eqg.on_backward(t, lambda ct: jax.tree.map(single, ct)),
    lambda t: eqg.probe(t, {"h": t["x"], "x": None}),
    lambda t: {"h": t["h"], "x": eqg.replace_gradient(t["x"], t["h"])},
]


def of_cotangents(h, x):
    pulls = [jax.vjp(op, {"h": h, "x": x})[1] for op in OPS]
    return [pull({"h": 2 * h, "x": 3 * x}) for pull in pulls]


def at_event(h, x):
    grow, state = ft.partial(jax.tree.map, jnp.square), {"h": h, "x": x}
    gap = lambda t, state: jnp.sum(single(state["h"]) * state["x"]) - t
    t, state = eqg.event_time(gap, state, lambda _, state: grow(state), jnp.sum(single(h) * x))
    weak = eqg.jump(None, h[0], lambda t, _: 1.5, t)
    return weak, eqg.jump(None, state, lambda _, state: grow(state), t)


def online(h, x):
    def step(carry, _):
        other = product(h, jnp.sin(carry[1])) + single(carry[0])
        return (carry[0] * h + carry[1].astype(h.dtype), other), carry[1]

    return eqg.filter_scan(step, (h, x), jnp.ones(3), online=True)


TWO_PRECISIONS = {
    "gradient ops": of_cotangents, "online": online, "event": at_event,
    "linear_recurrence": lambda h, x: (
        eqg.linear_recurrence(h, x, x[0]),
        eqg.linear_recurrence(x, h, h[0], method="associative"),
    ), "selective_scan": lambda h, x: eqg.selective_scan(
        h[:, None], x[:, None], -x[:1, None], h[:, None], h[:, None]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO_PRECISIONS)
def test_two_precisions_in_one_call(name):
    """As in single precision, and each cotangent has the dtype of its argument."""

    def derivatives(h, x):
        floats = lambda *args: list(
            filter(eqx.is_inexact_array, jax.tree.leaves(TWO_PRECISIONS[name](*args)))
        )
        outs, pull = jax.vjp(floats, h, x)
        return pull(list(map(jnp.cos, outs))), outs

    h, x = jnp.array([0.5, -0.25], "bfloat16"), jnp.array([0.75, 1.25])
    run = jax.jit(lambda h, x: (derivatives(h, x), derivatives(single(h), x)))
    got, want = run(h, x)
    assert [ct.dtype for ct in got[0]] == ["bfloat16", "float32"]
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(single(a), b, rtol=0.04, atol=0.04 * np.max(np.abs(b)))


# ---------------------------------------------------------------- named axes


def _index(w):
    """Linear, and its own transpose."""
    return w * (1.0 + jax.lax.axis_index("i").astype(w.dtype)) + 0.1 * jax.lax.psum(w, "i")


_place = give_rules(eqg.custom_jvp(lambda w: (w, jax.lax.axis_index("i"))), lambda t: (t, None))
NAMED = {of.__name__: lambda of=of: give_rules(of(_index), _index) for of in DECORATORS} | {
    "filter_checkpoint": lambda: eqg.filter_checkpoint(_index),
    "zero_safe": lambda: eqg.zero_safe(_index),
    "an integer": lambda: lambda w: w * (1.2 + _place(w)[1].astype(w.dtype)),
    "filter_scan": lambda: lambda w: eqg.filter_scan(lambda h, _: (_index(w), h), w, T[:1])[0],
    "filter_cond": lambda: lambda w: eqg.filter_cond(True, _index, lambda w: w, w),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_named_axis_without_batched_operands(name):
    """Each member of the batch has another index, though no operand is batched."""
    f = NAMED[name]()

    def total(f, w):
        out = jax.vmap(lambda x: jnp.sum(x * f(w)), axis_name="i")(X[:, None] * Y[None])
        return jnp.sum(out**2), out

    for of in (jax.value_and_grad, jax.jit):
        got, want = (of(lambda w, f=f: total(f, w)[0])(T[1:]) for f in (f, _index))
        assert_same(got, want)
    forward = lambda f: jax.jvp(lambda w: total(f, w)[1], (T[1:],), (Y,))
    assert_same(forward(f), forward(_index))
