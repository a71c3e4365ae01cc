"""Count the mutants of the library that the tests notice: `make mutants`.

A mutant is the library with one fault (see `mutations.py`). Each test file of the quick tests
runs once on the library itself, to record which statements each test reaches (`reached.py`).
Then each mutant is imported in a process of its own, which runs the tests that reach the
changed statement. It leaves a test file at its first failure, or after `--per-file` seconds of
CPU time. So the results name every test file that notices, and those that were cut.

The results are lines of JSON in the folder `work`, and the next run adds what is missing. Why
a mutant may survive is in `tests/guard/survivors.json`. Tests that start Python in another
process run the library itself there.
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
IMPORTED = "jax equinox beartype jaxtyping hypothesis mpmath scipy.stats optax diffrax"
FORK = multiprocessing.get_context("fork")
HOURS = 4 * 3600


def run_pytest(files: list[str], seconds: float, prepare: Callable[[Any], Any], name: str):
    """What the plugin that `prepare` returns has sent, from a fork of this process, and whether
    the process ended by a "timeout" or a "crash"."""
    sent = Path("..", name)

    def run() -> None:
        os.setsid()
        os.dup2(os.open(f"{sent}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, os.getcwd())
        resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30))
        with sent.open("w", buffering=1) as lines:
            plugin = prepare(lambda event: print(json.dumps(event), file=lines))
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tier", "quick"]
            options += [
                "-W",
                "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
            ]
            pytest.main([*options, "--continue-on-collection-errors", *files], [plugin])

    sent.unlink(missing_ok=True)
    process = FORK.Process(target=run)
    process.start()
    process.join(seconds)
    ended = "crash" if process.exitcode else ""
    if process.exitcode in (None, -signal.SIGXCPU):
        ended = "timeout"
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
        file = file_of(item.nodeid)
        if file in self.noticed:
            pytest.skip("noticed")
        if self.spent[file] > self.per_file:
            self.send({"cut": file})
            pytest.skip("cut")
        self.send({"began": item.nodeid})
        limit = int(time.process_time() + 30 + 10 * self.tests[item.nodeid])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))

    @pytest.hookimpl
    def pytest_runtest_logstart(self) -> None:
        self.began = time.process_time()

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.spent[file_of(nodeid)] += time.process_time() - self.began

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and file_of(report.nodeid) not in self.noticed:
            self.noticed.add(file_of(report.nodeid))
            self.send({"failed": (report.nodeid, str(report.longrepr)[-200:])})

    pytest_collectreport = pytest_runtest_logreport


def run_mutant(job: tuple[Mutant, dict[str, float], float]) -> dict[str, Any]:
    """Which files notice, by which test, and which files were cut. A file whose test ends the
    process notices too, and the files that did not run are cut."""
    (mutant, tests, per_file), began = job, time.time()
    source = mutant.apply(Path(mutant.path).read_bytes())

    def prepare(send: Any) -> Chosen:
        import_as(lambda path: source if path == mutant.path else None)
        return Chosen(tests, per_file, send)

    files = list(dict.fromkeys(map(file_of, tests)))
    longest = max(tests.values(), default=0)
    events, ended = run_pytest(files, 900 + 30 * longest, prepare, f"sent-{os.getpid()}")
    of = lambda kind: [event[kind] for event in events if kind in event]
    noticed = {file_of(test): [test, message] for test, message in of("failed")}
    cut = set(of("cut"))
    if ended:  # if no test began, each of the files notices
        last = of("began")[-1:]
        noticed |= {file_of(test): [test, ended] for test in last or tests}
        cut |= set(files) - {file_of(test) for test in of("began")} if last else set()
    seconds = round(time.time() - began, 1)
    cut = sorted(cut - set(noticed))
    return {"name": mutant.name, "noticed": noticed, "cut": cut, "seconds": seconds}


def record(file: str) -> tuple[str, str]:
    """Which statements each test of the file reaches. In a process of its own, as a program
    that another file has traced before would not be traced again."""
    events, ended = run_pytest([file], HOURS, Reached, f"sent-{os.getpid()}")
    if events and events[0]["tests"] and not ended:
        _record_of(file).write_text(json.dumps(events[0]))
    return file, ended or f"{len(events[0]['tests'])} tests"


def _record_of(file: str) -> Path:
    return Path("..", "reached", f"{file.replace('/', '.')}.json")


class Tests:
    """The recorded tests that reach each statement, and their seconds."""

    def __init__(self, paths: list[Path]):
        self.files = [json.loads(path.read_text()) for path in paths]

    def of(self, mutant: Mutant) -> dict[str, float]:
        """Those that reach the statement. It may run only when the library is imported, or on
        a thread of the compiler: then those that reach its function, or its file."""
        path, _, _ = mutant.key.partition("::")
        function = mutant.key.partition(": ")[0]
        for prefix in (mutant.key, f"{function}: ", f"{path}::"):
            found = [self._of_file(file, prefix) for file in self.files]
            if any(found):
                # The files with the most tests of it are the most direct.
                found.sort(key=len, reverse=True)
                return {test: seconds for tests in found for test, seconds in tests.items()}
        return {}

    def _of_file(self, file: Any, prefix: str) -> dict[str, float]:
        wanted = {i for i, key in enumerate(file["statements"]) if key.startswith(prefix)}
        reach = {t: s for t, (s, reached) in file["tests"].items() if wanted & set(reached)}
        cheap = sorted(reach, key=reach.__getitem__)
        # One case of each function first: cases of other functions are more different.
        first = {test.partition("[")[0]: test for test in reversed(cheap)}.values()
        return {test: reach[test] for test in sorted(cheap, key=lambda t: t not in first)}


def report(chosen: list[Mutant], results: dict[str, Any], why: dict[str, str]) -> None:
    """By room; the test files that notice a mutant alone; the survivors."""
    known = [m for m in chosen if m.name in results]
    noticed = {m.name: set(results[m.name]["noticed"]) for m in known}
    by_guard = {n for n, files in noticed.items() if any("tests/guard/" in f for f in files)}
    print(f"{len(known)} of {len(chosen)} mutants have a result.")
    print("\n| room | mutants | the guard | all |\n|---|--:|--:|--:|")
    for room in (*sorted({room_of(m.path) for m in known}), "all"):
        those = {m.name for m in known if room in ("all", room_of(m.path))}
        counts = len(those & by_guard), sum(bool(noticed[name]) for name in those)
        shares = [f"{n} ({100 * n / len(those):.0f} %)" for n in counts if those]
        print(f"| {room} | {len(those)} | {' | '.join(shares)} |")
    print("\n| test file | notices | alone |\n|---|--:|--:|")
    for file, n in Counter(itertools.chain(*noticed.values())).most_common():
        print(f"| {file} | {n} | {sum(files == {file} for files in noticed.values())} |")
    print(
        "\n| not noticed by the guard | before | after | by | reason |",
        "|---" * 5 + "|",
        sep="\n",
    )
    for m in known:
        if m.name not in by_guard:
            texts = [" ".join(text.split()).replace("|", "\\|") for text in (m.before, m.after)]
            cells = [f"{m.kind}: {m.path}:{m.line}", *(f"`{text}`" for text in texts)]
            by = ", ".join(Path(file).stem for file in sorted(noticed[m.name]))
            print("|", " | ".join([*cells, by, why.get(m.name, "")]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="a folder for the copy and the results")
    parser.add_argument("only", nargs="*", help="parts of the names of mutants")
    parser.add_argument("--number", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests", default="tests/**/test_*.py", help="the test files")
    parser.add_argument("--per-file", type=float, default=10.0, help="CPU seconds")
    parser.add_argument("--again", action="store_true", help="also those that nothing noticed")
    args = parser.parse_intermixed_args()
    (args.work / "reached").mkdir(parents=True, exist_ok=True)
    path = args.work.resolve() / "results.jsonl"
    # A copy, so that the tree may change while the tests run.
    ignored = shutil.ignore_patterns(".git", ".venv*", "site", "mutants")
    shutil.rmtree(args.work / "tree", ignore_errors=True)
    shutil.copytree(ROOT, args.work / "tree", ignore=ignored)
    os.chdir(args.work / "tree")
    warnings.simplefilter("ignore")  # JAX warns of forks, and has started no threads so far
    for name in IMPORTED.split():
        __import__(name)
    sources = {str(p): p.read_bytes() for p in sorted(Path("eqx_grads").rglob("*.py"))}
    chosen = sample(sources, args.number, args.seed)
    chosen = [m for m in chosen if all(part in m.name for part in args.only)]
    files = sorted(map(str, Path().glob(args.tests)))
    with ProcessPoolExecutor(args.jobs, FORK) as pool:
        for done in pool.map(record, [f for f in files if not _record_of(f).exists()]):
            print(*done, flush=True)
        tests = Tests([_record_of(f) for f in files if _record_of(f).exists()])
        results = _results(path)
        is_done = lambda m: m.name in results and (results[m.name]["noticed"] or not args.again)
        those = [m for m in chosen if not is_done(m)]
        # In random order: a run that is stopped is a fair sample.
        random.Random(0).shuffle(those)
        for result in pool.map(run_mutant, [(m, tests.of(m), args.per_file) for m in those]):
            with path.open("a") as lines:
                print(json.dumps(result), file=lines)
            counts = f"{len(result['noticed'])} files notice, {len(result['cut'])} were cut"
            print(f"{counts}, {result['seconds']} s: {result['name']}", flush=True)
    why = Path("tests/guard/survivors.json")
    report(chosen, _results(path), json.loads(why.read_text()) if why.exists() else {})


def _results(path: Path) -> dict[str, Any]:
    """The last result of each mutant."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


if __name__ == "__main__":
    main()
