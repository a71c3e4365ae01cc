"""Which elements a sum adds up: whether a norm is that of the vector of an element."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..._jaxprs.evaluate import bind
from ..origins import Origin


_MOST = 1_000_000  # elements that are compared


@dataclasses.dataclass(frozen=True)
class Group:
    """The sums of an array over some axes.

    - `labels`: for each element of the array, flat, the number of the sum that it is in, or -1.
        `None` if there are too many.
    - `shape`: of the array. `of_sums`: of the sums.
    - `size`: how many elements each sum has.
    """

    labels: Any
    shape: tuple[int, ...]
    of_sums: tuple[int, ...]
    size: int


def group_of(total: Origin, path: Sequence[Any]) -> Group:
    """Those of a `reduce_sum`.

    - `path`: the equations that make the layout of its operand from that of the array.
    """
    operand, out = total.eqn.invars[0].aval, total.eqn.outvars[0].aval
    shape = path[0].invars[0].aval.shape if path else operand.shape
    size = int(np.prod(operand.shape)) // max(1, int(np.prod(out.shape)))
    if max(np.prod(shape), np.prod(operand.shape)) > _MOST:
        return Group(None, shape, out.shape, size)
    labels = np.full(int(np.prod(shape)), -1)
    labels[_laid_out(path, shape).ravel()] = _spread(total).ravel()
    return Group(labels, shape, out.shape, size)


def is_of_own_group(group: Group, path: Sequence[Any], to_sum: Sequence[Any]) -> bool:
    """Whether an operation of the array and of its sums has for each element the sum that it is
    in. True if there are too many elements.

    - `path`: from the array to the operation. `to_sum`: from the sums to it.
    """
    if group.labels is None:
        return True
    own = group.labels[_laid_out(path, group.shape)]
    used = _laid_out(to_sum, group.of_sums)
    return _fits(used, own) and bool(np.all(used == own))


def are_same_groups(total: Origin, to_sum: Sequence[Any], other: Origin) -> bool:
    """Whether two sums are over the same elements: one of the array, and one that `to_sum`
    takes to its layout."""
    shape = total.eqn.invars[0].aval.shape
    if np.prod(shape) > _MOST:
        return True
    ours, theirs = _spread(total), _laid_out(to_sum, other.eqn.outvars[0].aval.shape)
    if not _fits(theirs, ours):
        return False
    pairs = {*zip(ours.ravel(), np.broadcast_to(theirs, shape).ravel(), strict=True)}
    return len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


def _fits(small: Any, large: Any) -> bool:
    """Whether one is broadcast to the other, as by the operations of JAX: those of a scalar,
    and of axes of size one."""
    pairs = zip(small.shape, large.shape, strict=False)
    return small.ndim in (0, large.ndim) and all(n in (1, m) for n, m in pairs)


def _spread(total: Origin) -> Any:
    """For each element of the operand of a `reduce_sum`, the number of its sum."""
    sums = _numbers(total.eqn.outvars[0].aval.shape)
    sums = np.expand_dims(sums, total.eqn.params["axes"])
    return np.broadcast_to(sums, total.eqn.invars[0].aval.shape)


def _laid_out(path: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """For each element after some changes of layout, the number of that of the array."""
    numbers = _numbers(shape)
    with jax.ensure_compile_time_eval():
        for eqn in path:
            if eqn.primitive.name != "stop_gradient":
                numbers = bind(eqn, [numbers])[0]
    return np.asarray(numbers)


def _numbers(shape: tuple[int, ...]) -> Any:
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
