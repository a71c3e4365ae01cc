"""A step of a scan, from PyTrees to arrays."""

from collections.abc import Callable, Sequence
from typing import Any

from .._errors import name_of, place_of, rule_error, show_tree
from .._rules.flatten_call import TreeSplit
from .._tangent_spaces import as_array_list
from .carry import Carry, is_number, is_sliced


class Step:
    """`f` of a scan as a function of lists of arrays.

    - `init`, `xs` are the arrays that the loop starts from and slices.
    - `numbers` says which Python integers in the carry are arrays.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        init: Any,
        xs: Any,
        carry_gradient: Callable[..., Any] | None,
        numbers: frozenset[int],
    ):
        self._f = f
        self._carry_gradient = carry_gradient
        self._carry = Carry(init, numbers)
        self.init = self._carry.first
        self._x, self.xs = TreeSplit.split(xs, is_sliced)
        # Whoever traces the step leaves here what is not an array in `y`.
        self._y: list[TreeSplit] = []

    def __call__(self, carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        carry_tree = self._carry.tree(carry)
        if self._carry_gradient is not None:
            passed = self._carry_gradient(carry_tree)
            self._carry.arrays(
                passed,
                self._carry_gradient,
                "`carry_gradient` of `filter_scan` returned another carry than it was given.",
            )
            carry_tree = passed
        result = self._f(carry_tree, self._x.tree(as_array_list(x)))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise rule_error(
                f"`{name_of(self._f)}`, a step of `filter_scan`, did not return a pair.",
                f"it returned {show_tree(result)}",
                place_of(self._f),
                do="Return `carry, y`; `y` may be `None`.",
            )
        new_carry = self._carry.arrays(
            result[0],
            self._f,
            f"`{name_of(self._f)}`, a step of `filter_scan`, returned another carry than it "
            "was given.",
        )
        y, ys = TreeSplit.split(result[1], is_number)
        self._y[:] = [y]
        return new_carry, ys

    def outputs(self, carry: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        """What `filter_scan` returns."""
        return self._carry.tree(carry), self._y[0].tree(ys)
