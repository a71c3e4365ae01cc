"""The verdict on the gradient of one leaf, from its differences along random directions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._compare import norm
from ._gradient_report import DEAD, KINK, LeafVerdict, RIGHT, UNMEASURED, WRONG
from ._loss_program import along, in_float64, LossProgram
from ._slope import (
    central_slope,
    confirmed_slope,
    is_settled,
    Samples,
    Slope,
    with_sides,
)


# How many times its estimated error a difference may be off.
_SAFETY = 10.0
# An estimate of the differences with a larger relative error is no evidence.
_USELESS = 0.03
# Along how many directions a leaf is judged at most, beside the first.
_MORE_DIRECTIONS = 3
# How far a model is moved off a kink, relative to its entries.
_MOVE = 1e-3


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
    - `rounding`: for each leaf an estimate of the absolute error of its gradient in less than
        float64, to be compared with `size`.
    - `unsettled`: the names of directions along which the slope depends on the step, down to
        the shortest.
    """

    def __init__(self, program: LossProgram, tolerance: float, modes: Sequence[str], seed: int):
        self.program = program
        self.tolerance = tolerance
        self.modes = modes
        self.rng = np.random.default_rng(seed)
        self.leaves = [in_float64(x) for x in program.leaves]
        self.scales = list(map(_scale, self.leaves))
        self.gradient = program.gradient if "reverse" in modes else None
        # What differs from zero by less than this, relative to the loss, is zero.
        self.floor = 1e-12
        if program.lowest is not None:
            self.floor = 4 * float(jnp.finfo(program.lowest).eps)
        self.rounding = self._rounding_of_gradient()
        self.evaluations = 0
        self.measured: dict[int, tuple[Direction, Slope]] = {}
        self.unsettled: list[str] = []

    def _rounding_of_gradient(self) -> list[float]:
        """By how much the gradient changes when the model changes by what rounding does."""
        rounding = [0.0] * len(self.leaves)
        if self.program.lowest is None or self.gradient is None:
            return rounding
        eps = float(jnp.finfo(self.program.lowest).eps)
        for _ in range(2):
            moved = [x * (1 + eps * self.rng.uniform(-1, 1, x.shape)) for x in self.leaves]
            other = self.program.gradient_at(moved)
            for i, (g, h, s) in enumerate(zip(self.gradient, other, self.scales, strict=True)):
                change = norm((in_float64(g) - in_float64(h)) * s)
                rounding[i] = max(rounding[i], change if np.isfinite(change) else 0.0)
        return rounding

    def direction(self, name: str, kept: Sequence[int]) -> Direction:
        """A random direction, relative to the entries of the leaves, with a component along
        the gradient."""
        tangents = [np.zeros_like(x) for x in self.leaves]
        for i in kept:
            noise = _normal(self.rng, self.leaves[i])
            if self.gradient is not None:
                g = in_float64(self.gradient[i]) * self.scales[i]
                g = np.where(np.isfinite(g), g, 0)
                size = np.abs(g)
                sign = np.divide(np.conj(g), size, out=np.zeros_like(g), where=size > 0)
                noise = noise + 2 * sign / np.sqrt(max(g.size, 1))
            tangents[i] = np.asarray(self.scales[i] * noise)
        return Direction(name, tuple(kept), tangents)

    def size(self, direction: Direction, gradient: Any) -> float:
        """How large a derivative along a direction usually is."""
        if gradient is None:
            return 0.0
        return norm(
            np.array([norm(in_float64(gradient[i]) * self.scales[i]) for i in direction.kept])
        )

    def judge_leaf(self, leaf: int) -> LeafVerdict:
        """The verdict on one leaf. An error that only the tolerance admits may be larger along
        other directions: by chance, it is small along a few."""
        verdict = self._judge_alone(leaf)
        for _ in range(_MORE_DIRECTIONS):
            direction, slope = self.measured[leaf]
            gap = _gap(verdict.reverse, verdict.forward, slope)
            explained = _SAFETY * (slope.error + self._rounding(direction))
            if verdict.verdict != RIGHT or gap <= explained:
                break
            verdict = self._judge_alone(leaf)
        return verdict

    def _judge_alone(self, leaf: int) -> LeafVerdict:
        return self.judge(self.direction(self.program.names[leaf], [leaf]))

    def judge(self, direction: Direction) -> LeafVerdict:
        samples = self.program.samples(self.leaves, direction.tangents)
        verdict, slope = self._compare(direction, self.leaves, self.gradient, samples)
        if verdict.verdict == WRONG:
            verdict = self._unless_kink(direction, verdict, with_sides(samples, slope))
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
        size = self.size(direction, self.gradient)
        gap = abs(derivative - slope.value)
        return not gap <= self._admitted(direction, size, slope)

    def _compare(self, direction, leaves, gradient, samples: Samples):
        """The verdict by central differences, which takes a kink for a wrong gradient."""
        reverse = forward = None
        if gradient is not None:
            reverse = along(gradient, direction.tangents)
        if "forward" in self.modes:
            forward = self.program.tangent(leaves, direction.tangents)
        have = reverse if reverse is not None else forward or 0.0
        size = self.size(direction, gradient) if reverse is not None else abs(have)
        slope = central_slope(samples, size)
        floor = self.floor * abs(samples(0.0))
        gap = _gap(reverse, forward, slope)
        if gap > self._admitted(direction, size, slope) + floor:
            slope = confirmed_slope(samples, slope)
            gap = _gap(reverse, forward, slope)
        if not np.isfinite(gap):
            verdict = WRONG if np.isfinite(slope.error) else UNMEASURED
        elif gap > self._admitted(direction, size, slope) + floor:
            verdict = WRONG
        elif size <= floor:
            is_exact = size == 0 and _SAFETY * slope.error <= 1e-6 * abs(samples(0.0))
            verdict = DEAD if is_exact else UNMEASURED
        else:
            error = _SAFETY * (slope.error + self._rounding(direction))
            is_useless = error > max(_USELESS, 2 * self.tolerance) * size
            verdict = UNMEASURED if is_useless else RIGHT
        relative = gap / max(size, abs(slope.value), np.finfo(float).tiny)
        return LeafVerdict(
            direction.name, verdict, reverse, forward, slope.value, slope.error, relative
        ), slope

    def _rounding(self, direction: Direction) -> float:
        return norm(np.array([self.rounding[i] for i in direction.kept]))

    def _admitted(self, direction: Direction, size: float, slope: Slope) -> float:
        size = max(size, abs(slope.value))
        return self.tolerance * size + _SAFETY * (slope.error + self._rounding(direction))

    def _unless_kink(self, direction, verdict: LeafVerdict, slope: Slope) -> LeafVerdict:
        """At a kink of the loss, the gradient is one of many. It can be judged at a point
        nearby, which in general has no kink."""
        have = [d for d in (verdict.reverse, verdict.forward) if d is not None]
        have = [d for d in have if np.isfinite(d)]
        if not have:
            return verdict
        is_kink = slope.is_kink and all(map(slope.admits, have))
        if not is_kink and not self._has_kink(direction, abs(have[0] - slope.value)):
            return verdict
        moved = [
            x + _MOVE * s * _normal(self.rng, x)
            for x, s in zip(self.leaves, self.scales, strict=True)
        ]
        gradient = self.program.gradient_at(moved) if self.gradient is not None else None
        samples = self.program.samples(moved, direction.tangents)
        nearby, slope = self._compare(direction, moved, gradient, samples)
        sides = with_sides(samples, slope)
        self.evaluations += samples.count
        is_wrong = (
            nearby.verdict == WRONG
            and not sides.is_kink
            and _is_evidence(samples, slope, nearby)
        )
        return dataclasses.replace(verdict, verdict=WRONG if is_wrong else KINK)

    def _has_kink(self, direction: Direction, gap: float) -> bool:
        """Whether there is a kink along some direction that is as large as a gap. The kinks of
        several entries may cancel along one direction."""
        for _ in range(4):
            other = self.direction(direction.name, direction.kept)
            samples = self.program.samples(self.leaves, other.tangents)
            slope = with_sides(samples, Slope(0.0, 0.0))
            self.evaluations += samples.count
            if slope.is_kink and abs(slope.right - slope.left) > 0.05 * gap:
                return True
        return False


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
