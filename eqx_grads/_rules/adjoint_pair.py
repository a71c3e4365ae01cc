"""Two linear maps. JAX transposes the first into the second, and the second into the first."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.interpreters import ad

from .linear_primitive import linear_call, LinearMap


class Side(NamedTuple):
    """One of the two maps.

    - `run(parameters, xs)` returns the arrays of the output, which have these `types`. JAX
        differentiates the function with respect to the parameters. The function holds no
        tracer, as JAX keeps it with the program.
    """

    name: str
    run: Callable[[list[Any], list[Any]], Sequence[Any]]
    types: Sequence[Any]
    note: str | None = None  # for errors of the derivative with respect to the parameters


def apply_side(
    side: Side, transpose: Side, parameters: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Apply `side`. JAX uses `transpose` where it transposes `side`, and `side` where it
    transposes `transpose`."""

    def pull_back(parameters, cts):
        pairs = zip(cts, side.types, strict=True)
        cts = [ad.zeros_like_aval(t) if ct is None else ct for ct, t in pairs]
        return apply_side(transpose, side, parameters, cts)

    linear_map = LinearMap(side.name, side.run, pull_back, side.types, side.note)
    return list(linear_call(linear_map, parameters, xs))
