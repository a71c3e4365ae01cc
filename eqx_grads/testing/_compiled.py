"""A function of arrays with its derivatives, each compiled once and called many times."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


class Program:
    """`fn(*leaves) -> list of arrays` at `leaves`; all results are NumPy arrays."""

    def __init__(
        self,
        fn: Callable[..., Sequence[Any]],
        leaves: Sequence[jax.Array],
        context: Callable[[], Any] = contextlib.nullcontext,
    ):
        self.fn = lambda *xs: list(fn(*xs))
        self.leaves = list(leaves)
        self._context = context
        self._compiled: dict[str, Callable[..., Any]] = {}

    def value(self) -> list[Any]:
        return self.value_at(self.leaves)

    def value_at(self, leaves: Sequence[Any]) -> list[Any]:
        return self._run("value", lambda xs: self.fn(*xs), list(leaves))

    def jvp(self, tangents: Sequence[Any]) -> list[Any]:
        return self._run("jvp", self.jvp_of, self.leaves, list(tangents))

    def vjp(self, cotangents: Sequence[Any]) -> list[Any]:
        return self._run("vjp", self.vjp_of, self.leaves, list(cotangents))

    def higher(
        self,
        kind: str,
        tangents: Sequence[Any],
        cotangents: Sequence[Any],
        order: int,
        leaves: Sequence[Any] | None = None,
    ) -> list[Any]:
        """A derivative of order `order` of a scalar loss along `tangents`, as a list of arrays
        like the leaves.

        The loss is the quadratic `sum(r + r**2 / 2s)` with `r` the outputs weighted with
        `cotangents`, so that the cotangents depend on the leaves as well.
        """
        derive = _HIGHER[kind]
        scales = self._scales(cotangents)
        run = lambda xs, t, w, s: derive(_loss(self.fn, w, s), xs, t, order)
        leaves = list(self.leaves if leaves is None else leaves)
        args = leaves, list(tangents), list(cotangents), scales
        return self._run(f"{kind} {order}", run, *args)

    def _scales(self, cotangents):
        products = [np.abs(x * w) for x, w in zip(self.value(), cotangents, strict=True)]
        real = [np.abs(w).dtype for w in cotangents]
        return [
            np.asarray(1 + np.max(p, initial=0)).astype(dtype)
            for p, dtype in zip(products, real, strict=True)
        ]

    def jvp_of(self, xs, tangents):
        return jax.jvp(self.fn, xs, tangents)[1]

    def vjp_of(self, xs, cotangents):
        return list(jax.vjp(self.fn, *xs)[1](cotangents))

    def _run(self, name, fn, *args):
        with self._context():
            compiled = self._compiled.setdefault(name, jax.jit(fn))
            try:
                out = compiled(*args)
            except jax.errors.ConcretizationTypeError:  # looks at values: eager only
                self._compiled[name] = fn
                out = fn(*args)
            return [np.asarray(x) for x in out]


def _loss(fn, cotangents, scales):
    def loss(*xs):
        total = 0.0
        for out, w, s in zip(fn(*xs), cotangents, scales, strict=True):
            r = (out * w).real
            total = total + (r + r * r / (2 * s)).sum()
        return total

    return loss


def _gradient(fn, xs):
    """With respect to every leaf, complex ones as JAX has it."""
    return list(jax.grad(fn, argnums=tuple(range(len(xs))))(*xs))


def _forward_over_reverse(loss, xs, tangents, order):
    gradient = lambda *ys: _gradient(loss, ys)
    for _ in range(order - 1):
        gradient = _along(gradient, tangents)
    return gradient(*xs)


def _along(fn, tangents):
    return lambda *ys: jax.jvp(fn, list(ys), list(tangents))[1]


def _reverse_over_reverse(loss, xs, tangents, order):
    for _ in range(order - 1):
        loss = _slope_in_reverse(loss, tangents)
    return _gradient(loss, xs)


def _slope_in_reverse(scalar, tangents):
    def slope(*ys):
        gradient = _gradient(scalar, ys)
        terms = [(g * t).real.sum() for g, t in zip(gradient, tangents, strict=True)]
        return sum(terms[1:], terms[0])

    return slope


def _reverse_over_forward(loss, xs, tangents, order):
    for _ in range(order - 1):
        loss = _along(loss, tangents)
    return _gradient(loss, xs)


_HIGHER = {
    "forward over reverse": _forward_over_reverse,
    "reverse over reverse": _reverse_over_reverse,
    "reverse over forward": _reverse_over_forward,
}
