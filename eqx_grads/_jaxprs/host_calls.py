"""Which function an equation calls on the host."""

from typing import Any

from .in_float64 import primal_program


def name_on_host(eqn: Any) -> str:
    """What the user calls the function of a callback, or an empty string."""
    return _name_in_library(eqn) or getattr(_function(eqn), "__name__", "")


def host_function_in(eqn: Any) -> str:
    """The name of the host function that an equation is the call of, or an empty string."""
    program = primal_program(eqn) if eqn.primitive.name == "eqg_call" else None
    names = map(_name_in_library, () if program is None else program.eqns)
    return next(filter(None, names), "")


def _name_in_library(eqn: Any) -> str:
    """That of a host function of this library is in the object that JAX calls for it."""
    return getattr(getattr(_function(eqn), "op", None), "name", "")


def _function(eqn: Any) -> Any:
    return getattr(eqn.params.get("callback"), "callback_func", None)
