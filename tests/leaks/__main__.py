"""Run every shape in this process, and say which ones fail.

`python -m tests.leaks [part of a name ...]`
"""

import sys
import traceback

from . import SHAPES
from .registry import check, Faulty


def main(parts: list[str]) -> None:
    failed, faulty = [], 0
    names = [name for name in SHAPES if not parts or any(part in name for part in parts)]
    for name in names:
        try:
            check(name)
        except Faulty as fault:
            faulty += 1
            print(f"{name}: {fault}")
        except Exception:
            failed.append(name)
            print(f"{name}: FAILED")
            traceback.print_exc(file=sys.stdout)
    n_right = len(names) - len(failed) - faulty
    print(f"{n_right} right, {faulty} at fault upstream, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


main(sys.argv[1:])
