"""Nothing is claimed here: how programs are timed side by side, for the other files."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax


class Compiled(NamedTuple):
    """A program as a function without arguments, the bytes it sets aside, and the seconds that
    it took to trace and to compile."""

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


def in_turn(variants, rounds):
    """Seconds of each variant in each round."""
    times = {name: [] for name in variants}
    for run in variants.values():
        run()
    for i in range(rounds):
        order = list(variants.items())
        for name, run in order if i % 2 else reversed(order):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def speed(times, name, reference):
    """The median over rounds of the ratio in the same round: above one is faster."""
    return statistics.median(a / b for a, b in zip(times[reference], times[name], strict=True))
