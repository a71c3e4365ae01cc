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


def loop(f, x, ys):
    """Four steps of `x -> f(x, y) + x/2`."""
    return jax.lax.scan(lambda x, y: (f(x, y) + 0.5 * x, None), x, ys)[0]


@composition
def eager_grad(f):
    return jax.grad(f, (0, 1))(x(), x())


@composition
def jit_of_grad_of_scan(f):
    return jax.jit(jax.grad(lambda x, ys: loop(f, x, ys), (0, 1)))(x(), ys())


@composition
def grad_of_jit_of_scan(f):
    return jax.grad(jax.jit(lambda x, ys: loop(f, x, ys)), (0, 1))(x(), ys())


@composition
def scan_of_jit(f):
    return jax.grad(lambda x, ys: loop(jax.jit(f), x, ys), (0, 1))(x(), ys())


@composition
def vmap_of_grad_of_jit_of_scan(f):
    grad = jax.grad(jax.jit(lambda x, ys: loop(f, x, ys)), (0, 1))
    return jax.vmap(grad, in_axes=(0, None))(xs(), ys())


@composition
def vjp_of_vmap_of_scan(f):
    """https://github.com/jax-ml/jax/issues/5832"""
    batched = jax.vmap(lambda x, ys: loop(f, x, ys), in_axes=(0, None))
    out, pull_back = jax.vjp(batched, xs(), ys())
    return out, pull_back(jnp.cos(out))


@composition
def scan_of_checkpoint(f):
    return jax.jit(jax.grad(lambda x, ys: loop(jax.checkpoint(f), x, ys), (0, 1)))(x(), ys())


@composition
def checkpoint_of_scan(f):
    return jax.jit(jax.grad(jax.checkpoint(lambda x, ys: loop(f, x, ys)), (0, 1)))(x(), ys())


@composition
def scan_of_checkpoint_of_scan(f):
    """Checkpoints on two levels, as a checkpointed while loop has them."""
    inner = jax.checkpoint(lambda x, ys: (loop(f, x, ys), None))
    outer = lambda x, ys: jax.lax.scan(inner, x, ys)[0]
    return jax.grad(jax.jit(outer), (0, 1))(x(), ys().reshape(2, 2))


@composition
def forward_mode(f):
    """https://github.com/jax-ml/jax/issues/3996"""
    push = lambda x, y: jax.jvp(f, (x, y), (y, x))
    return push(x(), x()), jax.jit(push)(x(), x())


@composition
def forward_mode_of_jit_of_scan(f):
    return jax.jvp(jax.jit(lambda x, ys: loop(f, x, ys)), (x(), ys()), (x(), ys()))


@composition
def jacfwd_and_jacrev(f):
    vector = lambda xs: loop(f, xs, ys())
    return jax.jacfwd(vector)(xs()), jax.jacrev(vector)(xs())


@composition
def linearize_and_transpose(f):
    vector = lambda xs: f(xs, ys())
    out, push = jax.linearize(vector, xs())
    return out, push(ys()), jax.linear_transpose(push, xs())(ys())


@composition
def grad_of_grad_of_scan(f):
    return jax.grad(jax.grad(lambda x: loop(f, x, ys())))(x())


@composition
def hessian_of_scan(f):
    return jax.jit(jax.hessian(lambda x, ys: loop(f, x, ys), (0, 1)))(x(), ys())


@composition
def hessian_of_jit(f):
    return jax.hessian(jax.jit(f), (0, 1))(x(), x())


@composition
def grad_of_jvp(f):
    return jax.jit(jax.grad(lambda x: jax.jvp(f, (x, x), (x, x))[1]))(x())


@composition
def cond_and_switch(f):
    def branching(x, flag):
        y = jax.lax.cond(flag, f, lambda x, y: x + y, x, x)
        return jax.lax.switch(flag.astype(int), [f, lambda x, y: x * y], x, y)

    grad = jax.jit(jax.grad(branching))
    return grad(x(), jnp.array(True)), grad(x(), jnp.array(False))


@composition
def while_loop_in_forward_mode(f):
    def repeat(x, y):
        step = lambda state: (state[0] + 1, f(state[1], y))
        return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]

    return jax.jvp(jax.jit(repeat), (x(), x()), (x(), x()))


@composition
def fori_loop_and_map(f):
    def loss(x, ys):
        x = jax.lax.fori_loop(0, 3, lambda i, x: f(x, ys[i]), x)
        return jnp.sum(jax.lax.map(lambda y: f(x, y), ys))

    return jax.grad(jax.jit(loss), (0, 1))(x(), ys())


@composition
def unbatched_cotangent(f):
    """The backward rule under `vmap`, with a cotangent that is the same for all."""
    total = lambda xs, y: jnp.sum(jax.vmap(f, in_axes=(0, None))(xs, y))
    return jax.jit(jax.grad(total, (0, 1)))(xs(), x())


@composition
def vmap_of_scan_of_vmap(f):
    rows = jax.vmap(f, in_axes=(0, None))
    total = lambda xs, ys: jnp.sum(loop(rows, xs, ys))
    return jax.vmap(jax.grad(total, (0, 1)), in_axes=(0, None))(jnp.stack([xs(), ys()]), ys())


@composition
def ensemble_of_scan(f):
    total = lambda x: jnp.sum(eqx.filter_vmap(lambda x: loop(f, x, ys()))(x))
    return eqx.filter_jit(eqx.filter_value_and_grad(total))(xs())


@composition
def filter_transforms(f):
    loss = lambda args: loop(f, *args)
    inner = eqx.filter_jit(eqx.filter_grad(loss))((x(), ys()))
    outer = eqx.filter_grad(eqx.filter_jit(loss))((x(), ys()))
    return inner, outer, eqx.filter_jvp(loss, ((x(), ys()),), ((x(), None),))


@composition
def filter_checkpoint(f):
    """The arrays are operands: see `filter_checkpoint_of_a_module` for how else it can go."""
    body = lambda x, y: (eqx.filter_checkpoint(f)(x, y), None)
    loss = lambda x, ys: jax.lax.scan(body, x, ys)[0]
    return jax.jit(jax.grad(loss, (0, 1)))(x(), ys())


def sharded(f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    split = Spec("i")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(split, split), out_specs=split)
    return lambda xs, ys: jnp.sum(jnp.sin(mapped(xs, ys)))


@composition
def shard_map_eager(f):
    return jax.grad(sharded(f), (0, 1))(xs(), ys())


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
