"""Surrogates: densities and their integrals, from the papers."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import erf

from .entry import entry, Nasty, ORDERS


# A line has as many arguments as there is room for.
# fmt: off
A = np.array
# One of the first three numbers is far out in the tail of the steepest surrogate.
V = A([0.31, -0.22, 0.07, -1.4, 0.9])
INF, NAN = np.inf, np.nan


def step(v):
    return jnp.where(jnp.isnan(v), v, jnp.where(v > 0, jnp.ones_like(v), jnp.zeros_like(v)))


def normal(v, sigma):
    return jnp.exp(-(v**2) / (2 * sigma**2)) / (np.sqrt(2 * np.pi).astype(v.dtype) * sigma)


cumulative = lambda v, sigma: (1 + erf(v / np.sqrt(2.0).astype(v.dtype) / sigma)) / 2


def multi_gaussian(v, sigma, height, spread):
    """Yin, Corradi and Bohté (2021), equation 2."""
    wide = spread * sigma
    sides = normal(v - sigma, wide) + normal(v + sigma, wide)
    return (1 + height) * normal(v, sigma) - height * sides


def multi_cumulative(v, sigma, height, spread):
    """One half at the threshold: the area is one minus the height."""
    centered = lambda v, sigma: cumulative(v, sigma) - 0.5
    sides = centered(v - sigma, spread * sigma) + centered(v + sigma, spread * sigma)
    return 0.5 + (1 + height) * centered(v, sigma) - height * sides


triangle = lambda v, width, peak: peak * jnp.maximum(0, 1 - jnp.abs(v) / width)


def triangle_area(v, width, peak):
    u = jnp.clip(v, -width, width)
    return 0.5 + peak * (u - u * jnp.abs(u) / (2 * width))


# The density, its integral, and for each parameter the default and another number.
TABLE = {
    # Zenke and Ganguli (2018), equation 4.
    "superspike": (
        lambda v, s: 1 / (1 + s * jnp.abs(v)) ** 2, lambda v, s: 0.5 + v / (1 + s * jnp.abs(v)),
        ((25.0, 3.0),),
    ),
    # Fang et al. (2021), equation 17.
    "atan": (
        lambda v, s: s / 2 / (1 + (jnp.pi / 2 * s * v) ** 2),
        lambda v, s: 0.5 + jnp.arctan(jnp.pi / 2 * s * v) / jnp.pi, ((2.0, 3.1),),
    ),
    "sigmoid": (
        lambda v, s: s * jnp.exp(-s * v) / (1 + jnp.exp(-s * v)) ** 2,
        lambda v, s: 1 / (1 + jnp.exp(-s * v)), ((4.0, 1.7),),
    ),
    "gaussian": (normal, cumulative, ((0.5, 0.8),)),
    "multi_gaussian": (
        multi_gaussian, multi_cumulative, ((0.5, 0.7), (0.15, 0.25), (6.0, 3.0)),
    ),
    "triangle": (triangle, triangle_area, ((1.0, 1.2), (1.0, 0.3))),
    "rectangle": (
        lambda v, width, peak: jnp.where(jnp.abs(v) < width / 2, peak, 0),
        lambda v, width, peak: 0.5 + peak * jnp.clip(v, -width / 2, width / 2),
        ((1.0, 1.5), (1.0, 0.4)),
    ),
    "leaky": (
        lambda v, leak, slope: jnp.where(v > 0, slope, leak),
        lambda v, leak, slope: 0.5 + jnp.where(v > 0, slope, leak) * v,
        ((0.1, 0.3), (1.0, 0.7)),
    ),
}
# With the defaults at zero, where some have a kink, and far to the right and to the left.
N0 = 2 / np.sqrt(2 * np.pi)
SIDES = 0.3 * N0 / 6 * np.exp(-1 / 72)
PEAKS = {"gaussian": N0, "multi_gaussian": 1.15 * N0 - SIDES, "leaky": 0.55}
FAR = {"leaky": (1.0, 0.1)}


def enter(name, density, integral, params):
    surrogate = getattr(eqg.surrogates, name)
    defaults = [default for default, _ in params]

    def fn(v, *params):
        given = surrogate(*params)
        spikes = eqg.surrogates.spike(v, given), eqg.surrogates.spike(v, surrogate())
        return given.derivative(v), *spikes, given.primitive(v)

    # A slope for each element, and numbers for all.
    others = [A(other) for _, other in params]
    others[0] = others[0] * A([1.0, 1.1, 0.9, 1.3, 0.8])
    of_defaults = lambda v: integral(v, *(jnp.asarray(d, v.dtype) for d in defaults))
    full = name == "atan"
    right, left = FAR.get(name, (0.0, 0.0))
    edges = A([0.0, -0.0, 1e300, INF, -INF, -1e300, NAN])
    cts = A([*[PEAKS.get(name, 1.0)] * 2, right, right, left, left, NAN])
    entry(
        f"surrogates.{name}",
        fn,
        V,
        *others,
        plain=lambda v, *p: (density(v, *p), step(v), step(v), integral(v, *p)),
        smooth=lambda v, *p: (density(v, *p), integral(v, *p), of_defaults(v), integral(v, *p)),
        half=(np.linspace(-1.1, 1.4, 31), *(A(p) for p in defaults)),
        # The rule is one for all: what is their own are two formulas.
        orders=ORDERS if full else ("value", "vjp", "FR"),
        transforms=full,
        costs=full,
    )
    # Parameters may be in another precision than the potential.
    exact = list(map(np.float32, defaults))
    exact = exact if list(map(float, exact)) == defaults else defaults
    entry(f"surrogates.{name}: at the edges",
        lambda v: eqg.surrogates.spike(v, surrogate(*exact)), V,
        plain=step, smooth=of_defaults, orders=("value", "vjp"), transforms=False,
        nasty=[Nasty(edges, value=[A([0.0, 0, 1, 1, 0, 0, NAN])], cts=[cts])])


for _name, _row in TABLE.items():
    enter(_name, *_row)


class Exponential(eqg.surrogates.AbstractSurrogate):
    """A user's own."""

    slope: jax.Array
    scale: float = eqx.field(static=True, default=2.0)

    def derivative(self, v):
        return 0.5 * self.scale * self.slope * jnp.exp(-self.slope * jnp.abs(v))

    def primitive(self, v):
        tail = 0.5 * self.scale * jnp.exp(-self.slope * jnp.abs(v))
        return jnp.where(v < 0, tail, self.scale - tail)


exponential = lambda v, slope: jnp.sign(v) * (1 - jnp.exp(-slope * jnp.abs(v)))


entry("surrogates.spike", lambda v, slope: (
        eqg.surrogates.spike(v, Exponential(slope)),
        eqg.surrogates.spike(v, lambda v: 1 - jnp.tanh(v) ** 2),
    ), V, A(1.6), plain=lambda v, slope: (step(v), step(v)),
    smooth=lambda v, slope: (exponential(v, slope), jnp.tanh(v)),
    orders=("value", "jvp", "vjp", "FR"), transforms=False,
    nasty=[Nasty(A([NAN, 2.0]), A(1.6), value=[A([NAN, 1]), A([NAN, 1])])])
