"""The cost estimate behind `checkpoint="auto"`: replay or plain scan, on a CPU.

The constants are those of a CPU: on other platforms nothing is estimated, and `"auto"` is the
plain scan.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from .._jaxprs.dependence import depends, variables
from .._jaxprs.structure import Checkpoint, Cond, holds, inner_programs, Scan, structure
from .._tangent_spaces import is_differentiable
from .chunked_scan import near_divisor
from .traced_body import TracedBody


PLATFORM = "cpu"

# Per second, on two cores of a CPU. Fitted to which method was faster, for a gated unit, a
# plain one and an attention cell of 32 to 512 units, with 1 to 256 sequences of 64 to 512
# steps. All cells that were looked at for the constants and the conditions of this file are in
# `benchmarks/calibration_cells.py`; those that judge it, in `benchmarks/judged_cells.py`.
_FLOPS = 1.6e11  # of matrix products of many rows
_BYTES_IN_CACHE = 1.6e10  # read and written: the sums of the weight gradients
_BYTES_OF_NEW_PAGES = 7e9  # allocated by the operating system
_BYTES_COMPUTED = 2e9  # out of the cache
# glibc does not keep larger blocks when they are freed, and so allocates new pages every time:
# DEFAULT_MMAP_THRESHOLD_MAX in https://man7.org/linux/man-pages/man3/mallopt.3.html.
_KEPT_BY_MALLOC = 2**25
# The intermediate values of a chunk of steps take about so many times the bytes of its
# residuals: 2 to 4 times for gated, plain and spiking cells.
_COPIES_IN_CHUNK = 3
_USES_OF_A_WEIGHT = 2
# How much more has to be won than lost. Where the ratio is 1.2 to 1.7, as for cells of 24 or
# 32 sequences of some hundred steps, a replay has 0.7 to 1.3 times the speed of plain scan,
# depending on what else uses the cache. Where plain scan allocates new pages, 1.6 was enough.
_MARGIN = 1.8
_MARGIN_WITH_NEW_PAGES = 1.5


def why_never_better(body: TracedBody) -> str | None:
    """Why plain scan is at least as good for any batch size, as far as that was measured."""
    reason = _why_its_operations_are_worse(body)
    if reason is None and _bytes_of_carries(body) >= _bytes_of_residuals(body):
        reason = "has no residuals but its carry"
    return reason


def _why_its_operations_are_worse(body: TracedBody) -> str | None:
    if body.has_symbolic_shapes:
        return "has symbolic shapes"
    if holds(body.program, Cond, Checkpoint):
        # In parallel, all branches are computed; and the user knows what not to save.
        return "has branches, or is rematerialized"
    if holds(body.program, "conv_general_dilated"):
        # The kernel's gradient for a chunk of steps takes longer than step by step: a replay
        # has 0.2 to 0.9 times the speed.
        return "has a convolution"
    if holds(body.program, "gather"):
        # The transpose of a look-up adds to the table, for all steps of a chunk one by one.
        return "looks up rows of a table"
    return None


def is_replay_better(
    body: TracedBody, vjp: ClosedJaxpr, steps: int, perturbed_consts: Sequence[bool]
) -> bool:
    """Whether to replay the steps, given their derivative, and which `consts` have their
    cotangents asked for: if that is faster, and needs no more memory.

    A replay computes all steps once more. Plain scan adds to the gradients of all weights at
    every step, and it writes and reads the residuals of every step.
    """
    if _why_its_operations_are_worse(body) is not None:
        return False
    saved, carried = _bytes_of_residuals(body), _bytes_of_carries(body)
    if carried >= saved:
        return False
    of_chunk = saved + sum(map(_bytes, body.x_types))
    replayed = steps * carried
    replayed += _COPIES_IN_CHUNK * replay_chunk(body, steps) * of_chunk
    if replayed > steps * saved:
        return False
    flops = sum(flops for flops, _ in _products(body.program))
    weights = _summed_over_time(body, vjp, perturbed_consts)
    # The products of one step with each weight once. With fixed weights there is no gradient to
    # sum, and if a weight is used several times in a step, there is one sum for all uses.
    # Without products, there is nothing that several steps compute better at once.
    if not 0 < flops <= _USES_OF_A_WEIGHT * 2 * rows(body) * sum(t.size for t in weights):
        return False
    lost = flops / _FLOPS + _bytes_of_the_largest(body) / _BYTES_COMPUTED
    won = 2 * sum(map(_bytes, weights)) / _BYTES_IN_CACHE
    if steps * saved <= _KEPT_BY_MALLOC:
        return won > _MARGIN * lost
    won += saved / _BYTES_OF_NEW_PAGES
    return won > _MARGIN_WITH_NEW_PAGES * lost


def replay_chunk(body: TracedBody, steps: int) -> int:
    """The number of steps that are replayed at once: enough rows for a matrix product to be
    efficient, few enough to stay in the cache. A batch of unknown size is taken to be large."""
    if body.has_symbolic_shapes:
        return near_divisor(steps, 16)
    return near_divisor(steps, min(64, max(16, 256 // max(rows(body), 1))))


def rows(body: TracedBody) -> int:
    """How many rows the matrix products have on average: the size of the batch, mostly."""
    products = list(_products(body.program))
    flops = sum(flops for flops, _ in products)
    return round(flops / sum(flops / rows for flops, rows in products)) if flops else 1


def _products(program: ClosedJaxpr) -> Iterator[tuple[float, int]]:
    """The floating-point operations, and the rows, of each matrix product."""
    for eqn in program.eqns:
        if eqn.primitive is jax.lax.dot_general_p:
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = math.prod(shape[i] for i in contracted)
            size = eqn.outvars[0].aval.size
            if size * depth > 0:
                yield 2.0 * size * depth, math.prod(shape) // depth
        known = structure(eqn)
        times = known.length if isinstance(known, Scan) else 1
        for inner in inner_programs(eqn):
            yield from ((times * flops, rows) for flops, rows in _products(inner))


def _summed_over_time(
    body: TracedBody, vjp: ClosedJaxpr, perturbed_consts: Sequence[bool]
) -> list[Any]:
    """The types of the gradients that plain scan adds to at every step. There is none for a
    constant that a step reads under `stop_gradient`."""
    varying = depends(vjp, body.varies)
    consts = zip(body.const_types, perturbed_consts, strict=True)
    consts = [(t, p) for t, p in consts if is_differentiable(t)]
    cts = zip(consts, vjp.jaxpr.outvars, strict=False)
    return [t for (t, p), ct in cts if p and not isinstance(ct, Literal) and ct in varying]


def _bytes_of_carries(body: TracedBody) -> int:
    """What a replay saves of one step: its carry, unless that is an output as well."""
    pairs = zip(body.carry_types, body.y_of_carry(), strict=True)
    return sum(_bytes(t) for t, j in pairs if j is None)


def _bytes_of_residuals(body: TracedBody) -> int:
    """What one step of a plain scan saves for its derivative, beyond what is saved anyway."""
    program = body.trace_vjp(run_backward=False)
    varying = depends(program, body.varies)
    n_before_xs = len(body.const_types) + len(body.carry_types)
    xs = program.jaxpr.invars[n_before_xs:]
    saved = {v for v in variables(program.jaxpr.outvars) if v in varying} - {*xs}
    return sum(_bytes(v.aval) for v in saved)


def _bytes_of_the_largest(body: TracedBody) -> int:
    """The intermediate values larger than all inputs, outputs and matrix products: plain scan
    often never writes them to memory, while a chunk of steps does so for each step."""
    program = body.program
    varying = depends(program, body.varies)
    types = [*body.carry_types, *body.x_types, *body.y_types]
    types += [e.outvars[0].aval for e in program.eqns if _is_product(e)]
    usual = max((_bytes(t) for t in types), default=0)
    sizes = [
        _bytes(v.aval)
        for e in program.eqns
        for v in e.outvars
        if v in varying and not _is_product(e)
    ]
    return sum(size for size in sizes if size > 2 * usual)


def _is_product(eqn) -> bool:
    return eqn.primitive is jax.lax.dot_general_p


def _bytes(x: Any) -> int:
    return x.size * getattr(x.dtype, "itemsize", 4)  # a key has none
