"""Classes of users in all that takes or returns PyTrees (clause 11 of the contract).

JAX unflattens a registered class with arrays, tracers, `None` and `object()` only, so its
constructor may compute. Each case has the same result for a class as for a tuple.
"""

import traceback

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from .helpers import assert_close


pytestmark = pytest.mark.versions


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


class Layer(nnx.Module):
    def __init__(self, a, b):
        self.a, self.b = nnx.Param(a), nnx.Param(b)
        self.name = "layer"


# The first one sees all that is forbidden.
KINDS = [
    pytest.param(k, id=k.__name__, marks=[pytest.mark.slow] if k is not WithoutKeys else [])
    for k in (WithoutKeys, Layer)
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


def filter_custom_vjp():
    f = eqg.filter_custom_vjp(lambda px: _energy(*px))
    f.def_fwd(lambda perturbed, px: (f(px), None))
    f.def_bwd(lambda res, ct, perturbed, px: _cotangents(*px, ct))
    return lambda p, x: f((p, x))


RULES = [
    custom_jvp,
    custom_vjp_perturbed,
    custom_vjp_vmap,
    filter_custom_vjp,
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


def _bwd_of_product(res, ct):
    p, x = res
    terms = jax.tree.map(lambda leaf, c: leaf * c, p, ct)
    return jax.tree.map(lambda c: c * x, ct), sum(jax.tree.leaves(terms))


def returns_vjp():
    f = eqg.custom_vjp(_product)
    f.def_fwd(lambda p, x: (f(p, x), (p, x)))
    f.def_bwd(_bwd_of_product)
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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_rules_of_functions_that_return_a_class(kind):
    loss = lambda f: lambda p, x: _energy(f(p, x), x)
    # An output that is not used has the cotangent `None`.
    first = lambda f: lambda p, x: jnp.sum(jax.tree.leaves(f(p, x))[0] ** 2)
    for of in (loss, first):
        expected = everything(of(_product))((A, B))
        assert_close(everything(of(returns_vmap()))(kind(A, B)), expected, tolerance=1e-5)


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
    "mask_gradient": lambda p: eqg.mask_gradient(p, X > 0),
    "clip_gradient_norm": lambda p: eqg.clip_gradient_norm(p, 0.5),
    "noise_gradient": lambda p: eqg.noise_gradient(p, key=KEY, stddev=0.5),
    "on_backward": lambda p: eqg.on_backward(p, half),
    "replace_gradient": lambda p: eqg.replace_gradient(p, half(p)),
    "with_gradient_of": lambda p: eqg.with_gradient_of(lambda p: p, half)(p),
    "filter_checkpoint": lambda p: eqg.filter_checkpoint(half)(p),
    "filter_cond": lambda p: eqg.filter_cond(True, half, lambda p: p, p),
    "ste.round": eqg.ste.round,
    "tap_gradient": lambda p: eqg.tap_gradient(p, lambda ct: None),
    "zero_safe": lambda p: eqg.zero_safe(half)(p),
}
CASES = {name: _op(fn) for name, fn in GRADIENT_OPS.items()}


def case(fn):
    CASES[fn.__name__.removeprefix("_case_")] = lambda p: jax.tree.leaves(fn(p))
    return fn


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
    backwards = ("implicit", "fixed_point", "phantom")
    return [jax.grad(loss)(p, backward) for backward in backwards]


def _on_host(p):
    return jax.tree.map(lambda leaf: np.sin(leaf), p)


@case
def _case_host_function_rules(p):
    f = eqg.host_function(_on_host, out=lambda p: p)

    @f.def_bwd
    def bwd(res, ct, *, perturbed):
        assert all(type(flag) is bool for flag in jax.tree.leaves(perturbed))
        return (jax.tree.map(lambda leaf, c: np.cos(leaf) * c, res[0], ct),)

    loss = lambda p: _energy(f(p), X)
    return f(p), jax.grad(loss)(p), jax.jit(jax.grad(loss))(p)


@case
def _case_linear_host_function(p):
    double = lambda p: jax.tree.map(lambda leaf: 2 * leaf, p)
    f = eqg.linear_host_function(double, double)
    loss = lambda p: _energy(f(p), X)
    ones = jax.tree.map(jnp.ones_like, p)
    return jax.grad(loss)(p), jax.jvp(jax.grad(loss), (p,), (ones,))


@case
def _case_checks(p):
    eqgt.check_rule(custom_vjp(), p, X)
    eqgt.check_rule(returns_vjp(), p, X)
    eqgt.check_gradients(_energy, p, X)
    eqgt.assert_trees_close(p, p)
    return []


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


LONG = ("checks", "implicit", "fixed_point")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in CASES],
)
def test_everything_that_takes_or_returns_trees(name, kind):
    assert_close(CASES[name](kind(A, B)), CASES[name]((A, B)), tolerance=1e-5)


def test_a_tangent_of_a_state_of_nnx():
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
