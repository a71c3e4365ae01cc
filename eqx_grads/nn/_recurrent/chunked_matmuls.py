"""Code of the backward passes of GRU, LSTM and RNN: matrix products over chunks of time."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow.chunked_scan import near_divisor, Size, size_or
from ..._rules.explicit_sharding import (
    distribute_like,
    explicit_spec,
    sharding_like,
)
from ..._tangent_spaces import sum_dtype


def chunk_length(xs: jax.Array, hidden: int) -> Size:
    """The number of steps of a chunk of the backward pass: all steps if all states together are
    so few numbers that the loop over chunks, or a second chunk, takes longer than it saves.
    Otherwise enough rows for a matrix product to be efficient, and few enough for a chunk to
    stay in the cache."""
    steps, batch, _ = xs.shape
    enough = min(64, max(16, 256 // max(size_or(batch, 64), 1)))
    few = 2**14 if size_or(steps, 2**9) < 2 * enough else 2**13
    all_at_once = size_or(steps * batch * hidden, 2**15) <= few
    return max(steps, 1) if all_at_once else near_divisor(steps, enough)


def forward_chunk(xs: jax.Array, hidden: int) -> Size | None:
    """The number of steps of a chunk of the forward pass; `None` without chunks. The
    products with the inputs are computed at once for all steps of a chunk, or step by step.

    Step by step is faster if the product of one step has several rows, and so is efficient
    already, or if it is small: then the program need not write and read the products of all
    steps.
    """
    _, batch, features = xs.shape
    at_once = size_or(batch, 64) < 4 and features * hidden >= 2**11
    return chunk_length(xs, hidden) if at_once else None


def is_small(h: jax.Array) -> bool:
    """Whether the state of a batch is so small that a step costs by the operation, not by the
    element. A step then should have few operations, and otherwise few bytes."""
    return size_or(h.size, 2**12) < 64


def matmul_of_step(
    x: jax.Array, h: jax.Array, w_in: jax.Array, w_state: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """`x @ w_in + h @ w_state + bias`.

    In a small step, where each operation costs time, this is one product of `[x, h]` with a
    joint weight. In a large step, the features of `x` or of `h` may be sharded over devices,
    and all of `[x, h]` would be moved between them. Over explicit axes, they can't be joined.
    """
    is_sharded = explicit_spec(x)[-1] is not None or explicit_spec(h)[-1] is not None
    if is_sharded or size_or(x.size + h.size, 2**12) > 2**9:
        return matmul_steps(x, w_in, bias) + h @ w_state
    return matmul_steps(jnp.concatenate([x, h], -1), jnp.concatenate([w_in, w_state]), bias)


def split_gates(x: jax.Array, n: int) -> list[jax.Array]:
    """One array for each gate. A loop whose body slices one array of all gates takes twice as
    long on a CPU."""
    return jnp.split(x, n, axis=-1)


def matmul_steps(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight + bias` for all steps of a chunk at once.

    Steps and examples stay two axes: a sharded batch would have to be gathered on each device
    to merge them into one axis.
    """
    out = x @ weight
    return out if bias is None else out + jnp.expand_dims(bias, range(out.ndim - 1))


def zero_sum(weight: Any, perturbed: Any, hs: jax.Array) -> jax.Array | None:
    """The sum over no steps of the gradient of a weight, or `None` if it is not perturbed.

    Half precision is summed in single precision. Under `shard_map`, each device has a sum of
    its own if it has states `hs` of its own.
    """
    if weight is None or perturbed is not True:
        return None
    zeros = jnp.zeros_like(hs, shape=weight.shape, dtype=sum_dtype(weight.dtype))
    return distribute_like(zeros, weight, explicit_spec(weight))


def add_gradients(
    sums: Sequence[jax.Array | None], *gradients: tuple[Any, ...]
) -> list[jax.Array | None]:
    """Add a gradient `fn(*args)` to each sum, sharded as the sum is. Without a sum, it is not
    computed."""
    pairs = zip(sums, gradients, strict=True)
    like = lambda total, g: total + distribute_like(g, total, explicit_spec(total))
    return [None if total is None else like(total, fn(*args)) for total, (fn, *args) in pairs]


def weight_gradient(ct: jax.Array, x: jax.Array) -> jax.Array:
    """The sum over all steps and examples of the outer products of `ct` and `x`."""
    if x.shape[-1] == 1:
        # XLA:CPU is slow at a product with one column, and fast at one with one row.
        return _sum_of_products(x, ct, (0, 1)).T
    if size_or(ct.size * x.shape[-1], 2**20) <= 2**12:
        # XLA calls a library for a matrix product, which takes longer than a small sum.
        return jnp.sum(ct[..., None] * x[..., None, :], (0, 1), dtype=sum_dtype(x.dtype))
    # The barrier keeps XLA from merging the transpose into the product. XLA:CPU is slow at a
    # product whose left operand is contracted along its first axis: about half as fast, with
    # JAX 0.10.2. https://github.com/jax-ml/jax/issues/19327 (open) is about such layouts.
    ct = jax.lax.optimization_barrier(jnp.moveaxis(ct, -1, 0))
    return _sum_of_products(ct, x, (1, 2))


def _sum_of_products(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contract these axes of `a`, the steps and the examples, with the first two of `b`."""
    # If the batch is sharded over an explicit mesh axis, JAX asks for the sharding of the
    # result, which is a sum over all devices.
    spec = (explicit_spec(a)[2 if axes == (0, 1) else 0], explicit_spec(b)[-1])
    return jax.lax.dot_general(
        a,
        b,
        ((axes, (0, 1)), ((), ())),
        preferred_element_type=sum_dtype(b.dtype),
        out_sharding=sharding_like(a, spec),
    )


def bias_gradient(ct: jax.Array) -> jax.Array:
    """The sum over all steps and examples."""
    return jnp.sum(ct, (0, 1), dtype=sum_dtype(ct.dtype))


def vmap_into_batch(
    layer: Callable[..., tuple[Any, Any]],
    axis_size: Size,
    batched: Sequence[Any],
    args: Sequence[Any],
    **options: Any,
) -> Any:
    """The batching rule of a layer that has a batch dimension already.

    `args` are the weights (arrays or trees), then `xs`, the state and `valid`. The new batch
    dimension of the latter three is merged into the old batch dimension, so that the gradient
    of a weight is one sum over both. If a weight is batched, the answer is `NotImplemented`:
    each example has a network of its own.
    """
    *weights, xs, state, valid = args
    *weights_batched, xs_batched, state_batched, valid_batched = batched
    if any(b is True for b in jax.tree.leaves(weights_batched)):
        return NotImplemented
    pairs = zip(
        jax.tree.leaves((xs, state, valid)),
        jax.tree.leaves((xs_batched, state_batched, valid_batched)),
        strict=True,
    )
    fold = ft.partial(_fold_batch, next(x for x, b in pairs if b))
    hs, last = layer(
        *weights,
        fold(1, xs, xs_batched),
        fold(0, state, state_batched),
        fold(1, valid, valid_batched),
        **options,
    )
    inner = xs.shape[2 if xs_batched else 1]
    unfold = ft.partial(_unfold_batch, (axis_size, inner))
    return (unfold(1, hs), unfold(0, last)), True


def _fold_batch(of_batch: Any, axis: int, tree: Any, batched: Any) -> Any:
    """Merge a batch dimension in front, which `of_batch` has, into the dimension that is at
    `axis` without it."""

    def fold(x, is_batched):
        if not is_batched:
            # By `vmap`, as the batch may be sharded over a mesh.
            x = jax.vmap(lambda _: x)(of_batch)
        if x.shape[axis + 1] == 1:
            # No reshape, so that XLA cancels this transpose with the one that `vmap` adds.
            return jnp.moveaxis(jnp.squeeze(x, axis + 1), 0, axis)
        x = jnp.moveaxis(x, 0, axis)
        both = x.shape[axis] * x.shape[axis + 1]
        return x.reshape(*x.shape[:axis], both, *x.shape[axis + 2 :])

    return jax.tree.map(fold, tree, batched)


def _unfold_batch(sizes: tuple[Size, Size], axis: int, tree: Any) -> Any:
    """The inverse of `_fold_batch`, to batch dimensions with these sizes."""

    def unfold(x):
        if sizes[1] == 1:
            return jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis + 1)
        x = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    return jax.tree.map(unfold, tree)
