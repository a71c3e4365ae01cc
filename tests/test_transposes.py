"""The transpose of a linear function with rules: its rules give it (clause 12 of the contract).

The functions double their argument in a `while` loop, which JAX can't transpose. The witness is
the same program with `2 * t`.
"""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import (
    assert_close,
    fails_with_remat3,
    REMAT3_HAS_NO_TRANSPOSE,
)


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def loop(t):
    return jax.lax.while_loop(lambda s: s[1] < 1, lambda s: (2 * s[0], s[1] + 1), (t, 0))[0]


double = eqg.custom_vjp(loop)
double.def_fwd(lambda t: (double(t), None))
double.def_bwd(lambda _, ct: (2 * ct,))


def forward():
    f = eqg.custom_jvp(loop)
    f.def_jvp(lambda p, t: (f(*p), 2 * t[0]))
    return f


def of_equinox():
    f = eqg.filter_custom_vjp(loop)
    f.def_fwd(lambda perturbed, t: (f(t), None))
    f.def_bwd(lambda residuals, ct, perturbed, t: 2 * ct)
    return f


def on_the_host():
    f = eqg.host_function(lambda t: 2 * t, out=lambda t: t)
    f.def_bwd(lambda residuals, ct: (2 * ct,))
    return f


def in_a_callback():
    """Whose value JAX can't transpose either, and says so."""
    call = lambda t: jax.pure_callback(
        lambda t: 2 * np.asarray(t), t, t, vmap_method="sequential"
    )
    f = eqg.custom_vjp(call)
    f.def_fwd(lambda t: (f(t), None))
    f.def_bwd(lambda _, ct: (2 * ct,))
    return f


KINDS = {
    "custom_vjp": lambda: double,
    "custom_jvp": forward,
    "elementwise": lambda: eqg.elementwise(lambda ans, x: 2.0)(loop),
    "custom_gradient": lambda: eqg.custom_gradient(lambda t: (loop(t), lambda ct: 2 * ct)),
    "filter_custom_vjp": of_equinox,
    "host_function": on_the_host,
    "callback": in_a_callback,
}


def sine_of(g):
    """`sin(g(x))`, whose rule applies `g` to the tangent."""
    f = eqg.custom_jvp(lambda x: jnp.sin(g(x)))
    f.def_jvp(lambda p, t: (f(*p), jnp.cos(g(*p)) * g(*t)))
    return f


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rule(kind):
    g = KINDS[kind]()
    assert_close(jax.linear_transpose(g, 1.0)(1.0)[0], jnp.array(2.0))
    assert_close(jax.grad(sine_of(g))(1.0), 2 * jnp.cos(2.0))
    assert_close(jax.jit(jax.grad(sine_of(g)))(1.0), 2 * jnp.cos(2.0))


SURROUNDINGS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "vmap of a constant": lambda f: (
        lambda t: jnp.sum(jax.vmap(lambda a, t: a * f(t), (0, None))(jnp.arange(3.0), t), 0)
    ),
    "scan": lambda f: lambda t: jax.lax.scan(lambda c, x: (c + f(x), None), 0 * t[0], t)[0],
    "carry": lambda f: lambda t: jax.lax.scan(lambda c, _: (f(c), None), t, None, 3)[0],
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda t: jax.lax.cond(True, f, lambda t: t, t),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_in_all_surroundings(surroundings, request):
    if surroundings == "checkpoint":
        fails_with_remat3(request, REMAT3_HAS_NO_TRANSPOSE)
    wrap, x = SURROUNDINGS[surroundings], jnp.array([0.5, -1.0])
    got, witness = wrap(double), wrap(lambda t: 2 * t)
    ct = witness(x)
    expected = jax.linear_transpose(witness, x)(ct)
    assert_close(jax.linear_transpose(got, x)(ct), expected)
    assert_close(jax.jit(lambda ct: jax.linear_transpose(got, x)(ct))(ct), expected)
    cts = jnp.stack([ct, 3 * ct])
    batched = lambda f: jax.vmap(lambda ct: jax.linear_transpose(f, x)(ct))(cts)
    assert_close(batched(got), batched(witness))
    loss = lambda f: lambda x: jnp.sum(sine_of(f)(x))
    assert_close(jax.jit(jax.grad(loss(got)))(x), jax.grad(loss(witness))(x))


def test_a_rule_that_depends_on_the_linear_argument_runs_at_zero():
    f = eqg.custom_vjp(loop)
    f.def_fwd(lambda x: (f(x), x))
    f.def_bwd(lambda x, ct: ((2 + x) * ct,))
    assert jax.grad(f)(3.0) == 5.0
    assert jax.linear_transpose(f, 3.0)(1.0) == (2.0,)


def test_a_backward_rule_that_is_not_linear():
    clip = lambda t: eqg.clip_gradient(t, -0.1, 0.1)
    assert_close(jax.linear_transpose(clip, 1.0)(5.0)[0], jnp.array(0.1))


OPS = {
    "scale": (lambda t: eqg.scale_gradient(t, 0.5), 0.5),
    "reverse": (eqg.reverse_gradient, -1.0),
    "mask": (lambda t: eqg.mask_gradient(t, jnp.array(False)), 0.0),
    "clip": (lambda t: eqg.clip_gradient(t, -0.1, 0.1), 0.1),
    "clip norm": (lambda t: eqg.clip_gradient_norm(t, 0.1), 0.1),
    "on_backward": (lambda t: eqg.on_backward(t, lambda g: 3 * g), 3.0),
    "replace": (lambda t: eqg.replace_gradient(3 * t, t), 1.0),
    "nested": (lambda t: eqg.reverse_gradient(eqg.scale_gradient(t, 0.5)), -0.5),
}


@pytest.mark.parametrize("op", OPS)
def test_a_rule_that_is_not_the_derivative_of_its_function(op):
    """Applied to a tangent, a gradient op acts on the gradient, as it does on a value. JAX
    transposes a `jax.custom_jvp` by its function, and not at all a `jax.custom_vjp`."""
    fn, expected = OPS[op]
    assert_close(jax.linear_transpose(fn, 1.0)(1.0)[0], jnp.array(expected))
    f = eqg.custom_jvp(lambda x: 1.0 * x)
    f.def_jvp(lambda p, t: (f(*p), fn(*t)))
    assert_close(jax.jit(jax.grad(f))(1.0), jnp.array(expected))
    assert_close(jax.jvp(f, (1.0,), (1.0,))[1], jnp.asarray(fn(1.0)))


def _affine(w, x, b):
    return jnp.tanh(w) @ x + b


@pytest.mark.parametrize("custom_jvp", [jax.custom_jvp, eqg.custom_jvp])
def test_an_affine_function_of_a_tangent_and_of_zero(custom_jvp):
    """A term that is an operand may be zero. The witness: the function without rules."""
    affine = eqg.custom_vjp(_affine)
    affine.def_fwd(lambda w, x, b: (affine(w, x, b), (w, x)))
    affine.def_bwd(lambda r, ct: (None, jnp.tanh(r[0]).T @ ct, ct))
    w, x = jnp.array([[0.5, -1.0], [0.3, 0.2]]), jnp.array([0.4, 0.7])

    def gradients(layer, custom_jvp):
        f = custom_jvp(lambda x: layer(w, x, jnp.ones(2)))
        define = getattr(f, "def_jvp", None) or f.defjvp
        define(lambda p, t: (f(*p), layer(w, t[0], jnp.zeros(2))))
        loss = lambda x: jnp.sum(jnp.sin(f(x)))
        steps = lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0]
        return [
            jax.grad(loss)(x),
            jax.jit(jax.grad(loss))(x),
            jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x])),
            jax.grad(lambda x: jnp.sum(steps(x)))(x),
            jax.hessian(loss)(x),
            *jax.linear_transpose(lambda x: layer(w, x, jnp.zeros(2)), x)(x),
        ]

    for got, expected in zip(
        gradients(affine, custom_jvp), gradients(_affine, jax.custom_jvp), strict=True
    ):
        assert_close(got, expected)


def test_what_is_surely_not_linear_is_an_error():
    @eqg.custom_jvp
    def adds_one(x, y):
        return x + y + 1.0

    adds_one.def_jvp(lambda p, t: (adds_one(*p), t[0] + t[1]))
    multiply = eqg.custom_jvp(lambda x, y: x * (x + y))
    multiply.def_jvp(lambda p, t: (multiply(*p), t[0]))
    for f, match in ((adds_one, "it adds something"), (multiply, "a tangent by a tangent")):
        with pytest.raises(eqg.RuleError, match=match):
            jax.linear_transpose(lambda x: f(x, jnp.zeros(2)), jnp.ones(2))(jnp.ones(2))  # noqa: B023
