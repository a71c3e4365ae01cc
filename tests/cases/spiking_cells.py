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


def _lif(x, s, u, beta):
    u = beta * u + x - s
    return _fire(u - 1), u


def _lif_zero(x, s, u, threshold):
    u = 0.9 * (1 - jax.lax.stop_gradient(s)) * u + x
    return _fire(u - threshold), u


def _alif(x, s, u, a, rho):
    a = rho * a + s
    u = 0.9 * u + x - s
    return _fire(u - 1 - 1.8 * a), u, a


def _cuba(x, s, i, u, alpha):
    i = alpha * i + x
    u = 0.9 * u + i - s
    return _fire(u - 1), i, u


@case("nn.LIFCell", reference=_lif)
def _():
    def cell(x, spikes, membrane, beta):
        cell = eqg.nn.LIFCell(3, beta, learn_beta=True, detach_reset=False)
        out = cell(x, eqg.nn.LIFState(spikes, membrane))
        return out.spikes, out.membrane

    return cell, (*_start(), BETA)


@case("nn.LIFCell: to zero", reference=_lif_zero)
def _():
    def cell(x, spikes, membrane, threshold):
        options = {"reset": "zero", "learn_threshold": True, "threshold": threshold}
        out = eqg.nn.LIFCell(3, 0.9, **options)(x, eqg.nn.LIFState(spikes, membrane))
        return out.spikes, out.membrane

    return cell, (*_start(), jnp.array(0.7))


@case("nn.ALIFCell", reference=_alif)
def _():
    def cell(x, spikes, membrane, trace, rho):
        cell = eqg.nn.ALIFCell(3, 0.9, rho, learn_rho=True, detach_reset=False)
        out = cell(x, eqg.nn.ALIFState(spikes, membrane, trace))
        return out.spikes, out.membrane, out.adaptation

    return cell, (*_start(), TRACE, RHO)


@case("nn.CuBaLIFCell", reference=_cuba)
def _():
    def cell(x, spikes, current, membrane, alpha):
        cell = eqg.nn.CuBaLIFCell(3, alpha, 0.9, learn_alpha=True, detach_reset=False)
        out = cell(x, eqg.nn.CuBaLIFState(spikes, current, membrane))
        return out.spikes, out.current, out.membrane

    x, s, u = _start()
    return cell, (x, s, CURRENT, u, ALPHA)


@case("nn.LICell", reference=lambda x, u, beta: beta * u + x)
def _():
    def cell(x, membrane, beta):
        cell = eqg.nn.LICell(3, beta, learn_beta=True)
        return cell(x, eqg.nn.LIState(membrane)).membrane

    x, _, u = _start()
    return cell, (x, u, BETA)


ATTACHED = {"detach_reset": False, "key": jr.key(0)}


def _with(weight, cell):
    return eqx.tree_at(lambda cell: cell.weight_hh, cell, weight)


@case("nn.RLIFCell", reference=lambda x, s, u, w: _lif(x + w @ s, s, u, 0.9))
def _():
    def cell(x, spikes, membrane, weight):
        cell = _with(weight, eqg.nn.RLIFCell(3, 0.9, **ATTACHED))
        out = cell(x, eqg.nn.LIFState(spikes, membrane))
        return out.spikes, out.membrane

    return cell, (*_start(), WEIGHT)


@case("nn.RALIFCell", reference=lambda x, s, u, a, w: _alif(x + w @ s, s, u, a, 0.8))
def _():
    def cell(x, spikes, membrane, trace, weight):
        cell = _with(weight, eqg.nn.RALIFCell(3, 0.9, 0.8, **ATTACHED))
        out = cell(x, eqg.nn.ALIFState(spikes, membrane, trace))
        return out.spikes, out.membrane, out.adaptation

    return cell, (*_start(), TRACE, WEIGHT)


@case("nn.RCuBaLIFCell", reference=lambda x, s, i, u, w: _cuba(x + w @ s, s, i, u, 0.7))
def _():
    def cell(x, spikes, current, membrane, weight):
        cell = _with(weight, eqg.nn.RCuBaLIFCell(3, 0.7, 0.9, **ATTACHED))
        out = cell(x, eqg.nn.CuBaLIFState(spikes, current, membrane))
        return out.spikes, out.current, out.membrane

    x, s, u = _start()
    return cell, (x, s, CURRENT, u, WEIGHT)
