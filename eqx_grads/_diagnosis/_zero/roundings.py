"""Roundings beside a path that has a gradient: it is not zero, and leaves them out."""

from jax.extend.core import ClosedJaxpr

from ..._jaxprs.interpret import Domain, interpret
from ..._jaxprs.structure import CallWithRule
from ..pairs import is_inexact
from ..report import show_list
from ..source_lines import called_functions, source_line, UNKNOWN


_Fact = tuple[bool, frozenset[str]]
_CONSTANT: _Fact = (False, frozenset())
_ROUNDINGS = ("round", "rint", "floor", "ceil", "trunc", "fix", "sign")


def roundings(program: ClosedJaxpr, n: int) -> list[str]:
    """A remark on roundings of the first `n` inputs of a loss: those that the user calls, and
    not inside a `stop_gradient`, as a straight-through derivative has."""

    def apply(eqn, facts, path):
        moves, rounded = any(m for m, _ in facts), frozenset().union(*(r for _, r in facts))
        if moves and eqn.primitive.name in _ROUNDINGS:
            moves, rounded = False, rounded | set(_users_call((eqn, *reversed(path))))
        elif eqn.primitive.name == "stop_gradient":
            moves, rounded = False, frozenset()
        return [(moves, rounded) if is_inexact(v) else _CONSTANT for v in eqn.outvars]

    # A fact: whether a value moves with the inputs, and what it was rounded by.
    domain = Domain[_Fact](
        constant=lambda x: _CONSTANT,
        join=lambda a, b: (a[0] or b[0], a[1] | b[1]),
        apply=apply,
        enters=lambda known: not isinstance(known, CallWithRule),
    )
    starts: list[_Fact] = [(i < n, frozenset()) for i in range(len(program.in_avals))]
    found = sorted(interpret(program, starts, domain).outs[0][1])
    where, do = show_list(found, 4), "Other paths have one. If this one should, use `eqg.ste`."
    return [f"No gradient passes through {where}. {do}"] if found else []


def _users_call(eqns) -> list[str]:
    """The function and the line, if the user calls it, and no function of a library does.

    - `eqns`: the equation and the equations around it, innermost first.
    """
    lines = ((e, source_line(e)) for e in eqns)
    eqn, line = next(((e, line) for e, line in lines if line.file), (eqns[0], UNKNOWN))
    name = str(eqn.params.get("name", eqn.primitive.name))
    # JAX's own wrappers are local functions.
    by_library = any("<locals>" not in f and f != name for f in called_functions(eqn)[-1:])
    is_users = name in _ROUNDINGS and line.is_users and not (line.library or by_library)
    return [f"`{name}` at {line}"] if is_users else []
