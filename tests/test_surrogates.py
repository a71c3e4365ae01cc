"""Spikes: the surrogates of other libraries in terms of ours; tails, kinks, memory.

The published formulas are in `guard/registry/surrogates.py`.
"""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from eqx_grads import RuleError, surrogates
from eqx_grads.surrogates import (
    atan,
    gaussian,
    leaky,
    multi_gaussian,
    rectangle,
    sigmoid,
    spike,
    superspike,
    triangle,
)

from .guard.registry.surrogates import TABLE
from .helpers import assert_close, temp_bytes


pytestmark = pytest.mark.x64


ALL = [superspike, atan, sigmoid, gaussian, multi_gaussian, triangle, rectangle, leaky]


@pytest.mark.parametrize(
    ("surrogate", "density"),
    [
        (atan(), lambda v: 1 / (1 + (mp.pi * v) ** 2)),
        (sigmoid(), lambda v: 4 * mp.exp(-4 * v) / (1 + mp.exp(-4 * v)) ** 2),
        (gaussian(), lambda v: mp.exp(-2 * v * v) * mp.sqrt(2 / mp.pi)),
    ],
)
def test_the_lower_tail_of_a_primitive_keeps_its_digits(surrogate, density):
    v = jnp.array(-1.7, "float32")
    expected = float(mp.quad(density, [-mp.inf, -100, -10, -3, mp.mpf(float(v))]))
    got = float(surrogate.primitive(v))
    assert abs(got / expected - 1) < 1e-5
    assert 0 < got < 0.2


def test_the_formulas_of_the_papers():
    """A primitive, its derivatives by potential and parameters, and those of a spike."""
    weights, v = jnp.cos(jnp.arange(8.0)), jnp.linspace(-1.3, 1.6, 8)

    def run(name):
        _, integral, params = TABLE[name]
        make, args = getattr(surrogates, name), (v, *(other for _, other in params))
        fns = integral, lambda v, *p: make(*p).primitive(v), lambda v, *p: spike(v, make(*p))
        total = lambda fn: lambda *args: weights @ fn(*args)
        return [jax.value_and_grad(total(fn), range(len(args)))(*args) for fn in fns]

    for want, got, of_spike in jax.jit(lambda: list(map(run, TABLE)))():
        assert_close(got, want, tolerance=1e-5)
        assert_close(of_spike[1], want[1], tolerance=1e-5)
    half = jnp.ones((), "bfloat16")
    assert all(
        x.dtype == half.dtype for x in (atan().derivative(half), leaky().primitive(half))
    )
    far = sigmoid().derivative(jnp.array([-8.0, 8.0], "float32"))
    assert far[0] == far[1] > 0


def test_kinks():
    """Zero at the top; the average elsewhere."""
    for surrogate in (superspike(), triangle()):
        assert jax.grad(surrogate.derivative)(0.0) == 0.0
    assert jax.grad(triangle().derivative)(1.0) == -0.5
    assert rectangle(1.0, 0.5).derivative(0.5) == 0.25
    assert jax.grad(rectangle(1.0, 0.5).primitive)(-0.5) == 0.25
    assert jax.grad(lambda width: rectangle(width).primitive(jnp.inf))(1.0) == 0.5
    for kind in ALL:
        assert jnp.isnan(kind().primitive(jnp.nan))


# How the libraries write what they offer, with their defaults; and what it is here.
ELSEWHERE = {
    "snnTorch fast_sigmoid": (lambda x: 1 / (25 * np.abs(x) + 1) ** 2, superspike()),
    "Spyx superspike": (lambda x: 1 / (1 + 25 * np.abs(x)) ** 2, superspike()),
    "norse super": (lambda x: 1 / (100 * np.abs(x) + 1) ** 2, superspike(100)),
    "SpikingJelly SuperSpike": (lambda x: 1 / (np.abs(x) + 1) ** 2, superspike(1)),
    "SpikingJelly SoftSign": (
        lambda x: 1 / (2 * 2 * (1 / 2 + np.abs(x)) ** 2),
        lambda v: superspike(2).derivative(v),
    ),
    "BrainTools SoftSign": (
        lambda x: 1 / (2 * (1 + np.abs(x)) ** 2),
        lambda v: 0.5 * superspike(1).derivative(v),
    ),
    "snnTorch atan": (lambda x: 2 / 2 / (1 + (np.pi / 2 * 2 * x) ** 2), atan()),
    "BrainTools Arctan": (lambda x: 1 / (2 * (1 + (np.pi / 2 * x) ** 2)), atan(1)),
    "Spyx arctan": (
        lambda x: 1 / ((1 + (2 * np.pi * x) ** 2) * np.pi),
        lambda v: atan(4).derivative(v) / (2 * np.pi),
    ),
    "snnTorch sigmoid": (
        lambda x: 25 * np.exp(-25 * x) / (np.exp(-25 * x) + 1) ** 2,
        sigmoid(25),
    ),
    "norse tent": (lambda x: np.maximum(1 - np.abs(x), 0) * 0.3, triangle(peak=0.3)),
    "Spyx triangular": (lambda x: np.maximum(0, 1 - np.abs(2 * x)), triangle(width=0.5)),
    "SpikingJelly PiecewiseQuadratic": (
        lambda x: np.maximum(0, 1.7 - 1.7**2 * np.abs(x)),
        triangle(1 / 1.7, 1.7),
    ),
    "Spyx boxcar": (lambda x: 0.5 * (np.abs(x) < 1), rectangle(width=2, peak=0.5)),
    "SpikingJelly PiecewiseLeakyReLU": (
        lambda x: np.where(np.abs(x) < 1, 1 / 2, 0.01),
        lambda v: 0.01 + rectangle(width=2, peak=0.49).derivative(v),
    ),
    "norse tanh": (
        lambda x: 1 - np.tanh(1.5 * x) ** 2,
        lambda v: sigmoid(3).derivative(v) / 0.75,
    ),
    "norse erfc": (
        lambda x: 2 * np.exp(-(1.5**2) * x**2) / np.sqrt(np.pi),
        lambda v: gaussian(1 / (2**0.5 * 1.5)).derivative(v) / 0.75,
    ),
    "SpikingJelly Erf": (
        lambda x: 2 * np.exp(-((2 * x) ** 2)) / np.sqrt(np.pi),
        gaussian(1 / (2 * 2**0.5)),
    ),
    "BrainTools GaussianGrad": (
        lambda x: 0.5 * np.exp(-(x**2) / (2 * 0.5**2)) / (np.sqrt(2 * np.pi) * 0.5),
        lambda v: 0.5 * gaussian().derivative(v),
    ),
    "BrainTools LeakyRelu": (lambda x: np.where(x < 0, 0.1, 1), leaky()),
    "SpikingJelly LeakyKReLU": (lambda x: np.where(x >= 0, 1, 0), leaky(leak=0)),
}


def test_the_table_of_the_documentation():
    v = np.linspace(-2, 2, 98)
    slopes = lambda v, ours: jax.vmap(jax.grad(lambda v: spike(v, ours)))(v)
    every = jax.jit(lambda v: {n: slopes(v, ours) for n, (_, ours) in ELSEWHERE.items()})
    for name, got in every(v.astype("float32")).items():
        want = ELSEWHERE[name][0](v)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=name)


def test_what_is_a_constant_and_what_is_learned():
    assert not jax.tree.leaves(eqx.filter((atan(), superspike(25)), eqx.is_inexact_array))
    # A function may return a number, and close over what is traced.
    of_number = jax.grad(lambda v: jnp.sum(spike(v, lambda v: 0.5)))
    assert jnp.array_equal(of_number(jnp.ones(2)), [0.5] * 2)
    height = lambda h: jax.grad(lambda v: spike(v, lambda v: h * jnp.ones_like(v)))(0.1)
    assert jnp.array_equal(jax.vmap(height)(jnp.arange(3.0)), jnp.arange(3.0))


@jax.custom_jvp
def step_by_hand(v):
    return jnp.heaviside(v, jnp.zeros((), v.dtype))


@step_by_hand.defjvp
def _step_by_hand_jvp(primals, tangents):
    (v,), (t_v,) = primals, tangents
    return step_by_hand(v), t_v / (1 + 25 * jnp.abs(v)) ** 2


@pytest.mark.cost
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scan_keeps_no_more_than_with_the_rule_by_hand(dtype):
    args = jnp.ones((50, 20), dtype), jnp.ones((40, 20), dtype)

    def membrane(fire):
        def loss(weight, inputs):
            def tick(v, x):
                v = 0.9 * v + weight @ x
                spikes = fire(v - 1)
                return v - spikes, spikes

            at_rest = jnp.zeros_like(weight[:, 0])
            return jnp.sum(jax.lax.scan(tick, at_rest, inputs)[1] ** 2)

        return loss

    kept = lambda f: sum(x.nbytes for x in jax.tree.leaves(jax.vjp(membrane(f), *args)[1]))
    temporary = lambda fire: temp_bytes(jax.grad(membrane(fire)), *args)
    ours = lambda v: spike(v, superspike())
    assert kept(ours) == kept(step_by_hand)
    assert temporary(ours) <= temporary(step_by_hand)


class Bump(eqx.Module):
    slope: jax.Array

    def __call__(self, v):
        return self.slope * jnp.exp(-jnp.abs(v))


def test_errors():
    for surrogate in (atan, 2.0, "atan", None):
        with pytest.raises(RuleError, match=r"not a surrogate(?s:.)*atan\(\)"):
            inspect.unwrap(spike)(1.0, surrogate)  # no run-time type checks
    for wrong in (lambda v: None, lambda v: v * (1 + 1j), lambda v: (v, v)):
        with pytest.raises(RuleError, match=r"(not a number|does not broadcast)"):
            jax.grad(lambda v, wrong=wrong: spike(v, wrong))(1.0)
    assert jax.grad(spike)(0.0, Bump(jnp.array(2.0))) == 2.0
    match = r"`Bump`, which has no primitive.\n  at surrogate.slope"
    with pytest.raises(RuleError, match=match):
        jax.grad(spike, argnums=1)(0.0, Bump(jnp.array(2.0)))
    for kind, name in ((superspike, "slope"), (multi_gaussian, "spread"), (rectangle, "width")):
        match = f"The {name} of `surrogates.{kind.__name__}` is not positive.\n  it is "
        with pytest.raises(RuleError, match=match):
            kind(**{name: np.array([1.0, -1.0])})
