"""Why the steps of a scan can't be replayed, and why `checkpoint="auto"` does not replay them.

A replay runs steps again, and by `jax.vmap` over time. The reasons against it are predicates:
"a step has side effects".

A replay computes all steps once more, and wins where few wide matrix products replace many
narrow ones. It has to need less memory: it saves all carries, and the intermediate values of
one chunk. On an accelerator this is enough, as a step takes about 10 microseconds whatever its
size. On a CPU, a replay was faster where a step multiplies each weight with at most `_ROWS`
rows (`benchmarks/auto.py`): plain scan adds to the gradient of the weights at every step.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from .._errors import type_of
from .._jaxprs.dependence import depends, free_variables
from .._jaxprs.structure import (
    Checkpoint,
    Cond,
    equations,
    found,
    holds,
    inner_programs,
    Scan,
    structure,
    While,
)
from .accelerators import on_cpu
from .chunked_scan import near_divisor
from .traced_body import TracedBody


# ---------------------------------------------------------------- what can't be replayed


def why_not_recomputed(effects: Iterable[Any], mesh_axes: bool = False) -> str | None:
    """Why a program with these effects must run once and as it is; `None` if it may be run
    again, or in part. Sums over the axes of the mesh are allowed if `mesh_axes`."""
    allowed = jax.sharding.get_abstract_mesh().axis_names if mesh_axes else ()
    names = {getattr(effect, "name", None) for effect in effects}
    if names.issubset(allowed):
        return None
    return "has side effects, which must happen once each, or works across a named axis"


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


# ---------------------------------------------------------------- what is better


_ROWS = 20
_USES_OF_A_WEIGHT = 2  # in a step
_SLOW_IN_A_CHUNK = ("conv_general_dilated", "gather", "dynamic_slice")
_COPIES_IN_CHUNK = 3  # of the residuals, while a chunk is replayed: 2 to 4 for the cells there


def why_never_better(body: TracedBody) -> str | None:
    """Why plain scan is better, or as good, whatever the batch; `None` if it depends."""
    if body.has_symbolic_shapes:
        return "a step has symbolic shapes"
    if holds(body.program, Cond, Checkpoint):
        # In parallel, all branches are computed; and the user knows what not to save.
        return "a step has branches, or is rematerialized"
    # A CPU takes longer for the gradients of a chunk: of a kernel, and of the rows of a table.
    if on_cpu() and holds(body.program, *_SLOW_IN_A_CHUNK):
        return "a step has a convolution, or looks up rows of a table"
    return None


def why_not_better(body: TracedBody, vjp: ClosedJaxpr, steps: int) -> str | None:
    """Why plain scan is better for this batch. `vjp` is the derivative of a step
    (`TracedBody.trace_vjp`)."""
    inputs = body.input_types
    of_ct = depends(vjp, [i >= len(inputs) for i in range(len(vjp.in_avals))])
    varying = depends(vjp, [*body.varies, *(True for _ in vjp.in_avals[len(inputs) :])])
    backward = [e for e in vjp.eqns if not of_ct.isdisjoint(e.outvars)]
    residuals = {v for v in free_variables(backward, vjp.jaxpr.outvars) if v in varying - of_ct}
    xs = vjp.jaxpr.invars[len(inputs) - len(body.x_types) : len(inputs)]
    saved = sum(_bytes(v.aval) for v in residuals - {*xs})
    carries = zip(body.carry_types, body.y_of_carry(), strict=True)
    carried = sum(_bytes(t) for t, j in carries if j is None)
    of_chunk = replay_chunk(body, steps) * (saved + sum(map(_bytes, body.x_types)))
    if steps * carried + _COPIES_IN_CHUNK * of_chunk > steps * saved:
        return "replaying needs as much memory"
    if not on_cpu():
        return None
    flops, rows = _products(body.program)
    if flops > 0 and rows <= _ROWS:
        return None
    return "it is estimated to be as fast"


def why_not_for_gradients(body: TracedBody, perturbed: Sequence[bool]) -> str | None:
    """Why plain scan is better if only these `consts` are differentiated."""
    flops, rows = _products(body.program)
    weights = sum(t.size for t, p in zip(body.const_types, perturbed, strict=True) if p)
    if on_cpu() and flops > 2 * weights * min(_ROWS, _USES_OF_A_WEIGHT * rows):
        return "many weights have no gradient"
    return None


def replay_chunk(body: TracedBody, steps: int) -> int:
    """The number of steps that are replayed at once: enough rows for a matrix product to be
    efficient, few enough to stay in the cache. A batch of unknown size counts as large."""
    rows = 16 if body.has_symbolic_shapes else max(_products(body.program)[1], 1)
    return near_divisor(steps, min(64, max(16, 256 // rows)))


def log_choice(steps: Any, carry: Sequence[Any], choice: str) -> None:
    """What `"auto"` chose, for those who ask: nothing in the result tells."""
    logging.getLogger("eqx_grads").debug(
        '`filter_scan(checkpoint="auto")` of %s steps with the carry %s: %s.',
        steps,
        ", ".join(map(type_of, carry)) or "None",
        choice,
    )


def _products(program: ClosedJaxpr) -> tuple[float, int]:
    """The floating-point operations of all matrix products, and the rows that these have on
    average: the size of the batch, mostly."""
    found = list(_each_product(program))
    flops = sum(flops for flops, _ in found)
    return flops, round(flops / sum(flops / rows for flops, rows in found)) if flops else 1


def _each_product(program: ClosedJaxpr) -> Iterator[tuple[float, int]]:
    for eqn in program.eqns:
        if eqn.primitive is jax.lax.dot_general_p:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            sizes = [v.aval.size for v in eqn.invars]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            if eqn.outvars[0].aval.size * depth > 0:
                # Either operand may be the weight, which mostly has more rows than the batch.
                yield 2.0 * eqn.outvars[0].aval.size * depth, min(sizes) // depth
        known = structure(eqn)
        times = known.length if isinstance(known, Scan) else 1
        for inner in inner_programs(eqn):
            yield from ((times * flops, rows) for flops, rows in _each_product(inner))


def _bytes(x: Any) -> int:
    return x.size * getattr(x.dtype, "itemsize", 4)  # a key has none
