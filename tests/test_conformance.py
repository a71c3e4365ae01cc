"""`check_rule` on every public op. `tests/guard` has the contract, without `check_rule`."""

import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads.testing._subject import FlatFunction

from .cases import CASES


# The checks of `check_rule` that compile little; `_derivatives` stands for `transforms`.
CHEAP = ("primal", "forward", "reverse", "adjoint")


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_op(name):
    case = CASES[name]
    fn, args = case.make()
    eqgt.check_rule(fn, *args, **case.options)


# Cases leave out a check by its name in `check_rule`.
def _without(check):
    return [name for name in CASES if check not in CASES[name].options.get("skip", ())]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_op_in_both_modes(name):
    case = CASES[name]
    fn, args = case.make()
    checks = [check for check in CHEAP if name in _without(check)]
    eqgt.check_rule(fn, *args, checks=checks, **{**case.options, "skip": ()})


@pytest.mark.slow
@pytest.mark.parametrize("name", _without("transforms"))
def test_op_under_jit_vmap_and_scan(name):
    """Value, tangent and cotangents at two points: eagerly, and in one program of each kind."""
    case = CASES[name]
    fn, args = case.make()
    derive, leaves = _derivatives(fn, args, case.options.get("nondifferentiable", ()))
    points = [[leaf * scale for leaf in leaves] for scale in (1.0, 0.97)]
    eager = [derive(point) for point in points]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *points)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *eager)

    @jax.jit
    def programs(stacked):
        scanned = jax.lax.scan(lambda _, point: (None, derive(point)), None, stacked)[1]
        return jax.vmap(derive)(stacked), scanned

    eqgt.assert_trees_close(jax.jit(derive)(points[0]), eager[0])
    vmapped, scanned = programs(stacked)
    eqgt.assert_trees_close(vmapped, expected)
    eqgt.assert_trees_close(scanned, expected)


def _derivatives(fn, args, nondifferentiable):
    """A function of the arrays in `fn` and `args`, and these arrays: value, tangent and
    cotangents, along directions that are the same in each call."""
    subject = FlatFunction(fn, args, {}, nondifferentiable)

    def normals(seed, xs):
        keys = jr.split(jr.key(seed), len(xs))
        return [jr.normal(key, x.shape, x.dtype) for key, x in zip(keys, xs, strict=True)]

    def derive(leaves):
        out, tangents = jax.jvp(subject.arrays, leaves, normals(1, leaves))
        _, pull_back = jax.vjp(subject.arrays, *leaves)
        return out, tangents, pull_back(normals(2, out))

    return derive, subject.leaves
