"""Surrogate gradients for spikes: the value is a step, the derivative is a smooth bump."""

from ._piecewise import (
    leaky as leaky,
    rectangle as rectangle,
    triangle as triangle,
)
from ._smooth import (
    atan as atan,
    gaussian as gaussian,
    multi_gaussian as multi_gaussian,
    sigmoid as sigmoid,
    superspike as superspike,
)
from ._spike import AbstractSurrogate as AbstractSurrogate, spike as spike
