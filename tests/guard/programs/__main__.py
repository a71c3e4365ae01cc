"""`python -m tests.guard.programs SEED CASES`: random cases beyond the cases of the tests.

Prints the cases that are wrong, in a form that can be pasted into a test.
`python -m tests.guard.programs choose` prints the seeds of the quick test, after a change of
the grammar.
"""

import sys

from ... import conftest as conftest  # the configuration of the tests
from .coverage import choose
from .draw import wrong_cases


if __name__ == "__main__":
    if sys.argv[1:] == ["choose"]:
        print(choose(60_000))
    else:
        wrong = wrong_cases(*map(int, sys.argv[1:3]))
        print(f"{len(wrong)} cases are wrong.", *wrong, sep="\n\n")
        sys.exit(bool(wrong))
