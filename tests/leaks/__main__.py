"""Run every shape in this process, and print those that fail."""

import sys
import traceback

from .. import conftest as conftest  # its settings
from . import captures, compositions, issues  # noqa: F401
from .registry import check, Faulty, SHAPES


def main() -> None:
    failed = []
    for name, shape in SHAPES.items():
        if sys.argv[1:] and not any(a in name for a in sys.argv[1:]):
            continue
        try:
            check(shape)
        except Faulty as fault:
            print(f"{name}: at fault upstream: {fault}")
        except Exception:
            failed.append(name)
            print(f"{name}: FAILED")
            traceback.print_exc(file=sys.stdout)
    print(f"{len(SHAPES) - len(failed)} of {len(SHAPES)} right; failed: {failed}")
    sys.exit(bool(failed))


main()
