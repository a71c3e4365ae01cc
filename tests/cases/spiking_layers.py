"""Spiking layers, as functions of their inputs and parameters: with the derivative of a loop in
which each spike is a step whose derivative is that of its smooth primitive."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from .registry import case


XS = 2 * jr.normal(jr.key(3), (4, 2))
WEIGHT = jr.normal(jr.key(4), (3, 2))
RECURRENT = 0.5 * jr.normal(jr.key(5), (3, 3))
BETA, ALPHA, RHO = (jnp.array(b) for b in ([0.9, 0.5, 0.3], [0.2, 0.7, 0.4], [0.95, 0.8, 0.6]))


def _fire(v):
    smooth = eqg.surrogates.atan().primitive(v)
    return smooth + jax.lax.stop_gradient((v > 0) - smooth)


def _loop(xs, weight, beta, alpha=None, rho=None, recurrent=None, threshold=1.0):
    """The spikes of all steps. The reset is not detached."""
    s = u = i = a = jnp.zeros(3, xs.dtype)
    spikes = []
    for x in xs:
        current = weight @ x if recurrent is None else weight @ x + recurrent @ s
        i = current if alpha is None else alpha * i + current
        a = a if rho is None else rho * a + s
        u = beta * u + i - threshold * s
        s = _fire(u - threshold - 1.8 * a)
        spikes.append(s)
    return jnp.stack(spikes)


def _layer(name, xs, weight, recurrent=None, **decays):
    """The spikes of a layer with these weights and learned decays."""
    options = {f"learn_{decay}": True for decay in decays}
    options |= {} if name == "LI" else {"detach_reset": False}
    options |= {} if recurrent is None else {"key": jr.key(0)}
    cell = getattr(eqg.nn, f"{name}Cell")(3, **decays, **options)
    if recurrent is not None:
        cell = eqx.tree_at(lambda cell: cell.weight_hh, cell, recurrent)
    cell = eqg.nn.WeightedCell(2, cell, use_bias=False, key=jr.key(0))
    cell = eqx.tree_at(lambda cell: cell.weight_ih, cell, weight)
    return getattr(eqg.nn, name).from_cell(cell)(xs)[0]


@case("nn.LIF", reference=lambda xs, w, b: _loop(xs, w, b))
def _():
    return lambda xs, w, b: _layer("LIF", xs, w, beta=b), (XS, WEIGHT, BETA)


@case("nn.ALIF", reference=lambda xs, w, r: _loop(xs, w, 0.9, rho=r))
def _():
    layer = lambda xs, w, r: _layer("ALIF", xs, w, beta=0.9 * jnp.ones(3), rho=r)
    return layer, (XS, WEIGHT, RHO)


@case("nn.CuBaLIF", reference=lambda xs, w, a, b: _loop(xs, w, b, alpha=a))
def _():
    layer = lambda xs, w, a, b: _layer("CuBaLIF", xs, w, alpha=a, beta=b)
    return layer, (XS, WEIGHT, ALPHA, BETA)


def _integrate(xs, weight, beta):
    u, all_us = 0.0, []
    for x in xs:
        u = beta * u + weight @ x
        all_us.append(u)
    return jnp.stack(all_us)


@case("nn.LI", reference=_integrate)
def _():
    return lambda xs, w, b: _layer("LI", xs, w, beta=b), (XS, WEIGHT, BETA)


@case("nn.RLIF", reference=lambda xs, w, v: _loop(xs, w, 0.9, recurrent=v))
def _():
    layer = lambda xs, w, v: _layer("RLIF", xs, w, v, beta=0.9 * jnp.ones(3))
    return layer, (XS, WEIGHT, RECURRENT)


@case("nn.RALIF", reference=lambda xs, w, v, r: _loop(xs, w, 0.9, rho=r, recurrent=v))
def _():
    layer = lambda xs, w, v, r: _layer("RALIF", xs, w, v, beta=0.9 * jnp.ones(3), rho=r)
    return layer, (XS, WEIGHT, RECURRENT, RHO)


@case("nn.RCuBaLIF", reference=lambda xs, w, v, a: _loop(xs, w, 0.9, alpha=a, recurrent=v))
def _():
    layer = lambda xs, w, v, a: _layer("RCuBaLIF", xs, w, v, alpha=a, beta=0.9 * jnp.ones(3))
    return layer, (XS, WEIGHT, RECURRENT, ALPHA)


@case("nn.WeightedCell")
def _():
    def cell(x, weight, membrane):
        cell = eqg.nn.WeightedCell(2, eqg.nn.LICell(3, 0.9), key=jr.key(0))
        cell = eqx.tree_at(lambda cell: cell.weight_ih, cell, weight)
        return cell(x, eqg.nn.LIState(membrane)).membrane

    return cell, (XS[0], WEIGHT, jnp.array([0.4, 0.9, -0.6]))
