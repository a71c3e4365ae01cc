"""What happens in a call with one wrong argument."""

import re
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .kinds import KINDS, NotApplicable
from .targets import arrays, call, Target, TARGETS


FUNCTIONS = (
    "carry_gradient",
    "setup",
    "where",
    "reference",
    "activation",
    "backward",
    "call",
    "input_quantizer",
    "output",
    "surrogate",
)
ENDLESS = ("beyond int32", "beyond int64")
# A size that is too large takes memory without end, in a call that is not only traced.
HUGE = (*ENDLESS, "axis too large")


class Outcome(NamedTuple):
    """`verdict`: "right", "clear" (an error that names the argument), "unclear" (another error)
    or "silent". `text` is the error, or what was returned."""

    target: str
    argument: str
    kind: str
    verdict: str
    text: str


def names(argument: str, error: BaseException) -> bool:
    """Whether the text of an error names an argument, or a leaf in it.

    A short name is a word of English or mathematics as well, so it has to be marked as a name.
    """
    text = str(error)
    name = re.escape(argument).replace("_", "[ _]")
    if re.search(rf"[`'\"]{name}\b|\b{name}(\[|\.\w|=)", text):
        return True
    return len(argument) > 2 and re.search(rf"\b{name}\b", text) is not None


def outcome(target: str, argument: str, kind: str, mode: str = "staged") -> Outcome | None:
    """What happens in a call with this kind of argument. `None` if the kind or the mode does
    not apply.

    The `mode` is "eager", "staged" (inside a trace, with arguments that are constants) or
    "traced" (the argument is a tracer, if it is an array).
    """
    given = TARGETS[target]
    try:
        value = KINDS[kind](given.args[argument])
    except NotApplicable:
        return None
    if mode == "traced" and not isinstance(value, jax.Array):
        return None
    if callable(value) and (callable(given.args[argument]) or argument in FUNCTIONS):
        return None  # a function is only called later, and raises errors of its own
    if kind in HUGE and mode == "eager":
        return None
    if kind in ENDLESS and argument in ("num_layers", "num_spatial_dims", "state_size"):
        return None  # it would make as many
    return Outcome(target, argument, kind, *_judge(given, argument, value, mode))


def _judge(given: Target, argument: str, value: Any, mode: str) -> tuple[str, str]:
    is_documented = []

    def run(value):
        is_documented.append(given.domains[argument](value))
        return arrays(call(given, **{argument: value}))

    try:
        # As users run it. The tests are stricter.
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            warnings.catch_warnings(action="ignore"),
        ):
            if mode == "eager" or given.is_eager:
                out = run(value)
            elif mode == "staged":
                out = jax.eval_shape(lambda: run(value))
            else:
                out = jax.eval_shape(run, value)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        is_clear = isinstance(error, TypeError | ValueError) and (
            names(argument, error) or (given.called and given.called in str(error).lower())
        )
        # A solver that fails, as documented: its message names the user's function.
        is_clear = is_clear or isinstance(error, eqx.EquinoxRuntimeError)
        return ("clear" if is_clear else "unclear"), text
    return ("right" if is_documented[0] else "silent"), f"{out!r:.200}"
