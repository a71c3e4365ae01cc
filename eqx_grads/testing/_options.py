"""The options of checks, and what they may be: seeds, tolerances, flags and names."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from .._errors import check_flags, check_function, rule_error
from .._rules.float_args import as_integer, as_number


def as_seeds(name: str, seed: Any) -> list[int]:
    """One seed or several, as a list."""
    several = isinstance(seed, Iterable) and not isinstance(seed, str | bytes)
    several = several and getattr(seed, "ndim", 1) > 0  # not an array without axes
    given = list(seed) if several and as_integer(seed) is None else [seed]
    seeds = [s for s in map(as_integer, given) if s is not None and s >= 0]
    if not seeds or len(seeds) < len(given):
        raise rule_error(
            f"The `seed` of `{name}` is not a seed.",
            f"it is {seed!r:.60}",
            do="Give an integer that is not negative, or where several are taken, a list.",
        )
    return seeds


def as_seed(name: str, seed: Any) -> int:
    seeds = as_seeds(name, seed)
    if as_integer(seed) is None:
        raise rule_error(
            f"The `seed` of `{name}` is not one seed.",
            f"it is {seed!r:.60}",
            do="Give an integer that is not negative.",
        )
    return seeds[0]


def check_tolerance(name: str, **numbers: Any) -> None:
    """Raise unless each is a finite number, zero or positive, or `None`."""
    for argument, number in numbers.items():
        known = 0 if number is None else as_number(number)
        if known is None or not 0 <= known < math.inf:
            raise rule_error(
                f"The `{argument}` of `{name}` is not a finite number from zero.",
                f"it is {number!r:.60}",
                do="Give a number such as `1e-5`, or leave it out.",
            )


def as_names(name: str, argument: str, names: Any) -> tuple[str, ...]:
    """A name or a collection of names."""
    given = (names,) if isinstance(names, str) else names
    is_array = hasattr(given, "ndim")
    several = isinstance(given, Collection) and not is_array
    if not several or not all(isinstance(n, str) and n for n in given):
        raise rule_error(
            f"The `{argument}` of `{name}` are not names.",
            f"they are {names!r:.60}",
            do="Give a name, or a tuple of names.",
        )
    return tuple(given)


def check_options(name: str, functions: dict[str, Any], **flags: Any) -> None:
    """Raise unless these are functions, where they are given, and those are bools."""
    check_flags(name, **flags)
    for argument, fn in functions.items():
        if fn is not None:
            check_function(fn, argument, name)


def check_integer(name: str, argument: str, x: Any, smallest: int) -> None:
    known = as_integer(x)
    if known is None or known < smallest:
        raise rule_error(
            f"The `{argument}` of `{name}` is not an integer from {smallest}.",
            f"it is {x!r:.60}",
            do="Give an integer.",
        )


def check_points(name: str, argument: str, x: Any) -> None:
    given = x if isinstance(x, tuple | list) else [x]
    wrong = [i for i, point in enumerate(given) if not isinstance(point, tuple | list)]
    if given is x and not wrong:
        return
    where = (
        f"it is {x!r:.60}"
        if given is not x
        else (f"`{argument}[{wrong[0]}]` is {given[wrong[0]]!r:.60}, and no tuple")
    )
    raise rule_error(
        f"The `{argument}` of `{name}` is not a list of tuples.",
        where,
        do=f"Give a tuple of the arguments for each point, as in `{argument}=[(x,), (y,)]`.",
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `check_rule`, which documents them."""

    reference: Callable[..., Any] | None = None
    expected_tangent: Callable[..., Any] | None = None
    expected_cotangent: Callable[..., Any] | None = None
    nonlinear: bool = False
    nondifferentiable: Collection[str] = ()
    tangents: Any = None
    cotangents: Any = None
    order: int = 2
    at: Sequence[Any] = ()
    max_residual_bytes: int | None = None
    tolerance: float | None = None

    def __post_init__(self):
        functions = ("reference", "expected_tangent", "expected_cotangent")
        given = {name: getattr(self, name) for name in functions}
        check_options("check_rule", given, nonlinear=self.nonlinear)
        check_tolerance("check_rule", tolerance=self.tolerance)
        check_integer("check_rule", "order", self.order, 1)
        check_points("check_rule", "at", self.at)
        as_names("check_rule", "nondifferentiable", self.nondifferentiable)
        if self.max_residual_bytes is not None:
            check_integer("check_rule", "max_residual_bytes", self.max_residual_bytes, 0)

    @property
    def is_wrong_on_purpose(self) -> bool:
        """Whether the user asked for another derivative than that of the function."""
        options = self.reference, self.expected_tangent, self.expected_cotangent
        return any(option is not None for option in options)
