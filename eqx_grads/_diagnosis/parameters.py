"""The parts of a model that look like parameters, and are not arrays of floats."""

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import show_path
from .report import show_list, show_place
from .source_lines import is_users_file


# In the type of a field that may hold a number.
_NUMBER = r"\b(int|float|complex)\b"


class NoParameter(NamedTuple):
    """A leaf that can't have a gradient: what it is, and the line of the class that sets it."""

    path: str
    value: Any
    what: str
    file: str
    line: int

    @property
    def cure(self) -> str:
        code = "x.astype(float)" if eqx.is_array(self.value) else "jnp.zeros(n)"
        if isinstance(self.value, int | float | complex):
            code = f"jnp.array({self.value * 1.0!r})"
        name = re.sub(r".*\.(?=\w+$)", "", self.path)
        setting = " If it is a setting, declare it `eqx.field(static=True)`."
        is_number = "Python" in self.what
        return f"To train it, make it an array: `{name} = {code}`.{setting * is_number}"


def no_parameters(model: PyTree, path: str = "") -> list[NoParameter]:
    """Python numbers first, then `None` and arrays of integers. In a class of a library, only
    numbers in fields that are declared as arrays: the rate of a dropout is left out."""
    found: list[NoParameter] = []
    is_part = lambda x: isinstance(x, eqx.Module) and x is not model
    is_leaf = lambda x: x is None or is_part(x)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_leaf):
        name = show_path(keys)
        if is_part(leaf):
            found += no_parameters(leaf, path + name)
        elif what := _what(leaf):
            place = _place_in_class(model, name, what)
            full = (path + name).removeprefix(".") or "model"
            found += [NoParameter(full, leaf, what, *place)] if place else []
    return sorted(found, key=lambda one: "Python" not in one.what)


def remark_on(parts: Sequence[NoParameter]) -> list[str]:
    place = lambda x: f" at {show_place(x.file, x.line)}" if x.line else ""
    names = [f"`{x.path}` ({x.what}{place(x)})" for x in parts]
    return [f"No arrays of floats: {show_list(names, 4)}. {parts[0].cure}"] if parts else []


def _what(leaf: Any) -> str:
    if isinstance(leaf, int | float | complex) and type(leaf) is not bool:
        return f"the Python number {leaf!r}"
    dtype: Any = getattr(leaf, "dtype", None)
    is_integer = eqx.is_array(leaf) and jnp.issubdtype(dtype, jnp.integer)
    return f"an array of {dtype}" if is_integer else "`None`" if leaf is None else ""


def _place_in_class(owner: Any, name: str, what: str) -> tuple[str, int] | None:
    """The file and the line that set a field. `None` for a field that may hold what it has."""
    field = re.match(r"\.(\w+)", name)
    if not isinstance(owner, eqx.Module) or field is None:
        return "", 0
    declared = {f.name: str(f.type) for f in dataclasses.fields(owner)}[field[1]]
    sets = rf"self\.{field[1]}\s*=", rf"^\s*{field[1]}\s*[:=]"
    for kind in type(owner).__mro__:  # the field may be inherited
        try:
            file = inspect.getfile(kind)
            if not is_users_file(file):
                is_array = "Array" in declared and not re.search(_NUMBER, declared)
                return ("", 0) if "Python" in what and is_array else None
            lines, first = inspect.getsourcelines(kind)
        except (OSError, TypeError):
            break
        at = [i for pattern in sets for i, line in enumerate(lines) if re.search(pattern, line)]
        if at:
            return file, first + at[0]
    return "", 0
