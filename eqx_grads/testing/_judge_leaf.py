"""The verdict on the gradient of one leaf, from its differences along a random direction.

Where the gradient disagrees with the differences, experiments tell why: the values of
`stop_gradient`s are held; at a kink, the slopes on both sides are compared, entry by entry, as
several kinks may cancel; and a point nearby is judged.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._jaxprs.operands import fill
from .._jaxprs.structure import holds
from ._compare import as_double, norm, scale_of
from ._differences import Samples, Slope
from ._gradient_report import DEAD, FLAT, KINK, LeafVerdict, RIGHT, STOPPED, UNMEASURED, WRONG
from ._loss_program import along, LossProgram
from ._random_tangents import normal_like


# How many times its estimated error a difference may be off.
_SAFETY = 10.0
# An estimate of the differences with a larger relative error is not evidence.
_USELESS = 0.03
# How far a model is moved off a kink, relative to its entries.
_MOVE = 1e-3
# How many entries are judged alone at most.
_MOST_ENTRIES = 24
# A number that differs from zero by less than this, relative to the loss, is zero.
_FLOOR = 1e-12
_LONG_STEPS = (0.125, 0.5, 1.0, 4.0)
# Smaller numbers are out of the range of float32.
_TINY = float(np.finfo(np.float32).tiny)


class _Found(NamedTuple):
    """- `admitted`: by how much a derivative may differ from the slope."""

    verdict: LeafVerdict
    samples: Samples
    slope: Slope
    admitted: float

    @property
    def derivatives(self) -> list[float]:
        return [d for d in (self.verdict.reverse, self.verdict.forward) if d is not None]


class Judge:
    """Holds a gradient against differences.

    - `tolerance`: the relative error that passes.
    - `modes`: which of `"reverse"` and `"forward"` there are.
    """

    def __init__(self, program: LossProgram, tolerance: float, modes: Sequence[str], seed: int):
        self.program, self.tolerance, self.modes = program, tolerance, modes
        self.rng = np.random.default_rng(seed)
        self.leaves = program.leaves
        # An entry that is much smaller than the others is not a scale of its own.
        self.scales = [scale_of(x, least=1e-3) for x in self.leaves]
        self.gradient = program.gradient if "reverse" in modes else None
        # Far away, a loop that waits for convergence may never end.
        waits = holds(program.traced.program, "while")
        self._long_steps = _LONG_STEPS[:1] if waits else _LONG_STEPS
        self._tiny = 0.0 if program.lowest_of_user is None else _TINY
        self._measured: dict[int, tuple[np.ndarray, list[_Found]]] = {}

    def direction(self, leaf: int) -> np.ndarray:
        """A random direction of a leaf, relative to its entries, with a component along the
        gradient."""
        scale = self.scales[leaf]
        # Less than the component along the gradient, so that the two do not add up to zero.
        (noise,) = normal_like(self.rng, [self.leaves[leaf]], most=1.5)
        if self.gradient is not None:
            g = as_double(self.gradient[leaf]) * scale
            size = np.abs(np.where(np.isfinite(g), g, 0))
            sign = np.divide(np.conj(g), size, out=np.zeros_like(g), where=size > 0)
            noise = noise + 2 * sign / np.sqrt(g.size)
        return np.asarray(scale * noise)

    def judge(self, leaf: int) -> LeafVerdict:
        t = self.direction(leaf)
        found = self._judge(leaf, t, is_held=False)
        self._measured[leaf] = t, [found]
        if found.verdict.verdict != WRONG or not self.program.stops:
            return found.verdict
        held = self._judge(leaf, t, is_held=True)
        self._measured[leaf][1].append(held)
        if held.verdict.verdict in (RIGHT, DEAD):
            return dataclasses.replace(held.verdict, verdict=STOPPED)
        return (held if held.verdict.verdict in (KINK, FLAT) else found).verdict

    def is_wrong(self, leaf: int, gradient: Sequence[Any]) -> bool:
        """Whether another gradient is wrong along the direction of a leaf that was judged."""
        t, measured = self._measured[leaf]
        slope = along(gradient, self._only(leaf, t))
        return not any(abs(slope - found.slope.value) <= found.admitted for found in measured)

    def is_right_nearby(self, leaf: int) -> bool:
        nearby = self._nearby(leaf, self._measured[leaf][0], bool(self.program.stops))
        return nearby.verdict.verdict == RIGHT

    def _judge(self, leaf: int, t: np.ndarray, is_held: bool) -> _Found:
        found = self._compare(leaf, t, is_held)
        verdict = found.verdict
        if verdict.verdict == WRONG:
            verdict = self._unless_kink(leaf, t, found, is_held)
        if verdict.verdict == WRONG and not found.samples.is_settled(found.slope):
            verdict = dataclasses.replace(verdict, verdict=UNMEASURED)
        return found._replace(verdict=verdict)

    def _only(self, leaf: int, t: np.ndarray) -> list[np.ndarray]:
        return fill([np.zeros_like(x) for x in self.leaves], [leaf], [t])

    def _compare(self, leaf: int, t: np.ndarray, is_held: bool, at: Any = None) -> _Found:
        """The verdict by central differences, which takes a kink for a wrong gradient.

        - `at`: leaves and a gradient, by default the model's.
        """
        leaves, gradient = at or (self.leaves, self.gradient)
        tangents = self._only(leaf, t)
        samples = self.program.samples(leaves, tangents, is_held)
        reverse = forward = None
        if "forward" in self.modes:
            forward = self.program.tangent(leaves, tangents)
        # How large a derivative along a direction usually is.
        size = abs(forward or 0.0)
        if gradient is not None:
            reverse = along(gradient, tangents)
            size = norm(as_double(gradient[leaf]) * self.scales[leaf])
            # It multiplies the zero tangents of the other leaves, too. If it is NaN, that says
            # nothing about this leaf.
            forward = None if np.isnan(forward or 0.0) else forward
        floor = _FLOOR * abs(samples(0.0)) + self._tiny
        admits = lambda s: self.tolerance * max(size, abs(s.value)) + _SAFETY * s.error
        derivatives = [d for d in (reverse, forward) if d is not None]
        gap_to = lambda s: max(abs(d - s.value) for d in derivatives)
        slope = samples.slope(size)
        if gap_to(slope) > admits(slope) + floor:
            slope = samples.confirmed(slope)
        gap, admitted = gap_to(slope), admits(slope)
        if not np.isfinite(gap):
            is_known, known = np.isfinite(slope.error), WRONG
        elif gap > admitted + floor:
            is_known, known = gap > self._rounding(samples, t), WRONG
        elif size <= floor:
            is_known = size == 0 and _SAFETY * slope.error <= 1e-6 * abs(samples(0.0))
            known = self._of_zero(samples)
        else:
            is_known = _SAFETY * slope.error <= max(_USELESS, 2 * self.tolerance) * size
            known = RIGHT
        relative = gap / max(size, abs(slope.value), np.finfo(float).tiny)
        numbers = reverse, forward, slope.value, slope.error, relative
        verdict = LeafVerdict(
            self.program.names[leaf], known if is_known else UNMEASURED, *numbers
        )
        return _Found(verdict, samples, slope, admitted)

    def _far(self, samples: Samples) -> np.ndarray:
        """The finite values at long steps."""
        far = np.array([samples(sign * h) for h in self._long_steps for sign in (1, -1)])
        return far[np.isfinite(far)]

    def _rounding(self, samples: Samples, t: np.ndarray) -> float:
        """How far rounding may hide a change of the loss, where steps change it by a few units
        of rounding at most: the numbers in the loss may be as large as the loss is far away, or
        as the leaf. Elsewhere, the differences show their rounding."""
        near = {samples(k * 2.0**-10) for k in range(-2, 3)}
        if len(near) > 3:
            return 0.0
        return 4 * samples.eps * float(np.max(np.abs([*self._far(samples), *t.ravel()])))

    def _of_zero(self, samples: Samples) -> str:
        """Whether a loss with a zero gradient is a parabola, or changes over longer steps only
        (a staircase)."""
        coarse, fine = (samples(h) - samples(0.0) for h in (2.0**-6, 2.0**-7))
        if abs(coarse - 4 * fine) < abs(fine):
            return RIGHT
        far = self._far(samples) - samples(0.0)
        size = max(abs(samples(0.0)), np.max(np.abs(far), initial=0.0))
        return FLAT if np.any(np.abs(far) > 1e-9 * size) else DEAD

    def _unless_kink(self, leaf: int, t: np.ndarray, found: _Found, is_held: bool):
        """At a kink of the loss, the gradient is one of many: along each entry, it is right or
        between the slopes on both sides. Along the gradient in the entries with a kink, which
        is smooth for a tie that moves as a whole, it is right, or between the gradients on the
        sides that it was taken from. It is judged at a point nearby, too, which in general has
        no kink."""
        sides, wrong, unit = found.samples.sides, found.verdict, 1.0
        if not sides.is_kink:
            return wrong
        together, toward = np.zeros_like(t), np.zeros_like(t)
        for entry in np.sort(self.rng.permutation(np.flatnonzero(t))[:_MOST_ENTRIES]):
            alone = np.zeros_like(t)
            alone.flat[entry] = t.flat[entry]
            of_entry = self._compare(leaf, alone, is_held)
            if of_entry.verdict.verdict == WRONG:
                of_both = of_entry.samples.sides
                if not (of_both.is_kink and all(map(of_both.admits, of_entry.derivatives))):
                    return wrong
                sides, unit = of_both, float(np.real(t.flat[entry]))
                if self.gradient is not None:
                    together.flat[entry] = np.conj(self.gradient[leaf].flat[entry])
                    left, right = (abs(of_entry.derivatives[0] - s) for s in of_both[:2])
                    toward.flat[entry] = t.flat[entry] * (1 if right <= left else -1)
        if size := np.max(np.abs(together)):
            step = together / size * self.scales[leaf]
            of_all = self._compare(leaf, step, is_held)
            if of_all.verdict.verdict == WRONG and not of_all.samples.sides.is_kink:
                move = self._only(leaf, _MOVE * toward)
                ends = [
                    along(self.program.gradient_at(xs), self._only(leaf, step))
                    for xs in (list(map(op, self.leaves, move)) for op in (np.add, np.subtract))
                ]
                slope, margin = of_all.derivatives[0], 0.01 * max(map(abs, ends))
                if not min(ends) - margin <= slope <= max(ends) + margin:
                    return wrong
        nearby = self._nearby(leaf, t, is_held)
        if nearby.verdict.verdict == WRONG and not nearby.samples.sides.is_kink:
            if nearby.samples.is_settled(nearby.slope):
                return wrong
        left, right = [sides.left / unit, sides.right / unit][:: 1 if unit > 0 else -1]
        return dataclasses.replace(wrong, verdict=KINK, left=left, right=right)

    def _nearby(self, leaf: int, t: np.ndarray, is_held: bool) -> _Found:
        drawn = normal_like(self.rng, self.leaves)
        moved = [
            x + _MOVE * s * t for x, s, t in zip(self.leaves, self.scales, drawn, strict=True)
        ]
        gradient = None if self.gradient is None else self.program.gradient_at(moved)
        return self._compare(leaf, t, is_held, (moved, gradient))
