"""Residuals that stay on the host, found by the values of the arguments."""

import collections
import hashlib
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._rules.closure_convert import Opaque
from .host_op import read_only


class ResidualCache(Opaque):
    """The residuals of the last calls, which stay on the host.

    They are found by the values of the arguments and not by a handle. So it does not matter if
    JAX calls a forward rule twice, or drops it, or never calls the backward rule: residuals
    that are not found are computed again, and no more than `most` of them are ever kept.

    A later call may write into what an earlier call returned. So arrays are copied. Any other
    object that two calls return (a solver that factorizes in place) belongs to the later one:
    the residuals of the earlier one are dropped, and computed again when they are needed.
    """

    def __init__(self, most: int):
        self.most = most
        # The residuals and the objects in them, for each key.
        self._found: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self):
        return ResidualCache, (self.most,)

    def put(self, key: Any, residuals: Any, again: bool = False) -> Any:
        """Keep the residuals, which are returned as they are kept.

        A Jacobian needs residuals that were computed `again` several times in succession. After
        that, the backward pass needs the residuals of other calls next. So the residuals that
        were computed again are the first to be dropped.
        """
        objects: set[int] = set()
        residuals = _copied(residuals, objects)
        with self._lock:
            shared = [k for k, (_, o) in self._found.items() if objects & o]
            for other in (key, *shared):
                self._found.pop(other, None)
            while self._found and len(self._found) >= self.most:
                self._found.popitem(last=False)
            if self.most:
                self._found[key] = residuals, objects
                self._found.move_to_end(key, last=not again)
        return residuals

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The residuals, computed where they are not kept, and kept from then on."""
        with self._lock:
            if key in self._found:
                return self._found[key][0]
        return self.put(key, compute(), again=True)


def _copied(residuals: Any, objects: set[int]) -> Any:
    """The residuals with copies of their arrays. The identities of other objects are added to
    `objects`."""

    def copied(x):
        if isinstance(x, np.ndarray):
            return read_only(x.copy())
        if type(x) is dict:  # JAX sorts the keys, which may be anything here
            return {key: _copied(value, objects) for key, value in x.items()}
        if not isinstance(x, _CONSTANT):
            objects.add(id(x))
        return x

    return jax.tree.map(copied, residuals, is_leaf=lambda x: type(x) is dict)


_CONSTANT = (
    *(int, float, complex, str, bytes, type, np.generic, np.dtype, jax.Array),
    *(types.FunctionType, types.BuiltinFunctionType, np.ufunc),
)


def digest_key(call: Any, leaves: Sequence[np.ndarray]) -> Any:
    """The key of a call with these arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for x in leaves:
        # Their dtypes, and their shapes without the axes of `vmap`, are in `call`.
        digest.update(repr(x.shape).encode())
        digest.update(x.tobytes())
    return call, digest.digest()
