"""A rule, one call of it, and what it is held to."""

import contextvars
import dataclasses
import functools as ft
import inspect
from collections.abc import Callable
from typing import Any

import jax

from .._errors import name_of, place_of, rule_error, show_tree
from .closure_convert import check_holds_nothing, Copyable, Token
from .flatten_call import Outputs, ParameterNames, Recipe, trace_state


class Rule(Copyable):
    """A function that the user gave as a rule.

    Its parameters are read off when it is given, and not later: by then a copy may stand
    in its place that has traced values filled in, and no `__wrapped__`.
    """

    def __init__(
        self, fn: Callable[..., Any], symbolic_zeros: bool = False, surely_linear: bool = False
    ):
        self.fn = fn.__func__ if isinstance(fn, staticmethod) else fn
        self.symbolic_zeros = symbolic_zeros
        self.surely_linear = surely_linear  # of a forward rule: nothing to check
        parameters = inspect.signature(self.fn).parameters.values()
        self.keyword_only = frozenset(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        anything = any(p.kind == p.VAR_KEYWORD for p in parameters)
        # `None` is anything.
        self._accepted = None if anything else frozenset(p.name for p in parameters)

    @property
    def name(self) -> str:
        return name_of(self.fn)

    @property
    def place(self) -> str:
        return place_of(self.fn)

    def keywords(self, kwargs: dict[str, Any], filled: frozenset[str]) -> dict[str, Any]:
        """The keyword-only arguments of the function: all that were given, and of those
        that have their default value the ones that this rule has a parameter for."""
        if self._accepted is None or not filled:
            return kwargs
        left_out = filled - self._accepted
        return {k: v for k, v in kwargs.items() if k not in left_out}

    def asked_for(self, offered: dict[str, Any]) -> dict[str, Any]:
        """Of what is offered, that which the rule names as a keyword-only parameter."""
        return {k: v for k, v in offered.items() if k in self.keyword_only}


@dataclasses.dataclass
class RuleCall:
    """One differentiation of one call: what a rule needs to know.

    - `definition, args, kwargs`: the function and its arguments, put together again.
    - `operands`: the arrays; `tangents`: theirs, `None` for zero. Those of the positional
        arguments come first, and no others have a tangent.
    - `recipe, names`: how the operands make up the arguments, and the user's names.
    """

    definition: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Any]
    tangents: list[Any]
    recipe: Recipe
    names: ParameterNames

    def keywords(self, rule: Rule) -> dict[str, Any]:
        """The keyword-only arguments for `rule`."""
        return rule.keywords(self.kwargs, self.recipe.filled)

    def live(self) -> list[int]:
        """Which of the positional arrays have a tangent."""
        return [i for i, t in enumerate(self.tangents) if t is not None]


class Seen(Token):
    """What was found out about a function and its rules, for each type of arguments."""

    most = 256

    def __init__(self):
        self._found: dict[Any, Any] = {}

    def __reduce__(self):  # a copy has seen nothing
        return Seen, ()

    def once(self, call: RuleCall, what: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, but only once for arguments of the same type."""
        key = call.recipe.key(call.operands)
        if key is None:
            return compute()
        if (key, what) not in self._found:
            if len(self._found) >= self.most:
                self._found.clear()
            self._found[(key, what)] = compute()
        return self._found[(key, what)]


class CallWatch:
    """Notes whether a function is called in another trace than the one it begins in."""

    _current: contextvars.ContextVar["CallWatch | None"] = contextvars.ContextVar(
        "eqx_grads_call_watch", default=None
    )

    def __init__(self, seen: Seen, state: Any):
        self._seen, self._state = seen, state
        self.called_inside = False

    def __enter__(self):
        self._token = self._current.set(self)

    def __exit__(self, *_):
        self._current.reset(self._token)

    @classmethod
    def note(cls, seen: Seen) -> None:
        watch = cls._current.get()
        if watch is not None and watch._seen is seen and trace_state() != watch._state:
            watch.called_inside = True


# Raised by a function that looks at the values of its arguments, which works eagerly.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def check_outputs(call: RuleCall, rule: Rule, outputs: Outputs, box: list[Outputs]) -> None:
    """Raise if a rule returns anything but what the function does (clause 7)."""
    if box:
        expected = box[0]
    else:
        compute = ft.partial(_outputs, call)
        expected = call.definition.seen.once(call, "outputs", compute)
        if expected is not None and expected.difference(outputs) is not None:
            # A function may depend on more than its arguments (the size of a named axis, a
            # global variable), and so on more than was remembered.
            expected = compute()
    difference = None if expected is None else expected.difference(outputs)
    if expected is not None and difference is not None:
        name = name_of(call.definition.fn)
        raise rule_error(
            f"The rule `{rule.name}` of `{name}` returned another output than `{name}` "
            f"does: {difference}.",
            f"`{name}` returns {show_tree(expected.describe())}",
            f"`{rule.name}` returns {show_tree(outputs.describe())}",
            rule.place,
            do=f"The first result of the rule is the value: return `{name}(...)`, or what "
            "it computes.",
        )


def _outputs(call: RuleCall) -> Outputs | None:
    """What the function itself returns, less the arrays; `None` if it can't be traced."""
    recipe, found = call.recipe, []

    def primal(*operands):
        definition, args, kwargs = recipe.restore(operands)
        outputs, arrays = Outputs.of(definition.fn(*args, **kwargs))
        found.append(outputs)
        return arrays

    try:
        jax.eval_shape(primal, *call.operands)
    except NEEDS_VALUES:
        return None
    return found[0]


def check_no_tracers(fn: Any, outputs: Outputs) -> None:
    """Raise if a static output holds a traced value, which would escape with it."""

    def fail(i, name):
        return rule_error(
            f"`{name_of(fn)}` returned a function, or another object that is not an array, "
            "which holds a traced value.",
            f"at out{outputs.static_path(i)}: {name}",
            place_of(fn),
            do="What a function with a rule returns leaves the trace it was made in. Return "
            "the value as an array, for instance in an `eqx.Module` or `eqx.Partial`.",
        )

    check_holds_nothing(outputs.rest.static, fail)
