"""The interface between the primitive and a call: primal, JVP and batching, all flat."""

import abc
import types
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


class AbstractCall(abc.ABC):
    """A function of arrays with rules, all of them flat. Hashed by identity; no tracers, as
    JAX keeps it for as long as it keeps the program."""

    name: str
    code: types.CodeType | None = None  # what the user wrote, for errors of JAX
    n_operands: int
    n_args: int  # so many of the operands, the first ones, can have a tangent
    # Whether a tangent may depend on operands that its output does not depend on, in a way
    # that `jvp` does not show: the backward rule of a `custom_vjp` returns all cotangents.
    is_reverse: bool
    rules_key: Any  # the same object for all calls with the same rules

    @abc.abstractmethod
    def primal(self, operands: Sequence[Any]) -> list[Any]:
        """The outputs of the function."""

    @abc.abstractmethod
    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The outputs and their tangents; `None` is zero, in both lists."""

    @abc.abstractmethod
    def vmap(
        self, axis_data: Any, batched: Sequence[bool], operands: Sequence[Any]
    ) -> tuple[list[Any], list[bool]] | None:
        """The outputs by the user's batching rule, and which of them are batched; `None` if
        there is no rule. The batch dimension is the first."""

    def __repr__(self) -> str:  # what a jaxpr shows
        return self.name


def tangents_of_call(call, n_consts, args, *values):
    """The outputs of a rule, and then their tangents (an empty array where there is none), as
    a function of the operands and the tangents of `args`."""
    n = len(values) - len(args)
    ts: list[Any] = [None] * n
    for i, t in zip(args, values[n:], strict=True):
        ts[i] = t
    out, t_out = call.jvp(values[n_consts:n], ts[n_consts:])
    return [*out, *(jnp.zeros(0) if t is None else t for t in t_out)]
