"""The registry: no public op is missing, and the references are right.

Ops whose work is done on the host are here too: the contract sees their derivatives only.
"""

import types

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .contract import cast, Flat
from .registry import ENTRIES, NOT_OPS


def public_ops():
    """The names of what the library defines, in its namespaces."""
    for prefix in ("", "losses.", "safe.", "ste.", "surrogates.", "nn."):
        namespace = getattr(eqg, prefix[:-1]) if prefix else eqg
        for name in dir(namespace):  # some names are loaded on first use
            obj = getattr(namespace, name)
            is_own = getattr(obj, "__module__", "").startswith("eqx_grads")
            if is_own and not name.startswith("_") and not isinstance(obj, types.ModuleType):
                yield prefix + name


def test_none_is_missing():
    entered, public = {name.split(":")[0] for name in ENTRIES}, set(public_ops())
    missing = sorted(public - entered - NOT_OPS)
    assert not missing, f"Enter these in tests/guard/registry: {missing}"
    unknown = sorted((entered | NOT_OPS) - public)
    assert not unknown, f"There are no such ops: {unknown}"
    assert not entered & NOT_OPS


# A reference with a derivative of its own has raw rules, and one with two modes too.
TRUE = [
    name
    for name, entry in ENTRIES.items()
    if not (entry.smooth or entry.forward or entry.own_rule) and "jvp" in entry.orders
]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUE)
def test_reference(name):
    """Its tangent agrees with differences of its value."""
    jax.config.update("jax_enable_x64", True)
    try:
        for args in (ENTRIES[name].args, ENTRIES[name].complex_args):
            if args is not None:
                check_slope(Flat(ENTRIES[name].plain, cast(args, "float64")))
    finally:
        jax.config.update("jax_enable_x64", False)


def check_slope(fn):
    rng = np.random.default_rng(0)
    directions = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in fn.leaves]
    along = jax.jit(
        lambda s: fn(*(x + s * d for x, d in zip(fn.leaves, directions, strict=True)))
    )
    h = 1e-3
    far, near = (jax.tree.map(jnp.subtract, along(s * h), along(-s * h)) for s in (2, 1))
    slopes = jax.tree.map(lambda far, near: (8 * near - far) / (12 * h), far, near)
    exact = jax.jvp(fn, fn.leaves, directions)[1]
    for slope, tangent in zip(slopes, exact, strict=True):
        size = float(np.max(np.abs(tangent), initial=1e-3))
        np.testing.assert_allclose(slope, tangent, rtol=0, atol=1e-7 * size)


def test_nondifferentiable():
    # A rule that returns no derivative is no permission.
    silent = eqg.custom_vjp(lambda x, y: x * eqg.nondifferentiable(y, "the gate"))
    silent.def_fwd(lambda x, y: (silent(x, y), y))
    silent.def_bwd(lambda y, ct: (y * ct, None))
    with pytest.raises(eqg.RuleError, match="the gate was differentiated"):
        jax.grad(silent, 1)(1.0, 2.0)
    assert jax.grad(silent)(1.0, 2.0) == 2
