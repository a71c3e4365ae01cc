"""Ops of arrays that are sharded over explicit mesh axes, against formulas without a mesh."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
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
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-6, atol=2e-6)


# ---------------------------------------------------------------- one part on each device


def gru(w, xs):
    layer = eqg.nn.GRU(3, 3, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.cells[0][0].weight_hh, layer, w)
    return layer(xs, lengths=jnp.array([5, 2, 0, 4])[: len(xs)])[0]


def gru_plain(w, xs):
    cell = eqg.nn.GRU(3, 3, key=jax.random.key(0)).cells[0][0]
    cell = eqx.tree_at(lambda cell: cell.weight_hh, cell, w)

    def one(xs, length):
        step = lambda h, x: (cell(x, h),) * 2
        ys = jax.lax.scan(step, jnp.zeros(3), xs)[1]
        return jnp.where(jnp.arange(5)[:, None] < length, ys, 0)

    return jax.vmap(one)(xs, jnp.array([5, 2, 0, 4])[: len(xs)])


def scans(loop):
    """From a carry that is the same on all devices, and with a cell that is so."""
    step = lambda w: lambda h, x: (jnp.tanh(h @ w[:3].T + x), (h, jnp.sum(w)))
    return lambda w, xs: loop(step(w), jnp.zeros((len(xs), 3)), jnp.swapaxes(xs, 0, 1))


def far(xs):
    """One device goes on for longer than the other."""
    return jnp.where(xs[0, 0, 0] > xs[1, 0, 0], 5e3, 5.0)


def root(w, xs):
    more = lambda c: jnp.sum(c**2) < far(xs)
    step = lambda c: c * (1.5 + 0.1 * jnp.sum(w) ** 2) + 0.1
    return eqg.filter_while_loop(more, step, xs, max_steps=30)


def root_plain(w, xs):
    most = far(xs)
    for _ in range(30):
        more = jnp.sum(xs**2) < most
        xs = jnp.where(more, xs * (1.5 + 0.1 * jnp.sum(w) ** 2) + 0.1, xs)
    return xs


def balance(solve):
    """With the checks of a solver."""
    step = lambda w, xs: lambda z: 0.1 * jnp.sum(w) * jnp.tanh(jnp.roll(z, 1, 1)) + xs
    return lambda w, xs: solve(step(w, xs), xs)


solver = optx.FixedPointIteration(1e-7, 1e-7)
of_steps = lambda fn, xs: ft.reduce(lambda z, _: fn(z), range(15), xs)
of_solver = lambda fn, xs: eqg.fixed_point(fn, xs, solver=solver).value


LOCAL = {
    "nn.GRU": (gru, gru_plain, (9, 3)), **{
        f"filter_scan: {method}": (
            scans(ft.partial(eqg.filter_scan, checkpoint=method)), scans(jax.lax.scan), (3, 3),
        )
        for method in (None, 2, "replay")
    }, "filter_while_loop": (root, root_plain, (2,)),
    "fixed_point": (balance(of_solver), balance(of_steps), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_parts_on_devices(name):
    fn, plain, shape = LOCAL[name]
    w, xs = jnp.asarray(normal(*shape)), jnp.asarray(normal(4, 5, 3))
    xs = xs.at[::3, 0, 0].set(1.0).at[1:3, 0, 0].set(0.5)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    def total(fn):
        return lambda w, xs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(w, xs)))

    def over_devices(w, xs):
        of_part = lambda w, xs: jax.lax.psum(total(fn)(w, xs), "i")
        return jax.shard_map(of_part, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(w, xs)

    by_hand = lambda w, xs: total(plain)(w, xs[:2]) + total(plain)(w, xs[2:])
    got = jax.jit(jax.value_and_grad(over_devices, (0, 1)))(w, xs)
    want = jax.jit(jax.value_and_grad(by_hand, (0, 1)))(w, xs)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=5e-6, atol=2e-6)
