"""`zero_safe`: the transformation of a function of any PyTrees."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from ..._errors import rule_error
from ..._jaxprs.dependence import without_unused
from ..._jaxprs.evaluate import evaluate
from ..._rules.flatten_call import is_array, is_inexact, TreeSplit
from .ranges import analyze, Range
from .transform import evaluate_zero_safe
from .zero_wins import zero_wins_program


def zero_safe(
    fn: Callable[..., PyTree], *, policy: Literal["selected", "zero"] = "selected"
) -> Callable[..., PyTree]:
    """doc"""
    return eqx.module_update_wrapper(_ZeroSafe(fn, policy))


class _ZeroSafe(eqx.Module):
    _fn: Callable[..., Any]
    _policy: str = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self._fn

    def __call__(self, /, *args, **kwargs):
        call, arrays = TreeSplit.split((self._fn, args, kwargs), is_array)
        returned: list[TreeSplit] = []

        def run(arrays):
            fn, args, kwargs = call.tree(arrays)
            out, ys = TreeSplit.split(fn(*args, **kwargs), is_array)
            returned[:] = [out]
            return ys

        program = zero_safe_program(jax.make_jaxpr(run)(arrays), arrays)
        if self._policy == "zero":
            ys = zero_wins_program(program, arrays)
        else:
            ys = evaluate(program, arrays)
        return returned[0].tree(ys)

    def __get__(self, instance, owner=None):
        return self if instance is None else eqx.Partial(self, instance)


def zero_safe_program(program: ClosedJaxpr, values: Sequence[Any]) -> ClosedJaxpr:
    """The program, with the derivative of `zero_safe`."""
    n = len(program.out_avals)

    def run(*values):
        analysis = analyze(program, [Range()] * len(values))
        moved = [is_inexact(x) for x in values]
        return evaluate_zero_safe(analysis, values, moved, [True] * n, [False] * n)

    # What masks are made of is computed where a mask is used, and nowhere else.
    return without_unused(jax.make_jaxpr(run)(*values))
