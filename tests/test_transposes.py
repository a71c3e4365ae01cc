"""The transpose of a linear function with rules: its rules give it (clause 12 of the contract).

The functions double their argument in a `while` loop, which JAX can't transpose. The witness is
the same program with `2 * t`.
"""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import (
    assert_close,
    fails_with_remat3,
    REMAT3_HAS_NO_TRANSPOSE,
)


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def loop(t):
    return jax.lax.while_loop(lambda s: s[1] < 1, lambda s: (2 * s[0], s[1] + 1), (t, 0))[0]


def jvp_rule(fn, tangent):
    f = eqg.custom_jvp(fn)
    f.def_jvp(lambda p, t: (f(*p), tangent(p, t)))
    return f


def vjp_rule(fn, backward):
    f = eqg.custom_vjp(fn)
    f.def_fwd(lambda *xs: (f(*xs), xs))
    f.def_bwd(backward)
    return f


def of_equinox():
    f = eqg.filter_custom_vjp(loop)
    f.def_fwd(lambda perturbed, t: (f(t), None))
    f.def_bwd(lambda residuals, ct, perturbed, t: 2 * ct)
    return f


def on_the_host():
    """Whose value JAX can't transpose either."""
    f = eqg.host_function(lambda t: 2 * t, out=lambda t: t)
    f.def_bwd(lambda residuals, ct: (2 * ct,))
    return f


double = vjp_rule(loop, lambda _, ct: (2 * ct,))
# Each with the factor of its transpose. JAX transposes a `jax.custom_jvp` by its function.
KINDS = {
    "custom_vjp": (double, 2.0),
    "custom_jvp": (jvp_rule(loop, lambda p, t: 2 * t[0]), 2.0),
    "elementwise": (eqg.elementwise(lambda ans, x: 2.0)(loop), 2.0),
    "custom_gradient": (eqg.custom_gradient(lambda t: (loop(t), lambda ct: 2 * ct)), 2.0),
    "filter_custom_vjp": (of_equinox(), 2.0),
    "host_function": (on_the_host(), 2.0),
    "scale": (lambda t: eqg.scale_gradient(t, 0.5), 0.5),
    "nested": (lambda t: eqg.reverse_gradient(eqg.scale_gradient(t, 0.5)), -0.5),
    "mask": (lambda t: eqg.mask_gradient(t, jnp.array(False)), 0.0),
    "clip": (lambda t: eqg.clip_gradient(t, -0.1, 0.1), 0.1),
    "on_backward": (lambda t: eqg.on_backward(t, lambda g: 3 * g), 3.0),
    "replace": (lambda t: eqg.replace_gradient(3 * t, t), 1.0),
}


def sine_of(g):
    """`sin(x)`, whose rule applies `g` to the tangent."""
    return jvp_rule(jnp.sin, lambda p, t: jnp.cos(p[0]) * g(t[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rule(kind):
    """Applied to a tangent, a gradient op acts on the gradient, as it does on a value."""
    g, factor = KINDS[kind]
    assert_close(jax.linear_transpose(g, 1.0)(1.0)[0], jnp.array(factor))
    for grad in (jax.grad(sine_of(g)), jax.jit(jax.grad(sine_of(g)))):
        expected = jnp.array(0.1) if kind == "clip" else factor * jnp.cos(0.3)
        assert_close(grad(0.3), expected)
    assert_close(jax.jvp(sine_of(g), (0.3,), (1.0,))[1], jnp.cos(0.3) * g(1.0))


SURROUNDINGS = {
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap of a constant": lambda f: (
        lambda t: jnp.sum(jax.vmap(lambda a, t: a * f(t), (0, None))(jnp.arange(3.0), t), 0)
    ),
    "scan": lambda f: lambda t: jax.lax.scan(lambda c, x: (c + f(x), None), 0 * t[0], t)[0],
    "carry": lambda f: lambda t: jax.lax.scan(lambda c, _: (f(c), None), t, None, 3)[0],
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda t: jax.lax.cond(True, f, lambda t: t, t),
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
    cts = jnp.stack([ct, 3 * ct])
    batched = lambda f: jax.vmap(lambda ct: jax.linear_transpose(f, x)(ct))(cts)
    assert_close(batched(got), batched(witness))
    loss = lambda f: lambda x: jnp.sum(jvp_rule(lambda x: jnp.sin(f(x)), lambda p, t: jnp.cos(
        f(*p)) * f(*t))(x))  # fmt: skip
    assert_close(jax.jit(jax.grad(loss(got)))(x), jax.grad(loss(witness))(x))


def test_a_rule_that_depends_on_the_linear_argument_runs_at_zero():
    f = vjp_rule(loop, lambda r, ct: ((2 + r[0]) * ct,))
    assert jax.grad(f)(3.0) == 5.0
    assert jax.linear_transpose(f, 3.0)(1.0) == (2.0,)


def _affine(w, x, b):
    return jnp.tanh(w) @ x + b


@pytest.mark.parametrize("custom_jvp", [jax.custom_jvp, eqg.custom_jvp])
def test_an_affine_function_of_a_tangent_and_of_zero(custom_jvp):
    """A term that is an operand may be zero. The witness: the function without rules."""
    affine = vjp_rule(_affine, lambda r, ct: (None, jnp.tanh(r[0]).T @ ct, ct))
    w, x = jnp.array([[0.5, -1.0], [0.3, 0.2]]), jnp.array([0.4, 0.7])

    def gradients(layer, custom_jvp):
        f = custom_jvp(lambda x: layer(w, x, jnp.ones(2)))
        define = getattr(f, "def_jvp", None) or f.defjvp
        define(lambda p, t: (f(*p), layer(w, t[0], jnp.zeros(2))))
        loss = lambda x: jnp.sum(jnp.sin(f(x)))
        steps = lambda x: jax.lax.scan(lambda h, _: (f(h), None), x, None, 2)[0]
        return [
            jax.jit(jax.grad(loss))(x),
            jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x])),
            jax.grad(lambda x: jnp.sum(steps(x)))(x),
            jax.hessian(loss)(x),
            *jax.linear_transpose(lambda x: layer(w, x, jnp.zeros(2)), x)(x),
        ]

    expected = gradients(_affine, jax.custom_jvp)
    for one, other in zip(gradients(affine, custom_jvp), expected, strict=True):
        assert_close(one, other)


def test_what_is_surely_not_linear_is_an_error():
    adds_one = jvp_rule(lambda x, y: x + y + 1.0, lambda p, t: t[0] + t[1])
    multiply = jvp_rule(lambda x, y: x * (x + y), lambda p, t: t[0])
    for f, match in ((adds_one, "it adds something"), (multiply, "a tangent by a tangent")):
        with pytest.raises(eqg.RuleError, match=match):
            jax.linear_transpose(lambda x: f(x, jnp.zeros(2)), jnp.ones(2))(jnp.ones(2))  # noqa: B023
