"""Run every shape in this process, and say which ones fail.

`python -m tests.leaks [part of a name ...]`
"""

import sys
import traceback

from . import SHAPES
from .registry import check


def main(parts: list[str]) -> None:
    failed = []
    names = [name for name in SHAPES if not parts or any(part in name for part in parts)]
    for name in names:
        try:
            check(name)
        except Exception:
            failed.append(name)
            print(f"{name}: FAILED")
            traceback.print_exc(file=sys.stdout)
    print(f"{len(names) - len(failed)} right, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


main(sys.argv[1:])
