"""Classes of users in all that takes or returns PyTrees (clause 11 of the contract).

JAX unflattens a registered class with arrays, tracers, `None` and `object()` only, so its
constructor may compute. Each case has the same result for a class as for a tuple. The guard
draws classes as arguments and outputs of rules.
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
