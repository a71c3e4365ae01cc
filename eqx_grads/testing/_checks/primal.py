"""The check `primal`: the value with the rule is the value of the function."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import show_path
from .._case import Case
from .._compare import is_number, unlike
from .._findings import broke, compare, failed, skipped
from .._report import Finding


def primal(case: Case) -> Iterator[Finding]:
    """The value under `jax.vjp` and `jax.jvp` is the value of the function."""
    value = case.eager.value
    numbers = [x for x in jax.tree.leaves(value) if is_number(x)]
    numbers = [x for x in numbers if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    tolerance = case.strict_tolerance(case.own, case.own.plain.value_at)
    if not case.is_wide:
        tolerance = case.tolerance_with_rounding(numbers)
    where = "the undecorated function"
    try:
        plain, names = case.own.plain.value(), case.output_names
        cause = "the value depends on being traced"
        yield compare("primal", where, numbers, plain, names, *tolerance, cause=cause)
    except NotImplementedError as e:
        yield skipped("primal", f"the rule can't be removed from the function: {e}")
    except Exception as e:
        yield broke("primal", where, e)
    modes: dict[str, Callable[[], Any]] = {"under `jax.vjp`": case.eager.value_of_forward_pass}
    if case.offers_forward:
        modes["under `jax.jvp`"] = lambda: case.eager.jvp().value
    for where, value_of in modes.items():
        try:
            other = value_of()
        except Exception as e:
            yield broke("primal", where, e)
            continue
        yield from _same_tree(where, value, other, tolerance)


def _same_tree(where, value, other, tolerance) -> Iterator[Finding]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(value)
    flat_other, treedef_other = jax.tree_util.tree_flatten_with_path(other)
    if treedef != treedef_other:
        text = f"the structure is {treedef_other}, that of the function is {treedef}"
        yield failed("primal", where, text)
        return
    names, want, got = [], [], []
    for (path, x), (_, y) in zip(flat, flat_other, strict=True):
        name = f"output{show_path(path)}"
        why = unlike(y, x)
        if why:
            kind = "the value" if is_number(x) else "the static leaf"
            yield failed("primal", f"{where}, {name}", f"{kind} differs: {why}")
            return
        if is_number(x):
            names.append(name)
            want.append(x)
            got.append(y)
    cause = "the rule returns another value than the function"
    yield compare("primal", where, want, got, names, *tolerance, cause=cause)
