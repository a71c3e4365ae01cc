"""Classes of users in all that takes or returns PyTrees (clause 11 of the contract).

JAX unflattens a registered class with arrays, tracers, `None` and `object()` only, so its
constructor may compute. Each case has the same result for a class as for a tuple.
"""

import traceback

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.tangents as tangents
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("without_type_checks")]

FORBIDDEN = []


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


X = jnp.array([0.5, -1.0, 2.0])
A, B = jnp.array([1.0, 0.25, -0.5]), jnp.array([2.0, 3.0, 0.75])


def energy(p, x):
    a, b = jax.tree.leaves(p)
    return jnp.sum(jnp.sin(a * x) + b * x)


def _like(p, *leaves):
    return jax.tree.unflatten(jax.tree.structure(p), leaves)


def _cotangents(p, x, ct):
    a, b = jax.tree.leaves(p)
    slope = jnp.cos(a * x) * ct
    return _like(p, slope * x, x * ct), slope * a + b * ct


# ---------------------------------------------------------------- rules


def custom_jvp():
    f = eqg.custom_jvp(energy)

    @f.def_jvp
    def jvp(primals, ts):
        (ct_a, ct_b), (t_a, t_b) = map(jax.tree.leaves, (_cotangents(*primals, 1.0)[0], ts[0]))
        t_out = ct_a * t_a + ct_b * t_b + _cotangents(*primals, 1.0)[1] * ts[1]
        return energy(*primals), jnp.sum(t_out)

    return f


def custom_vjp():
    f = eqg.custom_vjp(energy)

    @f.def_fwd
    def fwd(p, x, *, perturbed):
        assert [type(flag) for flag in jax.tree.leaves(perturbed)] == [bool] * 3
        return f(p, x), (p, x)

    f.def_bwd(lambda res, ct, *, perturbed: _cotangents(*res, ct))

    @f.def_vmap
    def vmap(axis_size, batched, p, x):
        axes = [0 if flag else None for flag in jax.tree.leaves(batched)]
        one = lambda a, b, x: energy((a, b), x)
        return jax.vmap(one, axes)(*jax.tree.leaves((p, x))), True

    return f


def returns_a_class():
    """One output is not used, and has the cotangent `None`."""
    f = eqg.custom_vjp(lambda p, x: (_like(p, *(leaf * x for leaf in jax.tree.leaves(p))), p))
    f.def_fwd(lambda p, x: (f(p, x), (p, x)))

    @f.def_bwd
    def bwd(res, cts):
        (p, x), (ct, ct_p) = res, cts
        assert ct_p is None or len(jax.tree.leaves(ct_p)) == 2
        of_x = sum(jax.tree.leaves(jax.tree.map(lambda leaf, c: leaf * c, p, ct)))
        return jax.tree.map(lambda c: c * x, ct), of_x

    return lambda p, x: energy(f(p, x)[0], 1.0)


def everything(f):
    """A loss in many modes."""

    def run(p):
        ones = jax.tree.map(jnp.ones_like, (p, X))
        of_p = lambda p: f(p, X)
        gradient = jax.grad(f, (0, 1))
        return jax.tree.leaves(
            [
                *(f(p, X), gradient(p, X), jax.jit(gradient)(p, X), jax.grad(jax.jit(f))(p, X)),
                jax.jit(lambda p: jax.jvp(f, (p, X), ones)[1])(p),
                jax.linearize(of_p, p)[1](ones[0]),
                jax.jvp(jax.grad(of_p), (p,), (ones[0],))[1],
                jax.vmap(lambda x: jax.grad(f)(p, x))(jnp.stack([X, 2 * X])),
                jax.vmap(lambda s: f(jax.tree.map(lambda leaf: leaf * s, p), X))(X),
                jax.grad(jax.checkpoint(f))(p, X),
            ]
        )

    return run


RULES = [custom_jvp, custom_vjp, returns_a_class]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_rules(rule):
    f, plain = rule(), energy
    if rule is returns_a_class:
        plain = lambda p, x: energy([leaf * x for leaf in jax.tree.leaves(p)], 1.0)
    FORBIDDEN.clear()
    got, want = everything(f)(WithoutKeys(A, B)), everything(plain)((A, B))
    assert_close(got, want, tolerance=1e-5)
    assert not FORBIDDEN


# ---------------------------------------------------------------- all else
# Each case is a function of an object, and returns arrays.


def _op(fn):
    """A function that returns its argument, and does something to its gradient."""

    def run(p):
        loss, ones = lambda p: energy(fn(p), X), jax.tree.map(jnp.ones_like, p)
        first = lambda p: jnp.sum(jnp.sin(jax.tree.leaves(fn(p))[0] * X))
        return [
            fn(p),
            [jax.grad(loss)(p), jax.jit(jax.grad(loss))(p), jax.grad(first)(p)],
            jax.jvp(jax.grad(loss), (p,), (ones,)),
            jax.vmap(lambda s: jax.grad(loss)(jax.tree.map(lambda x: x * s, p)))(X),
        ]

    return run


half = lambda tree: jax.tree.map(lambda leaf: 0.5 * leaf, tree)
OPS = {
    "clip_gradient_norm": lambda p: eqg.clip_gradient_norm(p, 0.5),
    "on_backward": lambda p: eqg.on_backward(p, half),
    "replace_gradient": lambda p: eqg.replace_gradient(p, half(p)),
    "with_gradient_of": lambda p: eqg.with_gradient_of(lambda p: p, half)(p),
    "filter_checkpoint": lambda p: eqg.filter_checkpoint(half)(p),
    "filter_cond": lambda p: eqg.filter_cond(True, half, lambda p: p, p),
    "tap_gradient": lambda p: eqg.tap_gradient(p, lambda ct: None),
    "zero_safe": lambda p: eqg.zero_safe(half)(p),
}
CASES = {name: _op(fn) for name, fn in OPS.items()}


def case(fn):
    CASES[fn.__name__] = fn


def _step(p, x):
    new = jax.tree.map(lambda leaf: jnp.sin(leaf * x), p)
    return new, new


@case
def scans(p):
    def loss(p, options):
        last, ys = eqg.filter_scan(_step, p, X, **options)
        return energy(last, X) + sum(map(jnp.sum, jax.tree.leaves(ys)))

    clip = lambda p: eqg.clip_gradient_norm(p, 1.0)
    options = [{}, {"checkpoint": "replay"}, {"truncate": 2}, {"carry_gradient": clip}]
    return [jax.jit(jax.value_and_grad(lambda p, o=o: loss(p, o)))(p) for o in options]


@case
def scan_over_objects(p):
    """`xs` is an object, and so is a constant that the step closes over."""

    def loss(p):
        step = lambda c, slices: (c + energy(slices, 2.0) * energy(p, X), slices)
        total, ys = eqg.filter_scan(step, 0.0, p)
        return total + energy(ys, X)

    return jax.grad(loss)(p)


@case
def fixed_point(p):
    step = lambda y, p: jax.tree.map(lambda y, leaf: 0.3 * jnp.cos(y) + leaf, y, p)
    zeros = jax.tree.map(jnp.zeros_like, p)
    solve = lambda p, backward: eqg.fixed_point(step, zeros, p, backward=backward).value
    loss = lambda p, backward: energy(solve(p, backward), X)
    return [jax.grad(loss)(p, how) for how in ("implicit", "fixed_point", "phantom")]


@case
def host_functions(p):
    f = eqg.host_function(lambda p: jax.tree.map(np.sin, p), out=lambda p: p)

    @f.def_bwd
    def bwd(res, ct, *, perturbed):
        assert all(type(flag) is bool for flag in jax.tree.leaves(perturbed))
        return (jax.tree.map(lambda leaf, c: np.cos(leaf) * c, res[0], ct),)

    double = lambda p: jax.tree.map(lambda leaf: 2 * leaf, p)
    g = eqg.linear_host_function(double, double)
    return [jax.jit(jax.value_and_grad(lambda p, f=f: energy(f(p), X)))(p) for f in (f, g)]


class Cell(eqx.Module):
    """A cell whose state is an object."""

    like: object

    def __call__(self, x, state):
        return jax.tree.map(lambda s: jnp.sin(s + x), state)

    def initial_state(self):
        return jax.tree.map(jnp.zeros_like, self.like)


@case
def recurrent_layer(p):
    def loss(p, xs):
        ys, last = eqg.nn.Recurrent(Cell(p))(xs)
        return jnp.sum(ys) + sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(last))

    return jax.grad(loss, (0, 1))(p, jnp.stack([X, 2 * X])[:, None])


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_everything_that_takes_or_returns_trees(name):
    FORBIDDEN.clear()
    got, want = (jax.tree.leaves(CASES[name](p)) for p in (WithoutKeys(A, B), (A, B)))
    assert_close(got, want, tolerance=1e-5)
    assert not FORBIDDEN


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
