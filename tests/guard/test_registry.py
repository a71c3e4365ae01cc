"""The registry: no public op is missing, and the references are right.

Ops whose work is done on the host are here too: the contract sees their derivatives only.
"""

import types

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

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


def test_tap_gradient():
    seen = []

    @jax.jit
    @jax.grad
    def gradient(x):
        tap = lambda g, n: seen.append((int(n), g["a"].tolist(), g["n"]))
        x = eqg.tap_gradient({"a": x, "n": 3}, tap, jnp.asarray(7), ordered=True)["a"]
        x = eqg.tap_gradient(2 * x, lambda g: seen.append(g.tolist()), ordered=True)
        return jnp.sum(jnp.asarray([1.5, -1]) * x)

    gradient(jnp.ones(2))
    jax.effects_barrier()
    assert seen == [[1.5, -1], (7, [3, -2], None)]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 2.0])
def test_watch_gradient(bad):
    def loss(x, y):
        x = eqg.watch_gradient(x, "early")
        x = eqg.watch_gradient({"a": 2 * x, "b": y}, "late", step=jnp.asarray(4))
        return jnp.sum(jnp.asarray([1, bad]) * x["a"]) + jnp.sum(x["b"])

    gradient = jax.jit(jax.grad(loss))
    if bad == 2:
        assert gradient(jnp.ones(2), jnp.ones(1)).tolist() == [2, 4]
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="`late`") as error:
        jax.block_until_ready(gradient(jnp.ones(2), jnp.ones(1)))
    counts = "1 NaN and 0 infinite" if np.isnan(bad) else "0 NaN and 1 infinite"
    assert "The gradient of `late` is not finite at step 4." in str(error.value)
    assert f"at late['a']: {counts} of 2 elements" in str(error.value)
    assert "late['b']" not in str(error.value)


def test_nondifferentiable():
    # A rule that returns no derivative is no permission.
    silent = eqg.custom_vjp(lambda x, y: x * eqg.nondifferentiable(y, "the gate"))
    silent.def_fwd(lambda x, y: (silent(x, y), y))
    silent.def_bwd(lambda y, ct: (y * ct, None))
    with pytest.raises(eqg.RuleError, match="the gate was differentiated"):
        jax.grad(silent, 1)(1.0, 2.0)
    assert jax.grad(silent)(1.0, 2.0) == 2


def test_initial_values():
    """Uniform between the bounds that the papers and PyTorch say."""
    key = jax.random.key(0)
    lru = eqg.nn.LRU(2, 2, 999, r_min=0.5, r_max=0.9, max_phase=3.0, key=key).cells[0][0]
    ssm = eqg.nn.SelectiveSSM(2, 2, 99, conv_size=4, key=key).cells[0][0]
    gru, radius = eqg.nn.GRU(2, 16, key=key).cells[0][0], np.exp(-np.exp(lru.log_decay))
    for x, low, high in (
        (radius**2, 0.25, 0.81), (np.exp(lru.log_phase), 0, 3), (gru.weight_hh, -0.25, 0.25),
        (ssm.convolution, -0.5, 0.5),
    ):  # fmt: skip
        assert kstest(np.ravel(x), "uniform", (low, high - low)).pvalue > 1e-3
    np.testing.assert_allclose(np.exp(2 * lru.log_gamma), 1 - radius**2, rtol=1e-5)


@pytest.mark.parametrize(
    ("keep", "kind", "n_calls"),
    [(0, "array", 6), (1, "array", 5), (2, "array", 4), (3, "array", 3), (3, "objects", 3),
     (3, "one object", 5)],
)  # fmt: skip
def test_residuals_on_the_host(keep, kind, n_calls):
    """What is not kept, or belongs to a later call, is computed again."""
    calls, one = [], types.SimpleNamespace()

    def fwd(x):
        calls.append(x)
        kept = one if kind == "one object" else types.SimpleNamespace()
        kept.cos = np.cos(x)
        return np.sin(x), kept.cos if kind == "array" else kept

    sin = eqg.host_function(np.sin, out=lambda x: x)
    sin.def_fwd(fwd, keep=keep)
    sin.def_bwd(lambda kept, ct: (getattr(kept, "cos", kept) * ct,))
    got, want = (jax.grad(lambda x, f=f: f(f(f(x))))(1.0) for f in (sin, jnp.sin))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(calls) == n_calls
