"""Which infinities do not make the loss so, though they meet a NaN: as a weight `log(0)`."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.evaluate import bind
from ..._jaxprs.structure import Scan, structure, While
from .replay import Frame
from .sources import Found
from .trace_back import Elements, Input


_MOST = 8  # places that are looked at


class _NotFollowed(Exception):
    """It is made in a loop, which is compiled."""


def harmless_infinities(root: Frame, found: Found) -> list[Any]:
    """The keys of values of minus infinity with which the loss is finite, if all that is not
    finite elsewhere is one.

    A NaN makes the loss NaN, unless it is dropped, and then it is not among those found. An
    infinity that meets it may do no harm: of a logarithm of zero, the exponential is zero. Of
    what overflows, a quotient by it is finite as well, and wrong.
    """
    if len(found) < 2:
        return []
    keys = []
    for key, source in [*found.items()][:_MOST]:
        if isinstance(source, Input) or np.any(source.values[source.mask] != -np.inf):
            continue
        others = [other for k, other in found.items() if k != key]
        try:
            if np.all(np.isfinite(np.asarray(_loss_without(root, others)))):
                keys.append(key)
        except _NotFollowed:
            continue
    return keys if len(keys) < len(found) else []


def _loss_without(root: Frame, sources: Iterable[Elements | Input]) -> Any:
    """The loss, if these elements were one."""
    masks: dict[Any, Any] = {}
    changed: dict[Any, Any] = {}
    for source in sources:
        if isinstance(source, Input):
            v = root.node.program.jaxpr.invars[source.number]
            changed[v] = _with_ones(source.array, source.mask)
            continue
        if source.frame.steps or source.others:
            raise _NotFollowed
        masks[id(source.frame), source.position, source.output] = source.mask
    loss = root.node.program.jaxpr.outvars[0]
    last = 1 + root.node.producers[loss][0] if loss in root.node.producers else 0
    changed = _change(root, last, masks, changed)
    return changed.get(loss, root.results[0])


def _change(frame: Frame, last: int, masks: Mapping[Any, Any], changed: dict[Any, Any]):
    """What else changes in the equations before `last`, with what does so already."""
    changed = dict(changed)
    for i, eqn in enumerate(frame.node.eqns[:last]):
        is_loop = isinstance(structure(eqn), Scan | While)
        is_changed = any(not isinstance(v, Literal) and v in changed for v in eqn.invars)
        if frame.node.inner[i] and not is_loop:
            changed |= _change_inside(frame, i, masks, changed)
            continue
        outs: list[Any] = list(frame.outputs[i])
        if is_changed:
            pairs = zip(eqn.invars, frame.operands[i], strict=True)
            operands = [x if isinstance(v, Literal) else changed.get(v, x) for v, x in pairs]
            outs = list(bind(eqn, operands))
        own = [k for k in range(len(outs)) if (id(frame), i, k) in masks]
        for k in own:
            outs[k] = _with_ones(outs[k], masks[id(frame), i, k])
        if is_changed or own:
            changed |= dict(zip(eqn.outvars, outs, strict=True))
    return changed


def _change_inside(frame: Frame, i: int, masks: Mapping[Any, Any], changed) -> dict[Any, Any]:
    """The same of an equation with an inner program: what changes of its outputs."""
    eqn, child = frame.node.eqns[i], frame.child(i)
    program = child.node.program.jaxpr
    n_before = len(eqn.invars) - len(program.invars)  # the index of a `cond`
    index, operands = eqn.invars[:n_before], eqn.invars[n_before:]
    if any(not isinstance(v, Literal) and v in changed for v in index):
        raise _NotFollowed  # another branch
    inside = {
        inner: changed[outer]
        for inner, outer in zip(program.invars, operands, strict=True)
        if not isinstance(outer, Literal) and outer in changed
    }
    inside = _change(child, len(program.eqns), masks, inside)
    pairs = zip(program.outvars, eqn.outvars, strict=True)
    return {
        outer: inside[inner]
        for inner, outer in pairs
        if not isinstance(inner, Literal) and inner in inside
    }


def _with_ones(x: Any, mask: Any) -> Any:
    return np.where(mask, np.ones((), x.dtype), np.asarray(x))
