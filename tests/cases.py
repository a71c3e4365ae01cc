"""Every public op as a function with arguments in float32: what the tests of all ops run over.

They are the first entry of each op in `tests/guard/registry`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import eqx_grads as eqg

from .guard.contract import cast, reference
from .guard.registry import ENTRIES, Entry


class Case(NamedTuple):
    """`make()` returns the function and its arguments; `options` are `check_rule`'s."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    options: dict[str, Any]


# Their references are raw `jax.custom_vjp`s, which have no forward mode.
_ONE_MODE = {"nonlinear": True, "skip": ("forward", "adjoint", "linear", "order")}
# Forward mode differentiates the function, which is not what their backward rule says.
_OTHER_MODE = {"skip": ("forward", "adjoint", "order")}
# Their solver keeps tracers, and has equations of its own.
_SOLVER = {"skip": ("zeros", "leaks")}
_OPTIONS = {
    "nn.GradientProbe": _ONE_MODE,
    "custom_gradient": _OTHER_MODE,
    "jax_custom_vjp": _OTHER_MODE,
    "filter_custom_vjp": _OTHER_MODE,
    "implicit": _SOLVER,
    "fixed_point": _SOLVER,
    # To second order, the derivative of the gradient as it is, which no function has; or the
    # rule runs in NumPy; or the rule is not the derivative of its function.
    **{name: {"order": 1} for name in ("host_function", "scale_gradient", "reverse_gradient")},
    **{name: {"order": 1} for name in ("jax_custom_jvp", "filter_custom_jvp")},
    # `jax.debug_nans` stops at the product that is dropped afterwards.
    "zero_safe": {"skip": ("finite",)},
}


def _options(op: str, entry: Entry) -> dict[str, Any]:
    """What `check_rule` compares the op with: the reference of the registry."""
    options = _OPTIONS.get(op, {})
    if entry.forward is None:
        return {"reference": reference(entry), **options}
    both = eqg.custom_vjp(lambda *xs: entry.plain(*xs))
    both.def_fwd(lambda *xs: (entry.plain(*xs), xs))
    both.def_bwd(lambda xs, ct: eqx.filter_vjp(entry.plain, *xs)[1](ct))
    both.def_jvp(lambda xs, ts: (entry.plain(*xs), eqx.filter_jvp(entry.forward, xs, ts)[1]))
    return {"nonlinear": True, "reference": both, **options}


def _case(op: str, entry: Entry) -> Case:
    return Case(lambda: (entry.fn, cast(entry.args, "float32")), _options(op, entry))


CASES: dict[str, Case] = {}
for _entry in ENTRIES.values():
    _op = _entry.name.split(":")[0]
    if "vjp" in _entry.orders and _op not in CASES:
        CASES[_op] = _case(_op, _entry)

__all__ = ["CASES", "Case"]
