"""Number the equations of a loss, and find the number in the programs of its derivatives.

JAX differentiates a program to another one. An equation of the derivative keeps the name stack
of the equation that it was made from. So each equation of the loss is evaluated in a
`jax.named_scope` with its number.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from .._errors import first_line, name_of, place_of, rule_error, RuleError
from .._jaxprs.evaluate import bind, enter, evaluate
from .._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    inner_programs,
    Scan,
    ShardMap,
    structure,
    While,
)
from .._jaxprs.versions import assigns_shardings, function_name
from .shards import enter_shard_map, of_shards
from .source_lines import (
    is_traced_here,
    safe_function,
    source_line,
    SourceLine,
    UNKNOWN,
    with_safe,
)
from .traced_loss import layer_calls, TracedLoss


@dataclasses.dataclass(frozen=True)
class Origin:
    """An equation of the loss.

    - `primitive`: its name. For a call of a function with a rule, it is the name of that
        function, or of the function of `eqx_grads.safe` around it, such as `safe.norm`.
    - `source`: the line of the user's code.
    - `path`: the path of the innermost layer that it is called in, or empty.
    - `loops`: the numbers of the equations of the enclosing loops, outermost first.
    - `enclosing`: the numbers of all enclosing equations, outermost first.
    """

    number: int
    eqn: Any
    primitive: str
    source: SourceLine
    path: str
    loops: tuple[int, ...]
    enclosing: tuple[int, ...]

    def fields(self) -> dict[str, Any]:
        """The fields of a record that say which operation, and where."""
        return {**self.source.fields(), "primitive": self.primitive, "path": self.path}


def is_in_derivative(origins: Sequence[Origin], origin: Origin) -> bool:
    """Whether an equation of the loss is in a derivative that the loss takes."""
    around = (origins[i] for i in (origin.number, *origin.enclosing))
    return any("jvp(" in str(o.eqn.source_info.name_stack) for o in around)


def equation_tag(eqn: Any) -> str:
    """The number of the equation of a `NumberedLoss` that an equation of its derivative comes
    from, as text; otherwise empty."""
    numbers = re.findall(r"eqg_equation_(\d+)", str(eqn.source_info.name_stack))
    return numbers[-1] if numbers else ""


class NumberedLoss:
    """A loss whose equations all have a number.

    `origins[i]` is equation `i`, in the order of the program; the equations of an inner program
    follow the equation around them. Called with the inputs of the program, it returns the loss.
    It can be differentiated, and `origin_of` tells where an equation of the result comes from.
    """

    def __init__(self, traced: TracedLoss):
        self.traced = traced
        self.origins: list[Origin] = []
        # By the number of the equation around it: JAX may call one program in two places.
        self._numbers: dict[tuple[int | None, int], int] = {}
        self._number(traced.program, "", (), ())

    def __call__(self, *values: Any) -> Any:
        return self.replaced({})(*values)

    def replaced(
        self, instead: Mapping[int, Callable[[Sequence[Any]], Sequence[Any]]]
    ) -> Callable[..., Any]:
        """The loss, with other functions for some equations, by number."""
        return lambda *values: self._evaluate(self.traced.program, values, None, instead)[0]

    def origin_at(self, eqns: Sequence[Any]) -> Origin:
        """The origin of the last of these equations of the loss. The others are around it,
        outermost first."""
        number = None
        for eqn in eqns:
            number = self._numbers[number, id(eqn)]
        assert number is not None
        return self.origins[number]

    def origin_of(self, eqn: Any) -> Origin | None:
        """Where an equation of a derivative of this loss comes from.

        `None` if it has no number: the equation that it is in may have one.
        """
        tag = equation_tag(eqn)
        return self.origins[int(tag)] if tag else None

    def around(self, origin: Origin) -> list[Origin]:
        """The equation, and the equations around it, innermost first."""
        return [origin, *(self.origins[i] for i in reversed(origin.enclosing))]

    def caller_of(self, origin: Origin) -> str:
        """The innermost call around the line of an equation in which it differs from another
        equation of this line, such as "model.py:12, in `loss`"; otherwise empty."""
        place = lambda o: (o.path, *o.source.calls[0])
        same = [o.source.callers for o in self.origins if place(o) == place(origin)]
        for i, (file, line, function) in enumerate(origin.source.callers):
            if any(calls[i : i + 1] != origin.source.callers[i : i + 1] for calls in same):
                name = function.rpartition("<locals>.")[2]
                return f"{os.path.basename(file)}:{line}, in `{name}`"
        return ""

    def _number(self, program, path, loops, enclosing) -> None:
        around = [self.origins[i] for i in reversed(enclosing)]
        for eqn in program.eqns:
            number = len(self.origins)
            self._numbers[around[0].number if around else None, id(eqn)] = number
            calls, layers = layer_calls(eqn), self.traced.layers
            layer = layers[calls[-1][0]] if calls and layers else path
            source = source_line(eqn) if is_traced_here(eqn, program) else UNKNOWN
            if around:
                source = _called_from(source, around[0].source)
            name = _name_of_primitive(eqn, [o.eqn for o in around])
            self.origins.append(Origin(number, eqn, name, source, layer, loops, enclosing))
            inside = (*loops, number) if isinstance(structure(eqn), Scan | While) else loops
            for part in inner_programs(eqn):
                self._number(part, layer, inside, (*enclosing, number))

    def _evaluate(self, program: ClosedJaxpr, values: Sequence[Any], around, instead):
        def hook(eqn, values):
            number = self._numbers[around, id(eqn)]
            run = lambda program, values, _=None: self._evaluate(
                program, values, number, instead
            )
            if number in instead:
                return instead[number](values)
            with jax.named_scope(f"eqg_equation_{number}"):
                if (outs := of_shards(eqn, values)) is not None:
                    return outs
                if isinstance(structure(eqn), ShardMap):
                    with contextlib.suppress(Exception):  # `vmap` has no rule for it
                        return enter_shard_map(eqn, values, run)
                return enter(eqn, values, run) if _is_entered(eqn) else bind(eqn, values)

        return evaluate(program, values, hook)


def _called_from(source: SourceLine, around: SourceLine) -> SourceLine:
    """The line of an equation, with the calls around the equation that it is in."""
    # JAX cuts tracebacks where it traces a part of a program, such as a `jit`.
    if not source.is_users and around.file:
        return dataclasses.replace(around, library=source.library or around.library)
    calls = around.calls
    is_same = not around.file or source.calls[-len(calls) :] == calls
    return source if is_same else dataclasses.replace(source, callers=source.callers + calls)


def message_of_check(error: Exception) -> str:
    """The message of a check in a compiled program, such as `eqx.error_if`."""
    lines = [line for line in str(error).splitlines() if "Error: " in line]
    return (lines or [str(error)])[-1].partition("Error: ")[2] or first_line(error)


def raised_error(loss: Any, error: Exception) -> RuleError:
    """The error for a loss that raises one where its gradient is computed."""
    return rule_error(
        f"The loss `{name_of(loss)}` or its gradient raises an error.",
        message_of_check(error),
        place_of(loss),
        do="Pass arguments for which it raises none, or correct what it checks.",
    )


def _is_entered(eqn) -> bool:
    """Whether the equation is replaced by its inner equations. Where a rule or a sharding would
    be lost, it is not."""
    known = structure(eqn)
    if isinstance(known, Call):
        return not assigns_shardings(eqn.params)
    if isinstance(known, Cond):
        return not known.by_platform
    return isinstance(known, Checkpoint | Scan | While)


def _name_of_primitive(eqn, around: Sequence[Any]) -> str:
    """The name of the primitive, or of the function that an equation calls.

    - `around`: the equations that it is in, innermost first.
    """
    known = structure(eqn)
    if isinstance(known, CallWithRule | Call):
        name = eqn.params.get("name") or getattr(eqn.params.get("call"), "name", None)
        name = name if isinstance(name, str) else function_name(*known.programs)
        if isinstance(known, CallWithRule):  # and not a helper of it that has the rule
            name = safe_function([eqn, *around]) or with_safe(name, *known.programs)
        return name
    # JAX 0.12 calls some operations, such as `searchsorted`, by one primitive.
    called = eqn.params.get("_prim")
    return eqn.primitive.name if called is None else type(called).__name__
