"""Whether a dead branch is that of a point on the boundary of a mask, such as that of
`where(x == 0, a, f(x))` at zero, where the branch that is taken may have another derivative."""

from typing import Any

import numpy as np

from .trace_back import index_into, origin_of_value, Spot


# What is to be said of the cure then.
_ON_BOUNDARY = (
    " It is 0 / 0 on the boundary of the mask, or nearly. Either of these cures gives the "
    "derivative of the branch that is taken there. That of a constant is zero. If the quotient "
    "has a limit, the true derivative may be another one: compare with "
    "`eqg.testing.check_gradients`."
)
# Functions in place of a quotient, which have its limit.
_WITH_LIMIT = {
    "expm1(x) / x": "eqg.safe.expm1_ratio(x)",
    "log1p(x) / x": "eqg.safe.log1p_ratio(x)",
    "sinh(x) / x": "eqg.safe.sinhc(x)",
}

# A mask may have a tolerance, as that of `where(jnp.abs(x) > 1e-6, jnp.sin(x) / x, 1.0)`.
_NEARLY = 1e-3
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# What may be between a comparison and the mask.
_ELEMENTWISE = ("and", "or", "not", "xor", "convert_element_type", "copy")


def on_boundary(formula: str) -> str:
    """What is to be said of the cure on the boundary."""
    name = _WITH_LIMIT.get(formula)
    return _ON_BOUNDARY + (f" `{name}` has the limit, and its derivative." if name else "")


def is_on_boundary(select: Spot) -> bool:
    """Whether the mask of a `select_n` compares two equal, or nearly equal, numbers at the
    element, of which one depends on the model."""
    if select.eqn.primitive.name != "select_n":
        return False
    todo = [(select, 0)]
    while todo:
        spot, k = todo.pop()
        made = _made_by(spot, k)
        if made is None:
            continue
        name = made.eqn.primitive.name
        if name in _COMPARISONS:
            # Where neither depends on the model, the operands may be booleans, which have no
            # difference, or integers, of which it may wrap around.
            if (made.is_active(0) or made.is_active(1)) and _nearly_equal(made):
                return True
        elif name in _ELEMENTWISE or name == "broadcast_in_dim":
            todo.extend((made, k) for k in range(len(made.operands)))
    return False


def _nearly_equal(comparison: Spot) -> bool:
    x, y = (np.asarray(x)[index_into(x, comparison.index)] for x in comparison.operands)
    return bool(abs(x - y) <= _NEARLY * max(1, abs(x)))


def _made_by(spot: Spot, k: int) -> Spot | None:
    """The equation that computes what an element needs of operand `k`."""
    x = np.asarray(spot.operands[k])
    index = spot.index
    if spot.eqn.primitive.name == "broadcast_in_dim":
        index = tuple(index[axis] for axis in spot.eqn.params["broadcast_dimensions"])
    made = origin_of_value(spot.frame, spot.eqn.invars[k], index_into(x, index), _any)
    return made if isinstance(made, Spot) else None


def _any(x: Any) -> bool:
    return True
