"""The check `primal`: the value with the rule is the value of the function."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._tangent_spaces import is_differentiable
from .._case import Case
from .._compare import is_number, unlike
from .._findings import broke, compare, failed, skipped
from .._report import Finding


def primal(case: Case) -> Iterator[Finding]:
    """The value under `jax.vjp` and `jax.jvp` is the value of the function."""
    subject = case.subject
    value = subject.fn(*subject.args, **subject.kwargs)
    numbers = [x for x in jax.tree.leaves(value) if is_number(x)]
    numbers = [x for x in numbers if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    tolerance = case.tolerance(case.own, numbers) + 10 * case.noise
    where = "the undecorated function"
    try:
        plain, names = case.own.plain.value(), case.output_names
        cause = "the value depends on being traced"
        yield compare("primal", where, numbers, plain, names, tolerance, cause=cause)
    except NotImplementedError as e:
        yield skipped("primal", f"the rule can't be removed from the function: {e}")
    except Exception as e:
        yield broke("primal", where, e)
    modes = ["under `jax.vjp`", *(["under `jax.jvp`"] if case.offers_forward else [])]
    for where in modes:
        try:
            other = _value_under(case, where)
        except Exception as e:
            yield broke("primal", where, e)
            continue
        yield from _same_tree(where, value, other, tolerance)


def _value_under(case: Case, where: str) -> Any:
    """The whole output of a differentiated call, static leaves included."""
    seen: list[Any] = []

    def run(*leaves):
        flat, treedef = jax.tree.flatten(case.subject.call(leaves))
        arrays = [isinstance(x, jax.Array) for x in flat]
        inexact = [a and is_differentiable(x) for a, x in zip(arrays, flat, strict=True)]
        static = [None if a else x for a, x in zip(arrays, flat, strict=True)]
        seen[:] = [treedef, arrays, inexact, static]
        pick = lambda wanted: [
            x for x, a, i in zip(flat, arrays, inexact, strict=True) if a and i == wanted
        ]
        return pick(True), pick(False)

    leaves = case.subject.leaves
    if where == "under `jax.vjp`":
        differentiable, _, rest = jax.vjp(run, *leaves, has_aux=True)
    else:
        zeros = [np.zeros(x.shape, x.dtype) for x in leaves]
        differentiable, _, rest = jax.jvp(run, leaves, zeros, has_aux=True)
    treedef, arrays, inexact, flat = seen
    differentiable, rest = iter(differentiable), iter(rest)
    for index, (a, i) in enumerate(zip(arrays, inexact, strict=True)):
        if a:
            flat[index] = next(differentiable if i else rest)
    return jax.tree.unflatten(treedef, flat)


def _same_tree(where, value, other, tolerance) -> Iterator[Finding]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(value)
    flat_other, treedef_other = jax.tree_util.tree_flatten_with_path(other)
    if treedef != treedef_other:
        text = f"the structure is {treedef_other}, that of the function is {treedef}"
        yield failed("primal", where, text)
        return
    names, want, got = [], [], []
    for (path, x), (_, y) in zip(flat, flat_other, strict=True):
        name = f"output{jax.tree_util.keystr(path)}"
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
    yield compare("primal", where, want, got, names, tolerance, cause=cause)
