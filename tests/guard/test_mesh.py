"""Ops of arrays that are sharded over explicit mesh axes, against formulas without a mesh."""

import functools as ft

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
LABELS = np.array([0, 2, -100, 3])
rng = np.random.default_rng(5)
normal = lambda *shape: rng.normal(size=shape).astype("float32")


def losses(x, w, b, labels):
    head = ft.partial(eqg.losses.linear_cross_entropy, chunk=1, label_smoothing=0.1)
    of_each = head(x, w, labels, bias=b, reduction="none")
    return head(x, w, labels, bias=b) + jnp.sum(of_each**2)


def losses_plain(x, w, b, labels):
    logits = x @ w.T + b[None]
    log_p = logits - jax.nn.logsumexp(logits, 1, keepdims=True)
    smooth = 0.9 * log_p[np.arange(4), labels] + 0.1 * jnp.mean(log_p, 1)
    each = jnp.where(labels < 0, 0, -smooth)
    return jnp.sum(each) / 3 + jnp.sum(each**2)


CASES = {
    "tokens": ((("a", "b"), None), (None, None), (None,), (("a", "b"),)),
    "tokens and words": (("a", None), ("b", None), ("b",), ("a",)),
    "words": ((None, None), (("a", "b"), None), (None,), (None,)),
    "features": ((None, "a"), (None, "a"), (None,), (None,)),
    "one axis for both": (("a", None), ("a", None), (None,), (None,)),
}
ARGS = normal(4, 2), normal(4, 2), normal(4), LABELS


@pytest.mark.parametrize("name", CASES)
def test_losses_over_explicit_axes(name):
    want = jax.value_and_grad(losses_plain, (0, 1, 2))(*map(jnp.asarray, ARGS))
    with jax.set_mesh(MESH):
        put = lambda x, spec: jax.device_put(x, NamedSharding(MESH, P(*spec)))
        args = list(map(put, ARGS, CASES[name]))
        got = jax.jit(jax.value_and_grad(losses, (0, 1, 2)))(*args)
        for x, of_arg in zip(got[1], args, strict=False):
            assert jax.typeof(x).sharding == jax.typeof(of_arg).sharding
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-5)
