"""The calls of `jax.vmap` in a loss, and the same loss with one of them run in chunks.

A `vmap` leaves no equation in a program: its function is rewritten for whole arrays. So the
calls are seen while the loss is traced, and each marks the equations in it with a name.
"""

import contextlib
import dataclasses
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax

from ..._control_flow.map import filter_map
from ..source_lines import is_users_file, SourceLine, UNKNOWN


@dataclasses.dataclass(frozen=True)
class MapCall:
    """The line of a call of what `jax.vmap` returned, and the length of the mapped axis."""

    source: SourceLine
    length: int


def map_call_of(eqn: Any) -> int | None:
    """The index, in what `seeing_maps` returns, of the `vmap` that an equation is in."""
    found = re.search(r"eqg_map_(\d+)", str(eqn.source_info.name_stack))
    return int(found[1]) if found else None


_LOCK = threading.RLock()


@contextlib.contextmanager
def seeing_maps(chunks: dict[MapCall, int]) -> Iterator[list[MapCall]]:
    """In this context, calls of `jax.vmap` are seen, but for those inside of others. Those in
    `chunks` run by `filter_map`. Other threads are not affected."""
    calls: list[MapCall] = []
    original, inside, thread = jax.vmap, [False], threading.get_ident()

    def vmap(fun, in_axes: Any = 0, out_axes: Any = 0, *args: Any, **kwargs: Any):
        plain = original(fun, in_axes, out_axes, *args, **kwargs)

        def mapped(*xs, **options):
            is_seen = jax.vmap is vmap and threading.get_ident() == thread and not inside[0]
            # A name of the axis is for what `fun` does across it.
            if not is_seen or options or args or kwargs.get("axis_name") is not None:
                return plain(*xs, **options)
            parts, run = _by_parts(original, fun, in_axes, out_axes, xs)
            call = MapCall(_users_line(), len(parts[0]) if parts else 0)
            calls.append(call)
            inside[0] = True
            try:
                with jax.named_scope(f"eqg_map_{len(calls) - 1}"):
                    return run(chunks[call]) if call in chunks else plain(*xs)
            finally:
                inside[0] = False

        return mapped

    with _LOCK:
        jax.vmap = vmap  # there is no other hook
        try:
            yield calls
        finally:
            jax.vmap = original


def _by_parts(vmap, fun, in_axes, out_axes, xs):
    """The mapped arrays, their axis first; and what runs the `vmap` in chunks of them."""
    leaves, treedef = jax.tree.flatten(xs)
    is_mapped: list[bool] = []

    def mapped(*inner):  # an operand that is not mapped stays as it is
        pairs = list(zip(jax.tree.leaves(inner), leaves, strict=True))
        is_mapped[:] = [x is not outer for x, outer in pairs]
        return [x for x, outer in pairs if x is not outer]

    parts = vmap(mapped, in_axes)(*xs)

    def one(part):
        rest = iter(part)
        flat = [next(rest) if m else x for m, x in zip(is_mapped, leaves, strict=True)]
        return fun(*jax.tree.unflatten(treedef, flat))

    back = lambda out: vmap(lambda x: x, 0, out_axes)(out)
    return parts, lambda chunk: back(filter_map(one, parts, chunk=chunk))


def _users_line() -> SourceLine:
    """The line that calls a `vmap`; unknown if a layer of Equinox calls it."""
    frame, layers = sys._getframe(2), eqx.nn.__path__[0]
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = None if frame.f_code.co_filename.startswith(layers) else frame.f_back
    if frame is None:
        return UNKNOWN
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
