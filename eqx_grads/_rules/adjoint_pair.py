"""A linear map and its transpose, each of which JAX transposes into the other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.interpreters import ad

from .linear_primitive import linear_call, LinearMap


class Side(NamedTuple):
    """One of the two maps.

    - `run(parameters, xs)` returns the arrays of the output, of these `types`. It holds no
        tracer, as JAX keeps it with the program. It may depend on the parameters in any way,
        and is differentiated with respect to them as it is.
    """

    name: str
    run: Callable[[list[Any], list[Any]], Sequence[Any]]
    types: Sequence[Any]
    note: str | None = None  # for errors of the derivative with respect to the parameters


def apply_side(
    side: Side, transpose: Side, parameters: Sequence[Any], xs: Sequence[Any]
) -> list[Any]:
    """Apply `side`. `transpose` takes its place wherever JAX transposes it, and the other way
    round."""

    def pull_back(parameters, cts):
        pairs = zip(cts, side.types, strict=True)
        cts = [ad.zeros_like_aval(t) if ct is None else ct for ct, t in pairs]
        return apply_side(transpose, side, parameters, cts)

    linear_map = LinearMap(side.name, side.run, pull_back, side.types, side.note)
    return list(linear_call(linear_map, parameters, xs))
