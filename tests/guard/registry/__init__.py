"""Every public op, layer, loss, solver and shorthand: `ENTRIES` maps a name to an `Entry`.

An op is the part of the name before the first colon, so that each of its options may have an
entry: `"safe.norm"`, `"safe.norm: of an axis"`.
"""

import importlib
import pkgutil

from .entry import ENTRIES, Entry


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ENTRIES", "Entry"]
