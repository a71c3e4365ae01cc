"""The core as users see it: the arithmetic of tangents, the conventions of JAX's and Equinox's
decorators, users' classes, what an eager loop compiles, carries, and named axes.

The references are NumPy, plain JAX, Python loops, and JAX's and Equinox's own decorators.
"""

import collections
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
from jax.custom_derivatives import custom_vjp_primal_tree_values, CustomVJPPrimal, SymbolicZero
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
_keys = [jax.tree_util.GetAttrKey(name) for name in ("mean", "rest")]
jax.tree_util.register_pytree_node(Plain, _flatten, lambda _, parts: Plain(*parts))
jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda p: (list(zip(_keys, _flatten(p)[0], strict=True)), None),
    lambda _, parts: Keyed(*parts),
)
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
    ],
    "neg": lambda t: [
        (t.neg(None), None), (t.neg(MIXED), {"a": (-F, None), "b": [None, -H], "c": -C}),
        (t.neg((NO_TANGENT, SYMBOLIC, 1.5)), (None, None, np.float32(-1.5))),
    ],
    "scale": lambda t: [
        (t.scale(MIXED, 2), {"a": (2 * F, None), "b": [None, 2 * H], "c": 2 * C}),
        (t.scale(None, np.inf), None),
        (t.scale((None, SYMBOLIC, NO_TANGENT), INF), (None, None, None)),
        (t.scale(F, INF), F * INF), (t.scale(H, G), bf16(1.5, 20.0)), (t.scale(C, 1j), 1j * C),
        (t.scale(C, D), C * D),
        (t.scale(np.ones((3, 2), "float32"), F), np.broadcast_to(F, (3, 2))),
        (t.scale(np.ones((3, 2), "float32"), np.ones((3, 1))), np.ones((3, 2), "float32")),
        (t.scale(F, np.array(True)), F), (t.scale(F, AsArray()), F * G),
    ],
    "linear": lambda t: [
        (t.linear(jnp.sum, MIXED), {"a": (F.sum(), None), "b": [None, H.sum()], "c": C.sum()}),
        (t.linear(jnp.sum, None), None), (t.linear(lambda a, b: a + np.inf * b, F, None), F),
        (t.linear(lambda a, b: np.inf * a + 2 * b, SYMBOLIC, F), 2 * F),
        (t.linear(lambda a, b: 3 * a - b, F, G), 3 * F - G),
        (t.linear(lambda a, b, c: a + 2 * b + 3 * c, (F, None), None, (G, None)),
         (F + 3 * G, None)),
    ],
    "dot": lambda t: [
        (t.dot(None, F), None), (t.dot((F, None), (None, G)), None),
        (t.dot(F, G), np.float32(F @ G)),
        (t.dot((F, (C, None)), (G, (D, F))), np.float32(F @ G + np.vdot(C, D).real)),
        (t.dot((F, C), None), None), (t.dot(F, H), np.float32(F @ np.asarray(H, "float32"))),
        (t.dot(F, C), np.float32((F @ C).real)), (t.dot(C, 1j * C), np.float32(0)),
    ],
    "where": lambda t: [
        (t.where(F > 0, None, None), None), (t.where(F > 0, INF, None), array(np.inf, 0)),
        (t.where(F > 0, None, F), array(0, -2)),
        (t.where(F > 0, (F, None), (G, H)), (array(1, 5), bf16(0, 4))),
        (t.where(True, F, C), F.astype("complex64")),
        (t.where(False, C, F), F.astype("complex64")), (t.where(False, F, C), C),
        (t.where(np.array([[True], [False]]), np.eye(2), np.ones((2, 2))),
         array([1, 0], [1, 1])),
    ],
    "materialize": lambda t: [
        (t.materialize(PRIMAL, None), {"a": (0 * G, np.float32(0)), "b": [NO_TANGENT, 0 * H],
                                       "c": 0 * D, "d": None, "e": None}),
        (t.materialize((G, 1, "s"), (H, None, None)), (array(0.5, 4), NO_TANGENT[0], None)),
        (t.materialize((D, True), (F, np.zeros((), jax.dtypes.float0))),
         (F.astype("complex64"), NO_TANGENT[0])),
        (t.materialize(jax.random.key(0), None), np.zeros((), jax.dtypes.float0)),
        (t.materialize(Pair(H, (G,)), Pair(None, (2 * F,))), Pair(0 * H, (2 * F,))),
        (t.materialize(np.array([1, 2]), np.array([0, 0])), NO_TANGENT),
        (t.materialize([np.array(["s"]), np.ma.masked_array([1.0])], None), [None, None]),
    ],
    "zeros_like": lambda t: [
        (t.zeros_like(PRIMAL), jax.tree.map(lambda _: None, PRIMAL)),
        (t.zeros_like(None), None),
    ],
    "is_zero": lambda t: [
        (t.is_zero(None), True), (t.is_zero((None, [SYMBOLIC, NO_TANGENT])), True),
        (t.is_zero(()), True), (t.is_zero((None, 0 * F)), False), (t.is_zero([F, None]), False),
        (jax.jit(lambda x: jnp.array(t.is_zero(x)))(F), np.array(False)),
    ],
    "project": lambda t: [
        (t.project(None, PRIMAL), jax.tree.map(lambda _: None, PRIMAL)),
        (t.project(np.ones((3, 2), "float32"), F), array(3, 3)),
        (t.project(np.ones((3, 2), "float32"), np.float32(1)), np.float32(6)),
        (t.project(np.ones((3, 2), "float32"), F[None]), array([3, 3])),
        (t.project(np.arange(6.0).reshape(1, 2, 3), np.ones((2, 1), "float32")),
         array([3], [12])),
        (t.project(C, F), C.real), (t.project(F, C), F.astype("complex64")),
        (t.project(F, H), bf16(1, -2)),
        (t.project((np.array([0, 0]), "s", False), (np.array([1, 2]), "s", True)),
         (None, None, None)),
        (t.project({"a": SYMBOLIC, "b": (F, None)}, {"a": G, "b": (G, 2)}),
         {"a": None, "b": (F, None)}),
        (t.project(2.0, 1.0), np.float32(2)),
        (t.project(("t", jnp.cos), ("s", jnp.sin)), (None, None)),
        (t.project(F, jax.ShapeDtypeStruct((), jnp.float32)), np.float32(-1)),
        (sharded(t.project)(np.arange(4.0, dtype="float32"), F), array(2, 4)),
    ],
    "of": lambda t: [
        (t.of(LAYER, bias=F), Layer(None, F, Pair(None, None), "name")),
        (t.of(LAYER, weight=None, inner={"first": F}),
         Layer(None, None, Pair(F, None), "name")),
        (t.of(LAYER, inner=Pair(F, NO_TANGENT), bias=2.0),
         Layer(None, jnp.array(2.0), Pair(F, None), "name")),
        (t.of(Pair((F, G), F), second=G), Pair((None, None), G)),
        (t.of(Pair((F,), F), first=G), Pair((G,), None)),
        (t.of(Pair({"a": F}, F), first={"a": G}), Pair({"a": G}, None)),
        (t.of(Keyed(F, (G, 1)), mean=G).double, 2 * G),
        (t.of(Plain(F, (G, 1)), rest=(F, None)).rest, (F, None)),
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

    @eqg.custom_vjp
    def f(p, x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * x

    @f.def_fwd
    def f_fwd(p, x, *, perturbed):
        seen.append(perturbed[0])
        return f(p, x), (p, x)

    @f.def_bwd
    def f_bwd(residuals, ct):
        p, x = residuals
        double = [2 * ct * x * jnp.ones_like(leaf) for leaf in jax.tree.leaves(p)]
        return jax.tree.unflatten(jax.tree.structure(p), double), None

    at = lambda a, b, c: f(make(a, (b, c)), jnp.array(3.0))
    some, every = jax.grad(at, (0, 2)), jax.grad(at, (0, 1, 2))
    assert_same(some(F.sum(), G, G), (jnp.array(6.0), jnp.array([6.0, 6.0])))
    flags = seen[-1]
    assert (children(flags), repr(flags)) == ((True, (False, True)), shown)
    assert jax.tree.leaves(flags) == [True, False, True]
    assert not hasattr(flags, "nothing")
    assert copy.deepcopy(flags) == flags
    assert children(jax.tree.map(lambda flag: not flag, flags)) == (False, (True, False))
    some(F.sum(), F, G)
    assert seen[-1] == flags
    every(F.sum(), G, G)
    assert seen[-1] != flags
    assert jax.tree.leaves(seen[-1]) == [True, True, True]


# ---------------------------------------------------------------- the conventions of JAX


def kind_of(x):
    """The arguments of a rule, without their numbers."""
    if isinstance(x, CustomVJPPrimal):
        return "primal", kind_of(x.value), x.perturbed
    if isinstance(x, SymbolicZero):
        return "zero", x.shape, x.dtype.name
    dtype = getattr(x, "dtype", None)
    if dtype == jax.dtypes.float0:
        return "float0", x.shape
    return x if dtype is None else ("array", x.shape, dtype.name)


def kinds_of(tree):
    is_leaf = lambda x: x is None or isinstance(x, SymbolicZero | CustomVJPPrimal)
    return jax.tree.map(kind_of, tree, is_leaf=is_leaf)


T = jnp.array([1.0, 2.0, 3.0])
X, Y, N = jnp.array([0.5, 1.5]), jnp.array([2.0, -1.0]), jnp.array([3, 1])


class Given:
    """The arguments of the rules of a program: the same with JAX's decorator and with ours."""

    def __init__(self):
        self.found = {}

    def __call__(self, name, *given):
        self.found[name] = kinds_of(given)


def forward(custom, given, symbolic):
    f = custom.jvp(lambda x, tree, n: (x * tree["y"] * n.astype(x.dtype), n + 1, tree))

    def f_jvp(primals, ts):
        given("jvp", ts)
        (x, tree, n), (t_x, t_tree, _) = primals, ts
        dense = lambda t, y: jnp.zeros_like(y) if isinstance(t, SymbolicZero) else t
        t_y = dense(t_tree["y"], tree["y"])
        t = n.astype(x.dtype) * (tree["y"] * dense(t_x, x) + 3 * x * t_y)
        return f(x, tree, n), (t, np.zeros(2, jax.dtypes.float0), {"y": t_y})

    f.defjvp(f_jvp, symbolic_zeros=symbolic)
    at = lambda x: jnp.sum(f(x, {"y": Y}, N)[0])
    return derivatives(at, X), jax.jvp(lambda y: f(X, {"y": y}, N)[::2], (Y,), (X,))


def static_arguments(custom, given, ours=None, **nondiff):
    """The function or the array that is not differentiated may be anything, and traced."""
    nondiff = ours if ours and custom is OURS else nondiff
    of = lambda x, scale, fn, y: scale * x * fn(y)
    f, g = custom.jvp(of, **nondiff), custom.vjp(of, **nondiff)

    @f.defjvp
    def f_jvp(scale, fn, primals, ts):
        given("jvp", scale, ts)
        (x, y), (t_x, t_y) = primals, ts
        return f(x, scale, fn, y), 3 * scale * (fn(y) * t_x + x * t_y)

    def bwd(scale, fn, residuals, ct):
        given("bwd", scale, ct)
        x, y = residuals
        return scale * fn(y) * ct, 5 * scale * x * ct

    g.defvjp(lambda x, scale, fn, y: (g(x, scale, fn, y), (x, y)), bwd)
    found = [jax.grad(lambda s, f=f: jnp.sum(f(X, s * 1, jnp.cos, Y)) + s)(2.0)]
    for h in (f, g):
        total = lambda x, y, h=h: jnp.sum(h(x, 2.0, jnp.cos, y))
        by_name = lambda x, y, h=h: jnp.sum(h(fn=jnp.cos, y=y, x=x, scale=4.0))
        found += [h(X, 2.0, jnp.cos, Y), derivatives(total, X, Y), jax.grad(by_name, 1)(X, Y)]
    return found


def reverse(custom, given, symbolic):
    f = custom.vjp(lambda x, tree, n: (x * tree["y"], tree["z"] + x, n))

    def fwd(x, tree, n):
        given("fwd", x, tree, n)
        values = custom_vjp_primal_tree_values((x, tree, n)) if symbolic else (x, tree, n)
        return f(*values), values

    def bwd(residuals, cts):
        given("bwd", cts)
        x, tree, _ = residuals
        zero = SymbolicZero(jax.typeof(tree["z"]).to_tangent_aval()) if symbolic else None
        ct_n = None if symbolic else np.zeros(2, jax.dtypes.float0)
        return 2 * tree["y"] * cts[0], {"y": 3 * x * cts[0], "z": zero}, ct_n

    f.defvjp(fwd, bwd, symbolic_zeros=symbolic)
    at = lambda x, y, z: jnp.sum(f(x, {"y": y, "z": z}, N)[0])
    return jax.grad(at)(X, Y, Y), derivatives(at, X, Y, Y)


def a_leaf_for_a_tree(custom, given):
    f = custom.vjp(lambda p, q: jnp.sum(p["a"] * p["b"]) + q[0])
    f.defvjp(lambda p, q: (f(p, q), p), lambda p, ct: (given("bwd", ct) or 2 * ct, None))
    scalars = {"a": jnp.array(1.0), "b": jnp.array(2.0)}
    return jax.grad(f, (0, 1))(scalars, [jnp.array(1.0)])


def derivatives(fn, *args):
    """The value, the gradients, and the gradients of a batch of the first argument."""
    every = range(len(args))
    of_batch = jax.vmap(jax.grad(fn, every), (0, *[None] * (len(args) - 1)))
    found = fn(*args), jax.grad(fn, every)(*args)
    return *found, jax.jit(of_batch)(jnp.stack([X, Y]), *args[1:])


_with = lambda program, **options: lambda *args: program(*args, **options)
PROGRAMS = {
    "forward, symbolic zeros": _with(forward, symbolic=True),
    "forward, arrays": _with(forward, symbolic=False),
    "positions": _with(static_arguments, nondiff_argnums=(1, 2)),
    "from the end": _with(static_arguments, ours={"nondiff_argnums": (-2, np.int64(-3))},
                          nondiff_argnums=[2, 1]),
    "a name": _with(static_arguments, ours={"nondiff_argnums": 1, "nondiff_argnames": "fn"},
                    nondiff_argnames=("fn", "scale")),
    "reverse, symbolic zeros": _with(reverse, symbolic=True),
    "reverse, arrays": _with(reverse, symbolic=False), "a leaf for a tree": a_leaf_for_a_tree,
}  # fmt: skip


Decorators = collections.namedtuple("Decorators", "jvp vjp")
JAX = Decorators(jax.custom_jvp, jax.custom_vjp)
OURS = Decorators(eqg.jax_custom_jvp, eqg.jax_custom_vjp)
EQUINOX = Decorators(eqx.filter_custom_jvp, eqx.filter_custom_vjp)
OURS_OF_EQUINOX = Decorators(eqg.filter_custom_jvp, eqg.filter_custom_vjp)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_with_the_decorators_of_jax(name):
    theirs, ours = Given(), Given()
    want = PROGRAMS[name](JAX, theirs)
    got = PROGRAMS[name](OURS, ours)
    assert_same(got, want, name=name)
    assert ours.found == theirs.found
    assert ours.found


def deprecated(custom, given):
    """The rules are given arrays."""
    f, g = custom.jvp(lambda x, y, n: x * y), custom.vjp(lambda x, y: (x[0] * y, x[1]))

    def f_jvp(primals, ts):
        given("jvp", ts)
        return primals[0] * primals[1], 5 * ts[0] * primals[1] + primals[0] * ts[1]

    def bwd(residuals, cts, x, y):
        given("bwd", residuals, cts, x, y)
        return 2 * cts[0] * y, 3 * cts[1] + residuals

    with pytest.warns(UserWarning, match="deprecated"):
        f.defjvp(f_jvp)
    with pytest.warns(UserWarning, match="deprecated"):
        g.defvjp(lambda x, y: (g(x, y), X), bwd)
    of_f = jax.grad(lambda x: jnp.sum(f(x, Y, N)))(X), jax.jvp(lambda y: f(X, y, 3), (Y,), (X,))
    return of_f, jax.grad(lambda x: jnp.sum(g(x, 3.0)[0]))((X, Y))


def test_as_with_the_deprecated_decorators_of_equinox():
    theirs, ours = Given(), Given()
    want = deprecated(EQUINOX, theirs)
    assert_same(deprecated(OURS_OF_EQUINOX, ours), want)
    assert ours.found == theirs.found
    assert ours.found


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


DECORATORS = [*OURS, *OURS_OF_EQUINOX, eqg.custom_jvp, eqg.custom_vjp]
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


# ---------------------------------------------------------------- what is compiled once

SCALE = 2.0


class Box:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, h, x):
        return h * self.scale + x, h


class Step(eqx.Module):
    weight: Any
    power: int = eqx.field(static=True)

    def __call__(self, h, x):
        return h * self.weight**self.power + x, h


def _with_closure():
    scale, array, listed, box = 2.0, np.array(2.0, np.float32), [2.0], Box(2.0)
    partial, by_default = lambda s, h, x: (h * s + x, h), lambda h, x, s=2.0: (h * s + x, h)

    def change(to):
        nonlocal scale
        scale, box.scale, listed[0] = to, to, to
        array[...] = to
        by_default.__defaults__ = (to,)
        globals()["SCALE"] = to

    steps = {
        "global": lambda: lambda h, x: (h * SCALE + x, h),
        "closure": lambda: lambda h, x: (h * scale + x, h),
        "NumPy array": lambda: lambda h, x: (h * array + x, h),
        "tuple of a list": lambda: ft.partial(lambda s, h, x: (h * s[0][0] + x, h), (listed,)),
        "attribute": lambda: lambda h, x: (h * box.scale + x, h), "object": lambda: box,
        "partial": lambda: ft.partial(partial, scale), "default": lambda: by_default,
        "module": lambda: Step(jnp.asarray(scale), 1),
        "traced power": lambda: Step(jnp.asarray(2.0), 1 if scale == 2 else 2),
    }  # fmt: skip
    return steps, change


EAGER_STEPS = list(_with_closure()[0])


@pytest.mark.parametrize("kind", EAGER_STEPS)
def test_an_eager_loop_knows_a_function_by_its_identity(kind, monkeypatch):
    """As `jax.lax.scan` does: the same function has the numbers of its first call, and a new
    function has the present numbers. A Module is its parts."""
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    steps, change = _with_closure()
    same_object = steps[kind]()
    factor = lambda to: 4.0 if kind == "traced power" and to != 2.0 else to
    for to in (2.0, 3.0, 3.0, 2.0):
        change(to)
        by_value = ("module", "traced power", "partial")  # a new object has another number
        f = steps[kind]() if kind in by_value else same_object
        is_module = isinstance(f, eqx.Module)
        expected = jax.lax.scan((lambda *a: f(*a)) if is_module else f, jnp.array(1.0), T)  # noqa: B023
        assert_same(eqg.filter_scan(f, jnp.array(1.0), T), expected, name=f"{kind} {to}")
        got = eqg.filter_scan(lambda *a: f(*a), jnp.array(1.0), T)  # noqa: B023
        h, hs = 1.0, []
        for x in (1.0, 2.0, 3.0):
            hs.append(h)
            h = h * factor(to) + x
        assert_same(got, (jnp.array(h), jnp.array(hs)), name=f"{kind} {to}")


def test_an_eager_loop_is_compiled_once():
    """With other arrays; other shapes, structures and static numbers are other programs."""
    step, is_small, double = (lambda h, s: (h * s, None)), (lambda h: h < 9), lambda h: 2 * h
    first, second = (lambda x: x[0] * 3), lambda x: x[1]
    scan = lambda *args, **options: eqg.filter_scan(*args, **options)[0]
    calls = [
        lambda x: scan(step, x[1], x),
        lambda x: scan(Step(x[0], 2), x[1], x),
        lambda x: eqg.filter_cond(x[0] > 1, first, second, x),
        lambda x: eqg.filter_while_loop(is_small, double, x[0]),
    ]
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
    assert eqg.filter_cond(True, *branches[0], branches[1]) == 1.0
    assert eqg.filter_cond(True, first, second, [3.0, 2.0]) == 9.0
    # A function that the step makes can not be part of a compiled program.
    assert eqg.filter_scan(lambda h, x: (h, lambda: 3), T[0], T)[1]() == 3


# ---------------------------------------------------------------- carries of any kind

# The first carry, the step, and the arrays that the loop ends with by a Python loop.
CARRIES = {
    "float": (0.5, lambda h, x: (h * 2 + x, h)),
    "complex": (1j, lambda h, x: (h * 1j + x.astype(jnp.complex64), h)),
    "integer that varies": (3, lambda h, x: (h + 1, h)),
    "integer that becomes an array later": ((0, 0),
     lambda h, x: ((h[0] + 1, h[1] + h[0]), h[1])),
    "integer that stays": ((7, 0.0), lambda h, x: ((h[0], h[1] + h[0] * x), h[1])),
    "boolean": ((False, 1.0), lambda h, x: ((h[0] | (x > 2), jnp.where(h[0], x, h[1])), x)),
    "static": ({"h": jnp.array(1.0), "f": jnp.sin, "name": "name", "none": None},
     lambda h, x: ({**h, "h": h["f"](h["h"]) + x}, h["name"])),
}  # fmt: skip


@pytest.mark.parametrize("kind", CARRIES)
def test_carries(kind):
    init, step = CARRIES[kind]
    h, ys = init, []
    for x in T[::-1]:
        h, y = step(h, x)
        ys.insert(0, y)
    leaves = lambda tree: [x for x in jax.tree.leaves(tree) if eqx.is_array_like(x)]
    numbers = lambda tree: [np.asarray(x, "complex64") for x in leaves(tree)]
    for options in ({}, {"checkpoint": 2}, {"unroll": 3}):
        got, got_ys = eqg.filter_scan(step, init, T, reverse=True, **options)
        assert jax.tree.structure(got) == jax.tree.structure(h)
        jax.tree.map(np.testing.assert_allclose, numbers(got), numbers(h))
        for i, y in enumerate(ys):
            part = lambda y, i=i: y if isinstance(y, str) else y[i]
            of_step = jax.tree.map(part, got_ys)
            assert jax.tree.structure(of_step) == jax.tree.structure(y)
            jax.tree.map(np.testing.assert_allclose, numbers(of_step), numbers(y))
    body = lambda c: (c[0] + 1, step(c[1], T[::-1][c[0]])[0])
    _, got = eqg.filter_while_loop(lambda c: c[0] < 3, body, (0, init))
    jax.tree.map(np.testing.assert_allclose, numbers(got), numbers(h))


# ---------------------------------------------------------------- named axes


def _index(w):
    """Linear, and its own transpose."""
    return w * (1.0 + jax.lax.axis_index("i").astype(w.dtype)) + 0.1 * jax.lax.psum(w, "i")


NAMED = {of.__name__: lambda of=of: give_rules(of(_index), _index) for of in DECORATORS} | {
    "filter_checkpoint": lambda: eqg.filter_checkpoint(_index),
    "zero_safe": lambda: eqg.zero_safe(_index),
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
        got, want = (of(lambda w, f=f: total(f, w)[0])(T[:2]) for f in (f, _index))
        assert_same(got, want)
    forward = lambda f: jax.jvp(lambda w: total(f, w)[1], (T[:2],), (Y,))
    assert_same(forward(f), forward(_index))
