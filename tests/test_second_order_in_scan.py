"""The second derivative of a made-up derivative, inside of scans: that of the rule, not that of
the function.

In raw JAX before 0.12 it is that of the function: of a rounding it is zero.
"""

import functools as ft

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from .helpers import fails_with_remat3, REMAT3_HAS_NO_SECOND_ORDER


X = jnp.array([0.7, -1.3, 2.2])
STEPS = 4
ste = eqg.ste

OPS = {
    "ste.round": ste.round,
    "ste.floor": ste.floor,
    "ste.ceil": ste.ceil,
    "ste.trunc": ste.trunc,
    "ste.sign": ste.sign,
    "ste.binary_sign": ste.binary_sign,
    "ste.ternary": ste.ternary,
    "ste.heaviside": ste.heaviside,
    "ste.clip": lambda x: ste.clip(x, 0.0, 1.0),
    "ste.one_hot_argmax": ste.one_hot_argmax,
    "ste.top_k": lambda x: ste.top_k(x, 1),
    "ste.wrap": ste.wrap(jnp.round),
    "ste.gumbel_softmax": lambda x: ste.gumbel_softmax(x, key=jr.key(0), hard=True),
    "ste.gumbel_sigmoid": lambda x: ste.gumbel_sigmoid(x, key=jr.key(0), hard=True),
    "ste.bernoulli": lambda x: ste.bernoulli(jax.nn.sigmoid(x), key=jr.key(0)),
    "ste.reinmax": lambda x: ste.reinmax(x, key=jr.key(0)),
    "ste.fake_quantize": lambda x: ste.fake_quantize(x, 0.31, bits=4),
    "ste.lsq": lambda x: ste.lsq(x, 0.31, bits=4),
    "ste.dorefa": lambda x: ste.dorefa(x, bits=2),
    "ste.pact": lambda x: ste.pact(x, 1.5, bits=4),
    "ste.fsq": lambda x: ste.fsq(x, (5, 5, 5))[0],
    "replace_gradient": lambda x: eqg.replace_gradient(jnp.round(x), jnp.tanh(x)),
    "with_gradient_of": eqg.with_gradient_of(jnp.round, jnp.tanh),
    "on_forward": lambda x: eqg.on_forward(x, jnp.round),
    "scale_gradient": lambda x: eqg.scale_gradient(x, 3.0),
    "reverse_gradient": lambda x: eqg.reverse_gradient(x, 0.5),
    "mask_gradient": lambda x: eqg.mask_gradient(x, jnp.array([True, False, True])),
    "clip_gradient": lambda x: eqg.clip_gradient(x, -0.5, 1.0),
    "clip_gradient_norm": lambda x: eqg.clip_gradient_norm(x, 0.7),
    "normalize_gradient": eqg.normalize_gradient,
    "on_backward": lambda x: eqg.on_backward(x, jnp.tanh),
    **{
        f"surrogates.{name}": ft.partial(
            eqg.surrogates.spike, surrogate=getattr(eqg.surrogates, name)()
        )
        for name in (
            "superspike",
            "atan",
            "sigmoid",
            "erf",
            "gaussian",
            "multi_gaussian",
            "triangle",
            "piecewise_quadratic",
            "rectangle",
            "leaky",
        )
    },
}


def step(op, c, u):
    return jnp.sin(op(c) * c) + u * c, None


def unrolled(op, c):
    for u in jnp.linspace(0.5, 1.0, STEPS):
        c, _ = step(op, c, u)
    return c


def scanned(scan, op, c):
    return scan(ft.partial(step, op), c, jnp.linspace(0.5, 1.0, STEPS))[0]


def nested(scan, op, c):
    us = jnp.linspace(0.5, 1.0, STEPS).reshape(2, STEPS // 2)
    return scan(lambda c, us: scan(ft.partial(step, op), c, us), c, us)[0]


def filter_scan(checkpoint):
    return ft.partial(scanned, ft.partial(eqg.filter_scan, checkpoint=checkpoint))


def truncated(scan, op, c):
    """Two windows, cut by hand."""
    us = jnp.linspace(0.5, 1.0, STEPS)
    if scan is None:
        for t, u in enumerate(us):
            c = jax.lax.stop_gradient(c) if t == STEPS // 2 else c
            c, _ = step(op, c, u)
        return c
    return scan(ft.partial(step, op), c, us, truncate=STEPS // 2)[0]


def weighted(scan, op, w):
    """Differentiated in what the steps close over, and then in their inputs."""
    us = jnp.linspace(0.5, 1.0, STEPS)
    body = lambda c, u: (jnp.sin(op(w * c)) + u * c * op(w), None)
    if scan is None:
        c = jnp.ones(3)
        for u in us:
            c, _ = body(c, u)
        return c
    return scan(body, jnp.ones(3), us)[0]


LOOPS = {
    "lax.scan": ft.partial(scanned, jax.lax.scan),
    "nested": ft.partial(nested, jax.lax.scan),
    "nested filter_scan": ft.partial(nested, eqg.filter_scan),
    **{f"checkpoint={k!r}": filter_scan(k) for k in (None, 2, "sqrt", "replay", "auto")},
}
EVERY_DAY = ("ste.round", "surrogates.superspike", "reverse_gradient", "clip_gradient")


def second_derivative(loop, op):
    """A Hessian times a vector, over all elements."""
    loss = lambda c: jnp.sum(jnp.cos(loop(op, c)))
    return jax.jit(jax.grad(lambda c: jnp.sum(jax.grad(loss)(c) * jnp.arange(1.0, 4.0))))(X)


@ft.cache
def expected(name):
    return second_derivative(unrolled, OPS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in OPS]
)
def test_the_derivative_of_the_rule(name, loop, request):
    if loop in ("checkpoint=2", "checkpoint='sqrt'") and name.endswith("_gradient"):
        fails_with_remat3(request, REMAT3_HAS_NO_SECOND_ORDER, strict=name in EVERY_DAY)
    eqgt.assert_trees_close(second_derivative(LOOPS[loop], OPS[name]), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_in_lax_scan(name):
    eqgt.assert_trees_close(second_derivative(LOOPS["lax.scan"], OPS[name]), expected(name))


def test_the_smallest_example():
    """2.0, and not 1.0."""
    f = lambda c: jax.lax.scan(lambda c, _: (ste.round(c) * c, None), c, None, length=1)[0]
    assert jax.grad(jax.grad(f))(1.0) == 2.0


@pytest.mark.parametrize("name", EVERY_DAY)
@pytest.mark.parametrize("checkpoint", [None, "replay"])
def test_windows(name, checkpoint):
    """The derivative of the last carry is that of the last window, to all orders."""
    op = OPS[name]
    scan = ft.partial(eqg.filter_scan, checkpoint=checkpoint)
    loss = lambda scan, w: jnp.sum(jnp.cos(truncated(scan, lambda x: op(w * x), X)))

    def second(scan):
        first = jax.grad(ft.partial(loss, scan))
        return jax.jit(jax.grad(lambda w: jnp.sum(first(w) * jnp.arange(1.0, 4.0))))(X)

    eqgt.assert_trees_close(second(scan), second(None))


@pytest.mark.parametrize("name", EVERY_DAY)
@pytest.mark.parametrize(
    "checkpoint",
    [2, "replay", *(pytest.param(c, marks=pytest.mark.slow) for c in (None, "auto"))],
)
def test_what_the_steps_close_over(name, checkpoint, request):
    if checkpoint == 2 and name.endswith("_gradient"):
        fails_with_remat3(request, REMAT3_HAS_NO_SECOND_ORDER)
    scan = ft.partial(eqg.filter_scan, checkpoint=checkpoint)
    loop = lambda scan: lambda op, w: weighted(scan, op, w)
    eqgt.assert_trees_close(
        second_derivative(loop(scan), OPS[name]), second_derivative(loop(None), OPS[name])
    )
