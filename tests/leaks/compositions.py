"""`f(x, y) = sin(x) * y` with a rule, under every composition of transformations."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as Spec

from .registry import composition


def x():
    return jnp.array(0.7)


def ys():
    return jnp.linspace(0.5, 1.5, 4)


def xs():
    return jnp.linspace(-1.0, 1.0, 4)


def both_ways(loss, *args):
    """The gradient inside of `jit`, outside of it, and without."""
    inner = jax.jit(jax.grad(loss))(*args)
    return inner, jax.grad(jax.jit(loss))(*args), jax.grad(loss)(*args)


def loop(f, x, ys):
    """Four steps of `x -> f(x, y) + x/2`."""
    return jax.lax.scan(lambda x, y: (f(x, y) + 0.5 * x, None), x, ys)[0]


@composition
def grad_of_jit_of_scan(f):
    return jax.grad(jax.jit(lambda x, ys: loop(f, x, ys)), (0, 1))(x(), ys())


@composition
def vjp_of_vmap_of_scan(f):
    """https://github.com/jax-ml/jax/issues/5832"""
    batched = jax.vmap(lambda x, ys: loop(f, x, ys), in_axes=(0, None))
    out, pull_back = jax.vjp(batched, xs(), ys())
    return out, pull_back(jnp.cos(out))


@composition
def scan_of_checkpoint_of_scan(f):
    """Checkpoints on two levels, as a checkpointed while loop has them."""
    inner = jax.checkpoint(lambda x, ys: (loop(f, x, ys), None))
    outer = lambda x, ys: jax.lax.scan(inner, x, ys)[0]
    return jax.grad(jax.jit(outer), (0, 1))(x(), ys().reshape(2, 2))


@composition
def linearize_and_transpose(f):
    vector = lambda xs: f(xs, ys())
    out, push = jax.linearize(vector, xs())
    return out, push(ys()), jax.linear_transpose(push, xs())(ys())


@composition
def hessian_of_scan(f):
    return jax.jit(jax.hessian(lambda x, ys: loop(f, x, ys), (0, 1)))(x(), ys())


@composition
def cond_and_switch(f):
    def branching(x, flag):
        y = jax.lax.cond(flag, f, lambda x, y: x + y, x, x)
        return jax.lax.switch(flag.astype(int), [f, lambda x, y: x * y], x, y)

    grad = jax.jit(jax.grad(branching))
    return grad(x(), jnp.array(True)), grad(x(), jnp.array(False))


@composition
def vmap_of_scan_of_vmap(f):
    rows = jax.vmap(f, in_axes=(0, None))
    total = lambda xs, ys: jnp.sum(loop(rows, xs, ys))
    return jax.vmap(jax.grad(total, (0, 1)), in_axes=(0, None))(jnp.stack([xs(), ys()]), ys())


@composition
def filter_transforms(f):
    loss = lambda args: loop(f, *args)
    inner = eqx.filter_jit(eqx.filter_grad(loss))((x(), ys()))
    outer = eqx.filter_grad(eqx.filter_jit(loss))((x(), ys()))
    return inner, outer, eqx.filter_jvp(loss, ((x(), ys()),), ((x(), None),))


def sharded(f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    split = Spec("i")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(split, split), out_specs=split)
    return lambda xs, ys: jnp.sum(jnp.sin(mapped(xs, ys)))


@composition
def shard_map_in_jit(f):
    inner = jax.jit(jax.grad(sharded(f), (0, 1)))(xs(), ys())
    return inner, jax.grad(jax.jit(sharded(f)), (0, 1))(xs(), ys())


@composition
def windows_of_checkpoints(f):
    """The scan is a call with a rule, and a checkpoint is in it."""
    step = lambda x, y: (f(x, y) + 0.5 * x, None)
    scan = lambda x, ys: eqg.filter_scan(step, x, ys, checkpoint=1, truncate=2)[0]
    return jax.jit(jax.grad(scan, (0, 1)))(x(), ys())
