"""Eager calls of a function, as a user makes them: made once, and shared between the checks.

JAX compiles a loop again in each eager call, so that they take most of the time of some checks.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

from ._outcome import outcome
from ._random_tangents import normal_like
from ._subject import FlatFunction, is_output


_COMPILED = "/jax/core/compile/backend_compile_duration"


class Call(NamedTuple):
    """The result of one differentiated call.

    - `value`: the whole output, static leaves included.
    - `outputs`: its arrays that have a derivative.
    - `derivative`: the tangents of the outputs, or the cotangents of the leaves.
    - `n_compiled`: the number of programs that JAX compiled in the call.
    """

    value: Any
    outputs: list[Any]
    derivative: list[Any]
    n_compiled: int


class EagerCalls:
    """Calls of a function at its arguments.

    - `tangents`, `cotangents`: the random directions of the differentiated calls.
    """

    def __init__(self, subject: FlatFunction, outputs: Sequence[Any]):
        rng = np.random.default_rng(0)
        self._subject = subject
        self.tangents = [jnp.asarray(t) for t in normal_like(rng, subject.leaves)]
        self.cotangents = [jnp.asarray(w) for w in normal_like(rng, outputs)]
        self._calls: dict[str, list[Any]] = {"jvp": [], "vjp": []}
        self._value: list[Any] = []

    @ft.cached_property
    def value(self) -> Any:
        """The output of a call without derivatives."""
        return self._subject.fn(*self._subject.args, **self._subject.kwargs)

    def jvp(self, number: int = 0) -> Call:
        """The call in forward mode with this number: calls with two numbers are two calls."""
        return self._call("jvp", number)

    def vjp(self, number: int = 0) -> Call:
        """The call in reverse mode with this number: calls with two numbers are two calls."""
        return self._call("vjp", number)

    def value_of_forward_pass(self) -> Any:
        """The value under `jax.vjp`, whatever becomes of the backward pass."""
        call = outcome(self.vjp)
        if isinstance(call, Exception) and not self._value:
            raise call
        return self._value[0]

    def _call(self, mode: str, number: int) -> Call:
        calls = self._calls[mode]
        while len(calls) <= number:
            calls.append(outcome(self._jvp if mode == "jvp" else self._vjp))
        if isinstance(calls[number], Exception):
            raise calls[number]
        return calls[number]

    def _jvp(self) -> Call:
        run = _WithStaticLeaves(self._subject)
        with _Counter() as counter:
            xs, ts = self._subject.leaves, self.tangents
            out, tangents, rest = jax.jvp(run, xs, ts, has_aux=True)
        jax.block_until_ready((out, tangents))
        return Call(run.value(out, rest), out, tangents, counter.n)

    def _vjp(self) -> Call:
        run = _WithStaticLeaves(self._subject)
        with _Counter() as counter:
            out, pull, rest = jax.vjp(run, *self._subject.leaves, has_aux=True)
            self._value.append(run.value(out, rest))
            w = self.cotangents
            if [(x.shape, x.dtype) for x in out] != [(x.shape, x.dtype) for x in w]:
                # The rule returns another value than the function, which `primal` reports.
                w = [jnp.ones_like(x) for x in out]
            cotangents = list(pull(w))
        jax.block_until_ready((out, cotangents))
        return Call(self._value[-1], out, cotangents, counter.n)


class _WithStaticLeaves:
    """The function of its leaves, for `has_aux`: its outputs that have a derivative, and the
    other arrays. It keeps the rest of the output, so that `value` can return all of it."""

    def __init__(self, subject: FlatFunction):
        self._subject = subject

    def __call__(self, *leaves: Any) -> tuple[list[Any], list[Any]]:
        flat, self._treedef = jax.tree.flatten(self._subject.call(leaves))
        self._outputs = [i for i, x in enumerate(flat) if is_output(x)]
        arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array)]
        self._others = [i for i in arrays if i not in self._outputs]
        dynamic = {*self._outputs, *self._others}
        self._static = [None if i in dynamic else x for i, x in enumerate(flat)]
        return [flat[i] for i in self._outputs], [flat[i] for i in self._others]

    def value(self, outputs: Sequence[Any], others: Sequence[Any]) -> Any:
        flat = list(self._static)
        for i, x in zip((*self._outputs, *self._others), (*outputs, *others), strict=True):
            flat[i] = x
        return jax.tree.unflatten(self._treedef, flat)


class _Counter:
    """Counts the programs that JAX compiles inside the context."""

    def __init__(self):
        self.n = 0

    def _count(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        self.n += event == _COMPILED

    def __enter__(self):
        monitoring.register_event_duration_secs_listener(self._count)
        return self

    def __exit__(self, *_):
        monitoring.unregister_event_duration_listener(self._count)
