"""What `jax_custom_jvp` and `jax_custom_vjp` share: how JAX resolves the arguments of a call.

JAX has no keyword-only arguments for rules, and no methods: all arguments are resolved to
positions, and the rules get the arguments of `nondiff_argnums` first. Here these arguments are
the configuration of a call, so that they may be, or capture, traced values.
"""

import abc
import collections
import functools as ft
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic

import jax
from jax.core import Tracer

from .._errors import check_function, name_of, place_of, rule_error, RuleError
from .._rules.call import call_with_rules
from .._rules.closure_convert import Rebuildable
from .._rules.float_args import as_integer
from .._rules.rule import AbstractRules
from .._rules.signature import JAX, Signature, signature_of
from .._rules.wrapper import P, reduce_by_name, T


class MissingRuleError(RuleError, AttributeError):
    """The error of a call of a function without rules: JAX raises an `AttributeError`."""


class AbstractJaxDecorated(Rebuildable, abc.ABC, Generic[P, T]):
    """A function with rules that is called as JAX's are. Like JAX's, it is a leaf of a PyTree,
    compared by identity, and does not bind as a method.

    - `mode`, `how`: of an error before there are rules: which are missing, and how to give
        them.
    - `stops`: whether an argument of `nondiff_argnums` has the derivative zero, silently.
    - `new_rules`: the class of the rules.
    - `unset`: the attributes of JAX's class before there are rules.
    """

    captures = ("_fn", "_rules")
    mode: ClassVar[str]
    how: ClassVar[str]
    stops: ClassVar[bool]
    new_rules: ClassVar[type[AbstractRules]]
    unset: ClassVar[dict[str, Any]]

    def __init__(
        self,
        fun: Callable[P, T],
        nondiff_argnums: int | Iterable[int] = (),
        nondiff_argnames: str | Iterable[str] = (),
        **options: Any,
    ):
        if options:  # Python's error would name this class
            raise TypeError(f"`{type(self).__name__}` has no option `{next(iter(options))}`.")
        check_function(fun, "fun", type(self).__name__)
        ft.update_wrapper(self, fun)
        self.fun = fun
        self._arity = _arity(fun)
        self.nondiff_argnums = _argnums(self, nondiff_argnums, nondiff_argnames)
        self._rules = type(self).new_rules(JAX)
        self._fn = WithNondiff(fun, self.nondiff_argnums) if self.nondiff_argnums else fun
        self._has_rules = self.symbolic_zeros = False
        vars(self).update(type(self).unset)  # which `fun` may have, too

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._has_rules:
            name, mode = name_of(self.fun), self.mode
            raise MissingRuleError(  # after the sentence of JAX
                f"No {mode} defined for {_in_jax(self)} function {name} using "
                f"def{mode.lower()}.\n  {place_of(self.fun)}\n"
                f"Define one with `{self.how.format(name)}`."
            )
        values = _by_position(self, args, kwargs)
        if not self.nondiff_argnums:
            return call_with_rules(self._fn, self._rules, values, {})
        diff = tuple(x for i, x in enumerate(values) if i not in self.nondiff_argnums)
        fixed = [values[i] for i in self.nondiff_argnums]
        if self.stops:
            is_traced = lambda x: isinstance(x, Tracer)
            stop = lambda x: jax.lax.stop_gradient(x) if is_traced(x) else x
            fixed = jax.tree.map(stop, fixed)
        # Ordered, as a `dict` is sorted when JAX puts it together again.
        names = map(Signature(self.fun).names.__getitem__, self.nondiff_argnums)
        nondiff = collections.OrderedDict(zip(names, fixed, strict=True))
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
        # Without default values.
        parameters = enumerate(signature_of(fun).parameters.values())
        kept = [p.replace(default=p.empty) for i, p in parameters if i not in argnums]
        self.__signature__ = inspect.Signature(kept)

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
    names, positions = Signature(decorated.fun).by_position, set()
    by_name = [names.index(x) if x in names else str(x) for x in _as_tuple(argnames)]
    for x in (*_as_tuple(argnums), *by_name):
        i = as_integer(x)
        if i is not None and i < 0:  # from the end, as JAX allows it
            i += decorated._arity or 0
        if i is None or i < 0:
            raise rule_error(
                f"The `nondiff_argnums` of `{name_of(decorated.fun)}` are not positions.",
                f"they hold {x!r:.60}; the parameters are {', '.join(names)}",
                place_of(decorated.fun),
                do="Count the arguments from 0. `nondiff_argnames` are parameters that can be "
                "passed by position.",
            )
        positions.add(i)
    return tuple(sorted(positions))


def _as_tuple(x) -> tuple[Any, ...]:
    is_several = isinstance(x, Iterable) and not isinstance(x, str | jax.Array)
    return tuple(x) if is_several else (x,)


def _arity(fun) -> int | None:
    """How many arguments the function has, if there is only one way to pass them all."""
    if isinstance(fun, ft.partial):
        return None
    signature = Signature(fun)
    return len(signature.by_position) if signature.is_by_position else None


def _by_position(decorated, args, kwargs) -> tuple[Any, ...]:
    """All arguments by position, with default values."""
    if not kwargs and len(args) == decorated._arity:
        return args
    fun, nondiff = decorated.fun, decorated.nondiff_argnums
    # The parameters that a `functools.partial` was given are not arguments of the call.
    signature = Signature(_anything if isinstance(fun, ft.partial) else fun)
    try:
        values, by_keyword, filled = signature.bind(args, kwargs, True)
        if passed := [name for name in by_keyword if name not in filled]:
            what = "The following keyword arguments could not be resolved to positions"
            raise TypeError(f"{what}: {', '.join(passed)}")
        if any(i >= len(values) for i in nondiff):
            what = f"`nondiff_argnums` is {nondiff}"
            raise TypeError(f"{what}, and there are {len(values)} arguments")
    except TypeError as error:  # after the sentence of JAX, which its users search for
        raise rule_error(
            f"The input arguments to the {_in_jax(decorated)}-decorated function "
            f"{name_of(fun)} could not be resolved to positional-only arguments:\n{error}",
            place_of(fun),
            do=_AS_IN_JAX,
        ) from error
    return values


_AS_IN_JAX = (
    "Call it as the undecorated function is called. As in JAX, keyword-only arguments can't be "
    "passed, and a decorated function does not bind as a method: pass `self` first. With "
    "`eqx_grads.custom_jvp` or `eqx_grads.custom_vjp`, keyword-only parameters are "
    "configuration, and methods bind."
)


def _anything(*args, **kwargs):
    del args, kwargs


def _in_jax(decorated: AbstractJaxDecorated) -> str:
    return type(decorated).__name__.removeprefix("jax_")
