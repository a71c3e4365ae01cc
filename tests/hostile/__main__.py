"""Call every public function with every kind of wrong argument, and print what happened.

`python -m tests.hostile [--eager | --traced] [--all] [--quick] [part of a name ...]`
"""

import collections
import itertools
import sys

import jaxtyping

from . import outcomes


def main(args: list[str]) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # as users run it
    mode = next((mode for mode in ("eager", "traced") if f"--{mode}" in args), "staged")
    counts = collections.defaultdict(collections.Counter)
    parts = [arg for arg in args if not arg.startswith("--")]
    by_argument = itertools.groupby(
        outcomes(parts, mode, "--quick" in args), lambda found: found[:2]
    )
    for (target, argument), group in by_argument:
        alike = collections.defaultdict(list)
        for found in group:
            counts[target][found.verdict] += 1
            if found.verdict in ("silent", "unclear") or "--all" in args:
                alike[found.verdict, " | ".join(found.text.splitlines())[:200]].append(
                    found.kind
                )
        for (verdict, text), kinds in alike.items():
            print(f"{verdict:8}{target}({argument}): {', '.join(kinds)}\n            {text}")
        sys.stdout.flush()
    verdicts = ("right", "clear", "unclear", "silent")
    total = sum(counts.values(), collections.Counter())
    print(f"\n{'':40}" + "".join(f"{verdict:>9}" for verdict in verdicts))
    for target, count in [*counts.items(), ("all", total)]:
        print(f"{target:40}" + "".join(f"{count[verdict]:9}" for verdict in verdicts))


main(sys.argv[1:])
