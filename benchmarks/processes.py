"""Claim: two processes that train the character model of `examples/data_parallel.py` need at
most an eighth more CPU time than one.

Strong scaling: 32 sequences for all processes together. Weak scaling: 32 for each. A process
has one core, and four processes share two; `2 threads` is one process that has both cores. The
variants alternate. If the machine also runs other programs, as it did when this was written,
the wall time says little; the CPU time bounds the speed on idle cores.
"""

import argparse
import itertools
import json
import os
import pathlib
import runpy
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec


EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "data_parallel.py"
SEQUENCES = 32
GROUPS = {"1": (1, 1), "2 threads": (1, 2), "2": (2, 1), "4": (4, 1)}  # processes, cores each


def work(args):
    """For each number of sequences that the parent sends, answer with the seconds of a step."""
    cores = sorted(os.sched_getaffinity(0))
    mine = [cores[(args.process + i) % len(cores)] for i in range(args.cores)]
    os.sched_setaffinity(0, mine)
    jax.distributed.initialize(args.coordinator, args.processes, args.process)
    sys.path.insert(0, str(EXAMPLE.parent))  # as `python examples/data_parallel.py` has it
    example = runpy.run_path(str(EXAMPLE))
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    length, characters = example["LENGTH"], example["CHARACTERS"]
    model = example["CharacterModel"](characters, example["UNITS"], layers=1, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = (jnp.int32(0), params, optimizer.init(params), jnp.zeros(1))
    state = jax.device_put(state, NamedSharding(mesh, Spec()))
    step = example["make_step"](static, optimizer, mesh)
    rows = NamedSharding(mesh, Spec("batch"))
    for line in sys.stdin:
        shape = (int(line), length + 1)
        text = np.random.default_rng(0).integers(characters, size=shape, dtype="int32")
        text = jax.make_array_from_callback(shape, rows, text.__getitem__)
        start = time.perf_counter(), time.process_time()
        now = state
        for _ in range(args.steps):
            now = step(now, text)
        jax.block_until_ready(now)
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        print(json.dumps({"wall": wall / args.steps, "cpu": cpu / args.steps}), flush=True)


def start(processes, cores, steps):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--coordinator", coordinator, "--steps", str(steps)]
    command += ["--processes", str(processes), "--cores", str(cores), "--process"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, str(i)], env=env, **pipes) for i in range(processes)]


def ask(group: list[Any], sequences: int):
    """Run a step. Returns the seconds of the slowest process, and the CPU seconds of all
    together."""
    for worker in group:
        worker.stdin.write(f"{sequences}\n")
        worker.stdin.flush()
    answers = []
    for worker in group:
        # Gloo, the library of collectives, prints lines of its own.
        while not (line := worker.stdout.readline()).startswith("{"):
            if not line:
                sys.exit("A process ended before its answer.")
        answers.append(json.loads(line))
    return max(a["wall"] for a in answers), sum(a["cpu"] for a in answers)


def measure(names, rounds, steps):
    groups: dict[str, Any] = {name: start(*GROUPS[name], steps) for name in names}
    measured = {}
    try:
        for i in range(-1, rounds):  # the first compiles
            for name, group in list(groups.items())[:: 1 if i % 2 else -1]:
                for kind, each in (("strong", 1), ("weak", len(group))):
                    times = ask(group, SEQUENCES * each)
                    if i >= 0:
                        measured.setdefault((name, kind), []).append(times)
    finally:
        for worker in itertools.chain(*groups.values()):
            worker.stdin.close()  # the end of its loop
        for worker in itertools.chain(*groups.values()):
            worker.wait()
    return measured


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two processes, few steps")
    parser.add_argument("--steps", type=int, default=10, help="of a measurement (%(default)s)")
    parser.add_argument("--coordinator")
    for option in ("--processes", "--process", "--cores"):
        parser.add_argument(option, type=int)
    args = parser.parse_args()
    if args.coordinator:
        work(args)
        return
    names = ["1", "2"] if args.quick else list(GROUPS)
    measured = measure(names, *((1, 2) if args.quick else (11, args.steps)))
    print("| processes | scaling | ms | CPU ms, all | speed | CPU of one, relative |")
    print("|" + " --- |" * 6)
    for (name, kind), times in measured.items():
        one = measured["1", kind]
        each = GROUPS[name][0] if kind == "weak" else 1  # times the work
        wall, cpu = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        pairs = list(zip(one, times, strict=True))
        speed = statistics.median(each * a[0] / b[0] for a, b in pairs)
        ratio = statistics.median(b[1] / a[1] / each for a, b in pairs)
        print(f"| {name} | {kind} | {wall:.1f} | {cpu:.1f} | {speed:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
