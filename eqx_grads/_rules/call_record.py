"""A call of a function with rules, as the primitive carries it: for one example, or a batch."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._errors import name_of
from .._jaxprs.current_trace import is_of_innermost_trace
from .._tangent_spaces import is_differentiable


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

    def with_more_operands(self, n: int, primal: Any, jvp: Any) -> "Call":
        """A call with `n` more operands in front, whose batching rule was tried before."""
        return dataclasses.replace(
            self,
            n_operands=n + self.n_operands,
            n_args=n + self.n_args,
            primal=primal,
            jvp=jvp,
            vmap=lambda axis_data, batched, operands: None,
        )


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


def batched_call(
    call: Call,
    axis_data: Any,
    batched: Sequence[bool],
    call_jaxpr: ClosedJaxpr | None,
    n_consts: int,
) -> tuple[Call, list[bool]]:
    """A call for a whole batch: `vmap` of the function, and `vmap` of its rule. And which
    outputs have the batch dimension, a list that is filled when the function or the rule runs.

    An output that can have a tangent has the batch dimension: its tangent may have it although
    its value does not. (The value of `replace_gradient` depends on one operand, and its tangent
    on the other.) Other outputs have the batch dimension if `jax.vmap` gives it to them.
    """
    # The function of one example, where it was traced before.
    traced = None if call_jaxpr is None else jaxpr_as_fun(call_jaxpr)
    axes = [0 if b else None for b in batched]
    out_batched: list[bool] = []
    vmap = vmap_over(axis_data)

    def decide(out):
        out_batched[:] = [is_differentiable(x) or is_of_innermost_trace(x) for x in out]
        return out

    def as_decided(out):
        return [x if b else x[0] for x, b in zip(out, out_batched, strict=True)]

    def primal(operands):
        run = traced or (lambda *xs: call.primal(xs[n_consts:]))
        return as_decided(vmap(lambda *xs: decide(run(*xs)), axes)(*operands))

    def jvp(primals, tangents):
        t_axes = [None if t is None else a for t, a in zip(tangents, axes, strict=True)]

        def one(xs, ts):
            out, t_out = call.jvp(xs[n_consts:], ts[n_consts:])
            return decide(out), t_out

        out, t_out = vmap(one, (axes, t_axes))(list(primals), list(tangents))
        return as_decided(out), t_out

    return call.with_more_operands(n_consts, primal, jvp), out_batched
