"""No claim: how the other benchmarks compile and time programs."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax


class Compiled(NamedTuple):
    """A compiled program as a function without arguments, its temporary bytes, and the seconds
    that tracing and compilation took."""

    run: Callable[[], object]
    memory: int
    seconds: float


def compiled(fn, *args) -> Compiled:
    start = time.perf_counter()
    program = jax.jit(fn).lower(*args).compile()
    seconds = time.perf_counter() - start
    analysis = program.memory_analysis()
    memory = 0 if analysis is None else analysis.temp_size_in_bytes
    return Compiled(lambda: jax.block_until_ready(program(*args)), memory, seconds)


def repeated(program, args, times: int) -> Callable[[], None]:
    """A program that is run several times, if one run takes microseconds."""

    def run():
        for _ in range(times):
            jax.block_until_ready(program(*args))

    return run


def busy_time() -> float:
    """Seconds of CPU time, which leave out other processes. They also leave out what runs on an
    accelerator: with one, seconds of wall time."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def in_turn(variants, rounds, clock=time.perf_counter):
    """The seconds of each variant in each round. The order alternates from round to round."""
    times = {name: [] for name in variants}
    for run in variants.values():
        run()
    for i in range(rounds):
        order = list(variants.items())
        for name, run in order if i % 2 else reversed(order):
            start = clock()
            run()
            times[name].append(clock() - start)
    return times


def speed(times, name, reference):
    """The median over rounds of the speed relative to `reference` in the same round."""
    return statistics.median(a / b for a, b in zip(times[reference], times[name], strict=True))
