"""Claim: under `jit`, `host_function` costs at most 1.15 times a bare `jax.pure_callback` in a
`jax.custom_vjp`. An eager call costs less than half.

The cost comes from the Python code that runs at each call on the host: arguments to NumPy,
the user's tree, the comparison of what was returned with what was promised. "sin" is `np.sin`
of 10 numbers, which is nothing but this cost; "dct" is a cosine transform of 10000 numbers, for
which there is also `linear_host_function`. The variants alternate in one process. "us" is the
median CPU time of the process for one call of the function (or one value and gradient). "Ratio"
is the median over rounds of its ratio to the bare callback in the same round.

    python benchmarks/host.py [--quick]
"""

import argparse
import statistics

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import scipy.fft
from timing import busy_time, in_turn


def sin_bwd(x, ct):
    return np.cos(x) * ct


def cosine(x):
    return scipy.fft.dct(x, norm="ortho")


def cosine_bwd(_, ct):
    return scipy.fft.idct(ct, norm="ortho")


def bare(fn, bwd):
    """What one writes by hand."""

    def callback(fn, x, *args):
        spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(fn, spec, x, *args, vmap_method="sequential")

    function = jax.custom_vjp(lambda x: callback(fn, x))
    function.defvjp(lambda x: (callback(fn, x), x), lambda x, ct: (callback(bwd, x, ct),))
    return function


def ours(fn, bwd):
    function = eqg.host_function(fn, out=lambda x: x)
    function.def_bwd(lambda arguments, ct: (bwd(arguments[0], ct),))
    return function


def linear(fn, bwd):
    return eqg.linear_host_function(fn, lambda ct: bwd(ct, ct))


FUNCTIONS = {
    "sin": (np.sin, sin_bwd, 10, (bare, ours)),
    "dct": (cosine, cosine_bwd, 10_000, (bare, ours, linear)),
}
SCAN = 100


def scanned(f):
    step = lambda x, _: (0.9 * f(x), None)
    return lambda x: jax.lax.scan(step, x, None, length=SCAN)[0]


def grad(f):
    return jax.value_and_grad(lambda x: jnp.sum(f(x)))


# The program of a function, and how often it calls the function.
PROGRAMS = {
    "jit, call": (jax.jit, 1),
    "jit, value and gradient": (lambda f: jax.jit(grad(f)), 1),
    "scan, call": (lambda f: jax.jit(scanned(f)), SCAN),
    "scan, value and gradient": (lambda f: jax.jit(grad(scanned(f))), SCAN),
    "eager, call": (lambda f: f, 1),
    "eager, value and gradient": (grad, 1),
}


def repeated(program, x, times):
    def run():
        for _ in range(times):
            jax.block_until_ready(program(x))

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few calls, for the tests")
    quick = parser.parse_args().quick
    rounds, calls = (1, 2) if quick else (21, 100)
    for name, (fn, bwd, size, makers) in FUNCTIONS.items():
        x = jnp.linspace(0, 1, size, dtype=jnp.float32)
        for title, (program, n) in PROGRAMS.items():
            times = max(1, calls // n if not title.startswith("eager") else calls // 10)
            runs = {
                maker.__name__: repeated(program(maker(fn, bwd)), x, times) for maker in makers
            }
            seconds = in_turn(runs, rounds, clock=busy_time)
            for variant, ts in seconds.items():
                pairs = zip(ts, seconds["bare"], strict=True)
                ratio = statistics.median(a / b if b else 1.0 for a, b in pairs)
                us = 1e6 * statistics.median(ts) / (times * n)
                print(f"{name:6} {title:26} {variant:7} {us:9.1f} us {ratio:6.2f}")


if __name__ == "__main__":
    main()
