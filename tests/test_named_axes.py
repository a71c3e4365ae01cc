"""Functions and rules that use the named axis of a `vmap`, called without the batch.

The witness is the same program with its argument batched as well, as many copies of it: there
each example has its own value, tangent and cotangent, and nothing is computed once for all.
"""

import itertools

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest


XS = jnp.array([1.0, 2.0, 3.0])


def _index():
    return jax.lax.axis_index("i").astype(float)


USES = {
    "none": lambda x: 3 * x,
    "index": lambda x: x * (1 + _index()),
    "sum": lambda x: 2 * jax.lax.psum(x, "i"),
    "maximum": lambda x: x * jax.lax.pmax(_index(), "i"),
}


def _function(way, in_value, in_residual, in_backward, has_two_outputs):
    """A function, and rules that are none of its derivatives, which use the axis or do not."""
    of_value, of_residual, of_backward = USES[in_value], USES[in_residual], USES[in_backward]

    def value(w):
        out = of_value(jnp.sin(w))
        return (out, 2 * w) if has_two_outputs else out

    f = getattr(eqg, way)(value)
    if way == "custom_jvp":

        @f.def_jvp
        def _(primals, tangents):
            t_out = of_backward(tangents[0]) * of_residual(primals[0])
            return f(*primals), (t_out, tangents[0]) if has_two_outputs else t_out

    else:
        f.def_fwd(lambda w: (f(w), of_residual(w)))

        @f.def_bwd
        def _(residual, ct):
            first, second = ct if has_two_outputs else (ct, 0)
            return (of_backward(first) * residual + second,)

    return f


def _first(out):
    return out[0] if isinstance(out, tuple) else out


def _as_output(f):
    return lambda w: jax.lax.scan(lambda c, _: (c, f(w)), 0.0, None, length=1)[1]


def _as_carry(f):
    return lambda w: jax.lax.scan(lambda c, _: (_first(f(c)), None), w, None, length=2)[0]


WRAPS = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "output of a scan": _as_output,
    "carry of a scan": _as_carry,
}


def _gradient(wrapped, in_axis, transform):
    total = lambda w, x: x * sum(map(jnp.sum, jax.tree.leaves(wrapped(w))))
    mapped = transform(jax.vmap(total, (in_axis, 0), axis_name="i"))
    batch = (lambda w: jnp.broadcast_to(w, XS.shape)) if in_axis == 0 else lambda w: w
    return jax.grad(lambda w: jnp.sum(mapped(batch(w), XS)))(0.7)


# Each way to use the axis in each place, and one in all places.
SOME = [tuple(use if i == k else "none" for i in range(3)) for use in USES for k in range(3)]
SOME = [*dict.fromkeys(SOME), ("index", "sum", "maximum")]
QUICK = ("as it is", "carry of a scan")
CASES = [
    pytest.param(
        way,
        wrap,
        uses,
        marks=() if uses in SOME and wrap in QUICK else pytest.mark.slow,
        id=f"{way}-{wrap}-{', '.join(uses)}",
    )
    for way in ("custom_jvp", "custom_vjp")
    for wrap in WRAPS
    for uses in itertools.product(USES, repeat=3)
]


@pytest.mark.thorough
@pytest.mark.every(3)
@pytest.mark.parametrize(("way", "wrap", "uses"), CASES)
def test_gradient_of_an_argument_without_the_batch(way, wrap, uses):
    """The value, the residual (or factor of the tangent) and the cotangent use the axis."""
    for has_two_outputs, transform in itertools.product((False, True), (lambda f: f, jax.jit)):
        f = WRAPS[wrap](_function(way, *uses, has_two_outputs))
        got, want = (_gradient(f, in_axis, transform) for in_axis in (None, 0))
        eqgt.assert_trees_close(got, want, tolerance=1e-5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.checkpoint, jax.jit])
@pytest.mark.parametrize("ct", [lambda ct: (ct,), lambda ct: ct], ids=["right", "no tuple"])
def test_value_of_an_argument_without_the_batch(ct, transform):
    """The sum over the axis has no batch dimension, whatever is wrong with the backward rule.

    Such a rule is in JAX's `test_initial_style_vmap_with_collective`.
    """
    f = eqg.custom_vjp(lambda w: jax.lax.psum(w, "i"))
    f.def_fwd(lambda w: (f(w), None))
    f.def_bwd(lambda _, g: ct(g))
    run = transform(f)
    mapped = jax.vmap(lambda _, w: run(w), (0, None), None, axis_name="i")
    assert mapped(XS, 2.0) == 6.0
