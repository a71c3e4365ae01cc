"""Every kind of rule under every transformation, against autodiff of the function itself."""

import functools as ft
import itertools

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close
from .ops import ARGUMENTS, PAIRS


def scalar(f):
    """A loss that is not linear in the outputs of `f`."""
    return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*args)))


def every(args):
    return tuple(range(len(args)))


def directions(args):
    return tuple(jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in args)


def pushforward(f, args):
    return jax.jvp(f, args, directions(args))


def batches(args):
    return tuple(jnp.stack([a, 2 * a, -a]) for a in args)


def scanned(f, args):
    """`f` as the body of a scan, with a carry that holds a counter and a key as well."""
    x, *rest = args

    def loss(x, *rest):
        def body(carry, scale):
            x, count, key = carry
            out = scalar(f)(x * scale, *rest)
            key, _ = jax.random.split(key)
            return (x + 0.1 * out, count + 1, key), out

        init = (x, jnp.array(0), jax.random.key(0))
        (x, _, _), outs = jax.lax.scan(body, init, jnp.linspace(0.5, 1.5, 4, dtype=x.dtype))
        return jnp.sum(x) + jnp.sum(outs**2)

    return jax.grad(loss, every(args))(x, *rest)


def under_while(f, args):
    def loop(*args):
        step = lambda state: (state[0] + 1, 0.5 * state[1] + scalar(f)(*args))
        return jax.lax.while_loop(lambda s: s[0] < 3, step, (0, jnp.zeros((), args[0].dtype)))[
            1
        ]

    return pushforward(loop, args)


def under_cond(f, args):
    pick = lambda flag: (
        lambda *args: jax.lax.cond(flag, scalar(f), lambda *a: jnp.sum(a[0]), *args)
    )
    return [jax.grad(pick(flag), every(args))(*args) for flag in (True, False)]


def under_switch(f, args):
    branches = [scalar(f), lambda *a: jnp.sum(a[0] ** 2), lambda *a: 2 * scalar(f)(*a)]
    pick = lambda i: lambda *args: jax.lax.switch(i, branches, *args)
    return [jax.jit(jax.grad(pick(i), every(args)))(*args) for i in range(3)]


def checkpointed(policy):
    return lambda f, args: jax.jit(
        jax.grad(jax.checkpoint(scalar(f), policy=policy), every(args))
    )(*args)


def filter_checkpointed(f, args):
    return eqx.filter_grad(lambda a: eqx.filter_checkpoint(lambda b: scalar(f)(*b))(a))(args)


TRANSFORMS = {
    "value": lambda f, args: f(*args),
    "jit": lambda f, args: jax.jit(f)(*args),
    "value_and_grad": lambda f, args: jax.value_and_grad(scalar(f), every(args))(*args),
    "grad of each": lambda f, args: [jax.grad(scalar(f), i)(*args) for i in every(args)],
    "jit(grad)": lambda f, args: jax.jit(jax.grad(scalar(f), every(args)))(*args),
    "grad(jit)": lambda f, args: jax.grad(scalar(jax.jit(f)), every(args))(*args),
    "jvp": pushforward,
    "jit(jvp)": lambda f, args: jax.jit(lambda *a: pushforward(f, a))(*args),
    "jvp(jit)": lambda f, args: pushforward(jax.jit(f), args),
    "jacfwd": lambda f, args: jax.jacfwd(f, every(args))(*args),
    "jacrev": lambda f, args: jax.jacrev(f, every(args))(*args),
    "hessian": lambda f, args: jax.hessian(scalar(f), every(args))(*args),
    "jit(hessian)": lambda f, args: jax.jit(jax.hessian(scalar(f), every(args)))(*args),
    "jacrev(jacfwd)": lambda f, args: jax.jacrev(jax.jacfwd(scalar(f)))(*args),
    "jacrev(jacrev)": lambda f, args: jax.jacrev(jax.jacrev(scalar(f)))(*args),
    "jacfwd(jacfwd)": lambda f, args: jax.jacfwd(jax.jacfwd(scalar(f)))(*args),
    "third order": lambda f, args: jax.jacfwd(jax.jacrev(jax.jacfwd(scalar(f))))(*args),
    "grad(grad)": lambda f, args: jax.grad(lambda *a: scalar(jax.grad(scalar(f)))(*a))(*args),
    "linearize": lambda f, args: jax.linearize(f, *args)[1](*directions(args)),
    "vjp of jvp": lambda f, args: jax.vjp(lambda *a: pushforward(f, a)[1], *args)[1](f(*args)),
    "scan": scanned,
    "jit(scan)": lambda f, args: jax.jit(lambda *a: scanned(f, a))(*args),
    "while_loop": under_while,
    "cond": under_cond,
    "switch": under_switch,
    "checkpoint": checkpointed(None),
    "checkpoint, all saved": checkpointed(jax.checkpoint_policies.everything_saveable),
    "checkpoint, dots saved": checkpointed(jax.checkpoint_policies.dots_saveable),
    "filter_checkpoint": filter_checkpointed,
    "filter_jit(filter_grad)": lambda f, args: eqx.filter_jit(
        eqx.filter_grad(lambda a: scalar(f)(*a))
    )(args),
    "filter_jvp": lambda f, args: eqx.filter_jvp(f, args, directions(args)),
}


# Kinds of rules that take paths of their own through the library: these are tested under every
# transformation each day, and the others under six, which have the others as parts.
ONE_OF_EACH_KIND = ("jvp", "vjp", "vjp and vmap", "method")
SIX = ("jit(grad)", "jvp", "hessian", "jit(scan)", "checkpoint", "vjp of jvp")


@ft.cache
def reference(plain, transform):
    """Computed once: most of the pairs are rules for the same function."""
    return TRANSFORMS[transform](plain, ARGUMENTS[plain])


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        pytest.param(
            name,
            transform,
            marks=() if name in ONE_OF_EACH_KIND or transform in SIX else pytest.mark.slow,
        )
        for transform in TRANSFORMS
        for name in PAIRS
    ],
)
def test_transform(name, transform):
    with_rule, plain = PAIRS[name]
    got = TRANSFORMS[transform](with_rule, ARGUMENTS[plain])
    assert_close(got, reference(plain, transform))


@pytest.mark.parametrize(
    "order",
    [
        "vmap(grad)",
        "grad(vmap)",
        "jit(vmap(grad))",
        "vmap(jvp)",
        "jvp(vmap)",
        "vmap(hessian)",
        "vmap(vmap)",
        "grad(vmap(vmap))",
        "grad(scan(vmap))",
        "vmap(scan)",
        "checkpoint(vmap)",
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.slow)
        for name in PAIRS
    ],
)
def test_vmap(name, order):
    """Every order, with every subset of the arguments batched."""
    with_rule, plain = PAIRS[name]
    subsets = itertools.product((None, 0), repeat=len(ARGUMENTS[plain]))
    for axes in [axes for axes in subsets if any(axis == 0 for axis in axes)]:
        got = vmapped(order, with_rule, axes, batched(plain, axes))
        assert_close(got, vmapped_reference(order, plain, axes))


def batched(plain, axes):
    args = ARGUMENTS[plain]
    pairs = zip(args, batches(args), axes, strict=True)
    return tuple(a if axis is None else b for a, b, axis in pairs)


@ft.cache
def vmapped_reference(order, plain, axes):
    return vmapped(order, plain, axes, batched(plain, axes))


def vmapped(order, f, axes, args):
    loss, argnums = scalar(f), every(args)
    total = lambda *a: jnp.sum(jax.vmap(loss, axes)(*a))
    if order == "vmap(grad)":
        return jax.vmap(jax.grad(loss, argnums), axes)(*args)
    if order == "jit(vmap(grad))":
        return jax.jit(jax.vmap(jax.grad(loss, argnums), axes))(*args)
    if order == "grad(vmap)":
        return jax.grad(total, argnums)(*args)
    if order == "jvp(vmap)":
        return pushforward(jax.vmap(f, axes), args)
    if order == "vmap(jvp)":
        return jax.vmap(lambda *a: pushforward(f, a), axes)(*args)
    if order == "vmap(hessian)":
        return jax.vmap(jax.hessian(loss), axes)(*args)
    if order == "checkpoint(vmap)":
        return jax.grad(jax.checkpoint(total), argnums)(*args)
    if order == "vmap(scan)":
        return jax.vmap(lambda *a: scanned(f, a), axes)(*args)
    if order == "grad(scan(vmap))":

        def body(carry, _):
            return carry + total(*(a * carry for a in args)), None

        return jax.grad(lambda c: jax.lax.scan(body, c, None, length=2)[0])(
            jnp.ones_like(args[0], shape=())
        )
    doubled = tuple(
        a if axis is None else jnp.stack([a, 3 * a]) for a, axis in zip(args, axes, strict=True)
    )
    twice = jax.vmap(jax.vmap(loss, axes), axes)
    if order == "vmap(vmap)":
        return twice(*doubled)
    return jax.grad(lambda *a: jnp.sum(twice(*a)), argnums)(*doubled)


def half_batched(w, x):
    return 2 * w, w * x, jnp.ones_like(w), jnp.argmax(w)


half_batched_vjp = eqg.custom_vjp(half_batched)
half_batched_vjp.def_fwd(lambda w, x: (half_batched_vjp(w, x), (w, x)))
half_batched_vjp.def_bwd(lambda r, cts: (2 * cts[0] + r[1] * cts[1], r[0] * cts[1]))


@pytest.mark.parametrize("loop", ["switch", "fori", "while", "scan", "jit", "plain"])
def test_an_output_that_is_not_batched(loop):
    """Its tangent comes from the same call as the others, and is batched with them."""

    def call(f, i, w, x):
        if loop == "switch":
            return jax.lax.switch(i, [f, f], w, x)
        if loop == "fori":
            return jax.lax.fori_loop(0, 2, lambda _, c: f(c[0], x), f(w, x))
        if loop == "while":
            step = lambda c: (c[0] + 1, f(c[1][0], x))
            return jax.lax.while_loop(lambda c: c[0] < 2, step, (0, f(w, x)))[1]
        if loop == "scan":
            return jax.lax.scan(lambda c, _: (f(c[0], x), c[3]), f(w, x), None, 2)[0]
        return jax.jit(f)(w, x) if loop == "jit" else f(w, x)

    def loss(f):
        vmapped = jax.vmap(lambda i, w, x: call(f, i, w, x), (0, None, 0))
        return lambda w, xs: sum(
            jnp.sum(jnp.sin(o)) for o in vmapped(jnp.arange(3) % 2, w, xs)[:3]
        )

    args = (jnp.array([0.5, 0.7]), jnp.arange(6.0).reshape(3, 2))
    with_rule, plain = loss(half_batched_vjp), loss(half_batched)
    assert_close(jax.jvp(with_rule, args, args), jax.jvp(plain, args, args))
    if loop != "while":
        assert_close(jax.grad(with_rule, (0, 1))(*args), jax.grad(plain, (0, 1))(*args))
        assert_close(jax.jit(jax.grad(with_rule))(*args), jax.grad(plain)(*args))
