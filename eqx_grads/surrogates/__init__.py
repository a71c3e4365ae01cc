"""Surrogate gradients for spikes: the value is a step, the derivative is a smooth bump."""

from ._formulas import (
    atan as atan,
    gaussian as gaussian,
    leaky as leaky,
    multi_gaussian as multi_gaussian,
    rectangle as rectangle,
    sigmoid as sigmoid,
    superspike as superspike,
    triangle as triangle,
)
from ._spike import AbstractSurrogate as AbstractSurrogate, spike as spike
