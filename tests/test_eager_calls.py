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
    "filter_checkpoint",
    "losses.chunked",
    "nn.GRU",
    "nn.Recurrent",
    "nn.LIF",
)
# JAX itself compiles each operation of an eager `jax.shard_map`; and what is never a gradient.
# The branches are made in each call.
LEFT_OUT = ("psum_gradient", "nondifferentiable", "filter_cond")


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


XS = jnp.arange(1.0, 4.0)
SCALE = 2.0


def _scaled(h):
    return h * SCALE


def _step(h, x):
    return _scaled(h) + x, None


def test_a_function_is_known_by_its_identity(monkeypatch):
    """Whatever it reads has the value of the first call, as in `jax.lax.scan`. A new function
    is compiled anew."""
    scale = np.array(2.0, np.float32)
    same = lambda h, x: (h * scale + x, None)
    for number in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", number)
        scale[...] = number
        new = lambda h, x: (h * number + x, None)  # noqa: B023
        for step in (_step, same, new):
            assert eqg.filter_scan(step, 1.0, XS)[0] == jax.lax.scan(step, 1.0, XS)[0]


class Scaled(eqx.Module):
    fn: Callable[[jax.Array], jax.Array]
    shift: jax.Array

    def __call__(self, h, x):
        return self.fn(h) + self.shift * x, None

    def step(self, h, x):
        return self(h, x)


def test_a_module_is_known_by_its_parts():
    twice, thrice = (lambda h: 2 * h), (lambda h: 3 * h)
    modules = [Scaled(fn, jnp.array(s)) for fn in (twice, thrice) for s in (1.0, 2.0)]

    def check():
        for module in modules:
            expected = jax.lax.scan(lambda h, x: module(h, x), 1.0, XS)[0]  # noqa: B023
            assert eqg.filter_scan(module, 1.0, XS)[0] == expected
            assert eqg.filter_scan(module.step, 1.0, XS)[0] == expected

    check()
    found = []
    for module in modules:
        with compilations() as of_module:
            eqg.filter_scan(module, 1.0, XS)
        found += of_module
    assert not found


def _second_input(c, x):
    return c, x[1]


def test_static_leaves_come_back_as_they_were_given():
    """Zero and minus zero are not the same, nor are one and `True`; a function that a step
    returns is the one that it was given."""
    step = lambda c, x: ((c[0], c[1] / x[1]), c[0])
    for divisor in (0.0, -0.0, 0.0):
        (fn, h), y = eqg.filter_scan(step, (_scaled, 1.0), (jnp.ones(1), divisor))
        assert h == (-jnp.inf if np.signbit(divisor) else jnp.inf)
        assert fn is y is _scaled
    for number in (1, True, 1.0):
        y = eqg.filter_scan(_second_input, 0.0, (jnp.ones(1), number))[1]
        assert y.dtype == jnp.asarray(number).dtype
    make = lambda c, x: (c, lambda: _scaled(1.0))
    assert eqg.filter_scan(make, 0.0, jnp.ones(2))[1]() == 2.0


class Config:
    scale = 2.0


@pytest.mark.parametrize("kind", ["list", "attribute", "array", "helper", "partial"])
def test_a_residual_that_reads_what_changes(kind):
    """The derivative is that of the residual as it is now: the solution is."""
    scale, config = [2.0], Config()
    array = np.array(2.0, np.float32)  # see UPSTREAM.md: "A NumPy array that changes"
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
