"""Sequences of different lengths in one batch: which steps count."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ..._errors import rule_error, type_of


def valid_steps(layer: str, lengths: Any, xs: Array, is_batch: bool) -> Array | None:
    """The `(time, batch)` mask of the steps that count, or `None` if all do."""
    if lengths is None:
        return None
    lengths = lengths if isinstance(lengths, Tracer) else np.asarray(lengths)
    steps, batch = xs.shape[:2]
    known = lengths if isinstance(lengths, np.ndarray) else np.zeros(1)
    fits = lengths.shape == ((batch,) if is_batch else ())
    fits = fits and jnp.issubdtype(lengths.dtype, jnp.integer)
    if not fits or np.any(known != known.clip(0, steps)):
        raise rule_error(
            f"`{layer}` was given `lengths` that do not fit `xs`.",
            f"`lengths` is {type_of(lengths)}: {lengths!r:.60}",
            f"`xs` is {show_batch(xs, is_batch)}",
            do="Pass one integer for each sequence: for a mask, `mask.sum(-1)`. In a "
            "`jax.vmap` over sequences, map their lengths as well: `jax.vmap(lambda x, n: "
            "layer(x, lengths=n))(xs, lengths)`. Did you swap the time axis and the batch "
            "axis? See `time_major`.",
        )
    times = jnp.arange(steps)[:, None]
    return times < jnp.asarray(lengths).astype(times.dtype).reshape(1, batch)


def where_valid(valid: Array | None, new: PyTree, old: PyTree) -> PyTree:
    """The new arrays at the steps that count, and the old ones elsewhere. `valid` has the first
    axes of the arrays."""
    if valid is None:
        return new
    mask = lambda x: jnp.expand_dims(valid, range(valid.ndim, x.ndim))
    return jax.tree.map(lambda n, o: jnp.where(mask(n), n, o), new, old)


def zero_padding(xs: PyTree, valid: Array | None) -> PyTree:
    """The arrays, with zeros at the steps that do not count."""
    zeros = None if valid is None else jax.tree.map(jnp.zeros_like, xs)  # as large as `xs`
    return where_valid(valid, xs, zeros)


def show_batch(xs: Array, is_batch: bool) -> str:
    steps, batch = xs.shape[:2]
    of_sequences = f"a batch of {batch} sequences" if is_batch else "one sequence"
    return f"{of_sequences} of {steps} steps"
