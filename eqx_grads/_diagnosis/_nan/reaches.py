"""Whether a cotangent that is not finite reaches the gradient, or is dropped by a mask."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.evaluate import bind
from ..._jaxprs.structure import Cond, Scan, structure, While
from .derivative_program import Derivative
from .replay import Frame, is_bad, is_inexact


class _NotFollowed(Exception):
    """It enters a loop, which is compiled."""


def reaches_gradient(derivative: Derivative, root: Frame, number: int) -> bool:
    """Whether what equation `number` makes, of all that is not finite it alone, makes the
    gradient so. True as well if a loop is on the way.

    The equations after it are evaluated once more where an operand is not finite. What another
    cause on the way makes by itself is followed with it: it is not known which elements would
    be finite if that was mended.
    """
    node, position = derivative.places[number]
    frame = None if node.loops else root.at(node, ())
    if frame is None:
        return True
    outs = zip(node.eqns[position].outvars, frame.outputs[position], strict=True)
    # Before the replacement by zero.
    values = {v: x for v, x in outs if v in node.cotangents and _is_hit(x)}
    try:
        while True:
            values = _follow(frame, position + 1, values)
            inside = frame.node.program.jaxpr.outvars
            if frame.parent is None:
                return any(_value_of(values, v) is not None for v in inside[1:])
            position, frame = frame.node.position, frame.parent
            values = _renamed(values, inside, frame.node.eqns[position].outvars)
    except _NotFollowed:
        return True


def _follow(frame: Frame, first: int, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """What is not finite because of such values, in the equations from `first` on."""
    values = dict(values)
    for i, eqn in enumerate(frame.node.eqns[first:], first):
        if all(_value_of(values, v) is None for v in eqn.invars):
            continue
        if frame.node.inner[i]:
            known = structure(eqn)
            if isinstance(known, Scan | While):
                raise _NotFollowed
            child = frame.child(i)
            operands = eqn.invars[1:] if isinstance(known, Cond) else eqn.invars
            program = child.node.program.jaxpr
            inside = _follow(child, 0, _renamed(values, operands, program.invars))
            values |= _renamed(inside, program.outvars, eqn.outvars)
            continue
        pairs = zip(frame.operands[i], eqn.invars, strict=True)
        operands = [x if (y := _value_of(values, v)) is None else y for x, v in pairs]
        outs = zip(eqn.outvars, bind(eqn, operands), strict=True)
        values |= {v: out for v, out in outs if _is_hit(out)}
    return values


def _is_hit(x: Any) -> bool:
    return is_inexact(x) and bool(is_bad(np.asarray(x), None).any())


def _value_of(values: Mapping[Any, Any], atom: Any) -> Any:
    return None if isinstance(atom, Literal) else values.get(atom)


def _renamed(values: Mapping[Any, Any], before, after) -> dict[Any, Any]:
    pairs = zip(before, after, strict=True)
    known = ((b, _value_of(values, a)) for a, b in pairs)
    return {v: x for v, x in known if x is not None}
