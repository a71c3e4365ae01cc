"""Programs in which a custom derivative has leaked a tracer, somewhere, to somebody.

Each is a `Shape`: one function that is run with rules and without, so that plain autodiff is
its own reference. The files of this folder hold them, `tests/test_leaks.py` runs them, and
`python -m tests.leaks` runs them in a process of its own, for JAX's flags.
"""

from .. import conftest as conftest  # the settings that all tests have, before JAX is used
from . import (
    captures as captures,
    compositions as compositions,
    issues as issues,
    modules as modules,
    solvers as solvers,
    values as values,
)
from .registry import SHAPES as SHAPES
