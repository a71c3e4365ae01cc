"""`python -m tests.guard.programs SEED CASES`: random cases beyond the cases of the tests.

Prints each case that is wrong, in a form that can be pasted into a test.
`python -m tests.guard.programs choose` prints the seeds of the quick test, after a change of
the grammar.
"""

import sys
import time

from ... import conftest as conftest  # the configuration of the tests
from .cases import judge
from .coverage import choose
from .run import fresh_batches


def main(start: int, n_cases: int) -> int:
    n_done = n_wrong = 0
    begin = time.process_time()
    for batch in fresh_batches(start, n_cases):
        for wrong in judge(batch):
            n_wrong += 1
            print(f"{wrong}\n", flush=True)
        n_done += len(batch.cases)
        rate = 60 * n_done / (time.process_time() - begin)
        print(
            f"seed {start}: {n_done} cases, {n_wrong} wrong, {rate:.0f} a CPU minute",
            flush=True,
        )
    return n_wrong


if __name__ == "__main__":
    if sys.argv[1:] == ["choose"]:
        print(choose(60_000))
    else:
        sys.exit(bool(main(*map(int, sys.argv[1:3]))))
