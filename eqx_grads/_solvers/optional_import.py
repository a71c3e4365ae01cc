"""Import an optional dependency, or say how to install it."""

import importlib
from typing import Any


def optional_import(module: str, user: str) -> Any:
    """The module of the extra `solvers` of this name, which `user` needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"`{user}` needs `{module}`, which is not installed.\n"
            f"  `{module}` belongs to the extra `solvers` of this library\n"
            "Run `pip install eqx-grads[solvers]`.",
            name=module,
        ) from None
