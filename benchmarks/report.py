"""No claim: run the tests and every benchmark on the device that JAX finds, and write a report.

The tests run with `jax_default_matmul_precision` "highest", as their tolerances are meant for
float32. On a GPU, JAX by default multiplies float32 matrices in TF32, with 10 of 23 bits. The
benchmarks run in the default precision. Without a GPU, the figures come from a CPU, and the
report says so.

    python benchmarks/report.py [--quick] [--only tests benchmarks] [--out report.md]

If a benchmark fails, or takes more than an hour, the report has the end of its output. The
exit status is 1 if anything failed.
"""

import argparse
import ast
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from typing import NamedTuple


# Several processes use the GPU, and JAX would reserve most of its memory for each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax


ROOT = pathlib.Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
TESTS = ["-m", "not (slow or conformance or cost)", "--continue-on-collection-errors"]
HOUR = 3600


class Outcome(NamedTuple):
    name: str
    passed: bool
    seconds: float
    output: str


def claim_of(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.split("\n\n")[0].replace("\n", " ")


def device():
    """The machine that the figures were measured on, in rows of a table."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "equinox")}
    return {
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "platform": jax.default_backend(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        **versions,
    }


def run(name, args, **environment):
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *args],
            cwd=ROOT,
            env={**os.environ, "MPLBACKEND": "Agg", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=4 * HOUR if name == "tests" else HOUR,
        )
        passed, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as expired:
        passed, output = False, f"{expired.output or ''}\nStopped after {expired.timeout} s."
    seconds = time.perf_counter() - start
    print(f"{name}: {'passed' if passed else 'FAILED'} in {seconds:.0f} s", flush=True)
    return Outcome(name, passed, seconds, output.strip())


def run_tests(quick, jobs):
    files = ["tests/test_matmul_precision.py"] if quick else []
    many = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    return run(
        "tests",
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *many, *TESTS, *files],
        JAX_DEFAULT_MATMUL_PRECISION="highest",
    )


def run_benchmarks(quick):
    claims = {path: claim_of(path) for path in BENCHMARKS}
    paths = [path for path, claim in claims.items() if not claim.startswith("No claim")]
    if quick:
        paths = [path for path in paths if path.name == "recurrent.py"]
    return [
        run(path.name, [str(path), *(["--quick"] if quick else [])], PYTHONPATH=str(ROOT))
        for path in paths
    ]


def report(outcomes):
    """The report, in Markdown."""
    lines = ["# Report", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in device().items()]
    if jax.default_backend() != "gpu":
        lines += ["", "**There was no GPU.** All figures come from the device above."]
    lines += ["", "| | | seconds |", "|---|---|--:|"]
    for name, passed, seconds, _ in outcomes:
        lines.append(f"| {name} | {'passed' if passed else '**FAILED**'} | {seconds:.0f} |")
    for name, passed, _, output in outcomes:
        lines += ["", f"## {name}", ""]
        if name == "tests":
            lines += ["Matrix products in float32.", ""]
            lines_of_interest = r"^(?:FAILED|ERROR) .*|^\d+ [a-z]+.* in [\d.]+s.*"
            short = re.findall(lines_of_interest, output, re.M)
            output = "\n".join(short) if short else output[-2000:]
        else:
            lines += [claim_of(ROOT / "benchmarks" / name), ""]
            output = output if passed else output[-2000:]
        # Most benchmarks print a Markdown table, and some print columns.
        is_table = passed and output.startswith("|")
        lines += [output] if is_table else ["```text", output, "```"]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one file of tests, one benchmark")
    parser.add_argument("--only", nargs="*", default=["tests", "benchmarks"])
    parser.add_argument("--jobs", type=int, default=1, help="processes that run tests")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the report")
    args = parser.parse_args()
    outcomes = [run_tests(args.quick, args.jobs)] if "tests" in args.only else []
    if "benchmarks" in args.only:
        outcomes += run_benchmarks(args.quick)
    text = report(outcomes)
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text)
    sys.exit(not all(outcome.passed for outcome in outcomes))


if __name__ == "__main__":
    main()
