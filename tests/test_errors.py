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

from .reports import record


HERE = pathlib.Path(__file__).name
X = jnp.array([1.0, 2.0, 3.0])


def square(x):
    return x**2


def forward(tangent):
    """`x**2` with this tangent, from the point and its tangent."""

    def rule(primals, tangents):
        return square(*primals), tangent(primals[0], tangents[0])

    decorated = eqg.custom_jvp(square)
    decorated.def_jvp(rule)
    return decorated


@jax.custom_vjp
def jax_double(t):
    return 2 * t


jax_double.defvjp(lambda t: (2 * t, None), lambda _, ct: (2 * ct,))


def doubled_twice(t):
    step = lambda state: (2 * state[0], state[1] + 1)
    return jax.lax.while_loop(lambda state: state[1] < 2, step, (t, 0))[0]


def test_an_error_reads_well():
    def norm(x):
        return {"direction": x / jnp.sqrt(jnp.sum(x**2))}

    def norm_jvp(primals, tangents):
        return norm(*primals), {"direction": jnp.sum(tangents[0])}

    decorated = eqg.custom_jvp(norm)
    decorated.def_jvp(norm_jvp)
    with pytest.raises(RuleError, match="does not fit its output") as info:
        jax.jvp(decorated, (X,), (X,))
    record(str(info.value))


def test_a_rule_that_is_not_linear():
    """The same error in every order of transformations, with the place of the rule."""
    f = forward(lambda x, t: t**2)
    total = lambda x: jnp.sum(f(x))
    match = "forward rule `rule` of `square` is not linear in its tangents: it raises a tangent"
    for derivative in (
        jax.jit(jax.grad(total)),
        jax.grad(jax.jit(total)),
        lambda x: jax.vmap(jax.grad(total))(x[None]),
        lambda x: jax.jvp(f, (x,), (x,)),
    ):
        with pytest.raises(RuleError, match=match) as info:
            derivative(X)
        assert re.search(rf'{HERE}", line \d+', str(info.value))
        assert info.value.__context__ is None


WITHOUT_A_TRANSPOSE = {
    "applies `stop_gradient` to a tangent": jax.jit(jax.lax.stop_gradient),
    "JAX can't transpose it .*top_k": lambda t: jax.lax.top_k(t, 3)[0],
    "JAX can't transpose it .*while_loop": doubled_twice,
    "JAX can't transpose it .*custom_vjp": jax_double,
}


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
@pytest.mark.parametrize("match", WITHOUT_A_TRANSPOSE)
def test_a_rule_without_a_transpose(match, around):
    tangent = WITHOUT_A_TRANSPOSE[match]
    f = forward(lambda x, t: tangent(2 * x * t))
    match = f"forward rule `rule` of `square` was used in reverse mode.*: .*{match}"
    with pytest.raises(RuleError, match=match):
        around(jax.grad(lambda x: jnp.sum(f(x))))(X)
    _, t = around(lambda x: jax.jvp(f, (x,), (x,)))(X)  # as in JAX, forward mode runs
    assert jnp.array_equal(t, tangent(2 * X * X))
    # Nothing is wrong with an operation whose result no tangent needs.
    f = forward(lambda x, t: (2 * x + 0 * tangent(x)) * t)
    assert jnp.allclose(jax.grad(lambda x: jnp.sum(f(x)))(X), 2 * X)


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


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(kernel_sum, (AssertionError, None)), (host_sum, (ValueError, "Pure callb"))],
)
def test_forward_mode_of_a_function_that_has_none(fn, reason):
    f, x = eqg.custom_vjp(fn), jnp.arange(4.0)
    f.def_fwd(lambda x: (f(x), x))
    f.def_bwd(lambda x, ct: (jnp.broadcast_to(ct, x.shape),))
    assert jnp.array_equal(jax.grad(lambda x: jnp.sum(f(x)))(x), jnp.ones(4))
    forward_modes = (
        lambda x: jax.jvp(f, (x,), (x,)),
        jax.jit(jax.jacfwd(f)),
        jax.hessian(lambda x: jnp.sum(f(x) ** 2)),
    )
    kind, message = reason
    for derivative in forward_modes:
        with pytest.raises(kind, match=message) as caught:
            derivative(x)
        notes = "\n".join(caught.value.__notes__)
        assert re.search(f"Forward mode of `{fn.__name__}` diff.*`def_jvp` of `eqx_gr", notes)
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.sum(*tangents, keepdims=True)))
    for derivative in forward_modes:
        derivative(x)


def test_an_error_that_names_its_cause_stays_and_gets_a_note():
    f = eqg.custom_vjp(lambda x: eqg.nondifferentiable(x, "the key"))
    f.def_fwd(lambda x: (x, None))
    f.def_bwd(lambda _, ct: (ct,))
    with pytest.raises(RuleError, match="the key was differentiated") as caught:
        jax.jvp(f, (1.0,), (1.0,))
    assert "differentiates the function itself" in caught.value.__notes__[0]
    f.def_fwd(lambda x: NotImplemented)  # then so does reverse mode, and needs no `def_jvp`
    with pytest.raises(RuleError, match="the key was differentiated") as caught:
        jax.grad(f)(1.0)
    assert "def_jvp" not in "".join(getattr(caught.value, "__notes__", ()))
