"""The transpose of a linear function with rules: its rules give it (clause 12 of the contract).

The functions double their argument in a `while` loop, which JAX can't transpose. The witness is
the same program with `2 * t`.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as Spec

from .helpers import (
    assert_close,
    fails_with_remat3,
    REMAT3_HAS_NO_TRANSPOSE,
)


def loop(t):
    return jax.lax.while_loop(lambda s: s[1] < 1, lambda s: (2 * s[0], s[1] + 1), (t, 0))[0]


double = eqg.custom_vjp(loop)
double.def_fwd(lambda t: (double(t), None))
double.def_bwd(lambda _, ct: (2 * ct,))


def both_modes():
    f = eqg.custom_vjp(loop)
    f.def_fwd(lambda t: (f(t), None))
    f.def_bwd(lambda _, ct: (2 * ct,))
    f.def_jvp(lambda p, t: (f(*p), f(*t)))
    return f


def forward():
    f = eqg.custom_jvp(loop)
    f.def_jvp(lambda p, t: (f(*p), 2 * t[0]))
    return f


def calls_itself_backward():
    f = eqg.custom_vjp(loop)
    f.def_fwd(lambda t: (f(t), None))
    f.def_bwd(lambda _, ct: (f(ct),))
    return f


def of_jax_forward():
    f = eqg.jax_custom_jvp(loop)
    f.defjvp(lambda p, t: (f(*p), 2 * t[0]))
    return f


def of_jax_backward():
    f = eqg.jax_custom_vjp(loop)
    f.defvjp(lambda t: (f(t), None), lambda _, ct: (2 * ct,))
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
    "def_jvp": both_modes,
    "custom_jvp": forward,
    "calls itself": calls_itself_backward,
    "elementwise": lambda: eqg.elementwise(lambda ans, x: 2.0)(loop),
    "custom_gradient": lambda: eqg.custom_gradient(lambda t: (loop(t), lambda ct: 2 * ct)),
    "jax_custom_jvp": of_jax_forward,
    "jax_custom_vjp": of_jax_backward,
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


ORDERS = {
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third": lambda f: jax.grad(jax.hessian(f)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order(order):
    derivative = ORDERS[order]
    assert_close(derivative(sine_of(double))(0.5), derivative(lambda x: jnp.sin(2 * x))(0.5))


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


class Map(eqx.Module):
    matrix: jax.Array

    @eqg.custom_vjp
    def __call__(self, x, *, scale):
        out = scale * loop(self.matrix @ x["a"])
        return {"y": out, "n": jnp.arange(2), "sum": jnp.sum(out)}

    @__call__.def_fwd
    def _call_fwd(self, x, *, scale):
        return self(x, scale=scale), (self, x)

    @__call__.def_bwd
    def _call_bwd(residuals, ct, *, scale):
        self, x = residuals
        ct_y = 2 * scale * (ct["y"] + ct["sum"])
        return (
            eqg.tangents.of(self, matrix=jnp.outer(ct_y, x["a"])),
            {"a": self.matrix.T @ ct_y},
        )


MATRIX = jnp.array([[0.5, -1.0, 0.3], [0.2, 0.7, -0.4]])
X = {"a": jnp.array([1.0, -0.5, 2.0])}


def test_a_method_with_trees_and_keyword_arguments():
    """Linear in the second of its arguments, and differentiated in the first as well."""

    def back(matrix, ct):
        f = lambda x: Map(matrix)(x, scale=3.0)["y"]
        return jax.linear_transpose(f, X)(ct)[0]["a"]

    witness = lambda matrix, ct: 6.0 * (matrix.T @ ct)
    ct = jnp.array([1.0, 2.0])
    assert_close(back(MATRIX, ct), witness(MATRIX, ct))
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))
    for derivative in (jax.grad, jax.hessian):
        got = jax.jit(derivative(loss(back), (0, 1)))(MATRIX, ct)
        assert_close(got, derivative(loss(witness), (0, 1))(MATRIX, ct), eps=100)


def test_a_bilinear_function():
    """Each term of the rule applies it to one tangent and to one value."""
    product = eqg.custom_vjp(lambda a, b: loop(a) * b)
    product.def_fwd(lambda a, b: (product(a, b), (a, b)))
    product.def_bwd(lambda r, ct: (2 * ct * r[1], 2 * ct * r[0]))
    f = eqg.custom_jvp(lambda a, b: 2 * a * b)
    f.def_jvp(lambda p, t: (f(*p), product(t[0], p[1]) + product(p[0], t[1])))
    got, witness = (lambda a, b: jnp.sin(f(a, b))), (lambda a, b: jnp.sin(2 * a * b))
    for derivative in (jax.grad, jax.hessian, lambda f, n: jax.jacrev(jax.grad(f, n), n)):
        assert_close(derivative(got, (0, 1))(0.3, 0.4), derivative(witness, (0, 1))(0.3, 0.4))


def test_a_batching_rule_of_a_linear_function():
    f = eqg.custom_vjp(loop)
    f.def_fwd(lambda t: (f(t), None))
    f.def_bwd(lambda _, ct: (2 * ct,))
    f.def_vmap(lambda axis_size, batched, t: (double(t), batched[0]))
    x = jnp.array([0.3, 0.7])
    got = jax.grad(lambda x: jnp.sum(jax.vmap(sine_of(f))(x)))(x)
    assert_close(got, 2 * jnp.cos(2 * x))


def test_outputs_without_a_cotangent():
    seen = []
    f = eqg.custom_vjp(lambda x: (loop(x), loop(loop(x)), jnp.array(1)))
    f.def_fwd(lambda x: (f(x), None))

    @f.def_bwd(symbolic_zeros=True)
    def bwd(_, cts):
        seen.append([ct is None for ct in cts])
        return (2 * cts[0],)

    assert_close(jax.linear_transpose(lambda x: f(x)[0], 1.0)(1.5)[0], jnp.array(3.0))
    assert seen == [[False, True, True]]


def test_a_rule_without_a_derivative():
    f = eqg.custom_jvp(loop)
    f.def_jvp(lambda p, t: (f(*p), None))
    assert jax.linear_transpose(f, 1.0)(1.0) == (0.0,)


def test_a_rule_that_depends_on_the_linear_argument_runs_at_zero():
    f = eqg.custom_vjp(loop)
    f.def_fwd(lambda x: (f(x), x))
    f.def_bwd(lambda x, ct: ((2 + x) * ct,))
    assert jax.grad(f)(3.0) == 5.0
    assert jax.linear_transpose(f, 3.0)(1.0) == (2.0,)


def test_a_rule_that_applies_its_own_function_to_a_tangent_says_nothing_of_the_transpose():
    f, g = eqg.custom_jvp(lambda t: 2 * t), eqg.custom_jvp(lambda t: 3 * t)
    f.def_jvp(lambda p, t: (f(*p), 2 / 3 * g(*t)))
    g.def_jvp(lambda p, t: (g(*p), 3 / 2 * f(*t)))
    assert_close(jax.linear_transpose(f, 1.0)(1.0)[0], jnp.array(2.0))
    assert_close(jax.jit(jax.grad(sine_of(g)))(0.5), 3 * jnp.cos(1.5))


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


def test_a_step_that_is_replayed():
    """Replay transposes what a backward rule does with a cotangent, and transposes it back."""

    @eqg.custom_vjp
    def product(w, h):
        return w * h

    product.def_fwd(lambda w, h: (product(w, h), (w, h)))
    product.def_bwd(lambda r, ct: (eqg.scale_gradient(r[1] * ct, 0.5), r[0] * ct))

    def loss(w, scan):
        step = lambda h, x: (jnp.tanh(product(w, h) + x), None)
        return jnp.sum(scan(step, jnp.ones(2), jnp.ones((3, 2)))[0])

    w = jnp.array([0.4, 0.6])
    replay = lambda *args: eqg.filter_scan(*args, checkpoint="replay")
    for derivative in (jax.grad, jax.hessian):
        assert_close(derivative(loss)(w, replay), derivative(loss)(w, jax.lax.scan))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    x, weight = jnp.linspace(-1.0, 1.0, 8), jnp.array(0.7)

    def loss(g):
        local = lambda w, x: sine_of(g)(w * x)
        specs = {"in_specs": (Spec(), Spec("i")), "out_specs": Spec("i")}
        sharded = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
        return lambda *args: jnp.sum(sharded(*args))

    expected = jax.grad(lambda w, x: jnp.sum(jnp.sin(2 * w * x)), (0, 1))(weight, x)
    assert_close(jax.jit(jax.grad(loss(double), (0, 1)))(weight, x), expected)


def test_errors():
    sine = eqg.custom_jvp(jnp.sin)
    sine.def_jvp(lambda p, t: (sine(*p), jnp.cos(p[0]) * t[0]))
    with pytest.raises(eqg.RuleError, match="transposed, and is not linear: it applies `sin`"):
        jax.linear_transpose(sine, 1.0)(1.0)

    def closes_over(x):
        scaled = eqg.custom_vjp(lambda y: x * y)
        scaled.def_fwd(lambda y: (scaled(y), None))
        scaled.def_bwd(lambda _, ct: (x * ct,))
        return scaled(2.0)

    with pytest.raises(eqg.RuleError, match=r"a value that it closes over.\n  at `x`, held by"):
        jax.linear_transpose(closes_over, 1.0)(1.0)
    keyword = eqg.custom_jvp(lambda x, *, y: x * y)
    keyword.def_jvp(lambda p, t, *, y: (keyword(*p, y=y), t[0] * y))
    with pytest.raises(eqg.RuleError, match=r"a keyword-only argument.\n  at `y`"):
        jax.linear_transpose(lambda y: keyword(2.0, y=y), 1.0)(1.0)


def _affine(w, x, b):
    return jnp.tanh(w) @ x + b


@pytest.mark.parametrize("custom_jvp", [jax.custom_jvp, eqg.custom_jvp])
def test_an_affine_function_of_a_tangent_and_of_zero(custom_jvp):
    """An addend that is an operand may be zero. The witness: the function without rules."""
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
