"""Which backward pass of a scan is likely to be faster, estimated from a step of it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._jaxprs.dependence import depends, variables
from .._jaxprs.structure import Checkpoint, Cond, holds, inner_programs, Scan, structure
from .traced_body import ArrayStep


# In one second, on two cores of a CPU. Fitted to which was faster, for a gated unit, a plain
# one and an attention cell of 32 to 512 units, with 1 to 256 sequences of 64 to 512 steps.
_FLOPS = 1.6e11  # of matrix products of many rows
_BYTES_IN_CACHE = 1.6e10  # read and written: the sums of the weight gradients
_BYTES_OF_NEW_PAGES = 7e9  # got from the operating system
_BYTES_COMPUTED = 2e9  # out of the cache
# glibc does not keep larger blocks when they are freed, and so gets new pages every time.
_KEPT_BY_MALLOC = 2**25


def is_replay_faster(step: ArrayStep, steps: int, wanted: Sequence[bool]) -> bool:
    """Whether to replay the steps, given which `consts` have their cotangents asked for.

    To replay is to compute all steps once more. Plain scan adds to the gradients of all weights
    at every step, and it writes and reads what the derivative of every step needs.
    """
    if holds(step.program, Cond, Checkpoint):
        # Side by side, all branches are computed; and the user knows what not to keep.
        return False
    weights = sum(_bytes(t) for t, want in zip(step.const_types, wanted, strict=True) if want)
    kept = _bytes_kept(step)
    lost = sum(flops for flops, _ in _products(step.program)) / _FLOPS
    lost += _bytes_of_the_largest(step) / _BYTES_COMPUTED
    won = 2 * weights / _BYTES_IN_CACHE
    if steps * kept > _KEPT_BY_MALLOC:
        won += kept / _BYTES_OF_NEW_PAGES
    return won > lost


def rows(step: ArrayStep) -> int:
    """How many rows the matrix products have on average: the size of the batch, mostly."""
    products = list(_products(step.program))
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
        elif eqn.primitive is jax.lax.conv_general_dilated_p:
            kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
            features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            if out.size * kernel.size > 0:
                yield 2.0 * out.size * kernel.size / features, out.size // features
        known = structure(eqn)
        times = known.length if isinstance(known, Scan) else 1
        for inner in inner_programs(eqn):
            yield from ((times * flops, rows) for flops, rows in _products(inner))


def _bytes_kept(step: ArrayStep) -> int:
    """What one step of a plain scan leaves for its derivative, beyond what is there anyway."""
    program = step.trace_vjp(run_backward=False)
    moves = depends(program, _moves(step))
    n_before_xs = len(step.const_types) + len(step.carry_types)
    xs = program.jaxpr.invars[n_before_xs:]
    kept = {v for v in variables(program.jaxpr.outvars) if v in moves} - {*xs}
    return sum(_bytes(v.aval) for v in kept)


def _bytes_of_the_largest(step: ArrayStep) -> int:
    """What is larger than all that comes in, goes out, or is a matrix product: in a plain scan
    it often is never written to memory, and in a chunk of steps it is, for each of them."""
    program = step.program
    moves = depends(program, _moves(step))
    types = [*step.carry_types, *step.x_types, *step.y_types]
    types += [e.outvars[0].aval for e in program.eqns if _is_product(e)]
    usual = max((_bytes(t) for t in types), default=0)
    sizes = [
        _bytes(v.aval)
        for e in program.eqns
        for v in e.outvars
        if v in moves and not _is_product(e)
    ]
    return sum(size for size in sizes if size > 2 * usual)


def _is_product(eqn) -> bool:
    return eqn.primitive in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)


def _moves(step: ArrayStep) -> list[bool]:
    """Which inputs are others at each step."""
    return [i >= len(step.const_types) for i in range(len(step.input_types))]


def _bytes(x: Any) -> int:
    return x.size * getattr(x.dtype, "itemsize", 4)  # a key has none
