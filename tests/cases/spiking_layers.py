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
    return smooth + jax.lax.stop_gradient((v > 0).astype(v.dtype) - smooth)


def _loop(xs, weight, beta, alpha=0.0, rho=None, recurrent=None):
    """The spikes of all steps. The reset is not detached."""
    s = u = i = a = jnp.zeros(3, xs.dtype)
    spikes = []
    for x in xs:
        x = weight @ x if recurrent is None else weight @ x + recurrent @ s
        i = alpha * i + x
        a = a if rho is None else rho * a + s
        u = beta * u + i - s
        s = _fire(u - 1 - 1.8 * a)
        spikes.append(s)
    return jnp.stack(spikes)


def _layer(xs, weight, beta, recurrent=None, layer=eqg.nn.LIF, **options):
    """The outputs of a layer with these weights and learned decays."""
    options["learn"] = tuple({"beta", *options} - {"detach_reset"})
    if recurrent is not None:
        options["recurrent"] = True
    made = layer(2, 3, beta, use_bias=False, key=jr.key(0), **options)
    weights = lambda made: (made.cells[0][0].weight_ih, made.cells[0][0].weight_hh)
    is_none = lambda x: x is None
    return eqx.tree_at(weights, made, (weight, recurrent), is_leaf=is_none)(xs)[0]


@case("nn.LIF", reference=lambda xs, w, b: _loop(xs, w, b))
def _():
    return lambda xs, w, b: _layer(xs, w, b, detach_reset=False), (XS, WEIGHT, BETA)


@case("nn.LIF: all", reference=_loop)
def _():
    def layer(xs, w, b, a, r, v):
        return _layer(xs, w, b, v, alpha=a, rho=r, detach_reset=False)

    return layer, (XS, WEIGHT, BETA, ALPHA, RHO, RECURRENT)


def _integrate(xs, weight, beta):
    u, all_us = 0.0, []
    for x in xs:
        u = beta * u + weight @ x
        all_us.append(u)
    return jnp.stack(all_us)


@case("nn.LI", reference=_integrate)
def _():
    return lambda xs, w, b: _layer(xs, w, b, layer=eqg.nn.LI), (XS, WEIGHT, BETA)
