"""`filter_scan(online=...)` as a method of a scan. The computation is in `_online`."""

import dataclasses
from typing import Any

from .._errors import rule_error
from .scan_backward import AbstractMethod, Loop


@dataclasses.dataclass(frozen=True)
class Online(AbstractMethod):
    """Save the inputs only, and compute the derivatives of the carry forward in time.

    - `approximate`: e-prop, which drops all but the diagonal of the derivative of the carry.
    """

    approximate: bool

    def unsupported(self, loop: Loop) -> str | None:
        return loop.why_not_again

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        from .._online.online_scan import online_scan, OnlineOptions  # only if asked for

        body, consts, init = loop.traced
        step: Any = loop.body  # of the user
        for_errors = tuple(step.carry_paths()), step.place()
        options = OnlineOptions(self.approximate, *for_errors, loop.reverse, loop.unroll)
        return online_scan(consts, init, loop.xs, loop.step_index, body=body, options=options)


def online_method(online: Any, checkpoint: Any, truncate: Any) -> Online | None:
    if online is False:
        return None
    if online is not True and not (isinstance(online, str) and online == "e-prop"):
        raise rule_error(
            "`filter_scan` was given an `online` that it does not know.",
            f"it is {online!r:.60}",
            do='Give `True`, "e-prop" or `False`.',
        )
    if checkpoint is not None or truncate is not None:
        raise rule_error(
            "An online `filter_scan` saves its inputs only, so there is nothing to choose.",
            f"`checkpoint` is {checkpoint!r:.60}, `truncate` is {truncate!r:.60}",
            do="Leave them out, or leave out `online`.",
        )
    return Online(approximate=online == "e-prop")


def check_online(method: Online, loop: Loop) -> None:
    reason = method.unsupported(loop)
    if reason is not None:
        raise rule_error(
            "These steps can't run in an online `filter_scan`.",
            reason,
            do="Use `truncate` or `checkpoint`.",
        )
