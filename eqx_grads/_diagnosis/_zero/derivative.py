"""The gradient of a loss, and where it becomes zero, in the mode that JAX has for the loss."""

import abc
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.evaluate import evaluate
from ..origins import NumberedLoss
from .cancellation import gradients_and_terms, is_rounding
from .values import Found, WatchedDerivative
from .walk import End, find_ends, find_gates


class AbstractDerivative(abc.ABC):
    """The derivative of a loss with respect to some leaves."""

    remarks: Sequence[str]

    @abc.abstractmethod
    def gradients(self) -> list[np.ndarray]:
        """For each leaf, its gradient or a directional derivative."""

    @abc.abstractmethod
    def rounding_errors(self) -> list[tuple[int, float, float]]:
        """The leaves whose gradient is as small as the rounding error of its terms, with the
        largest element of it and of the sums of the sizes of its terms."""

    @abc.abstractmethod
    def ends(self, leaf: int) -> list[End]:
        """Where the derivative with respect to a leaf becomes zero."""

    @abc.abstractmethod
    def gates(self, leaf: int) -> list[End]:
        """The equations that let the derivative pass for some elements only, in the order of
        the derivative."""


def derivative_of(
    numbered: NumberedLoss, leaves: Sequence[int], is_gate: Callable[[Any], bool]
) -> AbstractDerivative:
    """The derivative in reverse mode, or in forward mode if that raises."""
    try:
        return _Reverse(numbered, leaves, is_gate)
    except Exception as error:  # JAX has no one type of error for it; the report quotes it
        reverse_error = error
    try:
        return _Forward(numbered, leaves, is_gate, reverse_error)
    except Exception:
        raise reverse_error from None


class _Reverse(AbstractDerivative):
    def __init__(self, numbered, leaves, is_gate):
        self.remarks = ()
        self._leaves = list(leaves)
        values = numbered.traced.values

        def cotangents(values, ct):
            of_leaves = ft.partial(_loss_of, numbered, values, leaves)
            return jax.vjp(of_leaves, *(values[i] for i in leaves))[1](ct)

        ct = jnp.ones((), numbered.traced.program.out_avals[0].dtype)
        self._values = (*values, ct)
        program = jax.make_jaxpr(cotangents)(values, ct)
        self._program = program
        names = [*numbered.traced.inputs, None]
        self._watched = WatchedDerivative(program, names, is_gate)

    @ft.cached_property
    def _gradients(self) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        return gradients_and_terms(self._program, self._values)

    def gradients(self):
        return self._gradients[0]

    def rounding_errors(self):
        return [
            (leaf, float(np.max(np.abs(gradient))), float(np.max(np.abs(terms))))
            for leaf, gradient, terms in zip(self._leaves, *self._gradients, strict=True)
            if terms is not None and is_rounding(gradient, terms)
        ]

    @ft.cached_property
    def _found(self) -> Found:
        return self._watched(*self._values)

    def ends(self, leaf):
        return find_ends(self._watched.plan, self._found, self._leaves.index(leaf))

    def gates(self, leaf):
        return find_gates(self._watched.plan, self._found, self._leaves.index(leaf))


class _Forward(AbstractDerivative):
    """Along one random direction for each leaf: a derivative that is not zero is zero there
    with probability zero."""

    def __init__(self, numbered, leaves, is_gate, error):
        why = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        self.remarks = (
            f"The gradient of this loss raises {why.rstrip('.')}. Directional derivatives in "
            "forward mode were used.",
        )
        self._leaves = list(leaves)
        self._values = values = numbered.traced.values
        rng = np.random.default_rng(0)
        self._directions = [_random_like(rng, values[i]) for i in leaves]

        def tangent(values, directions):
            of_leaves = ft.partial(_loss_of, numbered, values, leaves)
            return [jax.jvp(of_leaves, [values[i] for i in leaves], directions)[1]]

        program = jax.make_jaxpr(tangent)(values, self._directions)
        self._run = _evaluated(program)
        names = [*numbered.traced.inputs, *(None for _ in leaves)]
        self._watched = WatchedDerivative(program, names, is_gate)

    def gradients(self):
        return [self._run(*self._inputs(leaf))[0] for leaf in self._leaves]

    def ends(self, leaf):
        return find_ends(self._watched.plan, self._watched(*self._inputs(leaf)), 0)

    def rounding_errors(self):
        return []  # the terms are not known

    def gates(self, leaf):
        return []  # the derivative is one number, not one for each unit

    def _inputs(self, leaf: int) -> list[Any]:
        pairs = zip(self._leaves, self._directions, strict=True)
        return [*self._values, *(x if i == leaf else jnp.zeros_like(x) for i, x in pairs)]


def _loss_of(numbered, values, leaves, *xs):
    full = list(values)
    for i, x in zip(leaves, xs, strict=True):
        full[i] = x
    return numbered(*full)


def _random_like(rng, x):
    direction = rng.normal(size=jnp.shape(x))
    if jnp.iscomplexobj(x):
        direction = direction + 1j * rng.normal(size=jnp.shape(x))
    return jnp.asarray(direction, jnp.result_type(x))


def _evaluated(program: ClosedJaxpr) -> Callable[..., list[np.ndarray]]:
    """The program as a function. It runs operation by operation, as it does to be watched: XLA
    takes minutes to compile some thousand operations."""
    return lambda *values: [np.asarray(x) for x in evaluate(program, values)]
