"""What the hand-written recurrent backward passes share: chunks, gates, batches, products."""

from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow.chunked_scan import near_divisor
from ..._tangent_spaces import sum_dtype


def chunk_of(xs: jax.Array) -> int:
    """How many steps to take at a time: enough rows for a matrix product to be efficient,
    few enough to stay in the cache."""
    steps, batch, _ = xs.shape
    return near_divisor(steps, min(64, max(16, 256 // max(batch, 1))))


def split_gates(x: jax.Array, n: int) -> list[jax.Array]:
    """Separate arrays, as a loop that slices one array of all gates is twice as slow."""
    return jnp.split(x, n, axis=-1)


def times(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight + bias` for all steps of a chunk at once."""
    out = x.reshape(-1, x.shape[-1]) @ weight
    out = out if bias is None else out + bias[None]
    return out.reshape(*x.shape[:-1], weight.shape[1])


def accumulator(weight: jax.Array | None, wanted: Any, states: jax.Array) -> jax.Array | None:
    """Where the gradient of a weight is summed: in single precision for half.

    Under `shard_map`, each device has a sum of its own if it has `states` of its own.
    """
    if weight is None or wanted is not True:
        return None
    return jnp.zeros_like(states, shape=weight.shape, dtype=sum_dtype(weight.dtype))


def weight_gradient(ct: jax.Array, x: jax.Array) -> jax.Array:
    """The sum over all steps and examples of the outer products `ct x`."""
    ct, x = ct.reshape(-1, ct.shape[-1]), x.reshape(-1, x.shape[-1])
    # XLA's matrix product for CPUs is slow where the left operand is contracted along its
    # first axis, and without the barrier that is what it makes of a transpose.
    return jnp.matmul(
        jax.lax.optimization_barrier(ct.T), x, preferred_element_type=sum_dtype(x.dtype)
    )


def bias_gradient(ct: jax.Array) -> jax.Array:
    """The sum over all steps and examples."""
    return jnp.sum(ct, (0, 1), dtype=sum_dtype(ct.dtype))


def fold_batch(size: int, batched: Any, xs: Any, state: Any, valid: Any) -> tuple[Any, ...]:
    """One more batch axis, in front, becomes part of the batch that is there."""

    def fold(axis):
        def fold_leaf(x, flag):
            if not flag:
                x = jnp.broadcast_to(x[None], (size, *x.shape))
            if x.shape[axis + 1] == 1:
                # No reshape, so that XLA sees the transpositions cancel that come with `vmap`.
                return jnp.moveaxis(jnp.squeeze(x, axis + 1), 0, axis)
            x = jnp.moveaxis(x, 0, axis)
            both = x.shape[axis] * x.shape[axis + 1]
            return x.reshape(*x.shape[:axis], both, *x.shape[axis + 2 :])

        return fold_leaf

    flag_xs, flag_state, flag_valid = batched
    return (
        jax.tree.map(fold(1), xs, flag_xs),
        jax.tree.map(fold(0), state, flag_state),
        jax.tree.map(fold(1), valid, flag_valid),
    )


def unfold_batch(size: int, hs: Any, last: Any) -> tuple[Any, Any]:
    """The batch axis in front again."""

    def unfold(axis):
        def unfold_leaf(x):
            if x.shape[axis] == size:
                return jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis + 1)
            x = x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :])
            return jnp.moveaxis(x, axis, 0)

        return unfold_leaf

    return jax.tree.map(unfold(1), hs), jax.tree.map(unfold(0), last)
