"""What `jax_custom_jvp` and `jax_custom_vjp` share: how JAX resolves the arguments of a call.

JAX has no keyword-only arguments for rules, and no methods: all arguments are resolved to
positions, and those of `nondiff_argnums` are handed to the rules first. Here these are the
configuration of a call, so that they may be, or capture, traced values.
"""

import abc
import collections
import functools as ft
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import jax

from .._errors import check_function, name_of, place_of, rule_error, RuleError
from .._rules.call import call_with_rules
from .._rules.float_args import as_integer
from .._rules.object_parts import Rebuildable
from .._rules.rule import AbstractRules
from .._rules.signature import Signature
from .._rules.wrapper import P, reduce_by_name, T


class MissingRuleError(RuleError, AttributeError):
    """The error of a call of a function without rules: JAX raises an `AttributeError`."""


class AbstractJaxDecorated(Rebuildable, abc.ABC, Generic[P, T]):
    """A function with rules that is called as JAX's are. Like JAX's, it is a leaf of a PyTree,
    compared by identity, and does not bind as a method."""

    captures = ("_fn", "_rules")
    _rules: AbstractRules

    def __init__(
        self,
        fun: Callable[P, T],
        nondiff_argnums: int | Iterable[int],
        nondiff_argnames: str | Iterable[str],
        rules: AbstractRules,
    ):
        check_function(fun, "fun", type(self).__name__)
        ft.update_wrapper(self, fun)
        self.fun = fun
        self.nondiff_argnums = _argnums(self, nondiff_argnums, nondiff_argnames)
        self._rules = rules
        self._fn = WithNondiff(fun, self.nondiff_argnums) if self.nondiff_argnums else fun
        self._arity = _arity(fun)

    @abc.abstractmethod
    def _check_complete(self) -> None:
        """Raise if there are no rules."""

    @abc.abstractmethod
    def _nondiff(self, value: Any) -> Any:
        """An argument of `nondiff_argnums`, as the function and the rules are given it."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._check_complete()
        values = _by_position(self, args, kwargs)
        if not self.nondiff_argnums:
            return call_with_rules(self._fn, self._rules, values, {})
        _check_given(self, values)
        diff = tuple(x for i, x in enumerate(values) if i not in self.nondiff_argnums)
        names = Signature(self.fun).names
        # Ordered, as a `dict` is sorted when JAX puts it together again.
        nondiff = collections.OrderedDict(
            (names[i], self._nondiff(values[i])) for i in self.nondiff_argnums
        )
        return call_with_rules(self._fn, self._rules, diff, {"nondiff": nondiff})

    def __getattr__(self, name: str) -> Any:
        # As in JAX: `f.def_vmap`, if the function is a `jax.custom_batching.custom_vmap`.
        if name.startswith("def"):
            return getattr(self.fun, name)
        raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")

    def __reduce__(self):
        return reduce_by_name(self, self.fun)

    def __repr__(self):
        return f"<eqx_grads.{type(self).__name__} of {name_of(self.fun)}>"


class WithNondiff(Rebuildable):
    """A function of the arguments that are differentiated, and of the others as `nondiff`."""

    captures = ("_fun",)

    def __init__(self, fun: Callable[..., Any], argnums: Sequence[int]):
        self._fun = fun
        self._argnums = argnums
        self.__qualname__ = name_of(fun)
        self.__wrapped__ = fun  # for the file and the line in errors
        self.__signature__ = _signature_without(fun, argnums)

    def __call__(self, /, *args: Any, nondiff: collections.OrderedDict[str, Any]) -> Any:
        return self._fun(*merge(args, self._argnums, nondiff))


def merge(args: Sequence[Any], argnums: Sequence[int], nondiff: Any) -> list[Any]:
    """All arguments by position."""
    merged = list(args)
    for i, value in zip(argnums, nondiff.values(), strict=True):
        merged.insert(i, value)  # they are in ascending order
    return merged


def _argnums(decorated, argnums, argnames) -> tuple[int, ...]:
    """The positions that `nondiff_argnums` and `nondiff_argnames` name, in ascending order."""
    positions, arity = set(), _arity(decorated.fun) or 0
    for i in _as_tuple(argnums):
        position = as_integer(i)
        if position is not None and -arity <= position < 0:  # from the end, as JAX allows it
            position += arity
        if position is None or position < 0:
            what = f"The `nondiff_argnums` of `{name_of(decorated.fun)}` are not positions."
            raise _error(decorated, what, f"they hold {i!r:.60}", do=_FROM_ZERO)
        positions.add(position)
    names = Signature(decorated.fun).by_position
    for name in _as_tuple(argnames):
        if not isinstance(name, str) or name not in names:
            raise _error(
                decorated,
                f"The `nondiff_argnames` of `{name_of(decorated.fun)}` are not positional "
                "parameters.",
                f"they hold {name!r:.60}; the parameters are {', '.join(names)}",
                do="Name parameters that can be passed by position.",
            )
        positions.add(names.index(name))
    return tuple(sorted(positions))


def _error(decorated, *what, do):
    return rule_error(*what, place_of(decorated.fun), do=do)


_FROM_ZERO = "Count the positional arguments from 0."


def _as_tuple(x) -> tuple[Any, ...]:
    if isinstance(x, str | jax.Array):
        return (x,)
    try:
        return tuple(x)
    except TypeError:  # one position, or an error
        return (x,)


def _arity(fun) -> int | None:
    """How many arguments the function has, if there is only one way to pass them all."""
    if isinstance(fun, ft.partial):
        return None
    signature = Signature(fun)
    return len(signature.by_position) if signature.is_by_position else None


def _signature_without(fun, argnums) -> inspect.Signature | None:
    """The signature of `fun` without these parameters, and without default values."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except ValueError:
        return None
    kept = [p for i, p in enumerate(parameters) if i not in argnums]
    return inspect.Signature([p.replace(default=p.empty) for p in kept])


def _by_position(decorated, args, kwargs) -> tuple[Any, ...]:
    """All arguments by position, with default values."""
    if not kwargs and len(args) == decorated._arity:
        return args
    fun = decorated.fun
    # The parameters that a `functools.partial` was given are not arguments of the call.
    signature = Signature(_anything if isinstance(fun, ft.partial) else fun)
    try:
        values, by_keyword, filled = signature.bind(args, kwargs, True)
    except TypeError as error:
        is_method = signature.by_position[:1] == ["self"]
        do = _NOT_BOUND if is_method else "Call it as the undecorated function is called."
        raise _error(decorated, f"{_not_resolved(decorated)}\n{error}", do=do) from error
    passed = [name for name in by_keyword if name not in filled]
    if passed:
        raise _error(
            decorated,
            f"{_not_resolved(decorated)}\n"
            "The following keyword arguments could not be resolved to positions: "
            f"{', '.join(passed)}",
            do="As in JAX, all arguments are passed to the rules by position. Make it a "
            "positional parameter, or use `eqx_grads.custom_jvp` or `eqx_grads.custom_vjp`, "
            "where keyword-only parameters are configuration.",
        )
    return values


def _in_jax(decorated: AbstractJaxDecorated) -> str:
    return type(decorated).__name__.removeprefix("jax_")


def _not_resolved(decorated: AbstractJaxDecorated) -> str:
    """The sentence of JAX, which its users search for."""
    return (
        f"The input arguments to the {_in_jax(decorated)}-decorated function "
        f"{name_of(decorated.fun)} could not be resolved to positional-only arguments:"
    )


def missing_rule(decorated: AbstractJaxDecorated, mode: str, do: str) -> MissingRuleError:
    """The error of a call before `defjvp` or `defvjp`; its first sentence is that of JAX."""
    name = name_of(decorated.fun)
    by = f"{_in_jax(decorated)} function {name} using def{mode.lower()}"
    what = f"No {mode} defined for {by}."
    return MissingRuleError(f"{what}\n  {place_of(decorated.fun)}\n{do}")


_NOT_BOUND = (
    "As in JAX, a decorated function does not bind as a method: pass `self` as the first "
    "argument, or use `eqx_grads.custom_jvp` or `eqx_grads.custom_vjp`, which bind."
)


def _anything(*args, **kwargs):
    del args, kwargs


def _check_given(decorated, values) -> None:
    if any(i >= len(values) for i in decorated.nondiff_argnums):
        raise _error(
            decorated,
            f"`{name_of(decorated.fun)}` was given fewer arguments than "
            "`nondiff_argnums` says.",
            f"`nondiff_argnums` is {decorated.nondiff_argnums}, and there are "
            f"{len(values)} arguments",
            do=_FROM_ZERO,
        )
