"""Programs in which a custom derivative has leaked a tracer, by the thread that reports it.

Each runs with rules, under the leak checker, and without rules, which is its own reference.
The guard draws compositions of transformations under the checker, and `tests/test_closures.py`
goes through the ways to hold a traced value.
"""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.jet import jet  # noqa: TID251, there is no other way to it

from .helpers import assert_close, checking_leaks


pytestmark = pytest.mark.versions

X, XS, YS = jnp.array(0.7), jnp.linspace(-1.0, 1.0, 4), jnp.linspace(0.5, 1.5, 4)


class Rules:
    """Gives functions a rule of a kind, `"jvp"` or `"vjp"`, or `"none"`. It counts the calls
    of the rules: a program that uses none compares plain autodiff with itself."""

    def __init__(self, kind):
        self.kind, self.n_calls = kind, 0

    def _counted(self, rule):
        @ft.wraps(rule)
        def run(*args, **kwargs):
            self.n_calls += 1
            return rule(*args, **kwargs)

        return run

    def jvp(self, fn, rule, **options):
        f = eqg.custom_jvp(fn)
        f.def_jvp(self._counted(rule), **options)
        return fn if self.kind == "none" else f

    def vjp(self, fn, fwd, bwd):
        f = eqg.custom_vjp(fn)
        f.def_fwd(self._counted(fwd))
        f.def_bwd(bwd)
        return fn if self.kind == "none" else f

    def __call__(self, fn, tangent=None, cotangents=None, plain=None):
        """By the formulas `tangent(*primals, *tangents)` and `cotangents(*primals, ct)`, or by
        autodiff of the function. JAX can't differentiate it by itself if there is a `plain`."""

        def jvp(primals, tangents):
            if tangent is not None:
                return f(*primals), tangent(*primals, *tangents)
            return f(*primals), eqx.filter_jvp(fn, primals, tangents)[1]

        def bwd(args, ct):
            return cotangents(*args, ct) if cotangents else eqx.filter_vjp(fn, *args)[1](ct)

        if self.kind == "none":
            return plain or fn
        by_vjp = self.kind == "vjp"
        f = self.vjp(fn, lambda *a: (f(*a), a), bwd) if by_vjp else self.jvp(fn, jvp)
        return f


def both_ways(loss, *args):
    """The gradient inside of `jit`, outside of it, and without."""
    inner = jax.jit(jax.grad(loss))(*args)
    return inner, jax.grad(jax.jit(loss))(*args), jax.grad(loss)(*args)


def scanned(step, x):
    return jax.lax.scan(lambda x, y: (step(x, y), None), x, YS)[0]


# ---------------------------------------------------------------- rules of both kinds

BOTH = {}


def both(program):
    BOTH[program.__name__] = program
    return program


@both
def jax_34216_captured_by_a_rule_only(ruled):
    """An integer that changes nothing."""

    def f_of(x, n):
        product = lambda x, t: jnp.where(n < 0, 0 * t, jnp.cos(x) * t)
        return ruled(jnp.sin, product, lambda x, ct: (product(x, ct),))(x)

    return both_ways(f_of, X, jnp.array(3))


@both
def jax_14760_closure_converted_with_an_integer(rules):
    apply = rules(lambda fn, x: fn(x))

    def loss(x, n):
        fn, constants = jax.closure_convert(lambda x: jnp.sin(x) * n.astype(x.dtype), x)
        return apply(lambda x: fn(x, *constants), x)

    return both_ways(loss, X, jnp.array(2))


@both
def jax_5832_vjp_of_vmap_of_scan(ruled):
    f = ruled(lambda x, y: jnp.sin(x) * y)
    out, pull_back = jax.vjp(jax.vmap(lambda x: scanned(lambda x, y: f(x, y) + x / 2, x)), XS)
    return out, pull_back(jnp.cos(out))


class Layer(eqx.Module):
    weight: jax.Array
    name: str = eqx.field(static=True, default="layer")
    activation: object = jnp.sin  # a leaf that is no array

    def value(self, x):
        return self.activation(self.weight * x)


@both
def equinox_725_method_in_a_scan(ruled):
    class WithRule(Layer):
        __call__ = ruled(Layer.value)

    loss = lambda layer, x: scanned(lambda x, y: layer(x) * y, x)
    of_both = lambda args: loss(*args)
    layer = WithRule(jnp.array(1.3))
    inner = eqx.filter_jit(eqx.filter_grad(of_both))((layer, X))
    outer = eqx.filter_grad(eqx.filter_jit(of_both))((layer, X))
    in_x = jax.grad(jax.jit(lambda x: loss(layer, x)))(X)
    return jax.tree.leaves((inner, outer, eqx.filter_grad(loss)(layer, X), in_x))


@both
def equinox_964_shortcut_of_an_inner_optimization(ruled):
    """With integer counts in the optimizer's state, and an auxiliary output."""
    optimizer = optax.adam(1e-1)

    def inner_loss(params):
        flat = jax.flatten_util.ravel_pytree(params)[0]
        return jnp.sum(flat**2), {"params": flat}

    def optimize(params, opt_state):
        def step(carry, _):
            params, opt_state = carry
            grads, aux = jax.grad(inner_loss, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), aux

        return jax.lax.scan(step, (params, opt_state), None, length=3)

    f = ruled(optimize)

    def outer_loss(params):
        (params, opt_state), aux = f(params, optimizer.init(params))
        return jnp.sum(params["w"]) + jnp.sum(aux["params"]), opt_state[0].count

    params = {"w": jnp.linspace(0.5, 1.0, 3), "b": jnp.array(0.2)}
    with jax.numpy_dtype_promotion("standard"):  # Optax needs it
        inner = eqx.filter_jit(eqx.filter_value_and_grad(outer_loss, has_aux=True))(params)
        return inner, jax.grad(jax.jit(outer_loss), has_aux=True)(params)


@both
def jax_20889_mask_in_a_scan_carry(ruled):
    f = ruled(lambda x, mask: jnp.where(mask, jnp.sin(x), 0))

    def loss(x, mask):
        step = lambda carry, _: ((f(*carry), carry[1]), None)
        (x, _), _ = jax.lax.scan(step, (x, mask), None, length=2)
        return jnp.sum(x)

    return both_ways(loss, jnp.linspace(0.1, 0.9, 4), jnp.array([True, False, True, True]))


@both
def jax_23065_indices_under_jit(ruled):
    f = jax.jit(ruled(lambda x, indices: x[indices] ** 2))
    x, indices = jnp.linspace(0.1, 0.9, 6), jnp.array([1, 3, 5])
    return jax.jacobian(f)(x, indices), jax.jacfwd(f)(x, indices)


@both
def jax_3964_seed_under_vmap(ruled):
    f = ruled(lambda scale, key: scale * jax.random.normal(key, (3,)))
    keys = jax.random.split(jax.random.key(0), 4)
    total = lambda scale: jnp.sum(jax.vmap(f, in_axes=(None, 0))(scale, keys) ** 2)
    return both_ways(total, X)


@both
def jax_2912_traced_configuration(rules):
    """A traced keyword-only argument."""
    slope = lambda x, scale: jnp.cos(x) * scale
    value = lambda x, *, scale: jnp.sin(x) * scale
    jvp = lambda p, t, *, scale: (f(*p, scale=scale), slope(*p, scale) * t[0])
    bwd = lambda x, ct, *, scale: (slope(x, scale) * ct,)
    by_vjp = rules.kind == "vjp"
    fwd = lambda x, *, scale: (f(x, scale=scale), x)
    f = rules.vjp(value, fwd, bwd) if by_vjp else rules.jvp(value, jvp)
    return both_ways(lambda x, scale: f(x, scale=scale), X, jnp.array(1.3))


@both
def jax_16000_integer_primal(ruled):
    f = ruled(lambda x, n: x * n.astype(float))
    total = lambda x, n: jnp.sum(jax.vmap(f, in_axes=(None, 0))(x, n))
    return both_ways(total, X, jnp.arange(3))


@both
def jax_31448_an_output_that_is_not_used(ruled):
    f = ruled(lambda x, y: (jnp.sin(x) * y, jnp.exp(x)))
    loss = lambda keep: lambda x: jax.lax.scan(lambda x, y: (f(x, y)[keep], None), x, YS)[0]
    return both_ways(loss(0), X), both_ways(loss(1), X)


@both
def jax_18311_while_loop_behind_a_rule(ruled):
    """`z = cos(a * z)`, by the implicit function theorem."""

    def solve(a):
        step = lambda state: (state[0] + 1, jnp.cos(a * state[1]))
        return jax.lax.while_loop(lambda state: state[0] < 120, step, (0, a))[1]

    def unrolled(a):
        return jax.lax.fori_loop(0, 120, lambda _, z: jnp.cos(a * z), a)

    def tangent(a, t_a):
        z = f(a)
        return -jnp.sin(a * z) * z / (1 + a * jnp.sin(a * z)) * t_a

    f = ruled(solve, tangent, lambda a, ct: (tangent(a, ct),), plain=unrolled)
    total = lambda v: jnp.sum(jax.vmap(f)(v))
    return both_ways(total, jnp.abs(XS)), both_ways(
        lambda x: scanned(lambda x, y: f(x * y / 2), x), X
    )


@both
def lineax_101_linear_solve(ruled):
    def tangent(matrix, b, t_matrix, t_b):
        return f(matrix, t_b - t_matrix @ f(matrix, b))

    def cotangents(matrix, b, ct):
        ct_b = f(matrix.T, ct)
        return -jnp.outer(ct_b, f(matrix, b)), ct_b

    f = ruled(lambda matrix, b: jnp.linalg.solve(matrix, b), tangent, cotangents)
    matrix = jnp.eye(3) + 0.1 * jnp.arange(9.0).reshape(3, 3)
    bs = jnp.arange(6.0).reshape(2, 3)
    loss = lambda matrix, bs: jnp.sum(jnp.sin(jax.vmap(f, in_axes=(None, 0))(matrix, bs)))
    return both_ways(lambda args: loss(*args), (matrix, bs))


# ---------------------------------------------------------------- rules of one kind


def jax_16614_zero_tangent_of_an_output(rules):
    """`None` for an output that does not move, of a carry that does elsewhere."""

    def jvp(primals, tangents):
        (x, _), (t_x, _) = primals, tangents
        return f(*primals), (None if t_x is None else jnp.cos(x) * t_x, None)

    f = rules.jvp(lambda x, y: (jnp.sin(x), jax.lax.stop_gradient(y)), jvp, symbolic_zeros=True)

    def loss(x, y):
        (x, y), _ = jax.lax.scan(lambda carry, _: (f(*carry), None), (x, y), None, length=3)
        return x * y

    return both_ways(loss, X, X)


def jax_18113_integer_index_through_jvp_and_vjp(rules):
    f = rules.jvp(lambda x, i: (x, i), lambda p, t: (f(*p), (t[0], None)))

    def take(x):
        x, index = f(x, jnp.array(1))
        return jnp.sin(x)[index]

    pushed = lambda x: jax.jvp(take, (x,), (x,))[1]
    return pushed(XS), jax.vjp(pushed, XS)[1](jnp.array(1.0))


def jax_24545_shorthands_that_close_over_a_tracer(rules):
    """And jax#23588, where the pullback of a `custom_gradient` is the one of `jax.vjp`."""

    def f_of(a):
        g = eqg.custom_gradient(rules._counted(lambda x: jax.vjp(lambda x: jnp.sin(x) * a, x)))
        h = eqg.elementwise(lambda x: x * a, rules._counted(lambda out, x: a))
        plain = lambda x: jnp.sin(x) * a * a
        return plain if rules.kind == "none" else lambda x: jax.tree.leaves(h(g(x)))[0]

    of_both = lambda x, a: f_of(a)(x)
    in_vmap = jax.vmap(jax.grad(of_both), in_axes=(None, 0))(X, YS)
    in_scan = both_ways(lambda x: scanned(lambda x, y: f_of(jnp.cos(y))(x), x), X)
    return both_ways(of_both, X, X), in_vmap, in_scan


ONE = [
    jax_16614_zero_tangent_of_an_output,
    jax_18113_integer_index_through_jvp_and_vjp,
    jax_24545_shorthands_that_close_over_a_tracer,
]
PROGRAMS = {
    f"{name}-{kind}": (fn, kind) for name, fn in BOTH.items() for kind in ("jvp", "vjp")
}
PROGRAMS |= {fn.__name__: (fn, "jvp") for fn in ONE}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_leak(name):
    program, kind = PROGRAMS[name]
    rules = Rules(kind)
    with checking_leaks():
        got = program(rules)
    assert rules.n_calls, "no rule was used"
    assert_close(got, _expected(program))


@ft.cache
def _expected(program):
    return program(Rules("none"))


# ---------------------------------------------------------------- the checker is awake


def sin_that_keeps(kept):
    """A function with a rule that puts a tracer where it outlives the call."""

    f = eqg.custom_vjp(jnp.sin)

    @f.def_fwd
    def _fwd(x):
        kept.append(jnp.cos(x))
        return jnp.sin(x), kept[0]

    @f.def_bwd
    def _bwd(cos, ct):
        return (cos * ct,)

    return f


def test_a_tracer_that_a_rule_keeps_is_found():
    """A leak of the user's own making, which is not for us to cover up."""
    kept = []
    with checking_leaks(), pytest.raises(Exception, match="Leaked"):
        jax.jit(jax.grad(sin_that_keeps(kept)))(0.7)


def test_a_tracer_that_a_rule_keeps_can_not_be_used_in_another_program():
    f = sin_that_keeps([])
    with jax.check_tracer_leaks(False):
        jax.jit(jax.grad(f))(0.7)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        jax.jit(jax.grad(f))(jnp.ones(3)[0])


def test_taylor_mode_is_at_fault_upstream():
    """`jax.experimental.jet` can't take any function with a forward rule:
    https://github.com/patrick-kidger/equinox/issues/1051. When this test fails, Taylor mode
    wants a program here."""
    if getattr(jax.config, "jax_custom_jvp3", False):
        pytest.skip("Taylor mode has no rule for this primitive")
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda primals, tangents: (f(*primals), jnp.cos(*primals) * tangents[0]))
    with pytest.raises(jax.errors.UnexpectedTracerError, match="unexpected tracer"):
        jet(f, (0.7,), ((1.0, 0.0),))
