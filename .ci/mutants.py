"""Count the mutants of the library that the quick tests notice: `make mutants`.

Each mutant (see `mutations.py`) is written into a copy of the tree. The quick tests that reach
the changed statement (see `reached.py`) run on it until one fails, in four stages:

- those of `tests/test_mutants.py`;
- one case of each test function in the two test files that reach most of the mutated file;
- one case of each test function in the other files, as many as take some seconds;
- the rest.

The results are lines of JSON. The next run adds what is missing. To save imports, a process
that has imported JAX, but not started its backend, is forked for each run of pytest, one at a
time.

    python .ci/mutants.py reached    record which test reaches which statement (10 minutes)
    python .ci/mutants.py run        run the mutants that have no result yet (an hour)
    python .ci/mutants.py control    check that the tests that failed pass on the library itself
    python .ci/mutants.py report     print the counts and the survivors
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import Mutant, sample
from reached import record_reached


ROOT = Path(__file__).resolve().parents[1]
# With the tests of the documentation, which `make test` leaves out: they notice mutants too.
QUICK = "not (slow or conformance or cost)"
# The rule core, the scans, the layers and the solvers, with the ops that are rules themselves.
MUTATED = (
    "_rules/*.py",
    "_tangent_spaces.py",
    "tangents.py",
    "_jaxprs/*.py",
    "_control_flow/*.py",
    "_gradient_ops/**/*.py",
    "ste/*.py",
    "surrogates/*.py",
    "nn/_gradient_layers.py",
    "nn/_recurrent/*.py",
    "nn/_linear_recurrent/*.py",
    "nn/_spiking/*.py",
    "nn/_quantized/*.py",
    "losses/*.py",
    "safe/*.py",
    "_solvers/*.py",
    "solvers/*.py",
    "_drop_ins/*.py",
)
# Imported before the fork, to save time. Never `eqx_grads`, which differs between mutants.
IMPORTED = ("jax", "equinox", "beartype", "jaxtyping", "hypothesis", "optax", "optimistix")
# CPU seconds: of importing the library and collecting the tests, and of one run at most.
START, LIMIT = 60, 900
FOR_MUTANTS = "tests/test_mutants.py"
FIRST = 4  # of the first tests of a mutant
MEMORY = 8 * 2**30
SURVIVED = ("survived", "not reached")


# ---------------------------------------------------------------- one run of pytest


def in_child(run: Callable[[], Any], cpu_seconds: float, log: Path) -> Any:
    """The result of `run` in a fork of this process, or how the process ended."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has started no threads so far
        child = os.fork()
    if child == 0:
        os.close(read)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_seconds), int(cpu_seconds) + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        with open(log, "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        try:
            result = run()
            with os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(write)
    # A deadlock takes no CPU.
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(int(4 * cpu_seconds))
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    if text:
        return json.loads(text)
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    is_timeout = ended in (signal.SIGXCPU, signal.SIGKILL)
    return {"outcome": "timeout" if is_timeout else "crash", "test": "", "message": str(ended)}


def pytest_in(tree: Path, args: list[str], *plugins: Any) -> int:
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", QUICK]
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *args], plugins=plugins))


def compile_all(tree: Path, files: list[str]) -> None:
    sys.dont_write_bytecode = False
    pytest_in(tree, ["--collect-only", *files])


class Chosen:
    """A pytest plugin: only these tests, in this order, up to the first that fails."""

    def __init__(self, tests: list[str]):
        self.order = {test: i for i, test in enumerate(tests)}
        self.n_run = 0
        self.failed = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.n_run += report.when == "call"
        if report.failed:
            self._note(report)

    def _note(self, report: Any) -> None:
        if self.failed is None:
            place = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr) if place is None else place.message
            self.failed = report.nodeid, text.strip()[-300:] if place is None else text[:300]


def test_mutant(tree: Path, tests: list[str], seconds: float) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        sys.dont_write_bytecode = True
        plugin = Chosen(tests)
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        status = pytest_in(tree, ["-x", *files], plugin)
        if status == 0:
            return {"outcome": "survived", "n_run": plugin.n_run}
        test, message = plugin.failed or ("", f"pytest exits with {status}")
        return {
            "outcome": "killed",
            "test": test,
            "message": message,
            "n_run": plugin.n_run,
        }

    return in_child(run, min(LIMIT, START + 5 * seconds), tree.parent / "log")


# ---------------------------------------------------------------- the copy of the tree


def copy_of_tree(work: Path) -> Path:
    """Copy all files that git tracks or would add. Files that have not changed are not written,
    so that their compiled files stay valid."""
    tree = work / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in names:
        source, target = ROOT / name, tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for folder in ("eqx_grads", "tests"):
        for target in (tree / folder).rglob("*.py"):
            if str(target.relative_to(tree)) not in names:
                target.unlink()
    return tree


# ---------------------------------------------------------------- which tests, in which order


def record(work: Path, only: list[str]) -> None:
    """Run each test file in a process of its own: a program that another file has traced before
    would not be traced again."""
    tree, results = copy_of_tree(work), work / "reached"
    results.mkdir(exist_ok=True)
    paths = [ROOT / "tests" / f"{name}.py" for name in only]
    for path in paths or sorted((ROOT / "tests").glob("test_*.py")):
        result = results / f"{path.stem}.json"
        if result.exists() and result.stat().st_mtime > path.stat().st_mtime:
            continue

        def run(name: str = path.name) -> dict[str, Any]:
            sys.dont_write_bytecode = False
            plugin = record_reached(tree, work / "instrumented")
            began = time.process_time()
            pytest_in(tree, [f"tests/{name}"], plugin)
            return {"seconds": time.process_time() - began, "tests": plugin.tests}

        found = in_child(run, 4 * LIMIT, work / "log")
        if "tests" not in found:
            print(f"{path.stem}: {found}", flush=True)
            continue
        failed = [name for name, test in found["tests"].items() if not test["passed"]]
        print(
            f"{path.stem}: {len(found['tests'])} tests in {found['seconds']:.0f} s, "
            f"not passed: {failed}",
            flush=True,
        )
        result.write_text(json.dumps(found))


class Tests:
    """The recorded tests that reach each statement."""

    def __init__(self, work: Path):
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}
        self.reaching: dict[str, list[str]] = {}  # of a statement
        self.breadth: dict[tuple[str, str], int] = {}  # of a file of tests in a source file
        for result in sorted((work / "reached").glob("*.json")):
            found = json.loads(result.read_text())
            lines = set()
            for name, test in found["tests"].items():
                if test["passed"] and "lines" in test:
                    self.seconds[name] = test["seconds"]
                    lines.update(test["lines"])
                    for line in test["lines"]:
                        self.reaching.setdefault(line, []).append(name)
            for line in lines:
                key = f"tests/{result.stem}.py", line.partition(":")[0]
                self.breadth[key] = self.breadth.get(key, 0) + 1
        self.of_file: dict[str, list[str]] = {}
        for name in self.seconds:
            self.of_file.setdefault(name.partition("::")[0], []).append(name)

    def stages(self, mutant: Mutant) -> list[list[str]]:
        """The tests that reach the statement, the most direct first. If none is recorded, since
        the statement runs at import or in another process, those that reach its file."""
        reaching = self.reaching.get(f"{mutant.path}:{mutant.line}")
        if reaching is None:
            files = [file for file, path in self.breadth if path == mutant.path]
            reaching = [test for file in files for test in self.of_file[file]]
        cheap = sorted(reaching, key=self.seconds.__getitem__)
        # Of the parameters of a test, the cheapest.
        of_function: dict[str, str] = {}
        for test in cheap:
            of_function.setdefault(test.partition("[")[0], test)
        file_of = lambda test: test.partition("::")[0]
        written_for_mutants = [test for test in cheap if file_of(test) == FOR_MUTANTS]
        first = [test for test in of_function.values() if file_of(test) != FOR_MUTANTS]
        breadth = lambda file: -self.breadth.get((file, mutant.path), 0)
        direct = sorted(dict.fromkeys(map(file_of, first)), key=breadth)[:2]
        stages = [
            written_for_mutants,
            self._within(FIRST, [test for test in first if file_of(test) in direct]),
            self._within(FIRST, [test for test in first if file_of(test) not in direct]),
        ]
        soon = {test for stage in stages for test in stage}
        stages.append([test for test in cheap if test not in soon])
        return [stage for stage in stages if stage]

    def _within(self, seconds: float, tests: list[str]) -> list[str]:
        """The first tests, which together take this many seconds."""
        total = itertools.accumulate(map(self.seconds.__getitem__, tests))
        return [test for test, until in zip(tests, total, strict=True) if until <= seconds]


# ---------------------------------------------------------------- all mutants


def mutants(number: int, seed: int) -> list[Mutant]:
    paths = sorted(p for pattern in MUTATED for p in (ROOT / "eqx_grads").glob(pattern))
    return sample({str(p.relative_to(ROOT)): p.read_bytes() for p in paths}, number, seed)


def run_all(
    work: Path,
    chosen: list[Mutant],
    results: Path,
    *,
    again: bool,
    n_stages: int,
    until: float,
) -> None:
    tree, tests = copy_of_tree(work), Tests(work)
    if not (tree / "eqx_grads" / "__pycache__").exists():
        in_child(lambda: compile_all(tree, list(tests.of_file)), LIMIT, work / "log")
    known = read_results(results)
    for i, mutant in enumerate(chosen):
        old = known.get(mutant.name)
        if old is not None and not (again and old["outcome"] in SURVIVED):
            continue
        if time.time() > until:
            print("No time is left.")
            return
        target = tree / mutant.path
        source, stat = target.read_bytes(), target.stat()
        began, n_run, result = _cpu_of_children(), 0, {"outcome": "not reached"}
        try:
            target.write_bytes(mutant.apply(source))
            # Compiled files are told apart by size and second: no two mutants have the same.
            os.utime(target, (i, i))
            for stage in tests.stages(mutant)[:n_stages]:
                seconds = sum(map(tests.seconds.__getitem__, stage))
                result = test_mutant(tree, stage, seconds)
                n_run += result.get("n_run", 0)
                if result["outcome"] != "survived":
                    break
        finally:
            target.write_bytes(source)
            os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        result = mutant._asdict() | result
        result |= {"n_run": n_run, "seconds": round(_cpu_of_children() - began, 1)}
        with open(results, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{i + 1}/{len(chosen)} {result['outcome']} in {result['seconds']} s "
            f"after {n_run} tests: {mutant.path}:{mutant.line}",
            flush=True,
        )


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def read_results(results: Path) -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {line["name"]: line for line in lines}


def control(work: Path, chosen: list[Mutant], results: Path) -> None:
    """Check that the tests that failed on mutants pass on the library itself."""
    known = read_results(results)
    tests = sorted({known[m.name].get("test", "") for m in chosen if m.name in known} - {""})
    # A file that can't be collected has no `::`.
    result = test_mutant(copy_of_tree(work), [t for t in tests if "::" in t], LIMIT)
    print("control:", "passed" if result["outcome"] == "survived" else result)


def report(chosen: list[Mutant], results: Path) -> None:
    known = read_results(results)
    run = [known[m.name] for m in chosen if m.name in known]
    for kind in ("killed", "timeout", "crash", "survived", "not reached"):
        print(f"{sum(r['outcome'] == kind for r in run):4} {kind}")
    print(f"{len(chosen) - len(run):4} not run")
    for r in run:
        if r["outcome"] in SURVIVED:
            print(f"{r['outcome']}: {r['path']}:{r['line']} in {r['within']}")
            print(f"    {r['before']}\n -> {r['after']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("reached", "run", "control", "report"))
    parser.add_argument(
        "only", nargs="*", help="names of test files, or parts of paths of source files"
    )
    parser.add_argument("--work", type=Path, required=True, help="a folder for the copy")
    parser.add_argument("--results", type=Path, help="by default in that folder")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="also what has survived so far")
    parser.add_argument("--stages", type=int, default=4, help="how many of the four")
    parser.add_argument("--minutes", type=float, default=600)
    args = parser.parse_intermixed_args()
    args.work.mkdir(parents=True, exist_ok=True)
    work = args.work.resolve()
    results = (args.results or work / "results.jsonl").resolve()
    if args.command != "report":
        for name in IMPORTED:
            __import__(name)
    if args.command == "reached":
        record(work, args.only)
    else:
        chosen = mutants(args.number, args.seed)
        if args.only:
            chosen = [m for m in chosen if any(part in m.path for part in args.only)]
        if args.command == "run":
            run_all(
                work,
                chosen,
                results,
                again=args.again,
                n_stages=args.stages,
                until=time.time() + 60 * args.minutes,
            )
        if args.command == "control":
            control(work, chosen, results)
        report(chosen, results)


if __name__ == "__main__":
    main()
