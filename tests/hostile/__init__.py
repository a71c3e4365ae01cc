"""Call every public function and layer with one wrong argument, which has to be an error.

`TARGETS` holds calls with good arguments, which it finds by the names of the arguments
(`parameters.py`), and what each argument may be (`domains.py`). `KINDS` makes wrong ones.
`outcome` replaces one argument of a call, and says what happened.
"""

from .. import conftest as conftest  # the settings that all tests have, before JAX is used
from .judge import outcome as outcome
from .kinds import KINDS as KINDS, NotApplicable as NotApplicable
from .targets import arrays as arrays, call as call, TARGETS as TARGETS
