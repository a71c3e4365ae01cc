"""The kind of a death: the name of the experiment that revives the tangent.

The operation runs again with other operands. If none revive the tangent, the operation has no
derivative. If other tangents do, terms cancel or underflow. An operand that does not move, and
revives the tangent, is a mask or a factor. If the operands that move do, the operation is flat.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import CallWithRule, Cond, holds, structure, While
from ..source_lines import is_of_jax
from .facts import Death, Fact, is_alive, is_inexact, push, value_of


NO_DERIVATIVE = "no derivative"
_SCALES = (2.0**-4, 2.0**-8, 2.0**-14, 2.0**-20)
_STEP = 1e-3


def kind_of_death(death: Death) -> tuple[str, Fact | None]:
    """The kind, and the operand that is to blame, if it is one that does not move."""
    eqn, k, leaf = death.place.eqn, death.k, death.leaf
    facts = death.values
    if not is_inexact(eqn.outvars[k]) or holds(eqn, While):
        return NO_DERIVATIVE, None  # with other operands, a loop may never end
    if isinstance(structure(eqn), Cond):
        return "branch not taken", facts[0]
    xs = [value_of(f) for f in facts]
    ts = [f.tangents.get(leaf) for f in facts]
    moving = [i for i, t in enumerate(ts) if t is not None]
    rest = [i for i in range(len(xs)) if i not in moving]
    rng = np.random.default_rng(0)

    def revives(values=xs, tangents=ts) -> bool:
        try:
            return is_alive(push(eqn, values, tangents)[k])
        except Exception:  # such values are not for this operation
            return False

    def other(x: Any) -> Any:
        """A value of the same type."""
        if is_inexact(x):
            return jnp.asarray(rng.normal(size=np.shape(x)) + 0.5, jnp.result_type(x))
        if jnp.issubdtype(jnp.result_type(x), jnp.bool_):
            return jnp.asarray(rng.integers(0, 2, np.shape(x)), bool)
        if jnp.issubdtype(jnp.result_type(x), jnp.integer):
            return jnp.asarray(rng.integers(0, 3, np.shape(x)), jnp.result_type(x))
        return x

    def replaced(where: Sequence[int], by) -> list[Any]:
        return [by(x) if i in where else x for i, x in enumerate(xs)]

    tries = range(3)
    scaled = lambda fn: [None if t is None else fn(jnp.asarray(t)) for t in ts]
    same_support = lambda t: jnp.where(t != 0, other(t), 0)
    if any(revives(tangents=scaled(same_support)) for _ in tries):
        each = [[t if i == j else None for j, t in enumerate(ts)] for i in moving]
        sizes = [jnp.abs(x) if is_inexact(x) and kind_of(eqn).linear else x for x in xs]
        cancels = (len(moving) > 1 and any(revives(tangents=t) for t in each)) or revives(
            sizes, scaled(jnp.abs)
        )
        return ("canceled" if cancels else "underflow"), None
    decisions = [i for i in rest if not is_inexact(xs[i])]
    if decisions and any(revives(replaced(decisions, other)) for _ in tries):
        is_select = eqn.primitive.name == "select_n"
        by_leaf = is_select and leaf in facts[0].died
        return ("dead units" if by_leaf else "masked" if is_select else "not selected"), None
    is_rule = isinstance(structure(eqn), CallWithRule)
    if kind_of(eqn).linear == "each" or is_rule or eqn.primitive.name in ("div", "eqg_linear"):
        for i in rest:
            is_zero = is_inexact(xs[i]) and not np.any(np.asarray(xs[i]))
            if is_zero and any(revives(replaced([i], other)) for _ in tries):
                return "multiplied by zero", facts[i]
        if not is_rule and any(revives(replaced(rest, other)) for _ in tries):
            return "multiplied by zero", facts[rest[0]]
    if any(revives(replaced(moving, other)) for _ in tries):
        return _flat(death, xs, ts, moving), None
    if is_rule and any(revives(replaced([*moving, *rest], other)) for _ in tries):
        return "zero derivative", None
    if any(revives(tangents=scaled(other)) for _ in tries):
        return "not selected", None
    if any(revives(replaced([*moving, *rest], other)) for _ in tries):
        return "dead units", None
    is_linear = kind_of(eqn).linear not in (None, "no")  # it drops what does not pass
    return "not selected" if is_linear else NO_DERIVATIVE, None


def _flat(death: Death, xs, ts, moving) -> str:
    """Next to a stationary point the derivative is small; next to a kink, it is not. Nearer to
    zero, a saturated function has one."""
    eqn, k = death.place.eqn, death.k
    if kind_of(eqn).selects:
        return "dead units"
    if isinstance(structure(eqn), CallWithRule) and not is_of_jax(eqn):
        return "zero derivative"

    def sizes(move) -> float:
        values = [move(np.asarray(x)) if i in moving else x for i, x in enumerate(xs)]
        t = push(eqn, values, ts)[k]
        return 0.0 if t is None else float(np.max(np.abs(np.asarray(t)), initial=0))

    size = max(float(np.max(np.abs(np.asarray(ts[i])), initial=0)) for i in moving)
    rng = np.random.default_rng(1)
    near = sizes(
        lambda x: x + (_STEP * (1 + abs(x)) * rng.normal(size=x.shape)).astype(x.dtype)
    )
    if near > 0:
        return "kink" if near > 30 * _STEP * size else "zero derivative"
    if any(sizes(lambda x, s=s: x * np.asarray(s, x.dtype)) > 0 for s in _SCALES):
        return "saturated"
    return "dead units"


def zero_origin(fact: Fact) -> Fact:
    """Where a value that is zero became so: back through sums and products, and from an input
    of another type."""
    while not isinstance(fact.made, str):
        place, operands, _ = fact.made
        kind = kind_of(place.eqn)
        passes = kind.linear is not None and kind.linear != "no"
        passes = passes or kind.layout or kind.identity
        is_cast = place.eqn.primitive.name == "convert_element_type"
        of_input = is_cast and isinstance(operands[0].made, str)
        passes = passes or is_cast
        zeros = [
            f
            for f in operands
            if (of_input or is_inexact(value_of(f))) and not np.any(np.asarray(value_of(f)))
        ]
        if not passes or not zeros:
            break
        fact = zeros[0]
    return fact
