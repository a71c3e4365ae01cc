"""Call every public function and layer with one wrong argument, which has to be an error.

`TARGETS` holds calls with good arguments, and what each argument may be (`domains.py`). `KINDS`
makes wrong ones. `outcome` replaces one argument of a call, and says what happened.
`tests/test_hostile_input.py` runs them, and `python -m tests.hostile` prints the table.
"""

from .. import conftest as conftest  # the settings that all tests have, before JAX is used
from . import (  # noqa: F401  they fill it
    diagnosis_targets,
    jax_drop_in_targets,
    layer_targets,
    op_targets,
)
from .judge import (
    Outcome as Outcome,
    outcome as outcome,
    outcomes as outcomes,
    some_kinds as some_kinds,
)
from .kinds import KINDS as KINDS
from .targets import NOT_CALLED as NOT_CALLED, TARGETS as TARGETS
