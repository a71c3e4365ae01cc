"""Whether `jax.vmap` of a traced program computes what calling it many times computes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, unmapped_aval

from .._jaxprs.primitives import kind_of
from .._jaxprs.structure import (
    CallWithRule,
    Cond,
    equations,
    holds,
    inner_programs,
    structure,
    While,
)


# Besides what moves elements. `random_split` and `random_fold_in` draw.
_DRAWS_NOTHING = ("random_seed", "random_wrap", "random_unwrap", "eq", "ne")


def why_not_vectorizable(program: ClosedJaxpr) -> str | None:
    """Why `jax.vmap` changes a program, as a predicate ("draws random bits"), or `None`."""
    for eqn in equations(program):
        known = structure(eqn)
        if _draws_bits_of_a_batch(eqn, known):
            return "draws random bits that are different under `jax.vmap`"
        # Under `vmap` all branches run, and the body of a loop runs for all elements until the
        # last one is done. A loop in there may not end for values that it is not meant for
        # (https://github.com/jax-ml/jax/issues/2947, open in JAX 0.12).
        if isinstance(known, Cond | While) and any(holds(p, While) for p in known.programs):
            where = "a branch of a `cond`" if isinstance(known, Cond) else "another"
            return f"has a `while_loop` in {where}"
    return None


def _draws_bits_of_a_batch(eqn: Any, known: Any) -> bool:
    """Whether an equation draws random bits that are different under `vmap`.

    Each threefry key has its own bits. XLA's generators (`rbg`, `unsafe_rbg`) draw the bits of
    a whole batch from its first key, in all versions of JAX that we support
    (https://github.com/jax-ml/jax/pull/20094). Nothing is known of other implementations.
    """
    if eqn.primitive.name in ("rng_bit_generator", "rng_uniform"):
        return True
    if not any(map(_is_other_key, eqn.invars)):
        return False
    if isinstance(kind_of(eqn).bounds, str) or eqn.primitive.name in _DRAWS_NOTHING:
        return False
    # The programs in an equation are looked at themselves. One without may draw when it is
    # compiled, as `random_gamma` does, and one with a rule when it is differentiated.
    return isinstance(known, CallWithRule) or not inner_programs(eqn)


def _is_other_key(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return dtype != jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def why_not_batched(program: ClosedJaxpr, flags: Sequence[bool]) -> str | None:
    """Why JAX can't trace `jax.vmap` of a program over the flagged inputs, or `None`."""
    axes = [0 if flag else None for flag in flags]
    types = [
        unmapped_aval(2, 0, t) if flag else t
        for t, flag in zip(program.in_avals, flags, strict=True)
    ]
    try:
        jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), axes, axis_size=2))(*types)
    except Exception as error:  # a batching rule may raise anything
        return no_batching_rule(error)
    return None


def no_batching_rule(error: Exception) -> str:
    """What JAX's error about an operation under `jax.vmap` says, as a predicate."""
    message = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"has an operation that JAX can't vectorize ({message:.200})"
