"""Train every layer for a long time, and check that nothing grows: `python -m tests.soak`.

A lap trains each layer on batches of several sizes. It also replaces one of the layers, and its
train step, by new ones: the programs of the old step have to be freed. After each lap, the
arrays, the tracers, the traced programs (jaxprs), the functions and the compiled programs are
counted, and the resident memory is measured. Every lap does the same, so the counts have to
stay the same after the first laps.

Memory levels off when JAX's own caches are full. As a reference, another process does the same
with a plain Equinox layer in `jax.lax.scan`, which is replaced as often.

In the second half of the laps,

- the line through each count has to rise by less than `COUNT`;
- the line through the memory has to rise by less than `MEMORY` of what is in use, or for each
    lap by at most twice as much as the reference.
"""

import argparse
import collections
import contextlib
import ctypes
import functools as ft
import gc
import itertools
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr

from .rules.layers import IN, LAYERS, REFERENCE, TIME


COUNT = 1.0  # objects
MEMORY = 0.02
SIZES = (1, 3, 8)  # of batches
COUNTED = {
    "arrays": jax.Array,
    "tracers": jax.core.Tracer,
    "jaxprs": (Jaxpr, ClosedJaxpr),
    "functions": types.FunctionType,
}
# JAX 0.10 to 0.12 keeps one more jaxpr for each `jnp.argmin` that it compiles, until a cache of
# its own is full: `jax.jit(lambda x: jnp.argmin(x))(x)`, again and again, shows it.
NOT_REPLACED = ("VectorQuantizer",)


# ---------------------------------------------------------------- training


class Trained(eqx.Module):
    """A layer, and how it is called with a sequence of vectors."""

    layer: Any
    call: Callable[[Any, jax.Array], Any] = eqx.field(static=True)

    def __call__(self, xs):
        return self.call(self.layer, xs)


class Training:
    """A layer in training, with a compiled step of its own.

    The step is compiled by `jax.jit`, as `eqx.filter_jit` keeps every function that it was
    given (Equinox 0.13.8).
    """

    def __init__(self, make, call, seed: int):
        optimizer = optax.adam(1e-3)
        self.params, static = eqx.partition(
            Trained(make(jr.key(seed)), call), eqx.is_inexact_array
        )
        self.state = optimizer.init(self.params)

        def loss(params, batch):
            model = eqx.combine(params, static)
            return jnp.mean(jnp.square(jax.vmap(model)(batch) - 0.5))

        @jax.jit
        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = optimizer.update(grads, state)
            return eqx.apply_updates(params, updates), state, value

        self.step = step

    def train(self, batch):
        self.params, self.state, loss = self.step(self.params, self.state, batch)
        if not np.isfinite(loss):
            raise FloatingPointError(f"The loss of {self.params.layer} is {loss}.")


def laps(layers: dict[str, Any], sizes: tuple[int, ...]) -> Iterator[None]:
    """Train all layers on all sizes. Each lap replaces one layer. The first lap replaces all of
    them, as caches of JAX or Equinox keep the last one of some layers."""
    trainings = {name: Training(make, call, 0) for name, (make, call) in layers.items()}
    names = itertools.cycle([name for name in layers if name not in NOT_REPLACED] or layers)
    for seed in itertools.count():
        again = layers if seed == 0 else [next(names)]
        for is_new in (False, True):
            for name, training in trainings.items():
                if is_new and name in again:
                    training = trainings[name] = Training(*layers[name], seed)
                for size in sizes if name in again or is_new else ():
                    training.train(jr.normal(jr.key(seed), (size, TIME, IN)))
        yield


# ---------------------------------------------------------------- what is there


@ft.cache
def _counted_as(kind: type) -> tuple[str, ...]:
    return tuple(name for name, kinds in COUNTED.items() if issubclass(kind, kinds))


def census() -> dict[str, float]:
    gc.collect()
    _return_freed_memory()
    counts = collections.Counter(dict.fromkeys(COUNTED, 0))
    for obj in gc.get_objects():
        counts.update(_counted_as(type(obj)))
    counts["arrays"] = len(jax.live_arrays())
    counts["compiled"] = len(jax.devices()[0].client.live_executables())
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {**counts, "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}


def _return_freed_memory():
    """Return it to the system: how much glibc keeps depends on where it was."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def slopes(records: list[dict[str, float]]) -> dict[str, float]:
    """How much each count rises in a lap, on the line through the second half of the laps."""
    half = records[len(records) // 2 :]
    at = np.arange(len(half))
    return {
        name: float(np.polyfit(at, [record[name] for record in half], 1)[0])
        if len(half) > 1
        else 0.0
        for name in records[0]
    }


def rising(records: list[dict[str, float]], reference: dict[str, float]) -> dict[str, float]:
    """The counts that do not level off, and how much they rise in the second half."""
    n = len(records) - len(records) // 2
    found = {}
    for name, slope in slopes(records).items():
        if name == "MiB":
            most = max(MEMORY * records[-1]["MiB"], 2 * n * reference.get("MiB", 0.0))
        else:
            most = COUNT
        if slope * n >= most:
            found[name] = slope * n
    return found


def soak(
    minutes: float, least: int, layers: dict[str, Any], sizes: tuple[int, ...]
) -> list[dict[str, float]]:
    """Run laps for some minutes, and `least` at least. Count after each, and print a line."""
    end, records = time.monotonic() + 60 * minutes, []
    for lap, _ in enumerate(laps(layers, sizes)):
        records.append(census())
        if lap == 0:
            print(f"{'lap':>5}" + "".join(f"{name:>11}" for name in records[0]))
        print(f"{lap:5}" + "".join(f"{n:11.0f}" for n in records[-1].values()), flush=True)
        if time.monotonic() > end and len(records) >= least:
            return records
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--laps", type=int, help="so many laps, and no minutes")
    parser.add_argument("--every", type=int, default=1, help="only every n-th layer")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many batch sizes")
    parser.add_argument("--reference", action="store_true", help="the reference only")
    args = parser.parse_args()
    sizes = SIZES[: args.sizes]
    minutes = args.minutes if args.laps is None else 0.0
    least = 8 if args.laps is None else args.laps
    if args.reference:
        records = soak(minutes, least, REFERENCE, sizes)
        print("slopes", *(f"{name}={x:.4f}" for name, x in slopes(records).items()))
        return
    # The reference runs in a process of its own, for a tenth of the time.
    command = [sys.executable, "-m", "tests.soak", "--reference"]
    command += ["--minutes", str(minutes / 10), "--sizes", str(args.sizes)]
    command += [] if args.laps is None else ["--laps", str(args.laps)]
    print("Reference:", *REFERENCE)
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print("\n".join([*output.splitlines()[:3], "  ...", *output.splitlines()[-2:]]))
    words = output.splitlines()[-1].split()[1:]
    reference = {name: float(x) for name, x in (word.split("=") for word in words)}
    layers = dict(list(LAYERS.items())[:: args.every])
    print("Layers:", *layers)
    records = soak(minutes * 9 / 10, least, layers, sizes)
    print(f"\n{len(records)} laps, {len(layers)} layers, batches of {sizes}")
    n = len(records) - len(records) // 2
    for name, slope in slopes(records).items():
        first, middle, last = (records[i][name] for i in (0, len(records) // 2, -1))
        print(
            f"{name:>11}: {first:9.0f} {middle:9.0f} {last:9.0f}, rises by {slope * n:8.2f} in "
            f"the last {n} laps (for each lap {slope:.4f}, reference {reference[name]:.4f})"
        )
    found = rising(records, reference)
    print("Does not level off:" if found else "All level off.", *found)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
