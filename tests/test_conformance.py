"""Every public op keeps the contract: `check_rule` on each, and none is missing."""

import types

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import pytest

from .cases import CASES, NOT_OPS


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


def _public_ops() -> set[str]:
    found = set()
    for prefix, namespace in (("", eqg), *_namespaces()):
        for name, obj in vars(namespace).items():
            defined = getattr(obj, "__module__", "").startswith("eqx_grads")
            if name.startswith("_") or isinstance(obj, types.ModuleType) or not defined:
                continue
            is_package = "__path__" in vars(namespace)  # else a file, which imports others
            if not is_package and obj.__module__ != namespace.__name__:
                continue
            found.add(prefix + name)
    return found


def _namespaces():
    for name in ("ste", "surrogates", "nn"):
        if hasattr(eqg, name):
            yield f"{name}.", getattr(eqg, name)


def test_none_is_missing():
    registered = {name.split(":")[0] for name in CASES} | NOT_OPS
    missing = _public_ops() - registered
    assert not missing, f"Enter these in tests/cases.py: {sorted(missing)}"
    assert not registered - _public_ops(), "There are no such ops."
