"""What neurons share: the decay of the membrane potential, the threshold and the reset."""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array

from .dynamics import Dynamics
from .parameters import NeuronParameter, Reset, Surrogate


class AbstractNeurons(eqx.Module):
    """Neurons whose membrane potential decays."""

    _beta: eqx.AbstractVar[NeuronParameter]
    hidden_size: eqx.AbstractVar[int | tuple[int, ...]]
    dtype: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def _dynamics(self, like: Array) -> Dynamics:
        """The constants of a step, in the dtype of an array."""

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
