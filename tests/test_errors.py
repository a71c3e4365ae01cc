"""Errors say what is wrong with a rule while it is traced: where, which leaf, what to do."""

import pathlib
import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError
from jax.experimental import pallas as pl  # noqa: TID251


HERE = pathlib.Path(__file__).name
X = jnp.array([1.0, 2.0, 3.0])


def forward(fn, rule, **options):
    decorated = eqg.custom_jvp(fn)
    decorated.def_jvp(rule, **options)
    return decorated


def reverse(fn, fwd, bwd):
    decorated = eqg.custom_vjp(fn)
    decorated.def_fwd(fwd)
    decorated.def_bwd(bwd)
    return decorated


def square(x):
    return x**2


@jax.custom_vjp
def jax_double(t):
    return 2 * t


jax_double.defvjp(lambda t: (2 * t, None), lambda _, ct: (2 * ct,))


def doubled_twice(t):
    step = lambda state: (2 * state[0], state[1] + 1)
    return jax.lax.while_loop(lambda state: state[1] < 2, step, (t, 0))[0]


def stopped_in_scan(t):
    return jax.lax.scan(lambda c, _: (jax.lax.stop_gradient(c), None), t, None, 2)[0]


def fails(fn, *args, match):
    """The same error in every order of transformations, with the place of the rule."""
    loss = lambda *args: sum(
        jnp.sum(leaf) for leaf in jax.tree.leaves(fn(*args)) if eqx.is_inexact_array(leaf)
    )
    for transform in (
        lambda: eqx.filter_grad(lambda args: loss(*args))(args),
        lambda: eqx.filter_jit(eqx.filter_grad(lambda args: loss(*args)))(args),
        lambda: eqx.filter_grad(eqx.filter_jit(lambda args: loss(*args)))(args),
        lambda: eqx.filter_vmap(
            eqx.filter_grad(lambda args: loss(*args)), in_axes=None, axis_size=2
        )(args),
    ):
        with pytest.raises(RuleError, match=match) as info:
            transform()
        assert re.search(rf'{HERE}", line \d+', str(info.value))
        assert len(str(info.value).splitlines()) >= 3


def test_an_error_reads_well():
    def norm(x):
        return {"direction": x / jnp.sqrt(jnp.sum(x**2))}

    def norm_jvp(primals, tangents):
        return norm(*primals), {"direction": jnp.sum(tangents[0])}

    with pytest.raises(RuleError, match="does not fit its output") as info:
        jax.jvp(forward(norm, norm_jvp), (X,), (X,))
    lines = str(info.value).splitlines()
    assert lines[0] == (
        "The forward rule `norm_jvp` of `norm` returned a tangent that does not fit its output."
    )
    assert lines[1] == (
        "  at out['direction']: the output is float32[3], the tangent is float32[]"
    ).replace("float32", str(X.dtype))
    assert re.fullmatch(rf'  in `norm_jvp`, file ".*{HERE}", line \d+', lines[2])
    assert lines[3] == "A tangent has the shape of its value. Did a sum drop an axis?"


class TestForwardRule:
    @pytest.mark.parametrize(
        ("tangent", "match"),
        [
            (lambda x, t: t**2, "raises a tangent to the power 2"),
            (lambda x, t: jnp.sin(t), "applies `sin` to a tangent"),
            (lambda x, t: 2 * x * t + 1, "adds something that no tangent multiplies"),
            (lambda x, t: 2 * x, "returns something that no tangent multiplies"),
            (lambda x, t: x / (1 + t), "divides by a tangent|adds something"),
            (lambda x, t: jnp.outer(t, t)[0], "multiplies a tangent by a tangent"),
            (lambda x, t: jax.lax.cond(True, jnp.tanh, jnp.negative, t), "applies `tanh`"),
            (
                lambda x, t: jax.lax.scan(lambda c, _: (c * c, None), t, None, 2)[0],
                "multiplies a tangent by a tangent",
            ),
            (lambda x, t: jnp.where(t > 0, t, 0.0), "applies `gt` to a tangent"),
            (lambda x, t: t.astype(int).astype(t.dtype), "casts a tangent to int"),
            (
                lambda x, t: jax.lax.cond(t[0] > 0, lambda t: t, lambda t: 2 * t, t),
                "applies `gt` to a tangent",
            ),
        ],
    )
    def test_not_linear(self, tangent, match):
        def rule(primals, tangents):
            return square(*primals), tangent(primals[0], tangents[0])

        match = rf"forward rule `rule` of `square` is not linear in its tangents: .*{match}"
        fails(forward(square, rule), X, match=match)
        # An argument without a hash, of which no check is kept: the error is the only one.
        f = forward(lambda x, options: square(x), lambda ps, ts: rule(ps[:1], ts[:1]))
        with pytest.raises(RuleError, match="not linear") as info:
            jax.jvp(lambda x: f(x, {"a"}), (X,), (X,))
        assert info.value.__context__ is None
        with pytest.raises(RuleError, match="not linear"):
            jax.jvp(forward(square, rule), (X,), (X,))

    @pytest.mark.parametrize("compile", [lambda f: f, jax.jit])
    @pytest.mark.parametrize(
        ("tangent", "match"),
        [
            (jax.lax.stop_gradient, "applies `stop_gradient` to a tangent"),
            (jax.jit(jax.lax.stop_gradient), "applies `stop_gradient` to a tangent"),
            (stopped_in_scan, "applies `stop_gradient` to a tangent"),
            (lambda t: jax.lax.top_k(t, 3)[0], "JAX can't transpose it .*top_k"),
            (
                lambda t: jnp.diag(jnp.linalg.cholesky(jnp.diag(t))),
                "JAX can't transpose it .*cholesky",
            ),
            (doubled_twice, "JAX can't transpose it .*while_loop"),
            (jax_double, "JAX can't transpose it .*custom_vjp"),
        ],
    )
    def test_without_a_transpose(self, tangent, match, compile):
        def rule(primals, tangents):
            return square(*primals), tangent(2 * primals[0] * tangents[0])

        f = forward(square, rule)
        match = f"forward rule `rule` of `square` was used in reverse mode.*: .*{match}"
        with pytest.raises(RuleError, match=match):
            compile(jax.grad(lambda x: jnp.sum(f(x))))(X)
        _, t = compile(lambda x: jax.jvp(f, (x,), (x,)))(X)  # as in JAX, forward mode runs
        assert jnp.array_equal(t, tangent(2 * X * X))

    def test_an_operation_without_a_transpose_whose_result_no_tangent_needs(self):
        def rule(primals, tangents):
            top = jax.lax.top_k(primals[0], 3)[0] + 0 * jax.lax.stop_gradient(primals[0])
            return square(*primals), 2 * jnp.flip(top) * tangents[0]

        x = jnp.arange(3.0)
        gradient = jax.grad(lambda x: jnp.sum(forward(square, rule)(x)))
        assert jnp.allclose(gradient(x), 2 * x)

    @pytest.mark.slow
    def test_linear_rules_are_not_accused(self):
        weight = jnp.ones((3, 3))
        maps = [
            lambda x, t: weight @ t,
            lambda x, t: jnp.where(x > 1, t, 0.0),
            lambda x, t: jnp.where(x > 1, t, jnp.zeros(3)) / x,
            lambda x, t: jnp.zeros(3).at[1].set(t[0]),
            lambda x, t: jnp.zeros(3).at[jnp.array([0, 1])].add(t[:2]),
            lambda x, t: jnp.concatenate([t[:1], jnp.zeros(2)]),
            lambda x, t: jnp.cumsum(t) - jnp.flip(t) + jnp.roll(t, 1),
            lambda x, t: jax.lax.scan(lambda c, s: (c + s, c * 2), jnp.zeros(()), t)[1],
            lambda x, t: jax.jvp(square, (x,), (t,))[1],
            lambda x, t: jax.jit(jnp.negative)(t) + x * t,
            lambda x, t: jax.lax.cond(x[0] > 0, lambda t: 2 * t, lambda t: t * x, t),
            lambda x, t: jax.vmap(lambda a, b: a * b)(x, t),
            lambda x, t: jnp.linalg.solve(weight + jnp.eye(3), t),
            lambda x, t: jnp.real(jnp.fft.ifft(jnp.fft.fft(t))).astype(t.dtype),
            lambda x, t: jnp.convolve(t, x, mode="same"),
            lambda x, t: jax.lax.fori_loop(0, 3, lambda i, t: t * x, t),
            lambda x, t: jnp.zeros_like(x),
            lambda x, t: None,
            lambda x, t: t[jnp.argsort(x)],
            lambda x, t: jnp.einsum("i,j->i", t, x),
            lambda x, t: -t + sum(t * i for i in range(3)),
        ]
        for tangent in maps:
            f = forward(
                square, lambda p, ts, tangent=tangent: (square(*p), tangent(p[0], ts[0]))
            )
            jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(X)
            jax.jvp(f, (X,), (X,))
            jax.grad(lambda x, f=f: jnp.sum(f(x)))(X)


def test_a_function_that_looks_at_values_can_be_used_eagerly():
    def branch(x):
        return jnp.sin(x) if x > 0 else jnp.cos(x)

    f = forward(branch, lambda p, t: (branch(*p), 2 * t[0] if p[0] > 0 else 3 * t[0]))
    assert (jax.grad(f)(1.0), jax.grad(f)(-1.0)) == (2.0, 3.0)


def test_a_rule_that_differentiates_its_own_function():
    class Scaled(eqx.Module):
        weight: jax.Array

        @eqg.custom_jvp
        def __call__(self, x):
            return jnp.sin(self.weight * x)

        @__call__.def_jvp
        def rule(primals, tangents):
            return eqx.filter_jvp(lambda self, x: self(x), primals, tangents)

    with pytest.raises(RecursionError, match="recursion") as error:
        jax.grad(Scaled(jnp.array(2.0)))(1.0)
    [note] = [n for n in error.value.__notes__ if "is called inside itself" in n]
    assert "Move the body into a function without a rule" in note


def _accumulate(x, out):
    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros_like(out)

    out[...] += jnp.sum(x[...])


def kernel_sum(x):
    """JAX's forward mode of a kernel with a grid is a bare `AssertionError`."""
    blocks = {"in_specs": [pl.BlockSpec((2,), lambda i: (i,))]}
    blocks["out_specs"] = pl.BlockSpec((1,), lambda i: (0,))
    out = jax.ShapeDtypeStruct((1,), x.dtype)
    return pl.pallas_call(_accumulate, out, grid=(2,), interpret=True, **blocks)(x)


def host_sum(x):
    out = jax.ShapeDtypeStruct((1,), x.dtype)
    return jax.pure_callback(lambda x: np.sum(x, keepdims=True), out, x)


class TestForwardModeOfTheFunctionItself:
    @pytest.mark.parametrize(
        ("fn", "reason"), [(kernel_sum, "AssertionError"), (host_sum, "ValueError: Pure callb")]
    )
    @pytest.mark.parametrize(
        "derive",
        [
            lambda f, x: jax.jvp(f, (x,), (x,)),
            lambda f, x: jax.jit(jax.jacfwd(f))(x),
            lambda f, x: jax.hessian(lambda x: jnp.sum(f(x) ** 2))(x),
        ],
    )
    def test_says_so_and_names_the_way_out(self, fn, reason, derive):
        f = reverse(fn, lambda x: (f(x), x), lambda x, ct: (jnp.broadcast_to(ct, x.shape),))
        x = jnp.arange(4.0)
        assert jnp.array_equal(jax.grad(lambda x: jnp.sum(f(x)))(x), jnp.ones(4))
        match = rf"(?s)Forward mode of `{fn.__name__}` diff.*{reason}.*`def_jvp` of `eqx_grads"
        with pytest.raises(RuleError, match=match):
            derive(f, x)
        f.def_jvp(lambda primals, tangents: (f(*primals), jnp.sum(*tangents, keepdims=True)))
        derive(f, x)

    def test_an_error_that_names_its_cause_stays_and_gets_a_note(self):
        fn = lambda x: eqg.nondifferentiable(x, "the key")
        f = reverse(fn, lambda x: (x, None), lambda _, ct: (ct,))
        with pytest.raises(RuleError, match="the key was differentiated") as caught:
            jax.jvp(f, (1.0,), (1.0,))
        assert "differentiates the function itself" in caught.value.__notes__[0]
