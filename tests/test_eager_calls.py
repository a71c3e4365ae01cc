"""Eager calls of everything, and their gradients, are compiled in the first call only.

And again where a function has changed. JAX's own counter of compilations is the witness.
`test_growth.py` looks at what is left behind.
"""

import functools as ft
from collections.abc import Callable

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
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
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
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


class Config:
    rate = 0.5  # the name of a global variable as well
    scale = 2.0


rate = jnp.array(0.0)
XS = jnp.arange(1.0, 4.0)


def _scaled(h):
    return h * SCALE


def _step_with_a_helper(h, x):
    return _scaled(h) + x, None


def _step_with_an_attribute(h, x):
    return h * Config.rate + x, None


SCALE = 2.0


def test_a_global_variable_of_a_helper(monkeypatch):
    for scale in (2.0, 3.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        expected = jax.lax.scan(lambda h, x: (h * scale + x, None), 1.0, XS)[0]  # noqa: B023
        assert eqg.filter_scan(_step_with_a_helper, 1.0, XS)[0] == expected


def test_a_default_argument_that_changes():
    def step(h, x, scale=2.0):
        return h * scale + x, None

    for scale in (2.0, 3.0):
        step.__defaults__ = (scale,)
        expected = jax.lax.scan(lambda h, x: (h * scale + x, None), 1.0, XS)[0]  # noqa: B023
        assert eqg.filter_scan(step, 1.0, XS)[0] == expected


def test_a_numpy_array_that_is_filled_anew():
    scale = np.array(2.0, np.float32)
    helper = lambda h: h * scale
    steps = (lambda h, x: (h * scale + x, None), lambda h, x: (helper(h) + x, None))
    for number in (2.0, 3.0):
        scale[...] = number
        for step in steps:
            expected = jax.lax.scan(lambda h, x: (h * number + x, None), 1.0, XS)[0]  # noqa: B023
            assert eqg.filter_scan(step, 1.0, XS)[0] == expected


def test_a_global_variable_with_the_name_of_an_attribute(monkeypatch):
    def call(i):
        monkeypatch.setitem(globals(), "rate", i)
        eqg.filter_scan(_step_with_an_attribute, 1.0, XS)

    call(jnp.array(1.0))
    other = jnp.array(2.0)
    with compilations() as found:
        call(other)
    assert not found


@pytest.mark.parametrize("kind", ["list", "attribute", "array", "helper", "partial"])
def test_a_residual_that_reads_what_changes(kind):
    """The derivative is that of the residual as it is now: the solution is."""
    scale, config = [2.0], Config()
    array = np.array(2.0, np.float32)  # see docs/upstream.md: "A NumPy array that changes"
    helper = lambda: scale[0]
    residual = {
        "list": lambda y, a: y**2 - scale[0] * a,
        "attribute": lambda y, a: y**2 - config.scale * a,
        "array": lambda y, a: y**2 - array * a,
        "helper": lambda y, a: y**2 - helper() * a,
        "partial": ft.partial(lambda c, y, a: y**2 - c.scale * a, config),
    }[kind]
    solve = eqg.implicit(residual)(lambda a: jnp.sqrt(scale[0] * a))
    for number in (2.0, 2.0, 3.0):
        scale[0] = config.scale = number
        array[...] = number
        expected = jax.grad(lambda a: jnp.sqrt(number * a))(1.5)  # noqa: B023
        assert jnp.allclose(jax.grad(solve)(1.5), expected)


class Scaled(eqx.Module):
    """Whose method, and whose function, read a global variable."""

    fn: Callable[[jax.Array], jax.Array]

    def __call__(self, h, x):
        return self.fn(h) + x, None

    def step(self, h, x):
        return SCALE * h + x, None


def test_a_global_variable_of_a_module(monkeypatch):
    module = Scaled(_scaled)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        expected = jax.lax.scan(lambda h, x: (h * scale + x, None), 1.0, XS)[0]  # noqa: B023
        for step in (module, module.step):
            assert eqg.filter_scan(step, 1.0, XS)[0] == expected
