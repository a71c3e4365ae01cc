"""The parts of a model that look like parameters, and are no arrays of floats."""

import dataclasses
import inspect
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import show_path
from .report import show_place
from .source_lines import is_users_file


@dataclasses.dataclass(frozen=True)
class NoParameter:
    """A leaf without a gradient: its path, what it is, and what to write where."""

    path: str
    what: str
    cure: str

    def __str__(self) -> str:
        return f"`{self.path}` is {self.what}, which has no gradient. {self.cure}"


def no_parameters(model: PyTree) -> list[NoParameter]:
    """Python numbers, arrays of integers, and `None` in fields of the user's classes."""
    nodes = lambda x: x is None or (isinstance(x, eqx.Module) and x is not model)
    found, owners = [], {"": model}
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=nodes)
    while leaves:
        path, leaf = leaves.pop(0)
        if isinstance(leaf, eqx.Module):
            inner = lambda x, leaf=leaf: (
                x is None or (isinstance(x, eqx.Module) and x is not leaf)
            )
            owners[show_path(path)] = leaf
            parts = jax.tree_util.tree_leaves_with_path(leaf, is_leaf=inner)
            leaves = [((*path, *p), x) for p, x in parts] + leaves
            continue
        what = _what(leaf)
        owner = next(
            (
                owners[show_path(path[:n])]
                for n in range(len(path), -1, -1)
                if show_path(path[:n]) in owners
            ),
            model,
        )
        place = _place_in_class(owner, show_path(path[-1:])) if path else ""
        if what and place is not None:
            name = show_path(path).removeprefix(".") or "model"
            found.append(NoParameter(name, what, _cure(leaf, show_path(path[-1:]), place)))
    return found


def _what(leaf: Any) -> str:
    if isinstance(leaf, bool):
        return ""
    if isinstance(leaf, int | float | complex):
        return f"the Python number {leaf!r}"
    if leaf is None:
        return "`None`"
    if eqx.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.integer):
        return f"an array of {leaf.dtype}"
    return ""


def _cure(leaf: Any, name: str, place: str) -> str:
    name = name.removeprefix(".")
    value = (
        f"jnp.array({float(leaf)!r})" if isinstance(leaf, int | float) else "an array of floats"
    )
    code = f"`{name} = {value}`" if isinstance(leaf, int | float) else value
    return f"If it is a parameter, make it {code}{f' at {place}' if place else ''}."


def _place_in_class(owner: Any, name: str) -> str | None:
    """Where a field is set; empty for no field of a class, `None` for a class of a library."""
    if not isinstance(owner, eqx.Module) or not name.startswith("."):
        return ""
    try:
        file = inspect.getfile(type(owner))
        lines, first = inspect.getsourcelines(type(owner))
    except (OSError, TypeError):
        return ""
    if not is_users_file(file):
        return None
    for pattern in (rf"self{re.escape(name)}\s*=", rf"^\s*{re.escape(name[1:])}\s*[:=]"):
        for i, line in enumerate(lines):
            if re.search(pattern, line):
                return show_place(file, first + i)
    return ""
