"""The verdict on the gradient of one leaf, from its differences along random directions.

Where the gradient disagrees with the differences, experiments tell why: the values of
`stop_gradient`s are held; the slopes on both sides are compared, at a kink; parts of the
direction are judged alone, as several kinks may cancel; and a point nearby is judged.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._jaxprs.structure import equations
from ._compare import as_double, norm
from ._gradient_report import DEAD, FLAT, KINK, LeafVerdict, RIGHT, STOPPED, UNMEASURED, WRONG
from ._loss_program import along, LossProgram
from ._slope import central_slope, confirmed_slope, is_settled, Samples, Slope, with_sides


# How many times its estimated error a difference may be off.
_SAFETY = 10.0
# An estimate of the differences with a larger relative error is no evidence.
_USELESS = 0.03
# Along how many directions a leaf is judged at most, beside the first.
_MORE_DIRECTIONS = 3
# How far a model is moved off a kink, relative to its entries.
_MOVE = 1e-3
# How many parts of a direction are judged at most.
_MOST_PARTS = 24
# What differs from zero by less than this, relative to the loss, is zero.
_FLOOR = 1e-12
_LONG_STEPS = (0.125, 0.5, 1.0, 4.0)


@dataclasses.dataclass(frozen=True)
class Direction:
    """A direction in the space of all leaves, of which it perturbs those in `kept`."""

    name: str
    kept: tuple[int, ...]
    tangents: list[np.ndarray]


class Judge:
    """Holds a gradient against differences.

    - `tolerance`: the relative error that passes.
    - `modes`: which of `"reverse"` and `"forward"` there are.
    - `measured`: for each leaf that was judged, the direction and its slope.
    - `unsettled`: the names of directions along which the slope depends on the step, down to
        the shortest.
    """

    def __init__(self, program: LossProgram, tolerance: float, modes: Sequence[str], seed: int):
        self.program, self.tolerance, self.modes = program, tolerance, modes
        self.rng = np.random.default_rng(seed)
        self.leaves = program.leaves
        self.scales = list(map(_scale, self.leaves))
        self.gradient = program.gradient if "reverse" in modes else None
        # Far away, a loop that waits for convergence may never end.
        waits = any(e.primitive.name == "while" for e in equations(program.traced.program))
        self.long_steps = _LONG_STEPS[:1] if waits else _LONG_STEPS
        self.evaluations = 0
        self.measured: dict[int, tuple[Direction, Slope]] = {}
        self.unsettled: list[str] = []

    def direction(self, name: str, kept: Sequence[int]) -> Direction:
        """A random direction, relative to the entries of the leaves, with a component along
        the gradient."""
        tangents = [np.zeros_like(x) for x in self.leaves]
        for i in kept:
            noise = _normal(self.rng, self.leaves[i])
            if self.gradient is not None:
                g = as_double(self.gradient[i]) * self.scales[i]
                g = np.where(np.isfinite(g), g, 0)
                size = np.abs(g)
                sign = np.divide(np.conj(g), size, out=np.zeros_like(g), where=size > 0)
                noise = noise + 2 * sign / np.sqrt(max(g.size, 1))
            tangents[i] = np.asarray(self.scales[i] * noise)
        return Direction(name, tuple(kept), tangents)

    def judge_leaf(self, leaf: int) -> LeafVerdict:
        """The verdict on one leaf. An error that only the tolerance admits may be larger along
        other directions: by chance, it is small along a few."""
        name = self.program.names[leaf]
        verdict = self.judge(self.direction(name, [leaf]))
        for _ in range(_MORE_DIRECTIONS):
            _, slope = self.measured[leaf]
            gap = _gap(verdict.reverse, verdict.forward, slope)
            if verdict.verdict != RIGHT or gap <= _SAFETY * slope.error:
                break
            verdict = self.judge(self.direction(name, [leaf]))
        return verdict

    def judge(self, direction: Direction) -> LeafVerdict:
        verdict = self._judge(direction, False)
        if verdict.verdict == WRONG and self.program.stops:
            first = self.measured.copy()
            held = self._judge(direction, True)
            if held.verdict in (RIGHT, DEAD):
                return dataclasses.replace(held, verdict=STOPPED)
            if held.verdict == UNMEASURED:
                self.measured = first
            else:
                verdict = held
        return verdict

    def _judge(self, direction: Direction, is_held: bool) -> LeafVerdict:
        samples = self.program.samples(self.leaves, direction.tangents, is_held)
        verdict, slope = self._compare(direction, self.leaves, self.gradient, samples)
        if verdict.verdict == WRONG:
            verdict = self._unless_kink(direction, verdict, samples, slope, is_held)
        if verdict.verdict == WRONG and not _is_evidence(samples, slope, verdict):
            verdict = dataclasses.replace(verdict, verdict=UNMEASURED)
            self.unsettled.append(direction.name)
        self.evaluations += samples.count
        if len(direction.kept) == 1:
            self.measured[direction.kept[0]] = (direction, slope)
        return verdict

    def is_wrong(self, leaf: int, derivative: float) -> bool:
        """Whether another derivative along the direction of a leaf that was judged already is
        wrong."""
        direction, slope = self.measured[leaf]
        gap = abs(derivative - slope.value)
        return not gap <= self._admitted(self._size(direction, self.gradient), slope)

    def _size(self, direction: Direction, gradient: Any) -> float:
        """How large a derivative along a direction usually is."""
        if gradient is None:
            return 0.0
        sizes = [norm(as_double(gradient[i]) * self.scales[i]) for i in direction.kept]
        return norm(np.array(sizes))

    def _admitted(self, size: float, slope: Slope) -> float:
        return self.tolerance * max(size, abs(slope.value)) + _SAFETY * slope.error

    def _compare(self, direction, leaves, gradient, samples: Samples):
        """The verdict by central differences, which takes a kink for a wrong gradient."""
        reverse = forward = None
        if gradient is not None:
            reverse = along(gradient, direction.tangents)
        if "forward" in self.modes:
            forward = self.program.tangent(leaves, direction.tangents)
        have = reverse if reverse is not None else forward or 0.0
        size = self._size(direction, gradient) if reverse is not None else abs(have)
        slope = central_slope(samples, size)
        floor = _FLOOR * abs(samples(0.0))
        gap = _gap(reverse, forward, slope)
        if gap > self._admitted(size, slope) + floor:
            slope = confirmed_slope(samples, slope)
            gap = _gap(reverse, forward, slope)
        if not np.isfinite(gap):
            verdict = WRONG if np.isfinite(slope.error) else UNMEASURED
        elif gap > self._admitted(size, slope) + floor:
            verdict = WRONG if gap > self._rounding(direction, samples) else UNMEASURED
        elif size <= floor:
            is_exact = size == 0 and _SAFETY * slope.error <= 1e-6 * abs(samples(0.0))
            verdict = self._of_zero(samples) if is_exact else UNMEASURED
        else:
            is_useless = _SAFETY * slope.error > max(_USELESS, 2 * self.tolerance) * size
            verdict = UNMEASURED if is_useless else RIGHT
        relative = gap / max(size, abs(slope.value), np.finfo(float).tiny)
        numbers = reverse, forward, slope.value, slope.error, relative
        return LeafVerdict(direction.name, verdict, *numbers), slope

    def _rounding(self, direction: Direction, samples: Samples) -> float:
        """What the loss may change by without any change of its value. Where steps change it by
        a few units of rounding, the numbers in it are as large as the loss itself is far away;
        where they do not change it at all, as the leaves. Elsewhere, the differences show their
        rounding, and a loss that grows, as a power does, is no excuse."""
        near = [[samples(sign * k * 2.0**-10) for k in range(3)] for sign in (1, -1)]
        is_stair = all(a == b or b == c for a, b, c in near)
        steps = self.long_steps if is_stair else _LONG_STEPS[:1]
        far = [samples(sign * h) for h in steps for sign in (1, -1)]
        size = max(map(abs, filter(np.isfinite, far)), default=0.0)
        if all(y == samples(0.0) for y in (*far[:2], near[0][2], near[1][2])):
            size = max(size, *(float(np.max(np.abs(t), initial=0)) for t in direction.tangents))
        return 4 * samples.eps * size

    def _of_zero(self, samples: Samples) -> str:
        """Of a zero gradient: whether the loss changes over longer steps (a staircase)."""
        far = [samples(sign * h) - samples(0.0) for h in self.long_steps for sign in (1, -1)]
        size = max(abs(samples(0.0)), max(map(abs, filter(np.isfinite, far)), default=0.0))
        return FLAT if any(abs(x) > 1e-9 * size for x in far if np.isfinite(x)) else DEAD

    # ------------------------------------------------------------ kinks

    def _unless_kink(self, direction, verdict: LeafVerdict, samples, slope, is_held):
        """At a kink of the loss, the gradient is one of many: it is between the slopes on both
        sides, along each direction. It is judged at a point nearby, too, which in general has
        no kink."""
        sides = with_sides(samples, slope)
        have = [d for d in (verdict.reverse, verdict.forward) if d is not None]
        if not all(map(np.isfinite, have)):
            return verdict
        if not sides.is_kink:
            return verdict
        is_between = all(map(sides.admits, have))
        if not self._parts_are_right(direction, is_between, is_held):
            return verdict
        nearby, is_evidence = self._nearby(direction, is_held)
        if nearby.verdict == WRONG and is_evidence:
            return verdict
        t = np.concatenate([direction.tangents[i].ravel() for i in direction.kept])
        unit = float(t[0].real) if t.size == 1 else 1.0
        left, right = sides.left / unit, sides.right / unit
        return dataclasses.replace(verdict, verdict=KINK, left=left, right=right)

    def _nearby(self, direction: Direction, is_held: bool = False) -> tuple[LeafVerdict, bool]:
        """The verdict at a point nearby, and whether it is evidence."""
        pairs = zip(self.leaves, self.scales, strict=True)
        moved = [x + _MOVE * s * _normal(self.rng, x) for x, s in pairs]
        gradient = self.program.gradient_at(moved) if self.gradient is not None else None
        samples = self.program.samples(moved, direction.tangents, is_held)
        nearby, slope = self._compare(direction, moved, gradient, samples)
        is_kink = with_sides(samples, slope).is_kink
        self.evaluations += samples.count
        return nearby, not is_kink and _is_evidence(samples, slope, nearby)

    def is_right_nearby(self, direction: Direction) -> bool:
        nearby, _ = self._nearby(direction, bool(self.program.stops))
        return nearby.verdict == RIGHT

    def _parts_are_right(self, direction: Direction, is_between: bool, is_held: bool) -> bool:
        """Whether the gradient is right, or between the slopes of a kink, along parts of a
        direction: the kinks of several entries may cancel along all of it, or hide another one.
        Single entries are parts, and where all of them are wrong, its halves. False if there is
        no kink.

        - `is_between`: whether it is between the slopes along the whole direction.
        """
        (number, *others) = direction.kept
        t = direction.tangents[number]
        entries = np.flatnonzero(t)
        if others or entries.size < 2 or self.gradient is None:
            return is_between
        n = min(entries.size, _MOST_PARTS)
        singles = list(self.rng.choice(entries, (n, 1), replace=False))
        found = [self._part(direction, part, is_held) for part in singles]
        if not all(is_right for is_right, _ in found):
            return False
        if is_between or n == entries.size:
            return is_between or any(is_kink for _, is_kink in found)
        waiting, has_kink, n = [entries], False, 0
        while waiting:
            for half in np.array_split(waiting.pop(), 2):
                is_right, is_kink = self._part(direction, half, is_held)
                n, has_kink = n + 1, has_kink or is_kink
                if not is_right and (half.size == 1 or n >= _MOST_PARTS):
                    return False
                waiting += [] if is_right else [half]
        return has_kink

    def _part(self, direction: Direction, part: np.ndarray, is_held: bool) -> tuple[bool, bool]:
        """Whether the gradient is right along some entries of a direction, and whether there is
        a kink."""
        (number,) = direction.kept
        t = direction.tangents[number]
        alone = np.zeros_like(t)
        alone.flat[part] = t.flat[part]
        tangents = [alone if i == number else x for i, x in enumerate(direction.tangents)]
        samples = self.program.samples(self.leaves, tangents, is_held)
        of_part = Direction(direction.name, (number,), tangents)
        verdict, slope = self._compare(of_part, self.leaves, self.gradient, samples)
        is_wrong = verdict.verdict == WRONG
        sides = with_sides(samples, slope) if is_wrong else slope
        self.evaluations += samples.count
        is_kink = is_wrong and sides.is_kink
        between = is_kink and sides.admits(along(self.gradient or [], tangents))
        return not is_wrong or between, is_kink


def _is_evidence(samples: Samples, slope: Slope, verdict: LeafVerdict) -> bool:
    have = [d for d in (verdict.reverse, verdict.forward) if d is not None and np.isfinite(d)]
    return not have or is_settled(samples, slope, max(have, key=abs))


def _gap(reverse: float | None, forward: float | None, slope: Slope) -> float:
    """By how much the derivatives differ from the differences."""
    if reverse is None:
        return abs(forward - slope.value) if forward is not None else np.nan
    gap = abs(reverse - slope.value)
    # Forward mode multiplies the zero tangents of the other leaves, too. Where that is NaN and
    # reverse mode is not, it says nothing about this leaf.
    if forward is None or not np.isfinite(forward) or not np.isfinite(gap):
        return gap
    return max(gap, abs(forward - slope.value))


def _scale(x: Any) -> np.ndarray:
    """The size of the entries, so that a difference takes a small step in each."""
    size = np.abs(x)
    finite = size[np.isfinite(size)]
    usual = norm(finite) / max(np.sqrt(finite.size), 1) or 1.0
    # An entry that is much smaller than the others is not a scale of its own.
    return np.asarray(np.where(np.isfinite(size), np.maximum(size, 1e-3 * usual), usual))


def _normal(rng, x: Any) -> np.ndarray:
    # Less than the component along the gradient, so that the two do not add up to zero.
    draw = lambda: np.clip(rng.standard_normal(np.shape(x)), -1.5, 1.5)
    return np.asarray(draw() + 1j * draw() if np.iscomplexobj(x) else draw())
