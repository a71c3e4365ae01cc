"""Which function an equation calls on the host."""

from typing import Any

from .in_float64 import primal_program


def name_on_host(eqn: Any) -> str:
    """What the user calls the function of a callback, or an empty string."""
    fn = getattr(eqn.params.get("callback"), "callback_func", None)
    return host_function_name(fn) or getattr(fn, "__name__", "")


def host_function_name(fn: Any) -> str:
    """The name of a host function of this library, by the object that JAX calls for it."""
    return getattr(getattr(fn, "op", None), "name", "")


def host_function_in(eqn: Any) -> str:
    """The name of the host function that an equation is the call of, or an empty string."""
    program = primal_program(eqn) if eqn.primitive.name == "eqg_call" else None
    for inner in () if program is None else program.eqns:
        callback = getattr(inner.params.get("callback"), "callback_func", None)
        if name := host_function_name(callback):
            return name
    return ""
