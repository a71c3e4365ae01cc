"""`implicit`: the derivative of any solver, from the equation that it solves."""

import functools as ft
import inspect
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._errors import name_of, place_of, rule_error, show_tree
from .._jaxprs.current_trace import is_eager
from .._rules.closure_convert import contains_tracer, lift_tracers
from .._rules.flatten_call import as_arrays, Signature
from .._rules.nondifferentiable import nondifferentiable
from .._rules.wrapper import AbstractWrapper, P, set_metadata, T, unwrap_method
from .implicit_tangent import Equation, with_implicit_tangent


def implicit(
    residual: Callable[..., Any],
    *,
    solver: Any = None,
    tags: object | Collection[object] = (),
    has_aux: bool = False,
    tolerance: float | None = 1e-2,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    r"""TODO"""
    if not callable(residual):
        raise rule_error(
            "`implicit` was given a residual that can't be called.",
            f"it is a `{type(residual).__qualname__}`",
            do="Write `@implicit(residual)` above the function that solves "
            "`residual(y, *args) = 0`.",
        )
    tags = frozenset(tags) if isinstance(tags, Collection) else frozenset([tags])
    return ft.partial(
        ImplicitFunction,
        residual=residual,
        solver=solver,
        tags=tags,
        has_aux=has_aux,
        tolerance=tolerance,
    )


class ImplicitFunction(AbstractWrapper[P, T]):
    """A function that solves an equation, with the derivative of the solution."""

    fn: Callable[..., Any]
    residual: Callable[..., Any]
    _binding: str = eqx.field(static=True)
    _solver: Any = eqx.field(static=True)
    _tags: frozenset[object] = eqx.field(static=True)
    _has_aux: bool = eqx.field(static=True)
    _tolerance: float | None = eqx.field(static=True)

    def __init__(
        self,
        fn: Callable[P, T] | staticmethod | classmethod,
        *,
        residual: Callable[..., Any],
        solver: Any,
        tags: frozenset[object],
        has_aux: bool,
        tolerance: float | None,
    ):
        self.fn, self._binding = unwrap_method(fn)
        self.residual = residual
        self._solver = solver
        self._tags = tags
        self._has_aux = has_aux
        self._tolerance = tolerance
        set_metadata(self, self.fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        args, kwargs, _ = Signature(self.fn).bind(args, kwargs, True)
        args = as_arrays(args)
        if is_eager() and not contains_tracer(self.fn, args, kwargs):
            return as_arrays(self.fn(*args, **kwargs))
        out = _without_tangents(self.fn, args, kwargs)
        y, aux = _split_aux(self.fn, out) if self._has_aux else (out, None)
        y = self._with_tangent(y, args, kwargs)
        return (y, aux) if self._has_aux else y

    def _with_tangent(self, y, args, kwargs):
        name = name_of(self.fn)
        config = _config(self.residual, args, kwargs, name)
        # The derivative of whatever is traced: the arguments, and what the residual or a
        # function among the arguments closes over.
        template, operands = lift_tracers([self.residual, args, config])
        if not operands:
            return y
        equation = Equation(template, self._solver, self._tags, self._tolerance, name)
        return with_implicit_tangent(y, operands, equation=equation)


def _without_tangents(fn, args, kwargs):
    """The value of a call, nothing in which is differentiated, whatever it closes over."""
    template, tracers = lift_tracers([fn, args, kwargs])
    (fn, args, kwargs), _ = template.substitute(_stop_gradient(tracers))
    return _stop_gradient(as_arrays(fn(*args, **kwargs)))


def _stop_gradient(tree):
    # The primal of `jax.grad(f)(3.0)` is a number of Python's.
    stop = lambda x: jnp.asarray(jax.lax.stop_gradient(x)) if isinstance(x, jax.Array) else x
    return jax.tree.map(stop, tree)


def _split_aux(fn, out):
    if not isinstance(out, tuple) or len(out) != 2:
        raise rule_error(
            f"`{name_of(fn)}` did not return a pair, as `has_aux=True` says.",
            f"it returned {show_tree(out)}",
            place_of(fn),
            do="Return `y, aux`: the solution and anything else.",
        )
    return out


def _config(residual, args, kwargs, solve):
    """The keyword-only arguments that the residual has a parameter for."""
    try:
        signature = inspect.signature(residual)
    except ValueError:  # a builtin that does not say
        return {}
    parameters = signature.parameters.values()
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind != p.POSITIONAL_ONLY}
    config = {k: v for k, v in kwargs.items() if takes_all or k in named}
    try:
        signature.bind(None, *args, **config)
    except TypeError as mismatch:
        raise rule_error(
            f"The residual `{name_of(residual)}` can't be called with the solution and the "
            f"arguments of `{solve}`: {mismatch}.",
            f"`{solve}` has {len(args)} arguments by position",
            place_of(residual),
            do="Give it the parameters `(y, *args)`, where `args` are the positional "
            "parameters of the function that it decorates. A first guess, and what else the "
            "solution does not depend on, is a keyword-only parameter of that function.",
        ) from None
    return {
        k: nondifferentiable(v, f"The keyword-only argument `{k}` of `{solve}`")
        for k, v in config.items()
    }
