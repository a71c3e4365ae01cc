"""At an element of a cotangent, the values and operations of the loss that it belongs to."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind
from ..._jaxprs.primitives import MULTILINEAR
from ..origins import Origin
from .derivative_program import Derivative
from .trace_back import Spot


def value_at(derivative: Derivative, spot: Spot, origin: Origin | None = None) -> Spot | None:
    """The same element in the part of the program that computes values, of the equation of the
    loss that an element is in the derivative of. `None` if that has another shape."""
    origin = origin or derivative.origin(spot.frame.node, spot.position)
    if origin is None:
        return None
    for node, position in derivative.places:
        eqn = node.eqns[position]
        if eqn.primitive is not origin.eqn.primitive or node.inner[position]:
            continue
        same = derivative.origin(node, position)
        is_value = eqn.outvars[0] not in node.cotangents
        if not is_value or same is None or same.number != origin.number:
            continue
        steps = spot.frame.steps
        frame = spot.frame.root.at(node, steps) if node.loops == len(steps) else None
        if frame is not None and np.shape(frame.outputs[position][0]) == spot.value_shape:
            return Spot(frame, position, 0, spot.index)
    return None


def largest_product(spot: Spot) -> tuple[Any, Any] | None:
    """Of the products that are summed to an element, factor and cotangent of the largest one.
    `None` if it is no such sum."""
    spot = _first_of_derivative(spot)
    cotangents = [k for k in range(len(spot.operands)) if spot.is_cotangent(k)]
    if spot.eqn.primitive.name not in MULTILINEAR or len(cotangents) != 1:
        return None
    factors, (k,) = pullback(spot, spot.operands, *cotangents), cotangents
    x = np.asarray(spot.operands[k])
    largest = np.unravel_index(np.argmax(np.abs(factors * x)), x.shape)
    return factors[largest], x[largest]


def _first_of_derivative(spot: Spot) -> Spot:
    """Of several equations that are the derivative of one equation of the loss, the one at
    which the cotangent of the element arrives."""
    node, outputs = spot.frame.node, spot.frame.outputs
    while True:
        cotangents = [v for k, v in enumerate(spot.eqn.invars) if spot.is_cotangent(k)]
        made = [node.producers[v] for v in cotangents if v in node.producers]
        if len(cotangents) != 1 or not made or made[0][0] not in node.within:
            return spot
        ((i, k),) = made
        if np.shape(outputs[i][k]) != spot.value_shape:
            return spot
        spot = Spot(spot.frame, i, k, spot.index)


def pullback(spot: Spot, values: Sequence[Any], k: int) -> Any:
    """The derivative of the element with respect to operand `k` at these operands."""

    def output(x):
        return bind(spot.eqn, [*values[:k], x, *values[k + 1 :]])[spot.output]

    out, pullback = jax.vjp(output, values[k])
    return np.asarray(pullback(jnp.zeros_like(out).at[spot.index].set(1))[0])


def first_of_rule(spot: Spot) -> Any:
    """The operation of which an equation is a part of the derivative: the first one that was
    traced at the same place."""
    traceback = spot.eqn.source_info.traceback
    same = lambda eqn: eqn.source_info.traceback == traceback
    return next(filter(same, spot.frame.node.eqns), spot.eqn)
