"""Whether `jax.vmap` of a traced program computes what calling it many times computes."""

import jax
from jax.extend.core import ClosedJaxpr

from .structure import Cond, equations, holds, structure, While


def why_not_vectorizable(program: ClosedJaxpr) -> str | None:
    """What differs under `jax.vmap`, as a predicate ("draws random bits"), or `None`."""
    if _draws_bits_of_a_batch(program):
        return "draws random bits that are different under `jax.vmap`"
    if _guards_a_loop(program):
        return "has a `while_loop` in a branch of a `cond`"
    return None


def _draws_bits_of_a_batch(program: ClosedJaxpr) -> bool:
    """Whether random bits are drawn that are different under `vmap`.

    Each threefry key has its own bits. XLA's generators (`rbg`, `unsafe_rbg`) draw the bits of
    a whole batch from its first key, in all versions of JAX that we support
    (https://github.com/jax-ml/jax/pull/20094). What another implementation does is not known.
    """
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype

    def draws(eqn):
        if eqn.primitive.name in ("random_bits", "random_split", "random_fold_in"):
            return eqn.invars[0].aval.dtype != threefry
        return eqn.primitive.name in ("rng_bit_generator", "rng_uniform")

    return any(draws(eqn) for eqn in equations(program))


def _guards_a_loop(program: ClosedJaxpr) -> bool:
    """Whether a `while_loop` stands in a branch of a `cond`.

    Under `vmap` all branches run, and a loop may not end for values that its branch is not
    meant for (https://github.com/jax-ml/jax/issues/2947, open in JAX 0.12)."""
    conds = [s for s in map(structure, equations(program)) if isinstance(s, Cond)]
    return any(holds(branch, While) for cond in conds for branch in cond.programs)
