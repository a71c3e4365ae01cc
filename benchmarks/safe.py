"""Claim: where plain JAX is right, most safe functions with their gradients take 0.7 to 1.5
times as long as JAX's.

The value and the gradient of a sum over 100000 elements of float32, compiled, with elements
where plain JAX is right as well. The figure is relative to JAX in the same process: the median
over rounds, in turn. Processor time counts all threads, so that other work on the machine
matters less. Measured with JAX 0.10.2 on one core of a shared machine. The exceptions are
`log_sub_exp` (1.9), `log_ndtr` (1.8), `expm1_ratio` (1.6) and `log1p_ratio` (2.5). `log_ndtr`
computes both of its formulas for each element. The ratios compute a series for each; the plain
formulas cancel near zero.

    python benchmarks/safe.py [--quick]
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.scipy.special as jsp
from eqx_grads import safe
from timing import busy_time, compiled, in_turn, speed


PEERS = {
    "sqrt": (jnp.sqrt, 1),
    "log": (jnp.log, 1),
    "divide": (jnp.divide, 2),
    "power": (jnp.power, 2),
    "hypot": (jnp.hypot, 2),
    "arctan2": (jnp.arctan2, 2),
    "arccos": (jnp.arccos, 1),
    "arcsin": (jnp.arcsin, 1),
    "xlogy": (jsp.xlogy, 2),
    "xlog1py": (jsp.xlog1py, 2),
    "log_cosh": (lambda x: jnp.log(jnp.cosh(x)), 1),
    "log_expm1": (lambda x: jnp.log(jnp.expm1(x)), 1),
    "log_sub_exp": (lambda x, y: x + jnp.log1p(-jnp.exp(y - x)), 2),
    "log_ndtr": (jsp.log_ndtr, 1),
    "expm1_ratio": (lambda x: jnp.expm1(x) / x, 1),
    "log1p_ratio": (lambda x: jnp.log1p(x) / x, 1),
    "sinhc": (lambda x: jnp.sinh(x) / x, 1),
}


def with_gradient(fn, n_arguments):
    total = lambda *xs: jnp.sum(fn(*xs))
    return jax.value_and_grad(total, tuple(range(n_arguments)))


def measure(name, n, rounds):
    peer, n_arguments = PEERS[name]
    y, gap = jr.uniform(jr.key(0), (2, n), minval=0.1, maxval=0.4)
    xs = (y + gap, y)[:n_arguments]
    variants = {
        "safe": compiled(with_gradient(getattr(safe, name), n_arguments), *xs).run,
        "jax": compiled(with_gradient(peer, n_arguments), *xs).run,
    }
    return 1 / speed(in_turn(variants, rounds, clock=busy_time), "safe", "jax")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    for name in ("sqrt", "hypot") if quick else PEERS:
        ratio = measure(name, *((1000, 3) if quick else (100_000, 51)))
        print(f"{name:12s} {ratio:.2f} times the processor time of JAX")
