"""Eager calls of everything, and their gradients, are compiled in the first call only.

JAX's own counter of compilations is the witness. `test_growth.py` looks at what is left behind.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from .cases import CASES
from .helpers import compilations


QUICK = (
    "linear_recurrence",
    "filter_scan",
    "filter_cond",
    "filter_checkpoint",
    "losses.chunked",
    "nn.GRU",
    "nn.Recurrent",
    "nn.LIF",
)
# JAX itself compiles each operation of an eager `jax.shard_map`; and what is never a gradient.
LEFT_OUT = ("psum_gradient", "psum_gradient: one device", "nondifferentiable")


def total(out):
    arrays = jax.tree.leaves(eqx.filter(out, eqx.is_inexact_array))
    return sum(jnp.sum(jnp.real(x)) for x in arrays)


def call_and_differentiate(fn, args, i):
    """At other arrays in each call."""
    new = lambda x: x * (1 + 1e-6 * i) if eqx.is_inexact_array(x) else x
    fn, args = jax.tree.map(new, (fn, args))
    fn(*args)
    eqx.filter_grad(lambda fn_and_args: total(fn_and_args[0](*fn_and_args[1])))((fn, args))


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough)
        for name in CASES
        if name not in LEFT_OUT
    ],
)
def test_everything_is_compiled_once(name):
    fn, args = CASES[name].make()
    for i in range(3):
        call_and_differentiate(fn, args, i)
    with compilations() as found:
        for i in range(3, 5):
            call_and_differentiate(fn, args, i)
    assert not found
