"""Scan bodies that are used again in later eager calls, so that JAX compiles them once.

JAX finds a loop that it has compiled by the identity of the function that it was given, for as
long as that function lives. So the scan body lives as long as the user's step, and refers to
the step weakly.

`jax.lax.scan` relies on that identity alone: it computes with the old value of a global
variable that was assigned since. Here the step is then traced again: a body is used again only
if all that it can reach is the same as it was, and is nothing that can be changed in place
(`reached_objects.py`).
"""

import dataclasses
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._jaxprs.current_trace import is_eager
from .carry import is_number, is_sliced
from .reached_objects import lives_in_a_module, Reached
from .scan_body import ScanBody


_KEPT: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[ScanBody, Reached]]] = (
    weakref.WeakKeyDictionary()
)
_MOST = 64  # bodies of one step: for other types of arguments, and other options


@dataclasses.dataclass(frozen=True)
class EagerCall:
    """An eager call of the step `f`.

    - `key` is equal for calls with arguments of the same types, and with the same options.
    - `static` is what else the body is made from: the static parts of the arguments.
    """

    f: types.FunctionType
    key: Hashable
    static: list[Any]

    def reached(self) -> Reached | None:
        return Reached.find([self.f, *self.static])

    def kept_body(self) -> ScanBody | None:
        """The body of an earlier call, if there is one that computes the same."""
        body, before = _KEPT.get(self.f, {}).get(self.key, (None, None))
        if body is None or before is None:
            return None
        now = self.reached()
        return body if now is not None and before.is_same(now) else None

    def keep_body(self, body: ScanBody) -> None:
        """Keep the body, if its static outputs and what it can reach allow for that."""
        reached = self.reached()
        if reached is None or any(_static_key(x) is None for x in body.static_outputs()):
            return
        bodies = _KEPT.setdefault(self.f, {})
        if len(bodies) >= _MOST:
            bodies.clear()
        bodies[self.key] = body, reached


def eager_call(
    f: Callable[..., Any], init: Any, xs: Any, options: tuple[Any, ...]
) -> EagerCall | None:
    """`None` if JAX transforms the call, or if the body would keep an object of the user
    alive."""
    if not isinstance(f, types.FunctionType) or not is_eager():
        return None
    first, init_tree = jax.tree.flatten(init)
    slices, xs_tree = jax.tree.flatten(xs)
    if any(isinstance(x, Tracer) for x in (*first, *slices)):
        return None
    # The body takes these as arrays. A Python integer in the carry may be static, and all
    # that is not sliced is.
    arrays = [*filter(_is_array, first), *filter(is_sliced, slices)]
    is_static = [not _is_array(x) for x in first] + [not is_sliced(x) for x in slices]
    static = [x for x, s in zip((*first, *slices), is_static, strict=True) if s]
    static += options
    keys = list(map(_static_key, static))
    if None in keys:
        return None
    types_of_arrays = [jax.typeof(jnp.asarray(x)) for x in arrays]
    key = (init_tree, xs_tree, *is_static, *types_of_arrays, *keys)
    try:
        hash(key)
    except TypeError:  # a static field without a hash
        return None
    return EagerCall(f, key, [*static, *_nodes(init_tree), *_nodes(xs_tree)])


def _is_array(x: Any) -> bool:
    """Whether a leaf of the first carry is certainly an array."""
    return is_sliced(x) or (is_number(x) and not isinstance(x, bool | int))


def _nodes(tree: Any) -> list[Any]:
    """The classes of the nodes of a tree, and their static fields."""
    data = tree.node_data()
    of_node = [] if data is None or data[0] in (tuple, list, dict, type(None)) else [*data]
    return [*of_node, *(x for child in tree.children() for x in _nodes(child))]


def _static_key(x: Any) -> Hashable | None:
    if isinstance(x, bool | int | float | complex | np.integer | str | bytes | None):
        return type(x), repr(x)  # `0.0 == -0.0`
    return (type(x), id(x)) if lives_in_a_module(x) else None
