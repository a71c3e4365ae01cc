"""`check_rule` on every public op. `tests/guard` has the contract, without `check_rule`."""

import inspect
import types

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads.testing._subject import FlatFunction

from .cases import CASES, NOT_OPS


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


def _public_ops() -> set[str]:
    found = set()
    for prefix, namespace in (("", eqg), *_namespaces()):
        for name, obj in inspect.getmembers(namespace):
            defined = getattr(obj, "__module__", "").startswith("eqx_grads")
            if name.startswith("_") or isinstance(obj, types.ModuleType) or not defined:
                continue
            is_package = "__path__" in vars(namespace)  # else a file, which imports others
            if not is_package and obj.__module__ != namespace.__name__:
                continue
            found.add(prefix + name)
    return found


def _namespaces():
    for name in ("losses", "safe", "ste", "surrogates", "nn"):
        if hasattr(eqg, name):
            yield f"{name}.", getattr(eqg, name)


@pytest.mark.thorough
def test_none_is_missing():
    registered = {name.split(":")[0] for name in CASES} | NOT_OPS
    missing = _public_ops() - registered
    assert not missing, f"Enter these in tests/cases: {sorted(missing)}"
    assert not registered - _public_ops(), "There are no such ops."
