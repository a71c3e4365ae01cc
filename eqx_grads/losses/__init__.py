"""Losses whose gradients are formed chunk by chunk."""

from ._chunked import chunked as chunked
from ._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
