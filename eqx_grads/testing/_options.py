"""The options of checks, and what they may be: seeds, tolerances, flags and names."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from .._errors import bad_argument, check_flags, check_function, rule_error
from .._rules.float_args import as_count, as_number


def as_seeds(name: str, seed: Any) -> list[int]:
    """One seed or several, as a list."""
    is_one = not isinstance(seed, Iterable) or getattr(seed, "ndim", 1) == 0
    return [as_seed(name, s) for s in ([seed] if is_one else list(seed) or [None])]


def as_seed(name: str, seed: Any) -> int:
    return as_count(name, "seed", seed, least=0)


def check_tolerance(name: str, tolerance: Any) -> None:
    """Raise unless it is a finite number, zero or positive, or `None`."""
    known = 0 if tolerance is None else as_number(tolerance)
    if known is None or not 0 <= known < math.inf:
        do = "Give a number such as `1e-5`, or leave it out."
        raise bad_argument(name, "tolerance", "a finite number of at least zero", tolerance, do)


def as_names(name: str, argument: str, names: Any) -> tuple[str, ...]:
    """A name or a collection of names."""
    given = (names,) if isinstance(names, str) else names
    several = isinstance(given, Collection) and not hasattr(given, "ndim")
    if not several or not all(isinstance(n, str) and n for n in given):
        raise rule_error(
            f"The `{argument}` of `{name}` are not names.",
            f"they are {names!r:.60}",
            do="Give a name, or a tuple of names.",
        )
    return tuple(given)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `check_rule`, which documents them."""

    reference: Callable[..., Any] | None = None
    nonlinear: bool = False
    nondifferentiable: Collection[str] = ()
    tangents: Any = None
    cotangents: Any = None
    order: int = 2
    at: Sequence[Any] = ()
    max_residual_bytes: int | None = None
    tolerance: float | None = None

    def __post_init__(self):
        check_flags("check_rule", nonlinear=self.nonlinear)
        if self.reference is not None:
            check_function(self.reference, "reference", "check_rule")
        check_tolerance("check_rule", self.tolerance)
        as_count("check_rule", "order", self.order)
        if self.max_residual_bytes is not None:
            as_count("check_rule", "max_residual_bytes", self.max_residual_bytes, least=0)
        is_list = isinstance(self.at, tuple | list)
        if not is_list or not all(isinstance(point, tuple | list) for point in self.at):
            do = "Give a tuple of the arguments for each point, as in `at=[(x,), (y,)]`."
            raise bad_argument("check_rule", "at", "a list of tuples", self.at, do)
