"""The parameters of a function, how a call is bound to them, and what can be differentiated."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import name_of, unpartial
from .._tangent_spaces import is_array, is_arraylike, is_dynamic, is_numeric_array
from .closure_convert import contains_tracer, Opaque


class Convention(NamedTuple):
    """A calling convention.

    - `args`, `kwargs`, `outputs`: which leaves of the positional arguments, the keyword-only
        arguments and the outputs are arrays, and so operands. The others are static.
    - `binds`: whether arguments are bound to the parameters of the function, and numbers are
        arrays even if nothing is transformed. If not, the arguments stay as they were given.
    - `fills_defaults`: whether a rule gets the positional arguments that were left out.
    - `configuration`: for errors, what can't be differentiated, and what to do.
    """

    args: Callable[[Any], bool] = is_dynamic
    kwargs: Callable[[Any], bool] = is_array
    outputs: Callable[[Any], bool] = is_dynamic
    binds: bool = True
    fills_defaults: bool = True
    configuration: tuple[str, str] = (
        "a keyword-only argument",
        "Keyword-only arguments are configuration. Make it a positional parameter to give it a "
        "derivative, or pass `jax.lax.stop_gradient` of it.",
    )


OURS = Convention()
# The rule gets the arguments of the caller.
AS_CALLED = Convention(fills_defaults=False)
JAX = Convention(
    outputs=is_arraylike,
    binds=False,
    configuration=(
        "an argument of `nondiff_argnums`",
        "Remove it from `nondiff_argnums`, and return its cotangent, or pass "
        "`jax.lax.stop_gradient` of it.",
    ),
)
EQUINOX = Convention(
    args=is_numeric_array,
    kwargs=is_numeric_array,
    binds=False,
    fills_defaults=False,
    configuration=(
        "an argument that was passed by keyword",
        "Pass it by position to give it a derivative, or pass `jax.lax.stop_gradient` of it.",
    ),
)


class ParameterNames:
    """The user's names of the positional arguments."""

    def __init__(self, names: Sequence[str], rest: str):
        self._names = tuple(names)
        self._rest = rest

    def __getitem__(self, i: int) -> str:
        if i < len(self._names):
            return self._names[i]
        return f"{self._rest}[{i - len(self._names)}]"


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """The signature of `fn`. A builtin without one counts as `(*args, **kwargs)`, and so does a
    ufunc: NumPy 2.4 names its many options (`out`, `casting`, ...), some of which exclude each
    other even with their default values."""
    inner = inspect.unwrap(unpartial(fn)) if callable(fn) else fn
    try:
        return _ANYTHING if isinstance(inner, np.ufunc) else inspect.signature(fn)
    except ValueError:
        return _ANYTHING


_ANYTHING = inspect.signature(lambda *args, **kwargs: None)


def accepted_keywords(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """The keyword arguments that `fn` has parameters for; and why it can't be called with
    these and `args`, or an empty string."""
    signature = signature_of(fn)
    parameters = signature.parameters
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        kwargs = {name: x for name, x in kwargs.items() if name in parameters}
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        return kwargs, str(mismatch)
    return kwargs, ""


class Signature(Opaque):
    """The parameters of a function, in two kinds.

    What can be passed by position can be differentiated; what is keyword-only is
    configuration.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._signature = signature_of(fn)
        parameters = self._signature.parameters.values()
        names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        rest = [p.name for p in parameters if p.kind == p.VAR_POSITIONAL]
        # Holds no default values, which may be tracers.
        self.names = ParameterNames(names, rest[0] if rest else "args")
        self.by_position = names
        self.is_by_position = len(names) == len(parameters)  # and no others
        bare = [p.replace(default=p.empty, annotation=p.empty) for p in parameters]
        self._call = f"{name_of(fn)}{inspect.Signature(bare)}"
        # Whether a default value is, or captures, a tracer.
        self.holds_tracer = contains_tracer([p.default for p in parameters])

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], fills_defaults: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], frozenset[str]]:
        """The arguments by position, the keyword-only ones, and the names of the
        keyword-only arguments that were filled in from defaults.

        Without `fills_defaults`, the last arguments by position may be missing.
        """
        if self.is_by_position and not kwargs and len(args) == len(self.by_position):
            return args, kwargs, frozenset()
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:  # which does not name the function
            raise TypeError(f"{error} in the call of `{self._call}`") from None
        # If one was passed by keyword, all before it are filled in.
        fills = fills_defaults or any(name in bound.kwargs for name in self.by_position)
        n = None if fills else len(bound.args)
        bound.apply_defaults()
        return bound.args[:n], bound.kwargs, frozenset(bound.kwargs) - frozenset(kwargs)
