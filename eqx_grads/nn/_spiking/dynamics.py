"""One step of leaky integrate-and-fire neurons as plain functions: decay and input, spike."""

from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
from jaxtyping import Array, Float

from ...surrogates import spike


Reset: TypeAlias = Literal["subtract", "zero", "none"]


class LIFState(eqx.Module):
    """The state of an [`eqx_grads.nn.LIFCell`][]. A part that its neurons do not have is
    `None`.

    - `spikes`: zeros and ones, the output of the cell.
    - `membrane`: the potential that was compared with the threshold, before the reset. It is
        the output of neurons that do not spike.
    - `current`: the synaptic current.
    - `adaptation`: the trace of the spikes that raises the threshold.
    """

    spikes: Float[Array, "*hidden"] | None
    membrane: Float[Array, "*hidden"]
    current: Float[Array, "*hidden"] | None = None
    adaptation: Float[Array, "*hidden"] | None = None


class Dynamics(eqx.Module):
    """The constants of a step: numbers, or arrays with one value for each neuron. They are
    `None` where the neurons have no such part: `alpha` belongs to the synaptic current, `rho`
    and `strength` to the adaptation, and all but `beta` to neurons that spike."""

    beta: Any
    alpha: Any
    rho: Any
    strength: Any
    threshold: Any
    surrogate: Any
    reset: Reset = eqx.field(static=True)
    detach_reset: bool = eqx.field(static=True)


def integrate(d: Dynamics, x: Any, state: LIFState) -> LIFState:
    """The state after decay, input and reset, without the spikes. Given the old spikes, this is
    linear in the state."""
    current = x if d.alpha is None else d.alpha * state.current + x
    membrane: Any = state.membrane
    spikes: Any = state.spikes
    if d.detach_reset:
        spikes = jax.lax.stop_gradient(spikes)
    if d.reset == "zero":
        membrane = membrane * (1 - spikes)
    membrane = d.beta * membrane + current
    if d.reset == "subtract":
        membrane = membrane - spikes * d.threshold
    adaptation = None if d.rho is None else d.rho * state.adaptation + state.spikes
    return LIFState(None, membrane, None if d.alpha is None else current, adaptation)


def fire(d: Dynamics, state: LIFState) -> Array | None:
    """The spikes that follow from the rest of a state."""
    if d.threshold is None:
        return None
    threshold = d.threshold
    if state.adaptation is not None:
        threshold = threshold + d.strength * state.adaptation
    return spike(state.membrane - threshold, d.surrogate)


def step(d: Dynamics, x: Array, state: LIFState) -> LIFState:
    """The next state. All arrays are of one dtype."""
    new = integrate(d, x, state)
    return LIFState(fire(d, new), new.membrane, new.current, new.adaptation)
