"""Claim: in eager mode, a call takes a tenth of raw JAX's time, and a derivative 0.9 to 1.3
times as long; `docs/benchmarks.md` has the table.

Under `jit` they do not differ: `tests/test_cost.py` compares the compiled programs. In
eager mode, each call and each derivative runs the Python code of the wrapper. The same rule is
written with `eqx_grads`, raw JAX and Equinox, and called on small arrays, so that the wrapper
dominates the time. The variants alternate in one process; the figures are medians over rounds
of the time per call, and of its ratio to raw JAX in the same round.

    python benchmarks/overhead.py [--quick]
"""

import argparse
import statistics
import time
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp


def multiply_sin(x, y):
    return jnp.sin(x) * y


def tangent(x, y, t_x, t_y):
    return jnp.cos(x) * y * t_x + jnp.sin(x) * t_y


def cotangents(residuals, ct):
    x, y = residuals
    return jnp.cos(x) * y * ct, jnp.sin(x) * ct


eqg_jvp = eqg.custom_jvp(multiply_sin)
raw_jvp = jax.custom_jvp(multiply_sin)
eqx_jvp = eqx.filter_custom_jvp(multiply_sin)


def rule(fn: Any):
    return lambda primals, tangents: (fn(*primals), tangent(*primals, *tangents))


def eqx_rule(primals, tangents):
    x, y = primals
    t_x, t_y = (jnp.zeros(()) if t is None else t for t in tangents)
    return eqx_jvp(x, y), tangent(x, y, t_x, t_y)


eqg_jvp.def_jvp(rule(eqg_jvp))
raw_jvp.defjvp(rule(raw_jvp))
eqx_jvp.def_jvp(eqx_rule)

eqg_vjp = eqg.custom_vjp(multiply_sin)
raw_vjp = jax.custom_vjp(multiply_sin)
eqx_vjp_ = eqx.filter_custom_vjp(lambda xy: multiply_sin(*xy))

eqg_vjp.def_fwd(lambda x, y: (multiply_sin(x, y), (x, y)))
eqg_vjp.def_bwd(cotangents)
raw_vjp.defvjp(lambda x, y: (multiply_sin(x, y), (x, y)), cotangents)
eqx_vjp_.def_fwd(lambda perturbed, xy: (multiply_sin(*xy), xy))
eqx_vjp_.def_bwd(lambda residuals, ct, perturbed, xy: cotangents(residuals, ct))


def eqx_vjp(x, y):
    return eqx_vjp_((x, y))


def seconds(fn, args, calls):
    start = time.perf_counter()
    jax.block_until_ready([fn(*args) for _ in range(calls)])
    return (time.perf_counter() - start) / calls


def compare(title, variants, args, calls, rounds):
    """Print the median microseconds of each variant and its ratio to the first."""
    times = {name: [] for name in variants}
    for fn in variants.values():
        seconds(fn, args, 3)
    for i in range(rounds):
        order = list(variants.items())
        for name, fn in order if i % 2 else reversed(order):
            times[name].append(seconds(fn, args, calls))
    reference = times[next(iter(variants))]
    for name, ts in times.items():
        ratio = statistics.median(t / r for t, r in zip(ts, reference, strict=True))
        print(f"{title:28} {name:10} {1e6 * statistics.median(ts):9.1f} us  {ratio:5.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few calls, for the tests")
    quick = parser.parse_args().quick
    calls, rounds = (2, 3) if quick else (50, 41)
    x, y = jnp.array(0.5), jnp.array(2.0)
    jvps = {"raw JAX": raw_jvp, "eqx_grads": eqg_jvp, "Equinox": eqx_jvp, "plain": multiply_sin}
    vjps = {"raw JAX": raw_vjp, "eqx_grads": eqg_vjp, "Equinox": eqx_vjp, "plain": multiply_sin}
    compare("custom_jvp: call", jvps, (x, y), calls, rounds)
    compare("custom_vjp: call", vjps, (x, y), calls, rounds)

    def grads(fns, argnums):
        return {name: jax.grad(fn, argnums) for name, fn in fns.items()}

    def jvp(fn):
        return lambda x, y: jax.jvp(fn, (x, y), (x, y))

    # Fewer calls, because raw JAX slows down with every eager derivative of a forward rule that
    # calls jitted functions: it keeps a weak reference for each (JAX 0.10.2).
    calls, rounds = max(1, calls // 25), min(rounds, 15)
    compare("custom_jvp: grad, all", grads(jvps, (0, 1)), (x, y), calls, rounds)
    compare("custom_jvp: grad, one of two", grads(jvps, 0), (x, y), calls, rounds)
    compare("custom_jvp: jvp", {k: jvp(f) for k, f in jvps.items()}, (x, y), calls, rounds)
    compare("custom_vjp: grad, all", grads(vjps, (0, 1)), (x, y), calls, rounds)
    compare("custom_vjp: grad, one of two", grads(vjps, 0), (x, y), calls, rounds)


if __name__ == "__main__":
    main()
