"""Count the mutants of the library that the tests notice: `make mutants`.

Each mutant (see `mutations.py`) is written into a copy of the tree. Two suites run on it, each
on its own: `old` (the quick tests of `tests/test_*.py`) and `guard` (`tests/guard`). A process
runs the tests that reach the changed statement (see `reached.py`), the cheapest first, and
leaves a test file at its first failure. So the results name every file that notices.

`--files`, `--per-file` and `--per-mutant` limit the run; the results name the files that were
cut. The results are lines of JSON in the folder `--work`, and the next run adds what is
missing. Each process is a fork of one that has imported JAX but not started its backend.

    python .ci/mutants.py reached --suite guard    record which test reaches which statement
    python .ci/mutants.py run --suite guard        run the mutants that have no result yet
    python .ci/mutants.py control --suite guard    check that the failed tests pass otherwise
    python .ci/mutants.py report                   print the table of rooms and the survivors
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutant, mutants_of, room_of, sample
from reached import record_reached


ROOT = Path(__file__).resolve().parents[1]
QUICK = "not (slow or conformance or cost or thorough)"
SUITES = {"old": "tests/test_*.py", "guard": "tests/guard/**/test_*.py"}
# Imported before the fork, to save time. Never `eqx_grads`, which differs between mutants.
IMPORTED = (
    "jax equinox beartype jaxtyping hypothesis mpmath scipy.stats optax optimistix diffrax"
)
RECORDING = 4 * 3600  # seconds that a test file may take while it is recorded
PROCESSES = 3  # for a mutant: each test that does not end, or crashes, takes one
MEMORY = 8 * 2**30


# ---------------------------------------------------------------- one run of pytest


def in_child(
    run: Callable[[Callable[[Any], Any]], Any], silent_seconds: float, log: Path
) -> tuple[list[Any], str]:
    """What `run` sends in a fork of this process, and whether the process ended by a "timeout"
    or a "crash". A process that sends nothing for so long is killed: a deadlock takes no CPU.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has started no threads so far
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run(lambda event: os.write(write, json.dumps(event).encode() + b"\n"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    text, chunk, ended = b"", b" ", ""
    while chunk:
        if not select.select([read], [], [], silent_seconds)[0]:
            ended = "timeout"
            os.killpg(child, signal.SIGKILL)
        chunk = os.read(read, 1 << 20)
        text += chunk
    os.close(read)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        ended = "timeout"
    events = [json.loads(line) for line in text.decode().split("\n")[:-1]]
    return events, ended or ("crash" if status else "")


def limit_cpu(seconds: float) -> None:
    """End this process after so many more CPU seconds."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, most))


def pytest_in(tree: Path, files: Sequence[str], *plugins: Any) -> None:
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", QUICK, "--tb=short"]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    pytest.main([*options, "--continue-on-collection-errors", *files], plugins=plugins)


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Chosen:
    """A pytest plugin: only these tests, in this order, and of each file up to the first that
    fails or to the limit. It sends what it sees. `tests` has the seconds of each test."""

    def __init__(self, tests: dict[str, float], send: Any, limits: argparse.Namespace):
        self.tests, self.send, self.limits = tests, send, limits
        self.noticed: set[str] = set()
        self.spent: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: i for i, test in enumerate(self.tests)}
        chosen = [item for item in items if item.nodeid in order]
        items[:] = sorted(chosen, key=lambda item: order[item.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file, most = file_of(item.nodeid), (1 if self.noticed else 3) * self.limits.per_mutant
        if file in self.noticed:
            pytest.skip("noticed")
        if self.spent[file] > self.limits.per_file or self.spent.total() > most:
            self.send({"cut": file})
            pytest.skip("cut")
        self.send({"began": item.nodeid})
        limit_cpu(30 + 10 * self.tests[item.nodeid])

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
            place = getattr(report.longrepr, "reprcrash", None)
            message = str(report.longrepr)[-200:] if place is None else place.message[:200]
            self.send({"failed": report.nodeid, "message": message})

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tree: Path, tests: dict[str, float], limits: Any) -> dict[str, Any]:
    """Which files notice, by which test, and which files were cut. A file whose test ends the
    process notices too, and the next process runs the other files."""
    files = list(dict.fromkeys(map(file_of, tests)))
    cut, tests = set(files[limits.files :]), dict(tests)
    noticed: dict[str, list[str]] = {}
    n_run, before = 0, _cpu_of_children()
    for _ in range(PROCESSES):
        tests = {t: s for t, s in tests.items() if file_of(t) not in cut | set(noticed)}
        if not tests:
            break

        def run(send: Any, tests: dict[str, float] = tests) -> None:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            # Programs are read from the cache of compiled ones, but not written: a process that
            # is killed could leave a part of a file.
            option = "jax_persistent_cache_min_compile_time_secs"
            sys.modules["jax"].config.update(option, 1e9)
            limit_cpu(120)  # to import and collect
            pytest_in(
                tree, list(dict.fromkeys(map(file_of, tests))), Chosen(tests, send, limits)
            )

        events, ended = in_child(run, 300 + 30 * max(tests.values()), tree.parent / "log")
        began = [event["began"] for event in events if "began" in event]
        n_run += len(began)
        cut.update(event["cut"] for event in events if "cut" in event)
        failed = [(e["failed"], e["message"]) for e in events if "failed" in e]
        if ended:  # if no test began, each of the files notices
            failed += [(test, ended) for test in (began[-1:] or tests)]
        for test, message in failed:
            noticed.setdefault(file_of(test), [test, message])
        if not ended:
            break
        tests = {test: seconds for test, seconds in tests.items() if test not in began}
    else:
        cut.update(map(file_of, tests))
    seconds = round(_cpu_of_children() - before, 1)
    cut -= set(noticed)
    return {"noticed": noticed, "cut": sorted(cut), "n_run": n_run, "seconds": seconds}


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# ---------------------------------------------------------------- copies of the tree


def copy_of_tree(folder: Path) -> Path:
    """Copy all files that git tracks or would add. Files that have not changed are not written,
    so that their compiled files stay valid."""
    tree = folder / "tree"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    content = lambda path: path.read_bytes() if path.exists() else None
    changed = [name for name in names if content(tree / name) != content(ROOT / name)]
    for name in changed:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    for package in ("eqx_grads", "tests"):
        for target in (tree / package).rglob("*.py"):
            if str(target.relative_to(tree)) not in names:
                target.unlink()
    if changed:  # a process that imports everything writes the compiled files
        collect = lambda send: pytest_in(tree, ["--collect-only", "tests"])
        in_child(collect, RECORDING, folder / "log")
    return tree


def in_parallel(
    n_jobs: int, items: Sequence[Any], folder: Path, do: Callable[..., None]
) -> None:
    """`do(item, tree)` for each item. Each process has a tree of its own."""
    context = multiprocessing.get_context("fork")
    counter = context.Value("i", 0)

    def work(job: int) -> None:
        tree = copy_of_tree(folder / str(job))
        while True:
            with counter.get_lock():
                i = counter.value
                counter.value += 1
            if i >= len(items):
                return
            do(items[i], tree)

    processes = [context.Process(target=work, args=(job,)) for job in range(n_jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


# ---------------------------------------------------------------- which tests reach what


def files_of(suite: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(SUITES[suite]))]


def reached_by(work: Path, file: str) -> Path:
    return work / "reached" / f"{file.replace('/', '.')}.json"


def record(work: Path, suite: str, n_jobs: int) -> None:
    """Run each test file in a process of its own: a program that another file has traced before
    would not be traced again."""
    (work / "reached").mkdir(exist_ok=True)

    def do(file: str, tree: Path) -> None:
        def run(send: Any) -> None:
            plugin = record_reached(tree, work / "instrumented")
            pytest_in(tree, [file], plugin)
            failed = [name for name, test in plugin.tests.items() if not test["passed"]]
            send(f"{len(plugin.tests)} tests, not passed: {failed}")
            reached_by(work, file).write_text(json.dumps(plugin.result()))

        before = _cpu_of_children()
        (*message,), ended = in_child(run, RECORDING, tree.parent / "log")
        print(f"{file}: {_cpu_of_children() - before:.0f} s {ended}", *message, flush=True)

    in_parallel(n_jobs, [f for f in files_of(suite) if not is_recorded(work, f)], work, do)


def is_recorded(work: Path, file: str) -> bool:
    """Whether the record is younger than the file, and than all files of the guard."""
    test, result = ROOT / file, reached_by(work, file)
    sources = [test] if test.parent == ROOT / "tests" else test.parent.rglob("*.py")
    times = [path.stat().st_mtime for path in sources]
    return result.exists() and max(times) < result.stat().st_mtime


class Tests:
    """The recorded tests of a suite that reach each statement, and their seconds."""

    def __init__(self, work: Path, suite: str):
        self.files: list[dict[str, Any]] = []
        for file in files_of(suite):
            found = json.loads(reached_by(work, file).read_text())
            cheap = sorted(found["tests"].items(), key=lambda item: item[1]["seconds"])
            tests = {n: (t["seconds"], set(t["reached"])) for n, t in cheap if t["passed"]}
            # One case of each function first: cases of other functions are more different.
            first = {test.partition("[")[0]: test for test in reversed(tests)}.values()
            found["tests"] = {n: tests[n] for n in sorted(tests, key=lambda n: n not in first)}
            self.files.append(found)

    def of(self, mutant: Mutant) -> dict[str, float]:
        """The tests that reach the statement, then the tests of a file that reaches it at
        import. If no test is recorded, the statement is new, or runs when the library is
        imported. Then the result is the tests that reach its function, or its file."""
        within = mutant.key.partition(": ")[0]
        prefix = (within,) if within.endswith("::") else (f"{within}:", f"{within}.")
        for is_wanted in (mutant.key.__eq__, lambda key: key.startswith(prefix)):
            found = [self._reaching(file, is_wanted) for file in self.files]
            if any(found):
                # The files with the most tests of it are the most direct.
                found.sort(key=lambda tests: -len(tests))
                return {test: seconds for tests in found for test, seconds in tests.items()}
        return {}

    def _reaching(self, file: Any, is_wanted: Callable[[str], bool]) -> dict[str, float]:
        wanted = {i for i, key in enumerate(file["statements"]) if is_wanted(key)}
        tests = {
            t: seconds for t, (seconds, reached) in file["tests"].items() if wanted & reached
        }
        if wanted.intersection(file["at_import"]):
            tests |= {t: s for t, (s, _) in file["tests"].items() if t not in tests}
        return tests


# ---------------------------------------------------------------- all mutants


def read_results(work: Path, suite: str) -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    path = work / f"{suite}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def run_all(work: Path, suite: str, chosen: list[Mutant], args: argparse.Namespace) -> None:
    tests, known = Tests(work, suite), read_results(work, suite)
    is_open = lambda old: old is None or (args.again and not old["noticed"])

    def do(mutant: Mutant, tree: Path) -> None:
        target = tree / mutant.path
        source, stat = target.read_bytes(), target.stat()
        try:
            target.write_bytes(mutant.apply(source))
            result = run_tests(tree, tests.of(mutant), args)
        finally:
            target.write_bytes(source)
            os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with open(work / f"{suite}.jsonl", "a") as file:
            file.write(json.dumps({"name": mutant.name} | result) + "\n")
        counts = {key: len(result[key]) for key in ("noticed", "cut")}
        print(suite, counts, f"{result['seconds']} s, {mutant.kind}: {mutant.name}", flush=True)

    # In random order: a run that is stopped is a fair sample.
    those = [m for m in chosen if is_open(known.get(m.name))]
    in_parallel(args.jobs, random.Random(0).sample(those, len(those)), work, do)


def control(work: Path, suite: str, args: argparse.Namespace) -> None:
    """Check that the tests that failed on mutants pass on the library itself."""
    results = read_results(work, suite).values()
    failed = sorted({test for result in results for test, _ in result["noticed"].values()})
    tests = {test: 60.0 for test in failed if "::" in test}
    args.files, args.per_file, args.per_mutant = len(tests), 1e6, 1e6
    found = run_tests(copy_of_tree(work / "0"), tests, args)["noticed"]
    print(f"control of {suite}: {len(tests)} tests,", found or "all pass")


def report(work: Path, chosen: list[Mutant], reasons: Path | None, names: set[str]) -> None:
    """Print the tables. In the file of reasons, each mutant that the guard does not notice has
    an entry. The entries of mutants that no longer exist are dropped."""
    results = {suite: read_results(work, suite) for suite in SUITES}
    known = [m for m in chosen if m.name in results["guard"]]
    both = {m.name for m in known if m.name in results["old"]}
    noticed = {
        s: {m.name for m in known if results[s].get(m.name, {}).get("noticed")} for s in SUITES
    }
    noticed["both"] = noticed["old"] | noticed["guard"]
    counted = {"old": both, "guard": {m.name for m in known}, "both": both}
    print(f"{len(known)} of {len(chosen)} mutants have a result, {len(both)} of both suites.")
    for title, label in (("room", lambda m: room_of(m.path)), ("kind", lambda m: m.kind)):
        print(f"\n| {title} | mutants | old | guard | both |\n|---|--:|--:|--:|--:|")
        for row in (*sorted(set(map(label, known))), "all"):
            those = {m.name for m in known if row in ("all", label(m))}
            counts = [(len(those & noticed[s]), len(those & counted[s])) for s in noticed]
            shares = [f"{n} of {of} ({100 * n / max(of, 1):.0f} %)" for n, of in counts]
            print(f"| {row} | {len(those)} | {' | '.join(shares)} |")
    survivors = [m for m in known if m.name not in noticed["guard"]]
    why = json.loads(reasons.read_text()) if reasons and reasons.exists() else {}
    why = {m.name: "" for m in survivors} | why
    why = {name: why[name] for name in why if name in names - noticed["guard"]}
    if reasons:
        reasons.write_text(json.dumps(why, indent=4, ensure_ascii=False) + "\n")
    print(f"\nThe guard does not notice {len(survivors)}:\n")
    print("| mutant | before | after | old suite | cut | reason |\n|---|---|---|---|---|---|")
    for m in survivors:
        texts = [" ".join(text.split()).replace("|", "\\|") for text in (m.before, m.after)]
        old = [Path(file).stem for file in results["old"].get(m.name, {}).get("noticed", ())]
        cells = f"{m.kind}: {m.path}:{m.line}", *(f"`{text}`" for text in texts), ", ".join(old)
        cut = len(results["guard"][m.name]["cut"]) or ""
        print("|", " | ".join([*cells, str(cut), why[m.name]]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("reached", "run", "control", "report"))
    parser.add_argument("only", nargs="*", help="parts of the names of mutants")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the copies")
    parser.add_argument("--suite", choices=(*SUITES, "all"), default="all")
    parser.add_argument("--number", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", type=int, default=1000, help="the most direct ones")
    parser.add_argument("--per-file", type=float, default=60.0, help="CPU seconds")
    parser.add_argument("--per-mutant", type=float, default=60.0, help="thrice if none notices")
    parser.add_argument("--again", action="store_true", help="also those that nothing noticed")
    parser.add_argument("--reasons", type=Path, help="JSON: why a mutant may survive")
    args = parser.parse_intermixed_args()
    args.work.mkdir(parents=True, exist_ok=True)
    work, suites = args.work.resolve(), list(SUITES) if args.suite == "all" else [args.suite]
    paths = sorted((ROOT / "eqx_grads").rglob("*.py"))
    sources = {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}
    chosen = (
        sample(sources, args.number, args.seed) if args.command in ("run", "report") else []
    )
    chosen = [m for m in chosen if all(part in m.name for part in args.only)]
    if args.command == "report":
        names = {m.name for path, source in sources.items() for m in mutants_of(path, source)}
        return report(work, chosen, args.reasons, names)
    for name in IMPORTED.split():
        __import__(name)
    for suite in suites:
        if args.command == "reached":
            record(work, suite, args.jobs)
        elif args.command == "run":
            run_all(work, suite, chosen, args)
        else:
            control(work, suite, args)
    return None


if __name__ == "__main__":
    main()
