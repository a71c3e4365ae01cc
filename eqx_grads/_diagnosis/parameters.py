"""The parts of a model that look like parameters, and are not arrays of floats."""

import dataclasses
import inspect
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._errors import show_path
from .report import show_list, show_place
from .source_lines import is_users_file


@dataclasses.dataclass(frozen=True)
class NoParameter:
    """A leaf without a gradient.

    - `path`, `value`, `what`: the leaf, such as "the Python number 0.5".
    - `file`, `line`: where the class of the user sets it, if that is known.
    - `code`: the line that makes it an array.
    """

    path: str
    value: Any
    what: str
    code: str
    file: str = ""
    line: int = 0


def no_parameters(model: PyTree) -> list[NoParameter]:
    """Python numbers first, then arrays of integers and `None`. In a class of a library, only
    numbers in fields that are declared as arrays: the rate of a dropout is left out."""
    found: list[NoParameter] = []
    _collect(model, "", found)
    return sorted(found, key=lambda one: "Python" not in one.what)


def remark_on_parameters(model: PyTree) -> list[str]:
    found = no_parameters(model)
    if not found:
        return []
    place = lambda one: f" at {show_place(one.file, one.line)}" if one.file else ""
    names = [f"`{one.path}` ({one.what}{place(one)})" for one in found]
    return [
        f"No arrays of floats, and without a gradient: {show_list(names, 4)}. To train "
        f"one, make it an array: `{found[0].code}`."
    ]


def _collect(owner: Any, path: str, found: list[NoParameter]) -> None:
    is_part = lambda x: x is None or (isinstance(x, eqx.Module) and x is not owner)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(owner, is_leaf=is_part):
        name = show_path(keys)
        if isinstance(leaf, eqx.Module) and leaf is not owner:
            _collect(leaf, path + name, found)
        elif what := _what(leaf):
            place = _place_in_class(owner, name)
            if place is not None:
                full = (path + name).removeprefix(".") or "model"
                code = f"{name.removeprefix('.') or 'model'} = {what[1]}"
                found.append(NoParameter(full, leaf, what[0], code, *place))


def _what(leaf: Any) -> tuple[str, str] | None:
    """The kind of a leaf, and the array that it could be."""
    if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool):
        return f"the Python number {leaf!r}", f"jnp.array({leaf * 1.0!r})"
    if leaf is None:
        return "`None`", "jnp.zeros(n)"
    if eqx.is_array(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.integer):
        return f"an array of {jnp.result_type(leaf)}", "x.astype(float)"
    return None


def _place_in_class(owner: Any, name: str) -> tuple[str, int] | None:
    """The file and the line that set a field. `None` for a field that may hold what it has."""
    field = re.match(r"\.(\w+)", name)
    if not isinstance(owner, eqx.Module) or field is None:
        return "", 0
    try:
        file = inspect.getfile(type(owner))
        lines, first = inspect.getsourcelines(type(owner))
    except (OSError, TypeError):
        return "", 0
    if not is_users_file(file):
        types = {f.name: f.type for f in dataclasses.fields(owner)}
        is_number = isinstance(getattr(owner, field[1], None), int | float | complex)
        return ("", 0) if is_number and "Array" in str(types.get(field[1])) else None
    sets = rf"self\.{field[1]}\s*=", rf"^\s*{field[1]}\s*[:=]"
    at = [i for pattern in sets for i, line in enumerate(lines) if re.search(pattern, line)]
    return file, first + (at[0] if at else 0)
