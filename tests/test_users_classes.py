"""Classes of users in all that takes or returns PyTrees (clause 11 of the contract).

JAX unflattens a registered class with arrays, tracers, `None` and `object()` only, so its
constructor may compute. Each case has the same result for a class as for a tuple.
"""

import collections
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


def everything(fn):
    """A loss in many modes."""

    def run(p):
        f = fn if callable(fn) else None
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
    terms = zip(jax.tree.leaves(ct_p), jax.tree.leaves(t_p), strict=True)
    return _energy(p, x), sum(jnp.sum(c * t) for c, t in terms) + jnp.sum(ct_x * t_x)


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
    f.defvjp(
        lambda n, p, x: (f(n, p, x), (p, x)), lambda n, res, ct: _cotangents(*res, n * ct)
    )
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
@pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_rules(rule, kind):
    for got, want in zip(everything(rule())(kind(A, B)), everything(_energy)((A, B)), strict=True):
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
@pytest.mark.parametrize("kind", CLASSES, ids=lambda k: k.__name__)
@pytest.mark.parametrize("rule", RETURNS, ids=lambda r: r.__name__)
def test_rules_of_functions_that_return_a_class(rule, kind):
    loss = lambda f: lambda p, x: _energy(f(p, x), x)
    # An output that is not used has the cotangent `None`.
    first = lambda f: lambda p, x: jnp.sum(jax.tree.leaves(f(p, x))[0] ** 2)
    for of in (loss, first):
        got, want = everything(of(rule()))(kind(A, B)), everything(of(_product))((A, B))
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, tolerance=1e-5)
