"""One call of a function with rules, as the primitive carries it: flat, without arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import name_of


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A function of arrays with rules. Hashed by identity; no tracers, as JAX keeps it for as
    long as it keeps the program.

    - `primal(operands)` returns the list of outputs.
    - `jvp(primals, tangents)` returns the outputs and their tangents. `None` is zero, in both
        lists of tangents.
    - `vmap(axis_data, batched, operands)` returns the outputs by the user's batching rule, and
        which of them are batched; `None` without a rule. The batch dimension is the first.
    - `fn` is the function that the user wrote, for errors. It may have placeholders.
    - `n_operands`: the number of operands. Only the first `n_args` can have a tangent.
    - `rules_key`: the same object for all calls with the same rules.
    """

    fn: Any
    n_operands: int
    n_args: int
    rules_key: Any
    primal: Callable[[Sequence[Any]], list[Any]]
    jvp: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    vmap: Callable[..., tuple[list[Any], list[bool]] | None]

    @property
    def name(self) -> str:
        return name_of(self.fn)

    def __repr__(self) -> str:  # what a jaxpr shows
        return self.name


def vmap_over(axis_data: Any) -> Callable[..., Any]:
    """The `jax.vmap` for which JAX calls a batching rule with `axis_data`."""
    return ft.partial(
        jax.vmap,
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )


def with_batch_in_front(operands: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    pairs = zip(operands, dims, strict=True)
    return [x if dim in (None, 0) else jnp.moveaxis(x, dim, 0) for x, dim in pairs]


def no_vmap_rule(axis_data: Any, batched: Sequence[bool], operands: Sequence[Any]) -> None:
    """The batching rule of a call whose batching rule was tried before."""
    del axis_data, batched, operands
