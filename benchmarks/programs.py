"""No claim: count the operations of a compiled program from its text, for `roofline.py`.

XLA's `cost_analysis` counts the body of a loop once, however often it runs; the text of the
program says how often. Bytes are those of the operands and results of all operations, as if
there were no cache. An operation in place or on a slice counts the bytes of the slice.
"""

import math
import re
from typing import NamedTuple


class Cost(NamedTuple):
    flops: float = 0  # of matrix products
    bytes: float = 0
    operations: float = 0
    collectives: float = 0
    sent: float = 0  # bytes of the operands of collectives

    def __add__(self, other):
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, n):
        return Cost(*(n * a for a in self))


class _Operation(NamedTuple):
    name: str
    type: str
    kind: str
    operands: list[str]
    rest: str  # the text after the operands


_LINE = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2}
_SIZES |= {"token": 0, "s64": 8, "u64": 8, "f64": 8, "s16": 2, "u16": 2}
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_COLLECTIVE = re.compile(r"(all-\w+|reduce-scatter|collective-\w+?)(-start)?$")


def _shapes(text):
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text)
    return [(kind, [int(n) for n in shape.split(",") if n]) for kind, shape in found]


def _size(text):
    return sum(_SIZES[kind] * math.prod(shape) for kind, shape in _shapes(text))


def _computations(text):
    """The operations of each computation, by its name. `ENTRY` is the main one."""
    found, current = {}, None
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%(\S+) .*{$", line):
            current = found[header[2]] = {}
            if header[1]:
                found["ENTRY"] = current
        elif current is not None and (match := _LINE.match(line)):
            name, kind, operation, rest = match.groups()
            arguments, _, attributes = rest.partition(")")
            operands = re.findall(r"%([\w.-]+)", arguments)
            current[name] = _Operation(name, kind, operation, operands, attributes)
    return found


def cost(text: str) -> Cost:
    """The cost of one run of a program, on one device."""
    return _Reader(_computations(text)).computation("ENTRY")


class _Reader:
    def __init__(self, computations):
        self.computations = computations

    def computation(self, name):
        inside = self.computations[name]
        return sum((self.operation(op, inside) for op in inside.values()), Cost())

    def operation(self, op, inside):
        if op.kind in _FREE or op.kind.endswith("-done"):
            return Cost()
        if op.kind == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', op.rest)
            if trips is None:
                raise ValueError(f"The text does not say how often the loop {op.name} runs.")
            return self.computation(_called(op, "body")).times(int(trips[1]))
        if op.kind == "call":
            return self.computation(_called(op, "to_apply"))
        if op.kind == "conditional":
            branches = re.findall(r"%([\w.-]+)", op.rest.split("branch_computations=")[1])
            return max(self.computation(b) for b in branches if b in self.computations)
        if _COLLECTIVE.match(op.kind):
            sent = sum(_size(inside[name].type) for name in op.operands)
            return Cost(bytes=2 * sent, operations=1, collectives=1, sent=sent)
        if op.kind == "custom-call":
            raise ValueError(f"The text does not say what the custom call {op.name} costs.")
        if op.kind == "fusion":
            body = self.computations[_called(op, "calls")]
            flops = sum(_flops(part, body) for part in body.values())
            return Cost(flops, _bytes_of_fusion(op, body), 1)
        return Cost(_flops(op, inside), _bytes(op, inside), 1)


def _called(op, attribute):
    return re.findall(rf"\b{attribute}=%([\w.-]+)", op.rest)[0]


def _flops(op, inside):
    if op.kind != "dot":
        return 0
    (_, result), (_, left) = _shapes(op.type)[0], _shapes(inside[op.operands[0]].type)[0]
    dims = re.findall(r"lhs_contracting_dims={([\d,]*)}", op.rest)[0]
    contracted = math.prod(left[int(i)] for i in dims.split(",") if i)
    return 2 * math.prod(result) * contracted


def _bytes(op, inside):
    if op.kind in _SLICES:
        return 2 * _size(op.type)
    if op.kind == "dynamic-update-slice":
        return 2 * _size(inside[op.operands[1]].type)
    if op.kind == "scatter":
        return 2 * _size(inside[op.operands[-1]].type)
    return _size(op.type) + sum(_size(inside[name].type) for name in op.operands)


def _bytes_of_fusion(op, body):
    """What it reads of its operands, and what it writes."""
    updates = [part for part in body.values() if part.kind == "dynamic-update-slice"]
    in_place = [part for part in updates if _size(part.type) == _size(op.type)]
    total = _size(body[in_place[-1].operands[1]].type) if in_place else _size(op.type)
    for operand in body.values():
        if operand.kind != "parameter":
            continue
        users = [part for part in body.values() if operand.name in part.operands]
        of_slices = all(
            user.operands[0] == operand.name
            and (user.kind in _SLICES or user.kind == "dynamic-update-slice")
            for user in users
        )
        if of_slices:
            total += sum(_size(user.type) for user in users if user.kind in _SLICES)
        else:
            total += _size(operand.type)
    return total
