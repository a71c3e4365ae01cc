"""Estimate the temporary memory that a compiler needs for a program.

The estimate follows the program in its order and adds up what is alive. It knows what XLA does
to elementwise operations: it fuses them into what uses them, so that their results are never
written to memory, unless a matrix product or a loop needs them there, or several operations use
what is expensive to compute.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    inner_programs,
    Scan,
    structure,
    While,
)


# Fusions do not grow beyond so many operands.
_MOST_OPERANDS = 8


def bytes_of(*types: Any) -> int:
    """The size of arrays of these types."""
    # A token of effects has no size.
    itemsize = lambda t: getattr(getattr(t, "dtype", None), "itemsize", 0)
    return sum(getattr(t, "size", 0) * itemsize(t) for t in types)


def is_cheap(eqn: Any) -> bool:
    """Whether an equation costs no more than to read its operands and write its outputs."""
    known, kind = structure(eqn), kind_of(eqn)
    if isinstance(known, Call | CallWithRule):
        return all(map(is_cheap, known.programs[0].eqns))
    return kind.layout or (kind.elementwise and kind.cost != "series")


def _is_expensive(eqn: Any) -> bool:
    """Whether XLA computes an elementwise operation once only, and writes its result."""
    return kind_of(eqn).cost == "expensive"


def _is_product(eqn: Any) -> bool:
    """Whether this is a matrix product or a convolution."""
    return kind_of(eqn).linear == "each" and not kind_of(eqn).elementwise


def _is_bitcast(eqn: Any) -> bool:
    """Whether the output is the memory of the operand."""
    return eqn.primitive.name in ("reshape", "squeeze", "expand_dims", "copy_p", "copy")


def _is_view_in_product(eqn: Any) -> bool:
    """Whether a matrix product can read the operand in place of the output."""
    return eqn.primitive.name == "transpose" or _is_bitcast(eqn)


def peak_bytes(program: ClosedJaxpr) -> int:
    """An estimate of the temporary bytes: all but the inputs and the outputs."""
    flat = _Flat()
    inputs = [flat.new(0) for _ in program.in_avals]
    outputs = flat.add(program, inputs)
    return flat.peak(outputs)


@dataclasses.dataclass
class _Value:
    size: int
    producer: "_Operation | None" = None
    is_read_by_product: bool = False
    is_read_in_memory: bool = False  # by another operation that is not fused
    is_read_by_loop: bool = False
    n_uses: int = 0
    is_written: bool = True
    is_expensive: bool = False
    roots: frozenset[int] = frozenset()


@dataclasses.dataclass
class _Operation:
    eqn: Any
    operands: list[int]
    outputs: list[int]
    is_fused: bool
    inside: int  # temporary bytes of inner programs
    carried: list[int]  # operands whose memory the outputs take over


class _Flat:
    """The operations of a program with its calls written out. Values are numbered."""

    def __init__(self):
        self.values: list[_Value] = []
        self.operations: list[_Operation] = []

    def new(self, size: int) -> int:
        self.values.append(_Value(size))
        return len(self.values) - 1

    def add(self, program: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        jaxpr = program.jaxpr
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((v, self.new(0)) for v in jaxpr.constvars)
        for eqn in jaxpr.eqns:
            operands = [env[v] for v in eqn.invars if not isinstance(v, Literal)]
            known = structure(eqn)
            if isinstance(known, Call | CallWithRule | Checkpoint):
                args = [self._read(env, v) for v in eqn.invars]
                if isinstance(known, Checkpoint) and known.prevent_cse:
                    # Nothing is fused across the barrier that XLA gets.
                    for i in args:
                        self.values[i].is_read_in_memory = True
                outs = self.add(known.programs[0], args)
            else:
                outs = [self.new(bytes_of(v.aval)) for v in eqn.outvars]
                self._append(eqn, known, operands, outs, env)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(env, v) for v in jaxpr.outvars]

    def _read(self, env, v) -> int:
        return self.new(0) if isinstance(v, Literal) else env[v]

    def _append(self, eqn, known, operands, outs, env):
        inner = inner_programs(eqn)
        inside = max(map(peak_bytes, inner), default=0)
        carried: list[int] = []
        if isinstance(known, Scan | While):
            first = (
                known.n_consts
                if isinstance(known, Scan)
                else known.n_cond_consts + known.n_body_consts
            )
            n = known.n_carry if isinstance(known, Scan) else len(outs)
            carry = eqn.invars[first : first + n]
            carried = [env[v] for v in carry if not isinstance(v, Literal)]
        is_fused = is_cheap(eqn)
        operation = _Operation(eqn, operands, outs, is_fused, inside, carried)
        self.operations.append(operation)
        for i in outs:
            self.values[i].producer = operation

    # ---------------------------------------------------------------- what is written

    def peak(self, outputs: Sequence[int]) -> int:
        self._count_uses(outputs)
        self._decide()
        last = self._last_uses()
        result = self._in_memory_of(outputs)
        size = lambda i: 0 if i in result else self.values[i].size
        indices = [_bytes_of_indices(operation.eqn) for operation in self.operations]
        alive, peak = sum(indices), 0
        for t, operation in enumerate(self.operations):
            written = [i for i in operation.outputs if self.values[i].is_written]
            taken_over = sum(size(i) for i in set(operation.carried) if last.get(i) == t)
            alive += sum(map(size, written))
            copied = sum(size(i) for i in written if self._is_copied(self.values[i]))
            peak = max(peak, alive - taken_over + operation.inside + copied)
            ended = {r for i in operation.operands for r in self.values[i].roots}
            ended = {r for r in ended if last.get(r) == t}
            ended.update(i for i in written if i not in last)
            alive -= sum(map(size, ended)) + indices[t]
        return peak

    def _count_uses(self, outputs):
        for operation in self.operations:
            for i in set(operation.operands):
                value = self.values[i]
                value.n_uses += 1
                if _is_product(operation.eqn):
                    value.is_read_by_product = True
                elif not operation.is_fused and not _reads_fused(operation.eqn):
                    value.is_read_in_memory = True
                    value.is_read_by_loop |= isinstance(structure(operation.eqn), Scan | While)
        for i in outputs:
            self.values[i].is_read_in_memory = True

    def _decide(self):
        for i, value in enumerate(self.values):
            operation = value.producer
            if operation is None:
                value.roots = frozenset([i])
                continue
            parts = [self.values[j] for j in operation.operands]
            roots = frozenset().union(*(part.roots for part in parts))
            value.is_expensive = _is_expensive(operation.eqn) or any(
                part.is_expensive and not part.is_written for part in parts
            )
            needs_memory = (
                value.is_read_in_memory and not self._is_view(value, _is_bitcast)
            ) or (value.is_read_by_product and not self._is_view(value, _is_view_in_product))
            value.is_written = (
                not operation.is_fused
                or needs_memory
                or len(roots) > _MOST_OPERANDS
                or (value.is_expensive and value.n_uses > 1)
            )
            value.roots = frozenset([i]) if value.is_written else roots

    def _is_view(self, value: _Value, keeps_memory: Callable[[Any], bool]) -> bool:
        """Whether the value is in the memory of what it is computed from."""
        operation = value.producer
        if operation is None or len(operation.operands) != 1:
            return False
        if not keeps_memory(operation.eqn):
            return False
        source = self.values[operation.operands[0]]
        return source.is_written or self._is_view(source, keeps_memory)

    def _is_copied(self, value: _Value) -> bool:
        """Whether the value is an array for a loop that is reshaped and then transposed. XLA
        changes the layout only, and copies it to that of the loop (on a CPU, JAX 0.10)."""
        operation = value.producer if value.is_read_by_loop else None
        is_transposed = False
        while operation and operation.operands and _is_view_in_product(operation.eqn):
            if is_transposed and operation.eqn.primitive.name == "reshape":
                return True
            is_transposed |= operation.eqn.primitive.name == "transpose"
            operation = self.values[operation.operands[0]].producer
        return False

    def _in_memory_of(self, outputs: Iterable[int]) -> set[int]:
        """The outputs, and what they are reshaped from."""
        found = set(outputs)
        for i in outputs:
            operation = self.values[i].producer
            while operation is not None and _is_bitcast(operation.eqn):
                (i,) = operation.operands
                found.add(i)
                operation = self.values[i].producer
        return found

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for t, operation in enumerate(self.operations):
            written = not operation.is_fused or any(
                self.values[i].is_written for i in operation.outputs
            )
            if written:
                last.update((r, t) for i in operation.operands for r in self.values[i].roots)
        return last


def _bytes_of_indices(eqn) -> int:
    """What XLA needs for the gradient of a max pooling, which it expands to a search and a
    scatter: an index of 32 bits for each axis of the operand and each entry, and the zeros of
    the search and the scatter. It computes these constants before all else."""
    if eqn.primitive.name != "select_and_scatter_add":
        return 0
    operand = eqn.invars[1].aval
    n_axes = sum(n > 1 for n in operand.shape)
    return (4 * (n_axes + 1) + operand.dtype.itemsize) * operand.size


def _reads_fused(eqn) -> bool:
    """Whether elementwise operations can be fused into this one, which is not one itself."""
    return eqn.primitive.name.startswith(("reduce_", "arg", "dynamic_update_slice"))
