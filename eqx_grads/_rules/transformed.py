"""Functions that stand in the place of another function, and run it on the arrays of a call."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx

from .._tangent_spaces import is_array
from .tree_split import TreeSplit


class AbstractTransformed(eqx.Module):
    """What `filter_checkpoint` and the like return: a PyTree with the leaves of a function."""

    _eqg_fn: eqx.AbstractVar[Callable[..., Any]]

    @property
    def __wrapped__(self):
        return self._eqg_fn

    @abc.abstractmethod
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""

    def __get__(self, instance, owner=None):
        return self if instance is None else eqx.Partial(self, instance)


def call_on_arrays(
    transform: Callable[[Callable[..., Any], list[Any]], Sequence[Any]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_operand: Callable[[Any], bool] = is_array,
) -> Any:
    """`fn(*args, **kwargs)`, by way of `transform(run, arrays)`. There, `run(arrays)` computes
    the arrays that the function returns from those among its leaves and its arguments."""
    call, arrays = TreeSplit.split((fn, args, kwargs), is_operand)
    returned: list[TreeSplit] = []

    # A new function for each call, so that JAX keeps nothing for the next call.
    def run(arrays):
        fn, args, kwargs = call.tree(arrays)
        out, ys = TreeSplit.split(fn(*args, **kwargs), is_operand)
        returned[:] = [out]
        return ys

    ys = transform(run, arrays)
    return returned[0].tree(ys)
