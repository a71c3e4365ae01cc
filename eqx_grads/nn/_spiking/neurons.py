"""What neurons share: the decay of the membrane potential, the threshold and the reset."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from .parameters import NeuronParameter, Reset, Surrogate


class AbstractNeurons(eqx.Module):
    """Neurons whose membrane potential decays."""

    _beta: eqx.AbstractVar[NeuronParameter]
    hidden_size: eqx.AbstractVar[int | tuple[int, ...]]
    dtype: eqx.AbstractVar[Any]

    @property
    def beta(self) -> Any:
        """The decay factor of the potential: a number or an array."""
        return self._beta.value

    @property
    def learn_beta(self) -> bool:
        """Whether `beta` is learned."""
        return self._beta.learned


class AbstractSpikingNeurons(AbstractNeurons):
    """Neurons that fire where their potential exceeds a threshold, and are then reset."""

    _threshold: eqx.AbstractVar[NeuronParameter]
    surrogate: eqx.AbstractVar[Surrogate]
    reset: eqx.AbstractVar[Reset]
    detach_reset: eqx.AbstractVar[bool]

    @property
    def threshold(self) -> Any:
        """The threshold: a number or an array."""
        return self._threshold.value

    @property
    def learn_threshold(self) -> bool:
        """Whether `threshold` is learned."""
        return self._threshold.learned

    def _next_membrane(self, current: Array, spikes: Array, membrane: Array) -> Array:
        """The potential after decay, input current and reset by the last spikes."""
        beta = self._beta.cast(membrane)
        if self.reset == "none":
            return beta * membrane + current
        last = jax.lax.stop_gradient(spikes) if self.detach_reset else spikes
        if self.reset == "zero":
            return beta * (membrane * (1 - last)) + current
        return beta * membrane + current - last * self._threshold.cast(membrane)
