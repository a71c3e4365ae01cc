"""Spiking cells: one step, whose derivative is that with the smooth primitive for the spike."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr

from .registry import case, vectors


BETA, ALPHA, RHO = (jnp.array(b) for b in ([0.9, 0.5, 0.3], [0.2, 0.7, 0.4], [0.95, 0.8, 0.6]))
WEIGHT = 0.3 * jr.normal(jr.key(0), (3, 3))
CURRENT, TRACE = jnp.array([0.4, 0.9, -0.6]), jnp.array([0.1, 0.7, 0.3])


def _start():
    """Spikes that are no spikes, so that they are no constants either."""
    x, membrane = vectors()
    return x, jnp.array([0.3, 0.9, 0.6]), membrane


def _fire(v):
    return eqg.surrogates.atan().primitive(v)


def _zero(x, s, u, threshold):
    u = 0.9 * (1 - jax.lax.stop_gradient(s)) * u + x
    return _fire(u - threshold), u


def _all(x, s, u, i, a, beta, alpha, rho, weight):
    i = alpha * i + x + weight @ s
    a = rho * a + s
    u = beta * u + i - s
    return _fire(u - 1 - 1.8 * a), u, i, a


@case("nn.LIFCell", reference=_all)
def _():
    def cell(x, spikes, membrane, current, trace, beta, alpha, rho, weight):
        options = {"alpha": alpha, "rho": rho, "learn": ("beta", "alpha", "rho")}
        options |= {"recurrent": True, "detach_reset": False, "key": jr.key(0)}
        cell = eqg.nn.LIFCell(3, beta, **options)
        cell = eqx.tree_at(lambda cell: cell.weight_hh, cell, weight)
        return tuple(
            jax.tree.leaves(cell(x, eqg.nn.LIFState(spikes, membrane, current, trace)))
        )

    return cell, (*_start(), CURRENT, TRACE, BETA, ALPHA, RHO, WEIGHT)


@case("nn.LIFCell: to zero", reference=_zero)
def _():
    def cell(x, spikes, membrane, threshold):
        options = {"reset": "zero", "learn": "threshold", "threshold": threshold}
        out = eqg.nn.LIFCell(3, 0.9, **options)(x, eqg.nn.LIFState(spikes, membrane))
        return out.spikes, out.membrane

    return cell, (*_start(), jnp.array(0.7))


@case("nn.LIFCell: with inputs", reference=lambda x, w, u, beta: beta * u + w @ x)
def _():
    def cell(x, weight, membrane, beta):
        options = {"threshold": None, "learn": "beta", "input_size": 2, "use_bias": False}
        cell = eqg.nn.LIFCell(3, beta, key=jr.key(0), **options)
        cell = eqx.tree_at(lambda cell: cell.weight_ih, cell, weight)
        return cell(x, eqg.nn.LIFState(None, membrane)).membrane

    x, _, u = _start()
    return cell, (x[:2], WEIGHT[:, :2], u, BETA)
