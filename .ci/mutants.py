"""Count the mutants of the library that the tests notice: `make mutants`.

A mutant is the library with one fault (see `mutations.py`). Each test file of the quick and
thorough tests runs once on the library itself, to record which statements each test reaches
(`reached.py`). Then all mutants are planted in one copy of the library, as
`((after) if __mutant__(3) else (before))`. A process collects the tests once, and switches on
one mutant after the other. It runs the tests that reach the changed statement, of each file up
to the first failure or to `--per-file` seconds of CPU time. So the results name every test file
that notices, and those that were cut. With `--first`, the first file that notices is the last.

A test that ends the process, or that fails and then fails without the mutant too, notices it:
the other files are then cut, and a new process goes on. While the tests are imported, all
mutants are off.

The results are lines of JSON in the folder `work`, and the next run adds what is missing. With
`--tier thorough`, it runs the mutants that no quick test notices. Why a mutant may survive is
in `tests/guard/survivors.json`. Tests that start Python in another process run the library
itself there.

`--choose` records only, and writes `tests/thorough.txt`: the tests that are not quick.
"""

import argparse
import builtins
import functools
import gc
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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax  # but not the library, which is planted
import pytest
from mutations import Mutant, plant, room_of, sample
from reached import import_as, Reached


ROOT = Path(__file__).resolve().parents[1]
FORK = multiprocessing.get_context("fork")
Jobs = dict[str, tuple[int, dict[str, float]]]  # of a mutant: its number; seconds of its tests


def run_pytest(files: list[str], tier: str, prepare: Callable[[], Any]) -> int | None:
    """The exit code, or minus the signal that ended it. In a fork of this process."""
    log = Path("..", f"{os.getpid()}.log")

    def run() -> None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, os.getcwd())
        resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30))
        options = ["-q", "-pno:cacheprovider", "-pno:xdist", "--tier", tier, *files]
        options += ["-Wignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        sys.exit(pytest.main(options, [prepare()]))

    process = FORK.Process(target=run)
    process.start()
    process.join()
    return process.exitcode


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Switch:
    """A pytest plugin: it runs the tests of each mutant with the mutant on, of each file up to
    the first that fails or to the limit. Before each test, it writes the result to `at`, in
    case the test ends the process."""

    def __init__(self, args: argparse.Namespace, jobs: Jobs, at: Path):
        self.args, self.jobs, self.at, self.on = args, jobs, at, None
        builtins.__mutant__ = lambda i: i == self.on  # type: ignore
        import_as(args.sources.get)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.message = str(report.longrepr)[-200:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from eqx_grads._rules.rule import CheckCache

        objects = gc.get_objects()
        items = {item.nodeid: item for item in session.items}
        is_own = lambda x: x.__module__.startswith(("eqx_grads", "tests"))
        caches = [x for x in objects if isinstance(x, functools._lru_cache_wrapper)]
        self.clears = [jax.clear_caches, *(x.cache_clear for x in filter(is_own, caches))]
        self.clears += [x._results.clear for x in objects if isinstance(x, CheckCache)]
        for name, (i, tests) in self.jobs.items():
            self._run(name, i, [items[test] for test in tests if test in items])
        return True

    def _run(self, name: str, i: int, items: list[Any]) -> None:
        noticed, cut, spent = {}, set(), Counter[str]()
        self._clear()
        for item in items:
            test, file = item.nodeid, file_of(item.nodeid)
            is_over = file in noticed or spent[file] > self.args.per_file
            if is_over or (self.args.first and noticed):
                cut.add(file)
                continue
            left = cut | {file_of(item.nodeid) for item in items} - {*spent}
            self.at.write_text(_line(name, noticed | {file: [test, "ends the process"]}, left))
            began, seconds = time.process_time(), self.jobs[name][1][test]
            if message := self._failure(i, item, seconds):
                self._clear()
                if self._failure(None, item, seconds):
                    os._exit(2)  # the mutant has spoiled the process
                self._clear()
                noticed[file] = [test, message]
            spent[file] += time.process_time() - began
        _write(self.args, _line(name, noticed, cut))
        self.at.write_text("")

    def _failure(self, i: int | None, item: Any, seconds: float) -> str:
        """The message of a test with this mutant on. The system ends a process that takes too
        long, as XLA does not return to Python."""
        signal.alarm(int(300 + 30 * seconds))
        self.on, self.message = i, ""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return self.message

    def _clear(self) -> None:
        """Drop what tests have made and others would use."""
        for clear in self.clears:
            clear()


def _line(name: str, noticed: dict[str, Any], cut: set[str]) -> str:
    result = {"name": name, "noticed": noticed, "cut": sorted(cut - {*noticed})}
    return json.dumps(result) + "\n"


def _write(args: argparse.Namespace, line: str) -> None:
    with args.results.open("ab", 0) as lines:  # at once, as other processes write too
        lines.write(line.encode())


def run_mutants(args: argparse.Namespace, jobs: Jobs) -> None:
    """Write which files notice, by which test, and which were cut."""
    at = Path("..", f"{os.getpid()}.json")
    files = list(dict.fromkeys(file_of(test) for _, tests in jobs.values() for test in tests))
    while jobs:
        at.write_text("")
        code = run_pytest(files, args.tier, lambda jobs=jobs: Switch(args, jobs, at))
        line = at.read_text()
        if not line and code not in (0, 1):
            raise RuntimeError(f"Without a mutant, pytest ends with {code}: see the logs.")
        _write(args, line)
        names = list(jobs)
        done = names.index(json.loads(line)["name"]) + 1 if line else len(jobs)
        jobs = dict(list(jobs.items())[done:])


def record(file: str) -> None:
    """Which statements each test of the file reaches. In a process of its own, as a program
    that another file has traced before would not be traced again."""
    send = lambda reached: _record_of(file).write_text(json.dumps(reached))
    code = run_pytest([file], "quick,thorough", lambda: Reached(send))
    print(file, f"ends with {code}" if code else "is recorded", flush=True)


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
    is_equal = lambda name: why.get(name, "").startswith(("Equal", "Words", "A picture"))
    equal = {name for name, files in by_any.items() if not files and is_equal(name)}
    print(f"{len(known)} of {len(chosen)} mutants have a result.")
    print("\n| room | mutants | equal | the guard | quick | all |\n|---|--:|--:|--:|--:|--:|")
    for room in (*sorted({room_of(m.path) for m in known}), "all"):
        those = {m.name for m in known if room in ("all", room_of(m.path))}
        of = lambda found, those=those: sum(bool(found[name]) for name in those)
        counts = len(those & by_guard), of(noticed), of(by_any)
        others = max(1, len(those - equal))
        shares = [f"{n} ({100 * n / others:.0f} %)" for n in counts]
        print(f"| {room} | {len(those)} | {len(those & equal)} | {' | '.join(shares)} |")
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
    parser.add_argument("--first", action="store_true", help="cut all after one file")
    parser.add_argument("--choose", action="store_true", help="which tests are quick")
    args = parser.parse_intermixed_args()
    (args.work / "reached").mkdir(parents=True, exist_ok=True)
    work = args.work.resolve()
    # A copy, so that the tree may change while the tests run.
    ignored = shutil.ignore_patterns(".git", ".venv*", "site", "mutants")
    shutil.rmtree(args.work / "tree", ignore_errors=True)
    shutil.copytree(ROOT, args.work / "tree", ignore=ignored)
    os.chdir(args.work / "tree")
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
        args.results = work / f"results-{args.tier}.jsonl"
        quick, old = _results(work, "quick"), _results(work, args.tier)
        done = {name for name, r in quick.items() if r["noticed"]} | {*old}
        those = [m for m in chosen if m.name not in done]
        those = [m for m in those if m.name in quick or args.tier == "quick"]
        # In random order: a run that is stopped is a fair sample.
        random.Random(0).shuffle(those)
        args.sources = plant(sources, those)
        jobs = [(m.name, (i, tests_of(m, records))) for i, m in enumerate(those)]
        shares = [dict(jobs[k :: args.jobs]) for k in range(args.jobs)]
        list(pool.map(functools.partial(run_mutants, args), shares))
    report(chosen, work)


def _results(work: Path, tier: str) -> dict[str, Any]:
    """The last result of each mutant."""
    texts = [path.read_text() for path in sorted(work.glob(f"results-{tier}.jsonl"))]
    return {line["name"]: line for text in texts for line in map(json.loads, text.splitlines())}


if __name__ == "__main__":
    main()
