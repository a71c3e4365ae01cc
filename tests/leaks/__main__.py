"""Run every shape in this process, and say which ones fail.

`python -m tests.leaks [part of a name ...]`
"""

import sys
import traceback

from .. import conftest as conftest  # the settings that all tests have
from . import SHAPES
from .registry import check, Faulty


def main(parts: list[str]) -> None:
    failed = []
    names = [name for name in SHAPES if not parts or any(part in name for part in parts)]
    for name in names:
        try:
            check(name)
        except Faulty as fault:
            print(f"{name}: at fault upstream: {fault}")
        except Exception:
            failed.append(name)
            print(f"{name}: FAILED")
            traceback.print_exc(file=sys.stdout)
    print(f"{len(names) - len(failed)} of {len(names)} shapes are right; failed: {failed}")
    sys.exit(bool(failed))


main(sys.argv[1:])
