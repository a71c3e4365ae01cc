"""The parts of a model that look like parameters, and are Python numbers."""

import dataclasses
import re
import sys
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._errors import show_path
from .source_lines import is_users_file


def python_floats(model: PyTree, path: str = "") -> dict[str, float]:
    """The Python floats in a model, by path. In a class of a library, only those in fields that
    are declared as arrays: the rate of a dropout is left out."""
    found: dict[str, float] = {}
    is_part = lambda x: isinstance(x, eqx.Module) and x is not model
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_part):
        name = show_path(keys)
        if is_part(leaf):
            found |= python_floats(leaf, path + name)
        elif isinstance(leaf, float) and _may_be_trained(model, name):
            found[(path + name).removeprefix(".") or "model"] = leaf
    return found


def _may_be_trained(owner: Any, name: str) -> bool:
    field = re.match(r"\.(\w+)", name)
    if not isinstance(owner, eqx.Module) or field is None:
        return True
    module = sys.modules.get(type(owner).__module__)
    types = {f.name: str(f.type) for f in dataclasses.fields(owner)}
    return is_users_file(getattr(module, "__file__", "") or "") or "Array" in types[field[1]]
