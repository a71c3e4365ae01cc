"""Programs compiled as users do, without the flags of the other tests: the cost of a rule is
that of raw JAX, and representative ops keep the contract."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .guard import test_contract as contract
from .helpers import temp_bytes


pytestmark = pytest.mark.cost

N = 64


def heavy(x, y):
    return jnp.tanh(x @ x) * y + jnp.sum(y)


def heavy_tangent(x, y, t_x, t_y):
    return (1 - jnp.tanh(x @ x) ** 2) * (t_x @ x + x @ t_x) * y + (
        jnp.tanh(x @ x) * t_y + jnp.sum(t_y)
    )


def heavy_cotangents(residuals, ct):
    x, y, tanh = residuals
    inner = (1 - tanh**2) * y * ct
    return inner @ x.T + x.T @ inner, tanh * ct + jnp.sum(ct)


def heavy_fwd(x, y):
    tanh = jnp.tanh(x @ x)
    return tanh * y + jnp.sum(y), (x, y, tanh)


eqg_jvp, raw_jvp = eqg.custom_jvp(heavy), jax.custom_jvp(heavy)
eqg_jvp.def_jvp(lambda p, t: (eqg_jvp(*p), heavy_tangent(*p, *t)))
raw_jvp.defjvp(lambda p, t: (raw_jvp(*p), heavy_tangent(*p, *t)))

eqg_vjp, raw_vjp = eqg.custom_vjp(heavy), jax.custom_vjp(heavy)
eqg_vjp.def_fwd(heavy_fwd)
eqg_vjp.def_bwd(heavy_cotangents)
raw_vjp.defvjp(heavy_fwd, heavy_cotangents)


def flops(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


ARGS = (jnp.ones((N, N)), jnp.ones((N, N)))
SCANNED = lambda f: lambda x, ys: jax.lax.scan(lambda c, y: (f(c, y), None), x, ys)[0]
OF_SQUARE = lambda f: lambda *args: jnp.sum(f(*args) ** 2)
BATCH = (ARGS[0], jnp.stack([ARGS[1]] * 7))
MODES = {
    "value": lambda f, argnums: f,
    "grad": lambda f, argnums: jax.grad(OF_SQUARE(f), argnums),
    "grad(jit)": lambda f, argnums: jax.grad(OF_SQUARE(jax.jit(f)), argnums),
    "vmap(grad)": lambda f, argnums: jax.vmap(jax.grad(OF_SQUARE(f), argnums), (None, 0)),
    "grad(scan)": lambda f, argnums: jax.grad(OF_SQUARE(SCANNED(f)), argnums),
    "grad(jit(scan))": lambda f, argnums: jax.grad(OF_SQUARE(jax.jit(SCANNED(f))), argnums),
}


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pair", [(eqg_jvp, raw_jvp), (eqg_vjp, raw_vjp)], ids=["jvp", "vjp"])
def test_as_raw_jax(pair, mode, argnums):
    ours, raw = (MODES[mode](f, argnums) for f in pair)
    args = BATCH if "scan" in mode or "vmap" in mode else ARGS
    assert flops(ours, *args) == flops(raw, *args)
    assert temp_bytes(ours, *args) <= temp_bytes(raw, *args)


def test_forward_mode_through_a_reverse_rule_costs_as_autodiff():
    pushforward = lambda f: lambda *a: jax.jvp(f, a, a)
    assert flops(pushforward(eqg_vjp), *ARGS) == flops(pushforward(heavy), *ARGS)


def test_nothing_is_kept_but_the_residuals():
    """The one vector that the rule returns for each of 50 steps: that is all."""
    decay = eqg.custom_vjp(lambda x: jnp.sin(jnp.cos(jnp.exp(x))))
    decay.def_fwd(lambda x: (decay(x), None))
    decay.def_bwd(lambda _, ct: (0.5 * ct,))
    raw = jax.custom_vjp(lambda x: jnp.sin(jnp.cos(jnp.exp(x))))
    raw.defvjp(lambda x: (raw(x), None), lambda _, ct: (0.5 * ct,))

    def program(f):
        loop = lambda x: jnp.sum(jax.lax.scan(lambda c, _: (f(c), None), x, None, length=50)[0])
        return jax.grad(loop)

    x = jnp.ones(10_000)
    assert temp_bytes(program(decay), x) <= temp_bytes(program(raw), x) + 64
    assert temp_bytes(program(decay), x) < x.nbytes


def test_the_program_stays_small():
    """The rule's own equations, and a handful."""
    grad = lambda f: jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1))
    ours, raw = (str(jax.make_jaxpr(grad(f))(*ARGS)).count(" = ") for f in (eqg_vjp, raw_vjp))
    assert ours <= raw + 3


_forget = contract._forget  # the precision


@pytest.mark.parametrize("name", [*contract.ENTRIES][:: len(contract.ENTRIES) // 20])
def test_an_optimized_program_keeps_the_contract(name):
    contract.test_contract(name)
