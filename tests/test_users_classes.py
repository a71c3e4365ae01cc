"""Classes of users in all that takes or returns PyTrees (clause 11 of the contract).

JAX unflattens a registered class with arrays, tracers, `None` and `object()` only, so its
constructor may compute. Each case has the same result for a class as for a tuple.
"""

import dataclasses
import traceback
from typing import NamedTuple

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import eqx_grads.testing as eqgt
import flax
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from .helpers import assert_close


FORBIDDEN = []


@pytest.fixture(autouse=True)
def _as_users_run_it():
    jaxtyping.config.update("jaxtyping_disable", True)
    FORBIDDEN.clear()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    assert not FORBIDDEN


def _computed(x):
    """What a constructor computes."""
    if x is None or type(x) is object:
        return x
    if not isinstance(x, jax.Array | np.ndarray):
        # JAX itself unflattens types for the names of the outputs of a `jit`, and goes on.
        if all(frame.name != "paths" for frame in traceback.extract_stack(limit=9)):
            FORBIDDEN.append(type(x))
        raise TypeError(f"a constructor was called with {x!r}")
    return jnp.asarray(x)


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, a, b):
        self.a, self.b = _computed(a), _computed(b)

    def tree_flatten(self):
        return (self.a, self.b), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@flax.struct.dataclass
class PostInit:
    a: jax.Array
    b: jax.Array

    def __post_init__(self):
        object.__setattr__(self, "a", jnp.asarray(self.a))
        object.__setattr__(self, "b", jnp.asarray(self.b))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Registered:
    a: jax.Array
    b: jax.Array

    def __post_init__(self):
        _computed(self.a)
        _computed(self.b)


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


class Layer(nnx.Module):
    def __init__(self, a, b):
        self.a, self.b = nnx.Param(a), nnx.Param(b)
        self.name = "layer"


CLASSES = [WithoutKeys, PostInit, Registered, Pair, Layer]
# The first one sees all that is forbidden.
KINDS = [
    pytest.param(k, id=k.__name__, marks=[pytest.mark.slow] if k is not WithoutKeys else [])
    for k in CLASSES
]
X = jnp.array([0.5, -1.0, 2.0])
A, B = jnp.array([1.0, 0.25, -0.5]), jnp.array([2.0, 3.0, 0.75])


def _energy(p, x):
    a, b = jax.tree.leaves(p)
    return jnp.sum(jnp.sin(a * x) + b * x)


def _like(p, *leaves):
    return jax.tree.unflatten(jax.tree.structure(p), leaves)


def _cotangents(p, x, ct):
    a, b = jax.tree.leaves(p)
    slope = jnp.cos(a * x) * ct
    return _like(p, slope * x, x * ct), slope * a + b * ct


def _scaled(p, x):
    """A function of a class that returns one."""
    return jax.tree.map(lambda leaf: leaf * x, p)


def grad(loss, p):
    return jax.tree.leaves(jax.grad(loss)(p, X))


def everything(f):
    """A loss in many modes."""

    def run(p):
        ones = jax.tree.map(jnp.ones_like, (p, X))
        of_p = lambda p: f(p, X)
        return jax.tree.leaves(
            [
                f(p, X),
                jax.grad(f, (0, 1))(p, X),
                jax.jit(jax.grad(f, (0, 1)))(p, X),
                jax.grad(jax.jit(f))(p, X),
                jax.jvp(f, (p, X), ones)[1],
                jax.jit(lambda p: jax.jvp(f, (p, X), ones)[1])(p),
                jax.linearize(of_p, p)[1](ones[0]),
                jax.jvp(jax.grad(of_p), (p,), (ones[0],))[1],
                jax.vmap(lambda x: jax.grad(f)(p, x))(jnp.stack([X, 2 * X])),
                jax.vmap(lambda s: f(_scaled(p, s), X))(X),
                jax.grad(jax.checkpoint(f))(p, X),
            ]
        )

    return run


# Functions of a class with rules, in all calling conventions.


def _jvp(p, t):
    (p, x), (t_p, t_x) = p, t
    ct_p, ct_x = _cotangents(p, x, 1.0)
    (ct_a, ct_b), (t_a, t_b) = map(jax.tree.leaves, (ct_p, t_p))
    return _energy(p, x), jnp.sum(ct_a * t_a + ct_b * t_b + ct_x * t_x)


def custom_jvp():
    f = eqg.custom_jvp(_energy)
    f.def_jvp(_jvp)
    return f


def custom_jvp_symbolic_zeros():
    f = eqg.custom_jvp(_energy)

    @f.def_jvp(symbolic_zeros=True)
    def rule(primals, ts):
        cts = _cotangents(*primals, 1.0)
        return f(*primals), tangents.add(*map(tangents.dot, ts, cts))

    return f


def custom_vjp():
    f = eqg.custom_vjp(_energy)
    f.def_fwd(lambda p, x: (f(p, x), (p, x)))
    f.def_bwd(lambda res, ct: _cotangents(*res, ct))
    return f


def custom_vjp_perturbed():
    f = eqg.custom_vjp(_energy)

    @f.def_fwd
    def fwd(p, x, *, perturbed):
        assert all(type(flag) is bool for flag in jax.tree.leaves(perturbed))
        return f(p, x), (p, x)

    @f.def_bwd
    def bwd(res, ct, *, perturbed):
        assert len(jax.tree.leaves(perturbed)) == 3
        return _cotangents(*res, ct)

    return f


def custom_vjp_three():
    f = custom_vjp()
    f.def_jvp(_jvp)
    return f


def custom_vjp_vmap():
    f = custom_vjp()

    @f.def_vmap
    def _(axis_size, batched, p, x):
        is_batched = iter(jax.tree.leaves(batched))
        fill = lambda leaf: (
            leaf if next(is_batched) else jnp.broadcast_to(leaf, (axis_size, *leaf.shape))
        )
        a, b, x = map(fill, jax.tree.leaves((p, x)))
        return jax.vmap(lambda a, b, x: _energy((a, b), x))(a, b, x), True

    return f


def custom_gradient():
    @eqg.custom_gradient
    def f(p, x):
        return _energy(p, x), lambda ct: _cotangents(p, x, ct)

    return f


def filter_custom_jvp():
    f = eqg.filter_custom_jvp(_energy)

    @f.def_jvp
    def rule(primals, ts):
        cts = _cotangents(*primals, 1.0)
        return f(*primals), tangents.add(*map(tangents.dot, ts, cts))

    return f


def filter_custom_vjp():
    f = eqg.filter_custom_vjp(lambda px: _energy(*px))
    f.def_fwd(lambda perturbed, px: (f(px), None))
    f.def_bwd(lambda res, ct, perturbed, px: _cotangents(*px, ct))
    return lambda p, x: f((p, x))


def jax_custom_jvp():
    f = eqg.jax_custom_jvp(_energy)
    f.defjvp(_jvp)
    return f


def jax_custom_vjp():
    f = eqg.jax_custom_vjp(_energy)
    f.defvjp(lambda p, x: (f(p, x), (p, x)), lambda res, ct: _cotangents(*res, ct))
    return f


def jax_custom_vjp_nondiff():
    f = eqg.jax_custom_vjp(lambda n, p, x: n * _energy(p, x), nondiff_argnums=0)
    f.defvjp(lambda n, p, x: (f(n, p, x), (p, x)), lambda n, res, ct: _cotangents(*res, n * ct))
    return lambda p, x: f(1, p, x)


def replace_gradient():
    return eqg.replace_gradient(lambda p, x: _energy(p, x) + 0.0, _energy)


RULES = [
    custom_jvp,
    custom_jvp_symbolic_zeros,
    custom_vjp,
    custom_vjp_perturbed,
    custom_vjp_three,
    custom_vjp_vmap,
    custom_gradient,
    filter_custom_jvp,
    filter_custom_vjp,
    jax_custom_jvp,
    jax_custom_vjp,
    jax_custom_vjp_nondiff,
]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_rules(rule, kind):
    for got, want in zip(
        everything(rule())(kind(A, B)), everything(_energy)((A, B)), strict=True
    ):
        assert_close(got, want, tolerance=1e-5)


# Functions that return a class.


def _product(p, x):
    a, b = jax.tree.leaves(p)
    return _like(p, a * x, b * x)


def returns_jvp():
    f = eqg.custom_jvp(_product)

    @f.def_jvp
    def rule(primals, ts):
        (p, x), (t_p, t_x) = primals, ts
        add = lambda leaf, t: t * x + leaf * t_x
        return f(p, x), jax.tree.map(add, p, t_p)

    return f


def _bwd_of_product(res, ct):
    p, x = res
    terms = jax.tree.map(lambda leaf, c: leaf * c, p, ct)
    return jax.tree.map(lambda c: c * x, ct), sum(jax.tree.leaves(terms))


def returns_vjp():
    f = eqg.custom_vjp(_product)
    f.def_fwd(lambda p, x: (f(p, x), (p, x)))
    f.def_bwd(_bwd_of_product)
    return f


def returns_jax_vjp():
    f = eqg.jax_custom_vjp(_product)
    f.defvjp(lambda p, x: (f(p, x), (p, x)), _bwd_of_product)
    return f


def returns_vmap():
    f = returns_vjp()

    @f.def_vmap
    def _(axis_size, batched, p, x):
        batched_p, batched_x = batched
        flags = jax.tree.leaves(batched_p)
        in_axes = [0 if flag else None for flag in flags]
        a, b = jax.vmap(
            lambda leaves, x: [leaf * x for leaf in leaves],
            (in_axes, 0 if batched_x else None),
        )(jax.tree.leaves(p), x)
        assert any(flags) or batched_x
        out_batched = jax.tree.map(lambda flag: flag or batched_x, batched_p)
        if not batched_x:
            return NotImplemented
        return _like(p, a, b), out_batched

    return f


def returns_elementwise():
    f = eqg.elementwise(jnp.sin, lambda out, x: (jnp.cos(x),))
    return lambda p, x: jax.tree.map(f, _product(p, x))


RETURNS = [returns_jvp, returns_vjp, returns_jax_vjp, returns_vmap]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RETURNS, ids=lambda r: r.__name__)
def test_rules_of_functions_that_return_a_class(rule, kind):
    loss = lambda f: lambda p, x: _energy(f(p, x), x)
    # An output that is not used has the cotangent `None`.
    first = lambda f: lambda p, x: jnp.sum(jax.tree.leaves(f(p, x))[0] ** 2)
    for of in (loss, first):
        expected = everything(of(_product))((A, B))
        assert_close(everything(of(rule()))(kind(A, B)), expected, tolerance=1e-5)


# All else that takes or returns PyTrees. Each case is a function of an object, and returns
# arrays.


def _op(fn):
    """A function that returns its argument, and does something to its gradient."""

    def run(p):
        loss = lambda p: _energy(fn(p), X)
        first = lambda p: jnp.sum(jnp.sin(jax.tree.leaves(fn(p))[0] * X))
        ones = jax.tree.map(jnp.ones_like, p)
        return jax.tree.leaves(
            [
                fn(p),
                [jax.grad(loss)(p), jax.jit(jax.grad(loss))(p), jax.grad(first)(p)],
                jax.jvp(fn, (p,), (ones,))[1],
                jax.jvp(jax.grad(loss), (p,), (ones,)),
                jax.vmap(lambda s: jax.grad(loss)(_scaled(p, s)))(X),
            ]
        )

    return run


KEY = jax.random.key(0)
half = lambda tree: jax.tree.map(lambda leaf: 0.5 * leaf, tree)
GRADIENT_OPS = {
    "scale_gradient": lambda p: eqg.scale_gradient(p, 0.5),
    "reverse_gradient": lambda p: eqg.reverse_gradient(p, 0.5),
    "mask_gradient": lambda p: eqg.mask_gradient(p, X > 0),
    "clip_gradient": lambda p: eqg.clip_gradient(p, -0.5, 0.5),
    "clip_gradient_norm": lambda p: eqg.clip_gradient_norm(p, 0.5),
    "normalize_gradient": lambda p: eqg.normalize_gradient(p),
    "zero_nonfinite_gradient": eqg.zero_nonfinite_gradient,
    "noise_gradient": lambda p: eqg.noise_gradient(p, key=KEY, stddev=0.5),
    "cast_gradient": lambda p: eqg.cast_gradient(p, "bfloat16"),
    "on_backward": lambda p: eqg.on_backward(p, half),
    "replace_gradient": lambda p: eqg.replace_gradient(p, half(p)),
    "with_gradient_of": lambda p: eqg.with_gradient_of(lambda p: p, half)(p),
    "filter_checkpoint": lambda p: eqg.filter_checkpoint(half)(p),
    "filter_cond": lambda p: eqg.filter_cond(True, half, lambda p: p, p),
    "ste.round": eqg.ste.round,
    "nn.GradientReversal": lambda p: eqg.nn.GradientReversal(0.5)(p),
    "tap_gradient": lambda p: eqg.tap_gradient(p, lambda ct: None),
    "watch_gradient": lambda p: eqg.watch_gradient(p, "name"),
    "zero_safe": lambda p: eqg.zero_safe(half)(p),
    "filter_jit": lambda p: jax.jit(eqg.filter_checkpoint(half))(p),
}
CASES = {name: _op(fn) for name, fn in GRADIENT_OPS.items()}


def case(fn):
    CASES[fn.__name__.removeprefix("_case_")] = lambda p: jax.tree.leaves(fn(p))
    return fn


@case
def _case_mask_tree(p):
    mask = _like(p, X > 0, X > 1)
    return jax.grad(lambda p: _energy(eqg.mask_gradient(p, mask), X))(p)


@case
def _case_probe(p):
    zeros = jax.tree.map(jnp.zeros_like, p)
    loss = lambda slot: _energy(eqg.probe(_scaled(p, 2.0), slot), X)
    found = lambda slot: _energy(eqg.probe(_scaled(p, 2.0), slot), X)
    return jax.grad(loss)(zeros), jax.grad(found)(eqg.GradientStatistics())


# Loops.


def _step(p, x):
    new = jax.tree.map(lambda leaf: jnp.sin(leaf * x), p)
    return new, new


def _scan(p, **options):
    def loss(p):
        last, ys = eqg.filter_scan(_step, p, X, **options)
        return _energy(last, X) + sum(map(jnp.sum, jax.tree.leaves(ys)))

    ones = jax.tree.map(jnp.ones_like, p)
    out = [loss(p), jax.grad(loss)(p), jax.jit(jax.grad(loss))(p)]
    if not options.get("online"):
        out.append(jax.jvp(loss, (p,), (ones,))[1])
    return out


SCANS = {
    "plain": {},
    "auto": {"checkpoint": "auto"},
    "sqrt": {"checkpoint": "sqrt"},
    "replay": {"checkpoint": "replay"},
    "truncate": {"truncate": 2},
    "carry_gradient": {"carry_gradient": lambda p: eqg.clip_gradient_norm(p, 1.0)},
}
for name, options in SCANS.items():
    CASES[f"filter_scan.{name}"] = lambda p, options=options: jax.tree.leaves(
        _scan(p, **options)
    )


@case
def _case_scan_over_objects(p):
    """`xs` is an object, and so is a constant that the step closes over."""

    def loss(p):
        step = lambda c, slices: (c + _energy(slices, 2.0) * _energy(p, X), slices)
        total, ys = eqg.filter_scan(step, 0.0, p)
        return total + _energy(ys, X)

    return jax.grad(loss)(p)


@case
def _case_filter_while_loop(p):
    def loop(p):
        cond = lambda carry: carry[0] < 3
        body = lambda carry: (carry[0] + 1, _step(carry[1], 0.5)[0])
        return eqg.filter_while_loop(cond, body, (0, p))[1]

    return loop(p), jax.jvp(loop, (p,), (jax.tree.map(jnp.ones_like, p),))[1]


@case
def _case_filter_cond(p):
    def choose(pred, p):
        return eqg.filter_cond(pred, half, lambda p: _step(p, X)[0], p)

    loss = lambda p, pred: _energy(choose(pred, p), X)
    return [jax.jit(jax.grad(loss))(p, jnp.array(pred)) for pred in (True, False)]


@case
def _case_checkpointed_method(p):
    return jax.grad(lambda p: _energy(eqg.filter_checkpoint(lambda p: _step(p, X)[0])(p), X))(p)


@case
def _case_chunked(p):
    loss = eqg.losses.chunked(lambda p, x: _energy(p, x), chunk=2, axis=(None, 0))
    of_slices = eqg.losses.chunked(lambda p, s: _energy(p, 1.0), chunk=2, axis=(0, 0))
    full = lambda p: loss((jnp.ones(1), jnp.ones(1)), X) + of_slices(p, X)
    whole = lambda p: eqg.losses.chunked(_row_energy, chunk=2, axis=(None, 0))(p, ROWS)
    return (
        jax.grad(full)(p),
        jax.grad(whole)(p),
        jax.vmap(lambda s: jax.grad(lambda p: whole(_scaled(p, s)))(p))(X),
    )


ROWS = jnp.stack([X, 2 * X, X - 1])


def _row_energy(p, rows):
    return jnp.sum(jax.vmap(lambda row: _energy(p, row))(rows))


# Solvers.


@case
def _case_implicit(p):
    residual = lambda y, p: jax.tree.map(lambda y, leaf: y**3 - leaf**2 - 1, y, p)
    solve = eqg.implicit(residual)(
        lambda p: jax.tree.map(lambda leaf: jnp.cbrt(leaf**2 + 1), p)
    )
    loss = lambda p: _energy(solve(p), X)
    ones = jax.tree.map(jnp.ones_like, p)
    return [
        jax.grad(loss)(p),
        jax.jit(jax.grad(loss))(p),
        jax.jvp(loss, (p,), (ones,)),
        jax.hessian(lambda s: loss(_scaled(p, s)))(1.0),
    ]


@case
def _case_fixed_point(p):
    step = lambda y, p: jax.tree.map(lambda y, leaf: 0.3 * jnp.cos(y) + leaf, y, p)
    zeros = jax.tree.map(jnp.zeros_like, p)
    loss = lambda p, backward: _energy(
        eqg.fixed_point(step, zeros, p, backward=backward).value, X
    )
    backwards = ("implicit", "fixed_point", "neumann", "phantom", "one_step")
    return [jax.grad(loss)(p, backward) for backward in backwards]


@case
def _case_jump(p):
    leaves = jax.tree.leaves
    fall = lambda t, y: jax.tree.map(lambda leaf: -0.5 * leaf, y)
    bounce = lambda t, y: jax.tree.map(lambda leaf: -0.8 * leaf, y)

    def loss(p):
        t, y = eqg.event_time(lambda t, y: jnp.sum(leaves(y)[0]) + t, p, fall, 1.0)
        t, y = eqg.jump(bounce, y, fall, t)
        return t * _energy(y, X)

    ones = jax.tree.map(jnp.ones_like, p)
    return jax.grad(loss)(p), jax.jvp(loss, (p,), (ones,))


def _on_host(p):
    return jax.tree.map(lambda leaf: np.sin(leaf), p)


def _host(**options):
    f = eqg.host_function(_on_host, out=lambda p: p, **options)

    def run(p):
        loss = lambda p: _energy(f(p), X)
        return jax.tree.leaves([f(p), jax.grad(loss)(p), jax.jit(jax.grad(loss))(p)])

    return f, run


CASES["host_function.differences"] = _host(finite_difference="central")[1]


@case
def _case_host_function_rules(p):
    f, run = _host()

    @f.def_bwd
    def bwd(res, ct, *, perturbed):
        assert all(type(flag) is bool for flag in jax.tree.leaves(perturbed))
        return (jax.tree.map(lambda leaf, c: np.cos(leaf) * c, res[0], ct),)

    return run(p)


@case
def _case_host_function_residuals(p):
    f, run = _host()
    f.def_fwd(lambda p: (_on_host(p), p), residuals=lambda p: p)
    f.def_bwd(lambda res, ct: (jax.tree.map(lambda leaf, c: np.cos(leaf) * c, res, ct),))
    return run(p)


@case
def _case_host_function_jvp(p):
    f, run = _host()

    @f.def_jvp
    def jvp(primals, ts):
        slopes = jax.tree.map(lambda leaf, t: np.cos(leaf) * t, primals[0], ts[0])
        return _on_host(primals[0]), slopes

    return run(p)


@case
def _case_linear_host_function(p):
    double = lambda p: jax.tree.map(lambda leaf: 2 * leaf, p)
    f = eqg.linear_host_function(double, double)
    loss = lambda p: _energy(f(p), X)
    ones = jax.tree.map(jnp.ones_like, p)
    return jax.grad(loss)(p), jax.jvp(jax.grad(loss), (p,), (ones,))


# Tangents, and checks.


@case
def _case_tangents(p):
    t = jax.tree.map(jnp.cos, p)
    return [
        tangents.add(p, t, None),
        tangents.neg(t),
        tangents.scale(t, 2.0),
        tangents.linear(lambda x, y: 2 * x + y, p, t),
        tangents.dot(p, t),
        tangents.where(X > 0, p, t),
        tangents.materialize(p, t),
        tangents.materialize(p, None),
        tangents.project(jax.tree.map(lambda x: jnp.stack([x, x]), t), p),
        eqgt.random_tangent(p, seed=0),
    ]


@case
def _case_checks(p):
    eqgt.check_rule(custom_jvp(), p, X)
    eqgt.check_rule(custom_vjp(), p, X)
    eqgt.check_rule(returns_vjp(), p, X)
    eqgt.check_gradients(_energy, p, X)
    eqgt.check_gradients(_energy, p, X, order=2)
    eqgt.assert_trees_close(p, p)
    return []


@case
def _case_diagnoses(p):
    bad = lambda p, x: jnp.sum(jnp.sqrt(jax.tree.leaves(p)[0] * 0)) + _energy(p, x)
    assert eqg.explain_nan(bad, p, X)
    flat = lambda p, x: jnp.sum(jnp.round(jax.tree.leaves(p)[0])) + jax.tree.leaves(p)[1][0]
    assert eqg.explain_zero(flat, p, X)
    str(eqg.explain_memory(_energy, p, X))
    assert not eqg.explain_nan(_energy, p, X)
    return []


@case
def _case_zero_safe(p):
    loss = lambda p, x: jnp.sum(jnp.where(x > 0, jnp.sqrt(jax.tree.leaves(p)[0] * x), 0.0))
    safe = eqg.zero_safe(loss)
    return safe(p, jnp.abs(X)), jax.grad(safe)(p, X * 0)


@case
def _case_gradient_flow(p):
    scale = eqg.nn.GradientReversal(jnp.array(0.5))
    loss = lambda model, x: _energy(model[1](model[0]), x)
    return list(eqg.gradient_flow(loss, (p, scale), X).values())


class _Cell(eqx.Module):
    """A cell whose state is an object."""

    like: object

    def __call__(self, x, state):
        return jax.tree.map(lambda s: jnp.sin(s + x), state)

    def initial_state(self):
        return jax.tree.map(jnp.zeros_like, self.like)


@case
def _case_recurrent_layer(p):
    def loss(p, xs):
        ys, last = eqg.nn.Recurrent(_Cell(p))(xs)
        return jnp.sum(ys) + sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(last))

    return jax.grad(loss, (0, 1))(p, jnp.stack([X, 2 * X])[:, None])


@case
def _case_safe_where(p):
    a = jax.tree.leaves(p)[0]
    return jax.grad(
        lambda p: jnp.sum(
            eqg.safe.where(a > 0, lambda p: jnp.log(jax.tree.leaves(p)[0]), p, 0.0)
        )
    )(p)


LONG = ("checks", "implicit", "fixed_point", "diagnoses")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in CASES],
)
def test_everything_that_takes_or_returns_trees(name, kind):
    assert_close(CASES[name](kind(A, B)), CASES[name]((A, B)), tolerance=1e-5)


def test_perturbed_has_the_attributes_of_the_object():
    seen = []
    f = eqg.custom_vjp(_energy)

    @f.def_fwd
    def fwd(p, x, *, perturbed):
        seen.append(perturbed)
        return f(p, x), (p, x)

    f.def_bwd(lambda res, ct: _cotangents(*res, ct))
    jax.grad(f, 1)(Registered(A, B), X)
    jax.grad(lambda a: f(Registered(a, B), X))(A)
    jax.grad(f)(WithoutKeys(A, B), X)
    assert [(p.a, p.b, x) for p, x in seen[:2]] == [(False, False, True), (True, False, False)]
    assert (seen[2][0][0], seen[2][0][1]) == (True, True)
    assert str(seen[1]) == "(Registered(a=True, b=False), False)"
    with pytest.raises(AttributeError, match="no child `c`"):
        _ = seen[1][0].c


def test_errors_show_objects_and_name_their_leaves():
    f = eqg.custom_vjp(_energy)
    f.def_fwd(lambda p, x: (f(p, x), (p, x)))
    f.def_bwd(lambda res, ct: (Registered(ct * X, jnp.ones((2, 2))), None))
    match = r"at p\.b: the value is float32\[3\], the cotangent is float32\[2,2\]"
    with pytest.raises(eqg.RuleError, match=match):
        jax.grad(f)(Registered(A, B), X)

    match = r"out: `half` returns a Registered, and `<lambda>` a tuple of 2"
    half = lambda p: p
    half.__qualname__ = "half"
    with pytest.raises(eqg.RuleError, match=match):
        eqg.filter_cond(jnp.array(True), half, lambda p: (A, B), Registered(A, B))

    match = r"at carry\.b: it was float32\[3\], and is float32\[\]"
    step = lambda p, _: (Registered(p.a, p.b[0]), None)
    with pytest.raises(eqg.RuleError, match=match):
        eqg.filter_scan(step, Registered(A, B), None, length=2)

    double = eqg.host_function(lambda p: (p.a, p.b), out=lambda p: p)
    with pytest.raises(Exception, match=r"promised was Registered\(a=float32\[3\], b="):
        jax.block_until_ready(double(Registered(A, B)))


class TestTangentOf:
    """`tangents.of` of classes whose children are their attributes."""

    @pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
    def test_fields(self, kind):
        p = kind(A, B)
        t = tangents.of(p, a=2 * A, b=3 * B)
        assert type(t) is kind
        assert_close(jax.tree.leaves(t), [2 * A, 3 * B])
        if kind is not PostInit:  # it can't hold `None`
            assert_close(jax.tree.leaves(tangents.of(p, b=B)), [B])

    def test_a_state_of_nnx(self):
        layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        state = nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)
        expected = jax.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)
        assert_close(tangents.of(layer, **state), expected)
        assert_close(tangents.of(layer, kernel=state["kernel"]).kernel, expected.kernel)

        f = eqg.custom_vjp(lambda layer, x: layer(x))
        f.def_fwd(lambda layer, x: (layer(x), layer))
        f.def_bwd(lambda layer, ct: (nnx.state(layer), None))
        with pytest.raises(eqg.RuleError, match=r"is State\(.*\n.*\n.*of\(module, \*\*mapping"):
            jax.grad(lambda layer: jnp.sum(f(layer, X)))(layer)

    def test_fields_of_fields(self):
        t = tangents.of(Pair(Pair(A, B), Layer(A, B)), a={"b": A}, b={"a": B})
        assert_close([t.a.b, t.b.a[...]], [A, B])
        assert t.a.a is None

    def test_names(self):
        with pytest.raises(eqg.RuleError, match=r"`c`, which is not a field.*\n.*a, b"):
            tangents.of(Layer(A, B), c=A)
        with pytest.raises(eqg.RuleError, match="`name`, which is a static field of `Layer`"):
            tangents.of(Layer(A, B), name=A)
        # It was registered without names, and both attributes are the same array.
        with pytest.raises(eqg.RuleError, match="has no fields"):
            tangents.of(WithoutKeys(A, A), a=A)


def test_a_rule_of_an_nnx_module_is_used_by_both_grads():
    f = custom_vjp()
    layer = Layer(A, B)
    expected = jax.grad(_energy, (0, 1))((A, B), X)
    assert_close(jax.tree.leaves(jax.grad(f, (0, 1))(layer, X)), jax.tree.leaves(expected))
    state = nnx.jit(nnx.grad(f))(layer, X)
    assert isinstance(state, nnx.State)
    assert_close([state["a"][...], state["b"][...]], list(expected[0]))
    t = jax.tree.map(jnp.ones_like, layer)
    t_out = jax.jvp(_energy, ((A, B), X), ((jnp.ones(3), jnp.ones(3)), X))[1]
    assert_close(jax.jvp(f, (layer, X), (t, X))[1], t_out)
