"""Identities of their first argument with another derivative: one function for each op."""

import functools as ft
from collections.abc import Callable
from typing import Any

from .custom_jvp import custom_jvp
from .custom_vjp import custom_vjp


def backward_op(fn: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False) -> Any:
    """The identity of the first argument, whose cotangent is `fn(ct, *others, **options)`. The
    other arguments have no cotangent. A decorator.

    The rule returns the argument itself and does not call the op again. Then a second
    derivative is the derivative of the gradient that the op makes, as finite differences of
    that gradient are.
    """
    if fn is None:
        return ft.partial(backward_op, symbolic_zeros=symbolic_zeros)
    op = custom_vjp(_identity(fn))
    op.def_fwd(lambda x, *others, **options: (x, (others, options)))

    def bwd(residuals, ct):
        others, options = residuals
        return fn(ct, *others, **options), *(None for _ in others)

    op.def_bwd(bwd, symbolic_zeros=symbolic_zeros)
    return op


def tangent_op(fn: Callable[..., Any]) -> Any:
    """The identity of the first argument, whose tangent is `fn(t, *others)`; a zero is `None`.
    The other arguments have no tangent. A decorator."""
    op = custom_jvp(_identity(fn))

    def jvp(primals, tangents):
        x, *others = primals
        return x, fn(tangents[0], *others)

    op.def_jvp(jvp, symbolic_zeros=True)
    return op


def _identity(fn):
    @ft.wraps(fn)  # which has the names of the parameters
    def identity(x, *others, **options):
        del others, options
        return x

    return identity
