"""The definition of a planted fault.

A fault is a function of one bool, `bug`: with `True` it makes a rule that is wrong in exactly
one way, with `False` the same rule without the fault, its right twin.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple


Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Fault(NamedTuple):
    """A rule that is wrong in one way.

    `make()` and `right()` return `(fn, args, options)` for `check_rule(fn, *args, **options)`,
    made afresh each time, so that nothing is remembered. The check named `check` must fail,
    with a text that `match` is found in.
    """

    make: Callable[[], Case]
    check: str
    match: str
    right: Callable[[], Case]


FAULTS: dict[str, Fault] = {}


def fault(check: str, match: str) -> Callable[[Callable[[bool], Any]], Any]:
    """Enter the decorated `build(bug) -> (fn, args)` or `(fn, args, options)`."""

    def enter(build):
        name = build.__name__
        assert name not in FAULTS, name
        FAULTS[name] = Fault(
            ft.partial(_case, build, True), check, match, ft.partial(_case, build, False)
        )
        return build

    return enter


def _case(build, bug) -> Case:
    fn, args, *options = build(bug)
    return fn, args, options[0] if options else {}
