"""One step of spiking neurons as a plain function: decay, input, reset, spike."""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array

from ...surrogates import spike
from .._dtypes import common_dtype
from .parameters import Reset


State = TypeVar("State")


class Dynamics(eqx.Module):
    """The constants of a step, numbers or arrays with one value for each neuron.

    Those of a part that neurons do not have are `None`: `alpha` is of the synaptic current,
    `rho` and `strength` are of the adaptation, and all but `beta` are of neurons that spike.
    """

    beta: Any
    alpha: Any = None
    rho: Any = None
    strength: Any = None
    threshold: Any = None
    surrogate: Any = None
    reset: Reset = eqx.field(static=True, default="none")
    detach_reset: bool = eqx.field(static=True, default=True)


class NeuronState(NamedTuple):
    """The state of any neurons. What they do not have is `None`."""

    spikes: Any
    membrane: Any
    current: Any
    adaptation: Any

    @staticmethod
    def of(state: Any) -> "NeuronState":
        """The state of a cell, as such a state."""
        return NeuronState(*(getattr(state, name, None) for name in NeuronState._fields))

    def like(self, state: State) -> State:
        """This state in the class of another one."""
        fields: Any = dataclasses.fields(state)  # pyright: ignore[reportArgumentType]
        return type(state)(**{f.name: getattr(self, f.name) for f in fields})

    def cast_like(self, state: "NeuronState") -> "NeuronState":
        """This state in the dtypes of another one, so that a scan can carry it."""
        return jax.tree.map(lambda new, s: new.astype(s.dtype), self, state)


def step(dynamics: Dynamics, x: Array, state: NeuronState) -> NeuronState:
    """The next state. The arrays of the state and the input are of one dtype."""
    d = dynamics
    current = x if d.alpha is None else d.alpha * state.current + x
    adaptation = None if d.rho is None else d.rho * state.adaptation + state.spikes
    membrane = decayed(d, state) + current
    if d.reset == "subtract":
        membrane = membrane - reset_by(d, state.spikes) * d.threshold
    spikes = None
    if d.threshold is not None:
        spikes = spike(over_threshold(d, membrane, adaptation), d.surrogate)
    return NeuronState(spikes, membrane, None if d.alpha is None else current, adaptation)


def over_threshold(dynamics: Dynamics, membrane: Array, adaptation: Array | None) -> Array:
    """By how much the potential exceeds the threshold."""
    if adaptation is None:
        return membrane - dynamics.threshold
    return membrane - (dynamics.threshold + dynamics.strength * adaptation)


def decayed(dynamics: Dynamics, state: NeuronState) -> Array:
    """The potential after decay and, if that is to zero, after the reset."""
    if dynamics.reset == "zero":
        return dynamics.beta * (state.membrane * (1 - reset_by(dynamics, state.spikes)))
    return dynamics.beta * state.membrane


def reset_by(dynamics: Dynamics, spikes: Array) -> Array:
    """The spikes that reset the potential."""
    return jax.lax.stop_gradient(spikes) if dynamics.detach_reset else spikes


def one_step(neurons: Any, x: Array, state: State) -> State:
    """A step of a cell, in the common dtype of input and state, in the dtypes of the state."""
    given = NeuronState.of(state)
    x, *arrays = common_dtype(x, *given)
    wide = NeuronState(*arrays)
    new = step(neurons._dynamics(wide.membrane), x, wide)
    return new.cast_like(given).like(state)
