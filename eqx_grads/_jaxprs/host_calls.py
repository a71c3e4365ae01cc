"""Which function an equation calls on the host."""

from typing import Any

from .structure import inner_programs


def name_on_host(eqn: Any) -> str:
    """The user's name of the function of a callback, or an empty string."""
    return _name_in_library(eqn) or getattr(_function(eqn), "__name__", "")


def host_function_in(eqn: Any) -> str:
    """The name of the host function that an equation is the call of, or an empty string."""
    eqns = (inner for program in inner_programs(eqn) for inner in program.eqns)
    return next(filter(None, map(_name_in_library, eqns)), "")


def is_without_derivative(eqn: Any) -> bool:
    """Whether an equation calls a host function that was given no derivative."""
    return not getattr(_op(eqn), "has_derivative", True)


def _name_in_library(eqn: Any) -> str:
    """The name of a host function of this library, which is in the object that JAX calls."""
    return getattr(_op(eqn), "name", "")


def _op(eqn: Any) -> Any:
    return getattr(_function(eqn), "op", None)


def _function(eqn: Any) -> Any:
    return getattr(eqn.params.get("callback"), "callback_func", None)
