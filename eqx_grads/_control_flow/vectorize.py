"""Whether a step may run again, and whether `jax.vmap` over time computes what the steps do.

The reasons are predicates: "a step has side effects".
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._jaxprs.structure import Cond, equations, found, holds, inner_programs, While


def why_not_recomputed(effects: Iterable[Any], mesh_axes: bool = False) -> str | None:
    """Why a program with these effects must run once and as it is; `None` if it may be run
    again, or in part. Sums over the axes of the mesh are allowed if `mesh_axes`."""
    allowed = jax.sharding.get_abstract_mesh().axis_names if mesh_axes else ()
    names = [getattr(effect, "name", None) for effect in effects]
    names = [name for name in names if name not in allowed]
    if not names:
        return None
    for name in names:
        if _is_axis(name):
            return f"communicates over the named axis {name!r}"
    return "has side effects, which have to happen once each"


def _is_axis(name: Any) -> bool:
    """Whether an effect is named after an axis. The effect of a `jax.new_ref` is not."""
    try:
        jax.lax.axis_size(name)
    except (NameError, TypeError):
        return False
    return True


def why_not_vectorized(program: ClosedJaxpr) -> str | None:
    """Why `jax.vmap` over time does not compute what the steps compute one after another;
    `None` if it does."""
    if holds(program, "pure_callback"):
        return "calls the host (`jax.pure_callback`)"
    if holds(program, *_NOT_BATCHED):
        return "has an operation that JAX can't vectorize"
    if any(map(_draws_bits_of_a_batch, list(equations(program)))):
        return "draws random bits that are different under `jax.vmap`"
    # Under `vmap` all branches run, and the body of a loop runs for all elements until the
    # last one is done. A loop in there may not end for values that it is not meant for
    # (https://github.com/jax-ml/jax/issues/2947, open in JAX 0.12).
    for eqn in found(program, Cond, While):
        if any(holds(inner, While) for inner in inner_programs(eqn)):
            where = "another" if eqn.primitive.name == "while" else "a branch of a `cond`"
            return f"has a `while_loop` in {where}"
    return None


# The gradient of the second one has no batching rule in JAX 0.10 to 0.12.
_NOT_BATCHED = ("ffi_call", "ragged_dot_general")


def _draws_bits_of_a_batch(eqn: Any) -> bool:
    """Whether an equation may draw random bits that are different under `vmap`.

    Each threefry key has its own bits. XLA's generators (`rbg`, `unsafe_rbg`) draw the bits of
    a whole batch from its first key, in all versions of JAX that we support
    (https://github.com/jax-ml/jax/pull/20094). Nothing is known of other implementations.
    """
    draws = eqn.primitive.name in ("rng_bit_generator", "rng_uniform")
    return draws or any(map(_is_other_key, eqn.invars))


def _is_other_key(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return dtype != jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
