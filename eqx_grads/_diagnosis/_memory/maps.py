"""The calls of `jax.vmap` in a loss, and the same loss with one of them run in chunks.

A `vmap` leaves no equation in a program: its function is rewritten for whole arrays. So the
calls are seen while the loss is traced, and each marks the equations in it with a name.
"""

import contextlib
import contextvars
import dataclasses
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..._control_flow.map import filter_map
from ..source_lines import is_layers_file, is_users_file, SourceLine, UNKNOWN


@dataclasses.dataclass(frozen=True)
class MapCall:
    """The line of a call of what `jax.vmap` returned, and the length of the mapped axis."""

    source: SourceLine
    length: int


@dataclasses.dataclass
class SeenMaps:
    """The calls in the order of tracing. A call equal to `chunked` runs by `filter_map`."""

    calls: list[MapCall] = dataclasses.field(default_factory=list)
    chunked: MapCall | None = None
    chunk: int | None = None
    depth: int = 0


def map_call_of(eqn: Any) -> int | None:
    """The index in `SeenMaps.calls` of the outermost `vmap` that an equation is in."""
    found = re.search(r"eqg_map_(\d+)", str(eqn.source_info.name_stack))
    return int(found[1]) if found else None


@contextlib.contextmanager
def seeing_maps(chunked: MapCall | None = None, chunk: int | None = None) -> Iterator[SeenMaps]:
    """In this context, calls of `jax.vmap` are seen. Other threads are not affected."""
    seen = SeenMaps(chunked=chunked, chunk=chunk)
    with _LOCK:
        token, original = _SEEN.set(seen), jax.vmap
        jax.vmap = _vmap(original)  # there is no other hook
        try:
            yield seen
        finally:
            jax.vmap = original
            _SEEN.reset(token)


_SEEN: contextvars.ContextVar[SeenMaps | None] = contextvars.ContextVar("_SEEN", default=None)
_LOCK = threading.RLock()


def _vmap(original):
    def vmap(fun, in_axes: Any = 0, out_axes: Any = 0, *args: Any, **kwargs: Any):
        plain = original(fun, in_axes, out_axes, *args, **kwargs)
        # A name of the axis is for what `fun` does across it.
        is_named = bool(args) or kwargs.get("axis_name") is not None

        def mapped(*xs, **options):
            seen = _SEEN.get()
            length = 0 if seen is None or options else _length(in_axes, xs)
            if seen is None or seen.depth or is_named or not length:
                return plain(*xs, **options)
            call = MapCall(_users_line(), length)
            seen.calls.append(call)
            seen.depth += 1
            try:
                with jax.named_scope(f"eqg_map_{len(seen.calls) - 1}"):
                    if call == seen.chunked:
                        return _in_chunks(fun, in_axes, out_axes, xs, seen.chunk)
                    return plain(*xs)
            finally:
                seen.depth -= 1

        return mapped

    return vmap


def _in_chunks(fun, in_axes, out_axes, xs, chunk):
    """`jax.vmap(fun, in_axes, out_axes)(*xs)` by `filter_map`."""
    pairs, treedef = _with_axes(in_axes, xs)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for axis, x in pairs]
    is_mapped = [axis is not None for axis, _ in pairs]

    def one(mapped):
        rest = iter(mapped)
        flat = [next(rest) if m else x for m, x in zip(is_mapped, moved, strict=True)]
        return fun(*jax.tree.unflatten(treedef, flat))

    mapped = [x for m, x in zip(is_mapped, moved, strict=True) if m]
    out = filter_map(one, mapped, chunk=chunk)
    pairs, treedef = _with_axes(out_axes, out)
    back = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for axis, x in pairs]
    return jax.tree.unflatten(treedef, back)


def _with_axes(axes: Any, tree: Any) -> tuple[list[tuple[int | None, Any]], Any]:
    """Each leaf of a tree with its axis. `axes` is a prefix of the tree."""
    axes = tuple(axes) if isinstance(axes, list) and isinstance(tree, tuple) else axes
    leaves, treedef = jax.tree.flatten(tree)
    spread = lambda axis, part: [axis] * len(jax.tree.leaves(part))
    is_none = lambda x: x is None
    flat = jax.tree.leaves(jax.tree.map(spread, axes, tree, is_leaf=is_none), is_leaf=is_none)
    return list(zip(flat, leaves, strict=True)), treedef


def _length(in_axes, xs) -> int:
    sizes = (jnp.shape(x)[axis] for axis, x in _with_axes(in_axes, xs)[0] if axis is not None)
    return next(sizes, 0)


def _users_line() -> SourceLine:
    """The line that calls a `vmap`; unknown if a layer of Equinox calls it."""
    frame = sys._getframe(2)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = None if is_layers_file(frame.f_code.co_filename) else frame.f_back
    if frame is None:
        return UNKNOWN
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
