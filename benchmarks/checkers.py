"""Claim: `check_rule` catches all planted faults, and other checkers 85 to 103 of 142.

The faults come from `tests/faults`: each is a rule that is wrong in one way, with the same
rule without the fault. A checker catches a fault if it rejects the wrong rule and accepts the
right one. The peers have their strictest options, see `peers_testing.py`, in single and
in double precision; PyTorch needs double precision. Chex and PyTorch are measured if they are
installed. Prints a Markdown table, which `--write` saves. The saved results are of 142 faults:
66 of them are left, one of each kind at each place.

    python benchmarks/checkers.py [--quick] [--write] [--check NAME]
"""

import argparse
import collections
import pathlib
import sys
import time


ROOT = pathlib.Path(__file__).parents[1]
QUICK = ("twice", "cotangents_swapped")
TABLE = ROOT / "benchmarks" / "checkers.md"


def table(rows, columns, totals) -> str:
    lines = ["| fault | " + " | ".join(columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    lines += [f"| {name} | " + " | ".join(row) + " |" for name, row in [*totals, *rows]]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few faults, for the tests")
    parser.add_argument("--write", action="store_true", help=f"save the table as {TABLE.name}")
    parser.add_argument("--check", help="only the faults that this check should catch")
    options = parser.parse_args()

    sys.path.insert(0, str(ROOT))

    import eqx_grads.testing as eqgt
    from peers_testing import CAUGHT, Peer, PEERS, verdict
    from tests.faults import FAULTS

    def ours(fn, args, options):
        eqgt.check_rule(fn, *args, **options)

    us = Peer("eqx_grads.testing.check_rule", "eqx_grads", "float32", ours)
    checkers = {"`check_rule`, float32": us}
    for peer in PEERS:
        if peer.why_not:
            print(f"{peer.name}: left out, {peer.why_not}")
        else:
            checkers[f"`{peer.name}`, {peer.precision}"] = peer
    faults = {
        name: fault
        for name, fault in FAULTS.items()
        if (name in QUICK or not options.quick) and options.check in (None, fault.check)
    }
    rows, seconds = [], collections.defaultdict(float)
    counts = {name: collections.Counter() for name in checkers}
    for fault_name, fault in sorted(faults.items(), key=lambda item: item[1].check):
        row = []
        for name, peer in checkers.items():
            start = time.perf_counter()
            said = verdict(peer, fault)
            seconds[name] += time.perf_counter() - start
            counts[name][said] += 1
            row.append(said)
        print(f"{fault.check}: {fault_name}: {row}", file=sys.stderr, flush=True)
        words = fault_name.replace("_", " ")
        rows.append((f"{fault.check}: {words}", row))
    caught = [f"**{counts[name][CAUGHT]}**" for name in checkers]
    spent = [f"{seconds[name]:.0f}" for name in checkers]
    totals = [(f"**caught, of {len(faults)}**", caught), ("seconds, in all", spent)]
    text = table(rows, checkers, totals)
    print(text)
    if options.write:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
