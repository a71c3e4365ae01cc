"""Count the mutants of the library that the tests notice: `make mutants`.

A mutant is the library with one fault (see `mutations.py`). Each test file of the quick and
thorough tests runs once on the library itself, to record which statements each test reaches
(`reached.py`). Then each mutant is imported in a process of its own, which runs the tests that
reach the changed statement. It leaves a test file at its first failure, or after `--per-file`
seconds of CPU time. So the results name every test file that notices, and those that were cut.

The results are lines of JSON in the folder `work`, and the next run adds what is missing. With
`--tier thorough`, it runs the mutants that no quick test notices. Why a mutant may survive is
in `tests/guard/survivors.json`. Tests that start Python in another process run the library
itself there.

`--choose` records only, and writes `tests/thorough.txt`: the tests that are not quick.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutant, room_of, sample
from reached import import_as, Reached


ROOT = Path(__file__).resolve().parents[1]
# Imported before the fork, to save time. Never `eqx_grads`, which differs between mutants.
IMPORTED = "jax equinox beartype jaxtyping mpmath scipy.stats optax diffrax"
FORK = multiprocessing.get_context("fork")


def run_pytest(files: list[str], tier: str, seconds: float, prepare: Callable[[Any], Any]):
    """What the plugin that `prepare` returns has sent, from a fork of this process, and whether
    the process ended by a "timeout" or a "crash"."""
    sent = Path("..", f"sent-{os.getpid()}")

    def run() -> None:
        os.setsid()
        os.dup2(os.open(f"{sent}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, os.getcwd())
        resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30))
        with sent.open("w", buffering=1) as lines:
            plugin = prepare(lambda event: print(json.dumps(event), file=lines))
            options = ["-q", "-pno:cacheprovider", "-pno:xdist", "--tier", tier, *files]
            options += ["-Wignore:Module already imported:pytest.PytestAssertRewriteWarning"]
            pytest.main(["--continue-on-collection-errors", *options], [plugin])

    sent.unlink(missing_ok=True)
    process = FORK.Process(target=run)
    process.start()
    process.join(seconds)
    timeouts = (None, -signal.SIGXCPU)
    ended = "timeout" if process.exitcode in timeouts else "crash" if process.exitcode else ""
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    lines = sent.read_text().splitlines() if sent.exists() else []
    return list(map(json.loads, lines)), ended


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Chosen:
    """A pytest plugin: only these tests, in this order, and of each file up to the first that
    fails or to the limit. `tests` has the seconds of each test."""

    def __init__(self, tests: dict[str, float], per_file: float, send: Callable[[Any], None]):
        self.tests, self.per_file, self.send = tests, per_file, send
        self.noticed: set[str] = set()
        self.spent: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: i for i, test in enumerate(self.tests)}
        chosen = [item for item in items if item.nodeid in order]
        items[:] = sorted(chosen, key=lambda item: order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file, self.began = file_of(item.nodeid), time.process_time()
        if file in self.noticed:
            pytest.skip("noticed")
        if self.spent[file] > self.per_file:
            self.send({"cut": file})
            pytest.skip("cut")
        self.send({"began": item.nodeid})
        limit = int(time.process_time() + 30 + 10 * self.tests[item.nodeid])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.spent[file_of(nodeid)] += time.process_time() - self.began

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and file_of(report.nodeid) not in self.noticed:
            self.noticed.add(file_of(report.nodeid))
            self.send({"failed": (report.nodeid, str(report.longrepr)[-200:])})

    pytest_collectreport = pytest_runtest_logreport


def run_mutant(job: tuple[Mutant, dict[str, float], str, float]) -> dict[str, Any]:
    """Which files notice, by which test, and which files were cut. A file whose test ends the
    process notices too, and the files that did not run are cut."""
    mutant, tests, tier, per_file = job
    source = mutant.apply(Path(mutant.path).read_bytes())

    def prepare(send: Any) -> Chosen:
        import_as(lambda path: source if path == mutant.path else None)
        return Chosen(tests, per_file, send)

    files = list(dict.fromkeys(map(file_of, tests)))
    events, ended = run_pytest(files, tier, 900 + 30 * max(tests.values(), default=0), prepare)
    of = lambda kind: [event[kind] for event in events if kind in event]
    noticed = {file_of(test): [test, message] for test, message in of("failed")}
    cut = set(of("cut"))
    if ended:  # if no test began, each of the files notices
        last = of("began")[-1:]
        noticed |= {file_of(test): [test, ended] for test in last or tests}
        cut |= set(files) - {file_of(test) for test in of("began")} if last else set()
    return {"name": mutant.name, "noticed": noticed, "cut": sorted(cut - set(noticed))}


def record(file: str) -> None:
    """Which statements each test of the file reaches. In a process of its own, as a program
    that another file has traced before would not be traced again."""
    events, ended = run_pytest([file], "quick,thorough", 4 * 3600, Reached)
    if events and events[0]["tests"] and not ended:
        _record_of(file).write_text(json.dumps(events[0]))
    print(file, ended or f"{len(events[0]['tests'])} tests", flush=True)


def _record_of(file: str) -> Path:
    return Path("..", "reached", f"{file.replace('/', '.')}.json")


def tests_of(mutant: Mutant, records: list[Any]) -> dict[str, float]:
    """The recorded tests that reach the statement, and their seconds. It may run only when the
    library is imported, or on a thread of the compiler: then those that reach its function, or
    its file."""
    path, _, _ = mutant.key.partition("::")
    function = mutant.key.partition(": ")[0]
    for prefix in (mutant.key, f"{function}: ", f"{path}::"):
        found = [_tests_of_file(record, prefix) for record in records]
        if any(found):
            # The files with the most tests of it are the most direct.
            found.sort(key=len, reverse=True)
            return {test: seconds for tests in found for test, seconds in tests.items()}
    return {}


def _tests_of_file(record: Any, prefix: str) -> dict[str, float]:
    wanted = {i for i, key in enumerate(record["statements"]) if key.startswith(prefix)}
    reach = {t: s for t, (s, reached) in record["tests"].items() if wanted & set(reached)}
    cheap = sorted(reach, key=reach.__getitem__)
    # One case of each function first: cases of other functions are more different.
    first = {test.partition("[")[0]: test for test in reversed(cheap)}.values()
    return {test: reach[test] for test in sorted(cheap, key=lambda t: t not in first)}


def choose(records: list[Any], results: dict[str, Any]) -> set[str]:
    """The tests that are not quick: they take a tenth of a second, and no mutant needs them.
    What they reach, a quick test reaches too; in the guard, two do. But of the contract, it is
    one, and an entry of each op is quick."""
    in_contract = lambda test: "::test_contract[" in test
    tests = {
        test: (seconds, {record["statements"][i] for i in reached})
        for record in records
        for test, (seconds, reached) in record["tests"].items()
    }
    for test in filter(in_contract, tests):
        tests[test][1].add(test.partition(": ")[0].rstrip("]"))
    n_of = Counter(itertools.chain.from_iterable(reached for _, reached in tests.values()))
    left_out: set[str] = set()
    for test in sorted(tests, key=lambda test: ("/guard/" in test, -tests[test][0])):
        seconds, reached = tests[test]
        others = 1 + ("/guard/" in test and not in_contract(test))
        if seconds > 0.1 and all(n_of[key] > others for key in reached):
            left_out.add(test)
            n_of.subtract(reached)
    for result in results.values():
        noticed = {test for test, _ in result["noticed"].values()}
        if noticed and noticed <= left_out:
            left_out.remove(min(noticed, key=tests.__getitem__))
    return left_out


def report(chosen: list[Mutant], work: Path) -> None:
    """By room; the test files that notice a mutant alone; the survivors."""
    why = json.loads(Path("tests/guard/survivors.json").read_text())
    quick, all_tiers = _results(work, "quick"), _results(work, "*")
    known = [m for m in chosen if m.name in quick]
    noticed = {m.name: set(quick[m.name]["noticed"]) for m in known}
    by_any = {m.name: {*noticed[m.name], *all_tiers[m.name]["noticed"]} for m in known}
    by_guard = {n for n, files in noticed.items() if any("tests/guard/" in f for f in files)}
    print(f"{len(known)} of {len(chosen)} mutants have a result.")
    print("\n| room | mutants | the guard | quick | all |\n|---|--:|--:|--:|--:|")
    for room in (*sorted({room_of(m.path) for m in known}), "all"):
        those = {m.name for m in known if room in ("all", room_of(m.path))}
        of = lambda found, those=those: sum(bool(found[name]) for name in those)
        counts = len(those & by_guard), of(noticed), of(by_any)
        shares = [f"{n} ({100 * n / len(those):.0f} %)" for n in counts if those]
        print(f"| {room} | {len(those)} | {' | '.join(shares)} |")
    print("\n| test file | notices | alone |\n|---|--:|--:|")
    for file, n in Counter(itertools.chain(*by_any.values())).most_common():
        print(f"| {file} | {n} | {sum(files == {file} for files in by_any.values())} |")
    print("\n| not noticed by the guard | before | after | by | reason |\n" + "|---" * 5 + "|")
    for m in filter(lambda m: m.name not in by_guard, known):
        texts = [" ".join(text.split()).replace("|", "\\|") for text in (m.before, m.after)]
        cells = [f"{m.kind}: {m.path}:{m.line}", *(f"`{text}`" for text in texts)]
        by = ", ".join(Path(file).stem for file in sorted(by_any[m.name]))
        print("|", " | ".join([*cells, by, why.get(m.name, "")]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="a folder for the copy and the results")
    parser.add_argument("only", nargs="*", help="parts of the names of mutants")
    parser.add_argument("--number", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tier", default="quick", help="of `make test MARK=...`")
    parser.add_argument("--per-file", type=float, default=10.0, help="CPU seconds")
    parser.add_argument("--again", action="store_true", help="also those that nothing noticed")
    parser.add_argument("--choose", action="store_true", help="which tests are quick")
    args = parser.parse_intermixed_args()
    (args.work / "reached").mkdir(parents=True, exist_ok=True)
    work = args.work.resolve()
    # A copy, so that the tree may change while the tests run.
    ignored = shutil.ignore_patterns(".git", ".venv*", "site", "mutants")
    shutil.rmtree(args.work / "tree", ignore_errors=True)
    shutil.copytree(ROOT, args.work / "tree", ignore=ignored)
    os.chdir(args.work / "tree")
    warnings.simplefilter("ignore")  # JAX warns of forks, and has started no threads so far
    for name in IMPORTED.split():
        __import__(name)
    files = sorted(map(str, Path().glob("tests/**/test_*.py")))
    with ProcessPoolExecutor(args.jobs, FORK) as pool:
        list(pool.map(record, [file for file in files if not _record_of(file).exists()]))
        paths = [path for path in map(_record_of, files) if path.exists()]
        records = [json.loads(path.read_text()) for path in paths]
        if args.choose:
            left_out = choose(records, _results(work, "*"))
            (ROOT / "tests/thorough.txt").write_text("\n".join([*sorted(left_out), ""]))
            return
        sources = {str(p): p.read_bytes() for p in sorted(Path("eqx_grads").rglob("*.py"))}
        chosen = sample(sources, args.number, args.seed)
        chosen = [m for m in chosen if all(part in m.name for part in args.only)]
        quick, old = _results(work, "quick"), _results(work, args.tier).items()
        done = {name for name, r in quick.items() if r["noticed"]}
        done |= {name for name, r in old if r["noticed"] or not args.again}
        those = [m for m in chosen if m.name not in done]
        those = [m for m in those if m.name in quick or args.tier == "quick"]
        # In random order: a run that is stopped is a fair sample.
        random.Random(0).shuffle(those)
        jobs = [(m, tests_of(m, records), args.tier, args.per_file) for m in those]
        for result in pool.map(run_mutant, jobs):
            with (work / f"results-{args.tier}.jsonl").open("a") as lines:
                print(json.dumps(result), file=lines)
            print(len(result["noticed"]), "files notice", result["name"], flush=True)
    report(chosen, work)


def _results(work: Path, tier: str) -> dict[str, Any]:
    """The last result of each mutant."""
    texts = [path.read_text() for path in sorted(work.glob(f"results-{tier}.jsonl"))]
    return {line["name"]: line for text in texts for line in map(json.loads, text.splitlines())}


if __name__ == "__main__":
    main()
