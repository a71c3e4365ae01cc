"""Which elements depend on which, of the operations for which NumPy tells.

A derivative at ones tells as well, but tracing one takes a millisecond, and there are tens of
thousands of questions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


_SAME_ORDER = frozenset(("reshape", "squeeze", "expand_dims"))
_SAME_SHAPE = frozenset(("neg", "copy", "conj", "real", "imag", "reduce_precision"))
_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"))
_PARTS = frozenset(("slice", "split", "concatenate"))
_OWN = frozenset(("transpose", "broadcast_in_dim", "dot_general", "fft"))
IN_NUMPY = _SAME_ORDER | _SAME_SHAPE | _REDUCTIONS | _PARTS | _OWN


def pull_back(eqn: Any, k: int, shape: Sequence[int], mask: Any, output: int = 0) -> Any:
    """The elements of operand `k`, of this shape, on which some elements of an output do."""
    return _maps(eqn, k, shape, np.shape(mask), output)[0](mask)


def push_forward(eqn: Any, k: int, mask: Any, shape: Sequence[int], output: int = 0) -> Any:
    """The elements of an output, of this shape, that depend on some of operand `k`."""
    return _maps(eqn, k, np.shape(mask), shape, output)[1](mask)


_Map = Callable[[Any], Any]


def _maps(
    eqn: Any, k: int, inner: Sequence[int], outer: Sequence[int], output: int
) -> tuple[_Map, _Map]:
    """From a mask of an output, `outer`, to one of the operand, and back."""
    name, params = eqn.primitive.name, eqn.params
    if name in _PARTS:
        part = _part(eqn, k, output)
        into = lambda shape: lambda m: _into(m, part, shape)
        take = lambda m: m[part]
        return (take, into(outer)) if name == "concatenate" else (into(inner), take)
    if name in _SAME_SHAPE:
        return lambda m: m, lambda m: m
    if name in _SAME_ORDER:
        return lambda m: np.reshape(m, inner), lambda m: np.reshape(m, outer)
    if name == "transpose":
        order = params["permutation"]
        return lambda m: np.transpose(m, np.argsort(order)), lambda m: np.transpose(m, order)
    if name in _REDUCTIONS:
        axes = tuple(params["axes"])
        return lambda m: _spread(m, axes, inner), lambda m: np.any(m, axis=axes)
    if name == "fft":  # a derivative at ones does not tell: the roots of unity cancel
        axes = tuple(range(len(inner)))[-len(params["fft_lengths"]) :]
        spread = lambda m, shape: np.broadcast_to(np.any(m, axis=axes, keepdims=True), shape)
        return lambda m: spread(m, inner), lambda m: spread(m, outer)
    if name == "broadcast_in_dim":
        return _broadcast(params["broadcast_dimensions"], inner, outer)
    return _dot_general(params["dimension_numbers"], k, inner, outer)


def _part(eqn: Any, k: int, output: int) -> tuple[slice, ...]:
    """Where an output is in the operand, or of a `concatenate`, operand `k` in the output."""
    params = eqn.params
    if eqn.primitive.name == "slice":
        bounds = params["start_indices"], params["limit_indices"]
        steps = params["strides"] or (1,) * len(bounds[0])
        return tuple(map(slice, *bounds, steps))
    is_split = eqn.primitive.name == "split"
    axis = params["axis" if is_split else "dimension"]
    sizes = params["sizes"] if is_split else [v.aval.shape[axis] for v in eqn.invars]
    number = output if is_split else k
    begin = sum(sizes[:number])
    return (slice(None),) * axis + (slice(begin, begin + sizes[number]),)


def _into(mask: Any, part: tuple[slice, ...], shape: Sequence[int]) -> Any:
    found = np.zeros(shape, bool)
    found[part] = mask
    return found


def _spread(mask: Any, axes: Sequence[int], shape: Sequence[int]) -> Any:
    """With new axes, along which the elements are equal."""
    return np.broadcast_to(np.expand_dims(mask, tuple(axes)), shape)


def _broadcast(kept: Sequence[int], inner, outer) -> tuple[_Map, _Map]:
    new = tuple(i for i in range(len(outer)) if i not in kept)
    ones = tuple(i for i, n in zip(kept, inner, strict=True) if n < outer[i])
    pull = lambda m: np.reshape(np.any(m, axis=new + ones, keepdims=True), inner)
    return pull, lambda m: _spread(m, new, outer)


def _dot_general(numbers, k: int, inner, outer) -> tuple[_Map, _Map]:
    """The output has the axes of the batch, then those that are left of both operands."""
    contracted, batch = (tuple(each[k]) for each in numbers)
    free = tuple(i for i in range(len(inner)) if i not in (*contracted, *batch))
    n_batch, n_free = len(batch), len(free)
    others = range(n_batch, len(outer) - n_free) if k else range(n_batch + n_free, len(outer))
    order = (*batch, *free, *contracted)

    def pull(mask):
        mask = np.any(mask, axis=tuple(others))
        axes = range(mask.ndim, len(inner))
        mask = _spread(mask, axes, [inner[i] for i in order])
        return np.transpose(mask, np.argsort(order))

    def push(mask):
        axes = range(n_batch + n_free, len(inner))
        return _spread(np.any(np.transpose(mask, order), axis=tuple(axes)), others, outer)

    return pull, push
