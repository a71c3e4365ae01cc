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
from ..._jaxprs.structure import CallWithRule, Cond, holds, Scan, structure, While
from ..pairs import is_inexact
from ..source_lines import is_of_jax
from .deaths import Death, Fact, is_alive, push


NO_DERIVATIVE = "no derivative"
_SCALES = (2.0**-4, 2.0**-8, 2.0**-14, 2.0**-20)
_STEP = 1e-3


class _Experiment:
    """An operation at which a tangent died, run again."""

    def __init__(self, death: Death):
        self.eqn, self.k = death.place.eqn, death.k
        self.xs, self.ts = [f.x for f in death.values], [f.t for f in death.values]
        self._rng = np.random.default_rng(0)

    def other(self, x: Any) -> Any:
        """A value of the same type."""
        dtype, shape, rng = jnp.result_type(x), np.shape(x), self._rng
        if is_inexact(x):
            return jnp.asarray(rng.normal(size=shape), dtype)
        if jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.integer):
            most = 2 if jnp.issubdtype(dtype, jnp.bool_) else 3
            return jnp.asarray(rng.integers(0, most, shape), dtype)
        return x

    def size(self, where: Sequence[int] = (), by: Any = None, ts: Any = None) -> float:
        """The largest tangent, with some operands changed, and with other tangents."""
        by = self.other if by is None else by
        xs = [by(x) if i in where else x for i, x in enumerate(self.xs)]
        try:
            t = push(self.eqn, xs, self.ts if ts is None else ts)[self.k]
        except Exception:  # such values are not for this operation
            return 0.0
        return float(np.max(np.abs(np.asarray(t)))) if is_alive(t) else 0.0

    def tangents(self, fn: Any) -> list[Any]:
        return [None if t is None else fn(jnp.asarray(t)) for t in self.ts]

    def revives(self, where: Sequence[int] = (), tangents: Any = lambda t: t) -> bool:
        return any(self.size(where, ts=self.tangents(tangents)) for _ in range(3))


def kind_of_death(death: Death) -> tuple[str, Fact | None]:
    """The kind, and the operand that is to blame, if it is one that does not move."""
    eqn, k, facts, kind = death.place.eqn, death.k, death.values, kind_of(death.place.eqn)
    known = structure(eqn)
    if not facts or not is_inexact(eqn.outvars[k]):
        return NO_DERIVATIVE, None
    if isinstance(known, Cond):
        return "branch not taken", facts[0]
    if isinstance(known, Scan | While):
        return "not selected", None  # its steps do not use it
    if holds(eqn, While):  # with other operands, a loop may never end
        return NO_DERIVATIVE, None
    run = _Experiment(death)
    moving = [i for i, t in enumerate(run.ts) if t is not None]
    rest = [i for i, t in enumerate(run.ts) if t is None]
    if run.revives(tangents=lambda t: jnp.where(t != 0, run.other(t), 0)):
        positive = lambda x: jnp.abs(x) if is_inexact(x) and kind.linear else x
        each = [[t if i == j else None for j, t in enumerate(run.ts)] for i in moving]
        cancels = run.size(range(len(run.xs)), positive, run.tangents(jnp.abs))
        cancels = cancels or any(run.size(ts=ts) for ts in each)
        return ("canceled" if cancels else "underflow"), None
    decisions = [i for i in rest if not is_inexact(run.xs[i])]
    if run.revives(decisions):
        if eqn.primitive.name != "select_n":
            return "not selected", None
        return ("dead units" if facts[0].died else "masked"), None
    is_rule = isinstance(known, CallWithRule)
    if kind.linear == "each" or is_rule or eqn.primitive.name in ("div", "eqg_linear"):
        zeros = [i for i in rest if is_inexact(run.xs[i]) and not np.any(np.asarray(run.xs[i]))]
        for i in zeros:
            if run.revives([i]):
                return "multiplied by zero", facts[i]
        if not is_rule and run.revives(rest):
            return "multiplied by zero", facts[rest[0]]
    if run.revives(moving):
        return _flat(
            run, moving, selects=kind.selects, is_users=is_rule and not is_of_jax(eqn)
        ), None
    every = range(len(run.xs))
    if run.revives(tangents=run.other):
        return "not selected", None
    if run.revives(every):
        return "dead units", None
    is_linear = kind.linear not in (None, "no")  # it drops what does not pass
    return "not selected" if is_linear else NO_DERIVATIVE, None


def _flat(run: _Experiment, moving, *, selects: bool, is_users: bool) -> str:
    """Next to a stationary point or a kink, there is a derivative. Nearer to zero, a saturated
    function has one."""
    if selects:
        # A count of many equal elements is infinite in half precision.
        is_half = lambda x: is_inexact(x) and jnp.finfo(x.dtype).bits < 32
        wide = lambda x: x.astype(jnp.float32) if is_half(x) else x
        is_alive = run.size(range(len(run.xs)), wide, run.tangents(wide))
        return "underflow" if is_alive else "dead units"
    if is_users:
        return "zero derivative"
    rng = np.random.default_rng(1)
    move = lambda x: _STEP * (1 + np.abs(x)) * rng.normal(size=np.shape(x))
    if run.size(moving, lambda x: (np.asarray(x) + move(x)).astype(x.dtype)):
        return "zero derivative"
    scaled = lambda s: lambda x: np.asarray(x) * np.asarray(s, x.dtype)
    return "saturated" if any(run.size(moving, scaled(s)) for s in _SCALES) else "dead units"
