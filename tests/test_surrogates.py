"""Spikes: exact steps, and bumps that agree with the published formulas to rounding."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from eqx_grads import RuleError
from eqx_grads.surrogates import (
    AbstractSurrogate,
    atan,
    erf,
    gaussian,
    leaky,
    multi_gaussian,
    piecewise_quadratic,
    rectangle,
    sigmoid,
    spike,
    superspike,
    triangle,
)


def density(v, mean, sigma):
    return mp.exp(-((v - mean) ** 2) / (2 * sigma**2)) / (sigma * mp.sqrt(2 * mp.pi))


# The derivatives as published, in high precision, and where they have kinks.
PUBLISHED = {
    superspike: (lambda v, slope: 1 / (slope * abs(v) + 1) ** 2, lambda slope: [0]),
    atan: (lambda v, slope: slope / 2 / (1 + (mp.pi / 2 * slope * v) ** 2), lambda slope: []),
    sigmoid: (
        lambda v, slope: slope * mp.exp(-slope * v) / (mp.exp(-slope * v) + 1) ** 2,
        lambda slope: [],
    ),
    erf: (
        lambda v, slope: slope / mp.sqrt(mp.pi) * mp.exp(-((slope * v) ** 2)),
        lambda slope: [],
    ),
    gaussian: (lambda v, sigma: density(v, 0, sigma), lambda sigma: []),
    multi_gaussian: (
        lambda v, sigma, height, spread: (
            density(v, 0, sigma) * (1 + height)
            - density(v, sigma, spread * sigma) * height
            - density(v, -sigma, spread * sigma) * height
        ),
        lambda sigma, height, spread: [],
    ),
    triangle: (
        lambda v, width, peak: peak * max(0, 1 - abs(v) / width),
        lambda width, peak: [-width, 0, width],
    ),
    piecewise_quadratic: (
        lambda v, slope: max(mp.mpf(0), -(slope**2) * abs(v) + slope),
        lambda slope: [-1 / slope, 0, 1 / slope],
    ),
    rectangle: (
        lambda v, width, peak: peak if abs(v) < width / 2 else mp.mpf(0),
        lambda width, peak: [-width / 2, width / 2],
    ),
    leaky: (
        lambda v, leak, slope: slope if v >= 0 else leak,
        lambda leak, slope: [0],
    ),
}
PARAMETERS = [
    (superspike, {"slope": 25.0}),
    (superspike, {"slope": 1.0}),
    (atan, {"slope": 2.0}),
    (atan, {"slope": 0.3}),
    (sigmoid, {"slope": 4.0}),
    (sigmoid, {"slope": 25.0}),
    (erf, {"slope": 2.0}),
    (gaussian, {"sigma": 0.5}),
    (multi_gaussian, {"sigma": 0.5, "height": 0.15, "spread": 6.0}),
    (triangle, {"width": 1.0, "peak": 0.3}),
    (triangle, {"width": 0.7, "peak": 2.0}),
    (piecewise_quadratic, {"slope": 1.7}),
    (rectangle, {"width": 2.0, "peak": 0.5}),
    (leaky, {"leak": 0.1, "slope": 1.0}),
]
IDS = [f"{kind.__name__}-{'-'.join(map(str, p.values()))}" for kind, p in PARAMETERS]
ALL = list(PUBLISHED)
each = pytest.mark.parametrize(("kind", "parameters"), PARAMETERS, ids=IDS)
each_default = pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
# For tests that compile a program for each: three are quick.
some_default_quick = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.__name__, marks=pytest.mark.slow if i % 4 else ())
        for i, kind in enumerate(ALL)
    ],
)
TAIL = [1e3, 1e10, 1e30]
NEAR = [0.013, 0.11, 0.37, 0.62, 0.93, 1.4, 3.1, 7.9]
VALUES = [sign * v for v in NEAR + TAIL for sign in (-1.0, 1.0)]


def in_mpmath(kind, parameters):
    """`derivative(v)` and `primitive(v)`, one half at zero: its integral, by quadrature."""
    formula, find_kinks = PUBLISHED[kind]
    parameters = {name: mp.mpf(float(p)) for name, p in parameters.items()}
    kinks = find_kinks(**parameters)

    def derivative(v):
        return formula(v, **parameters)

    def primitive(v):
        inside = sorted({k for k in kinks if min(0, v) < k < max(0, v)}, reverse=bool(v < 0))
        # The closer to zero, the more happens there.
        steps = [s * v / abs(v) for s in (mp.mpf("0.03"), mp.mpf("0.3"), 2) if s < abs(v)]
        points = sorted({0, v, *inside, *steps}, reverse=bool(v < 0))
        return mp.mpf("0.5") + mp.quad(derivative, points)

    return derivative, primitive


@pytest.fixture(autouse=True)
def _thirty_digits():
    with mp.workdps(30):
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each
def test_against_the_published_formulas(kind, parameters, dtype):
    """Right to the rounding of the result and of `slope * v`."""
    with jax.enable_x64(dtype == "float64"):
        surrogate = kind(**{name: jnp.array(p, dtype) for name, p in parameters.items()})
        rounded = {name: float(jnp.array(p, dtype)) for name, p in parameters.items()}
        values = VALUES + ([-1e300, 1e300] if dtype == "float64" else [])
        v = jnp.array(values, dtype)
        derivatives, primitives = surrogate.derivative(v), surrogate.primitive(v)
        assert derivatives.dtype == primitives.dtype == dtype
        eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
        derivatives, primitives = np.asarray(derivatives), np.asarray(primitives)
    derivative, primitive = in_mpmath(kind, rounded)
    for x, got, got_primitive in zip(np.asarray(v), derivatives, primitives, strict=True):
        x = mp.mpf(float(x))
        g = derivative(x)
        wiggle = abs(derivative(x * (1 + 8 * mp.mpf(eps))) - g)
        assert abs(mp.mpf(float(got)) - g) <= 8 * eps * abs(g) + wiggle + tiny, (x, got, g)
        if abs(x) < 100:
            p = primitive(x)
            allowed = 8 * eps * (1 + abs(p) + abs(x * g))
            assert abs(mp.mpf(float(got_primitive)) - p) <= allowed, (x, got_primitive, p)


@pytest.mark.parametrize("kind", [atan, sigmoid, erf, gaussian], ids=lambda k: k.__name__)
def test_the_lower_tail_of_a_primitive_keeps_its_digits(kind):
    v = jnp.array(-1.7, "float32")
    derivative = in_mpmath(kind, vars(kind()))[0]
    expected = float(mp.quad(derivative, [-mp.inf, -100, -10, -3, mp.mpf(float(v))]))
    got = float(kind().primitive(v))
    assert abs(got / expected - 1) < 1e-5
    assert 0 < got < 0.2


def test_kinks():
    """Zero at the top; the average elsewhere."""
    for surrogate in (superspike(), triangle(), piecewise_quadratic()):
        assert jax.grad(surrogate.derivative)(0.0) == 0.0
    assert jax.grad(triangle().derivative)(1.0) == -0.5
    assert rectangle(1.0, 0.5).derivative(0.5) == 0.25
    assert leaky(0.5, 1.0).derivative(0.0) == 0.75
    assert jax.grad(leaky(0.5, 1.0).primitive)(0.0) == 0.75
    assert jax.grad(rectangle(1.0, 0.5).primitive)(-0.5) == 0.25


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
    "BrainTools ReluGrad": (
        lambda x: np.maximum(0.3 * 1 - np.abs(x) * 0.3, 0),
        triangle(peak=0.3),
    ),
    "Spyx triangular": (lambda x: np.maximum(0, 1 - np.abs(2 * x)), triangle(width=0.5)),
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
        lambda v: erf(1.5).derivative(v) / 0.75,
    ),
    "BrainTools GaussianGrad": (
        lambda x: 0.5 * np.exp(-(x**2) / (2 * 0.5**2)) / (np.sqrt(2 * np.pi) * 0.5),
        lambda v: 0.5 * gaussian().derivative(v),
    ),
    "snnTorch LSO": (lambda x: np.where(x > 0, 1, 0.1), leaky()),
    "BrainTools LeakyRelu": (lambda x: np.where(x < 0, 0.1, 1), leaky()),
    "SpikingJelly LeakyKReLU": (lambda x: np.where(x >= 0, 1, 0), leaky(leak=0)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_table_of_the_documentation(name):
    theirs, ours = ELSEWHERE[name]
    v = np.linspace(-2, 2, 98)
    got = jax.vmap(jax.grad(lambda v: spike(v, ours)))(v.astype("float32"))
    np.testing.assert_allclose(got, theirs(v), rtol=2e-5, atol=1e-6)


@each_default
def test_stable_far_from_the_threshold(kind):
    """No NaN and no infinity, to second order, for what is learned too."""
    biggest = 1e300 if jax.config.jax_enable_x64 else 1e30
    v = jnp.array([-biggest, -1e19, -3e5, 3e5, 1e19, biggest])
    learned = jax.tree.map(jnp.asarray, kind())

    @jax.jit
    @jax.vmap
    def first_and_second(v):
        first = jax.grad(spike, (0, 1))(v, learned)
        return first, jax.jacrev(jax.grad(spike), (0, 1))(v, learned)

    for leaf in jax.tree.leaves(first_and_second(v)):
        assert jnp.isfinite(leaf).all()


@some_default_quick
def test_half_precision_is_single_precision_rounded(kind):
    v = jnp.array([-0.9, -0.013, 0.0, 0.2, 3.0])
    for dtype in ("float16", "bfloat16"):
        half = v.astype(dtype)
        got = jax.jit(jax.vmap(jax.grad(lambda v: spike(v, kind()))))(half)
        expected = kind().derivative(half.astype("float32")).astype(dtype)
        assert got.dtype == dtype
        assert jnp.array_equal(got, expected)
        big = jnp.array([-1, 1], dtype) * (6e4 if dtype == "float16" else 1e30)
        for f in (kind().derivative, kind().primitive):
            assert jnp.isfinite(f(big)).all() or kind is leaky
        learned = jax.tree.map(lambda p: jnp.array(p, "float32"), kind())
        grads = jax.grad(lambda s, half=half: spike(half[3], s))(learned)
        assert all(g.dtype == "float32" for g in jax.tree.leaves(grads))


def test_the_step():
    v = np.array([-np.inf, -1e-30, -0.0, 0.0, 1e-30, 2.0, np.inf, np.nan], "float32")
    expected = np.array([0, 0, 0, 0, 1, 1, 1, np.nan], "float32")
    for f in (spike, eqx.filter_jit(spike)):
        assert np.array_equal(f(v, atan()), expected, equal_nan=True)
    for dtype in ("float16", "bfloat16", "float32"):
        assert spike(jnp.array(0.5, dtype), atan()).dtype == dtype
    assert isinstance(spike(0.5, atan()), jax.Array)
    assert jax.grad(spike)(0.0, atan()) == jax.grad(spike)(np.float32(0), atan()) == 1.0
    assert spike(jnp.zeros((0, 3)), atan()).shape == (0, 3)


def test_numbers_are_constants_and_arrays_can_be_learned():
    assert not jax.tree.leaves(eqx.filter((atan(), superspike(25)), eqx.is_inexact_array))
    model = {"fixed": atan(), "learned": atan(jnp.array(2.0))}
    grads = eqx.filter_grad(lambda m: spike(0.1, m["fixed"]) + spike(0.1, m["learned"]))(model)
    assert grads["fixed"].slope is None
    assert grads["learned"].slope > 0
    per_neuron = atan(jnp.array([1.0, 2.0, 3.0]))
    peaks = jax.vmap(jax.grad(spike))(jnp.zeros(3), per_neuron)
    assert jnp.array_equal(peaks, jnp.array([0.5, 1.0, 1.5]))
    total = lambda s: jnp.sum(spike(jnp.ones((3,)), s))
    assert jax.grad(total)(atan(jnp.array(2.0))).slope.shape == ()


@pytest.mark.thorough
def test_a_surrogate_passes_through_transformations():
    """As an argument: the slope is an array, a batch of slopes, or part of a carry."""
    s = atan(jnp.array(2.0))
    assert eqx.filter_jit(jax.grad(spike))(0.0, s) == 1.0
    batch = atan(jnp.array([1.0, 2.0]))
    assert jnp.array_equal(
        jax.vmap(jax.grad(spike), (None, 0))(0.0, batch), jnp.array([0.5, 1.0])
    )

    def through_carry(s):
        def body(carry, v):
            s, total = carry
            return (s, total + spike(v, s)), None

        return jax.lax.scan(body, (s, 0.0), jnp.array([0.1, -0.2]))[0][1]

    apart = jax.grad(lambda s: spike(0.1, s) + spike(-0.2, s))(s).slope
    assert jnp.allclose(jax.grad(through_carry)(s).slope, apart)
    assert jnp.allclose(jax.jit(jax.grad(through_carry))(s).slope, apart)


class exponential(AbstractSurrogate):
    slope: jax.Array

    def derivative(self, v):
        return 0.5 * self.slope * jnp.exp(-self.slope * jnp.abs(v))

    def primitive(self, v):
        tail = 0.5 * jnp.exp(-self.slope * jnp.abs(v))
        return jnp.where(v < 0, tail, 1 - tail)


@pytest.mark.thorough
def test_your_own():
    own = exponential(jnp.array(3.0))
    assert jnp.allclose(jax.grad(spike)(-0.4, own), 1.5 * np.exp(-1.2))
    grad = jax.grad(lambda s: spike(-0.4, s))(own).slope
    assert jnp.allclose(grad, -0.2 * np.exp(-1.2))
    # A function may return a number, close over traced values, or be a Module.
    assert jnp.array_equal(
        jax.grad(lambda v: spike(v, lambda v: 0.5).sum())(jnp.ones(2)), [0.5] * 2
    )
    height = lambda h: jax.grad(lambda v: spike(v, lambda v: h * jnp.ones_like(v)))(0.1)
    assert jax.jit(height)(3.0) == 3.0
    assert jnp.array_equal(jax.vmap(height)(jnp.arange(3.0)), jnp.arange(3.0))


# ---------------------------------------------------------------- cost


def membrane(fire):
    """The squared firing of a layer over time: the plainest recurrent spiking network."""

    def loss(weight, inputs):
        def tick(v, x):
            v = 0.9 * v + weight @ x
            spikes = fire(v - 1)
            return v - spikes, spikes

        at_rest = jnp.zeros_like(weight[:, 0])
        return jnp.sum(jax.lax.scan(tick, at_rest, inputs)[1] ** 2)

    return loss


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

    def kept(fire):
        pullback = jax.vjp(membrane(fire), *args)[1]
        return sum(x.nbytes for x in jax.tree.leaves(pullback))

    def temporary(fire):
        compiled = jax.jit(jax.grad(membrane(fire))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = lambda v: spike(v, superspike())
    assert kept(ours) == kept(step_by_hand)
    assert temporary(ours) <= temporary(step_by_hand)
    one = jnp.ones((50,), dtype).nbytes * 40
    assert kept(ours) <= 2 * one + args[0].nbytes + args[1].nbytes  # `v` and the spikes


# ---------------------------------------------------------------- errors


class TestErrors:
    def test_not_floats(self):
        for v in (jnp.arange(3), True, 2, jnp.ones(2, "complex64")):
            expected = r"`surrogates\.spike` was given .*\n  `v` is "
            with pytest.raises(RuleError, match=expected):
                spike(v, atan())

    def test_not_a_surrogate(self):
        for surrogate in (atan, 2.0, "atan", None):
            with pytest.raises(RuleError, match=r"not a surrogate(?s:.)*atan\(\)"):
                inspect.unwrap(spike)(1.0, surrogate)  # no run-time type checks

    def test_a_derivative_that_does_not_fit(self):
        def too_long(v):
            return jnp.ones(3)

        with pytest.raises(
            RuleError, match=r"derivative of the surrogate `too_long` does not fit(?s:.)*\[3\]"
        ):
            jax.grad(lambda v: spike(v, too_long))(1.0)
        for wrong in (lambda v: None, lambda v: v * (1 + 1j), lambda v: (v, v)):
            with pytest.raises(RuleError, match="does not fit `v`"):
                jax.grad(lambda v, wrong=wrong: spike(v, wrong))(1.0)
        with pytest.raises(RuleError, match=r"`slope` of `surrogates.atan` does not broadcast"):
            jax.grad(spike)(1.0, atan(jnp.ones(2)))

    def test_a_function_can_not_be_learned(self):
        class bump(eqx.Module):
            slope: jax.Array

            def __call__(self, v):
                return self.slope * jnp.exp(-jnp.abs(v))

        assert jax.grad(spike)(0.0, bump(jnp.array(2.0))) == 2.0
        with pytest.raises(
            RuleError, match=r"`bump`, which has no primitive.\n  at surrogate.slope"
        ):
            jax.grad(spike, argnums=1)(0.0, bump(jnp.array(2.0)))
        with pytest.raises(RuleError, match=r"closes over.\n  at `slope`"):
            jax.grad(lambda slope: spike(0.0, lambda v: slope * jnp.ones_like(v)))(2.0)

    def test_parameters(self):
        for kind, name in (
            (superspike, "slope"),
            (atan, "slope"),
            (sigmoid, "slope"),
            (erf, "slope"),
            (piecewise_quadratic, "slope"),
            (gaussian, "sigma"),
            (multi_gaussian, "spread"),
            (triangle, "width"),
            (rectangle, "width"),
        ):
            with pytest.raises(
                RuleError, match=f"The {name} of `surrogates.{kind.__name__}` is not"
            ):
                kind(**{name: 0})
            with pytest.raises(RuleError, match=r"is not positive.\n  it is "):
                kind(**{name: np.array([1.0, -1.0])})

    def test_both_methods_are_needed(self):
        class half(AbstractSurrogate):
            def derivative(self, v):
                return jnp.asarray(v)

        kind: Any = half
        with pytest.raises(TypeError, match="primitive"):
            kind()
