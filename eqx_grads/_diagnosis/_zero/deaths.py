"""Where the tangent of a leaf ends, by one pass of forward mode along a random direction.

Beside each value, the pass carries the tangent, and the operations at which a tangent that is
not zero became zero on the way to the value: its deaths. A value that still moves has no
deaths. The deaths of the loss are the causes.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs.evaluate import bind, restricted
from ..._jaxprs.interpret import Domain, interpret
from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    holds,
    inner_programs,
    Scan,
    ShardMap,
    structure,
    While,
)
from ..carried import AbstractCarrier, enter, outward, Place
from ..eager import compute, compute_all
from ..pairs import differentiable_pairs, is_inexact, operands_of_outputs
from ..source_lines import is_of_jax


@dataclasses.dataclass(eq=False)
class Death:
    """An operation whose operands move, and output `k` does not.

    - `values`: its operands; none if it is known by structure only. `step`: of each loop around
        it, the last one, outermost first. `is_used`: whether the loss uses its result.
    """

    place: Place
    k: int
    values: Sequence["Fact"]
    step: tuple[int, ...] = ()
    is_used: bool = True


Died = frozenset[Death]
NONE: Died = frozenset()


class Fact(NamedTuple):
    """A value, and what is carried beside it.

    - `t`: its tangent; `None` if that is zero. `died`: why it is zero.
    - `made`: the input or the operation that it is made by; of zeros, where they begin.
    """

    x: Any
    t: Any = None
    died: Died = NONE
    made: Place | str = ""

    @property
    def truth(self) -> Any:
        return self.x


class Deaths(AbstractCarrier[Fact]):
    """The pass through a loss."""

    def __init__(self, known: dict[Any, Any]):
        self._found: dict[tuple[Any, ...], Death] = {}
        self._known = known  # of `push`

    def constant(self, x):
        return Fact(jnp.asarray(x))

    def map(self, fn, values):
        t = None
        if any(f.t is not None for f in values):
            zeros = lambda f: np.zeros(np.shape(f.x), jnp.result_type(f.x))
            t = _alive(fn(*(zeros(f) if f.t is None else f.t for f in values)))
        died = _died(values) if t is None else NONE
        return Fact(fn(*(f.x for f in values)), t, died, values[0].made)

    def decide(self, by, outs):
        return [f if f.t is not None else f._replace(died=f.died | by.died) for f in outs]

    def visit(self, place, values):
        eqn, known = place.eqn, structure(place.eqn)
        moves = any(f.t is not None for f in values)
        if not moves and not _died(values):
            return self._values(place, values)
        is_unit = moves and isinstance(known, Call) and is_of_jax(eqn)
        is_loop = isinstance(known, Scan | While)
        if isinstance(known, Call | Checkpoint) and not is_unit:
            return None
        if isinstance(known, Cond) and not known.by_platform:
            return self._branch(place, values)
        if is_loop and any(map(has_backward, _inside(eqn))):
            # Its forward mode may be another one: step by step, the backward pass is asked.
            inside = outs = list(enter(place, values, self))
        else:
            inside, outs = None, self._values(place, values)
            if moves:
                ts = map(_alive, self._push(place, values))
                outs = [f._replace(t=t) for f, t in zip(outs, ts, strict=True)]
        reads = [range(len(values))] * len(outs) if known is None else operands_of_outputs(eqn)
        lost = [
            f.t is None and any(values[i].t is not None for i in read)
            for f, read in zip(outs, reads, strict=True)
        ]
        if inside is None and (any(lost) or _died(values)):
            if is_unit or is_loop:
                inside = enter(place, values, self)
            elif isinstance(known, ShardMap) or _is_solver(eqn):
                inside = self._by_structure(place, values)
        before = _died(values)
        for k, f in enumerate(outs):
            if f.t is None:
                died = before if inside is None else inside[k].died
                if lost[k]:
                    died = self._causes(place, k, values, died)
                outs[k] = f._replace(died=died)
        return outs

    def _causes(self, place, k, values, died: Died) -> Died:
        """The deaths of a tangent that is lost in an operation. A function of JAX is one
        operation, unless a single one in it is the cause."""
        within = {d for d in died if any(p.eqn is place.eqn for p in outward(d.place))}
        if within and not (isinstance(structure(place.eqn), Call) and len(within) > 1):
            return died
        return died - within | {self._death(place, k, values)}

    def _death(self, place: Place, k: int, values: Sequence[Fact]) -> Death:
        around = list(outward(place))
        key = (k, *(id(p.eqn) for p in around))
        death = self._found.setdefault(key, Death(place, k, values))
        death.step = tuple(p.step for p in reversed(around) if p.step is not None)
        return death

    def _values(self, place, values) -> list[Fact]:
        eqn, kind = place.eqn, kind_of(place.eqn)
        is_cast = eqn.primitive.name == "convert_element_type"
        passes = is_cast or kind.linear not in (None, "no") or kind.layout or kind.identity
        facts = []
        for x in compute(eqn, [f.x for f in values]):
            made = place
            if passes and is_inexact(x) and not is_alive(x):
                of_input = is_cast and isinstance(values[0].made, str)
                zeros = (f for f in values if of_input or is_inexact(f.x))
                made = next((f.made for f in zeros if not is_alive(f.x)), place)
            facts.append(Fact(x, made=made))
        return facts

    def _push(self, place: Place, values) -> list[Any]:
        eqn = place.eqn
        if _is_solver(eqn):  # what it loses is known without running its steps
            moving = {i for i, f in enumerate(values) if f.t is not None}
            pairs = differentiable_pairs(eqn, moving) or [moving] * len(eqn.outvars)
            return [_one(v) if of else None for v, of in zip(eqn.outvars, pairs, strict=True)]
        try:
            return push(eqn, [f.x for f in values], [f.t for f in values], self._known)
        except Exception:  # JAX has no one type of error for what it can't differentiate
            return list(map(_one, eqn.outvars))

    def _branch(self, place, values) -> list[Fact]:
        outs, decided = list(enter(place, values, self)), values[0].died
        reads = operands_of_outputs(place.eqn)
        for k, f in enumerate(outs):
            if f.t is None:
                moves = any(values[i].t is not None for i in reads[k])
                own = {self._death(place, k, values)} if moves and not f.died else NONE
                outs[k] = f._replace(died=f.died | decided | own)
        return outs

    def _by_structure(self, place, values) -> list[Fact]:
        """The deaths in a program that can't be walked: what ends a tangent for any values."""
        (program,) = inner_programs(place.eqn)

        def apply(eqn, ins, path):
            at = place
            for around in (*path, eqn):
                at = Place(around, program, at)
            is_zero = kind_of(eqn).derivative == "zero"
            t, died = any(f.t for f in ins), _died(ins)
            dead = lambda k: died | ({self._death(at, k, ())} if t else NONE)
            return [
                Fact(None, True)
                if t and is_inexact(v) and not is_zero
                else Fact(None, died=dead(k))
                for k, v in enumerate(eqn.outvars)
            ]

        either = lambda a, b: Fact(None, a.t or b.t, a.died | b.died)
        domain = Domain[Fact](
            constant=lambda x: Fact(None),
            join=either,
            apply=apply,
            decide=lambda eqn, index, out: out._replace(died=out.died | index.died),
        )
        ins = [Fact(None, f.t is not None or None, f.died) for f in values]
        return list(interpret(program, ins, domain).outs)


def _is_solver(eqn) -> bool:
    return isinstance(structure(eqn), CallWithRule) and holds(eqn, While)


def _inside(eqn) -> Iterable[Any]:
    return (e for program in inner_programs(eqn) for e in equations(program))


def _alive(t: Any) -> Any:
    return t if is_alive(t) else None


def _died(facts: Iterable[Fact]) -> Died:
    return NONE.union(*(f.died for f in facts))


# ---------------------------------------------------------------- the tangents of one operation


def is_alive(t: Any) -> bool:
    return t is not None and bool(np.any(np.asarray(t)))


def has_backward(eqn: Any) -> bool:
    """Whether an equation calls a function with a backward pass of its own."""
    return isinstance(structure(eqn), CallWithRule) and eqn.primitive.name != "custom_jvp_call"


def push(
    eqn: Any, xs: Sequence[Any], ts: Sequence[Any], known: dict[Any, Any] | None = None
) -> list[Any]:
    """The tangents of the outputs of an equation; `None` for an output without a tangent.

    - `known`: to keep the program of an equation, which may be a step of a loop.
    """
    moving = [i for i, t in enumerate(ts) if t is not None and is_inexact(xs[i])]
    if not moving:
        return [None] * len(eqn.outvars)
    along = [ts[i] for i in moving]
    key, known = (id(eqn), *moving), {} if known is None else known
    at = lambda xs: [xs[i] for i in moving]
    fn = lambda xs: restricted(lambda *xs: bind(eqn, xs), xs, moving)
    out = None
    try:
        if key not in known:
            along_ts = lambda xs, ts: jax.jvp(fn(xs), at(xs), ts)[1]
            known[key] = jax.make_jaxpr(along_ts)(list(xs), along), eqn
        out = compute_all(known[key][0], [*xs, *along])
        out = [t if is_inexact(v) else None for t, v in zip(out, eqn.outvars, strict=True)]
    except Exception:  # JAX has no one type of error for a mode that does not exist
        if not has_backward(eqn):
            raise
    if has_backward(eqn) and (out is None or any(map(is_alive, out))):
        # Its backward pass may be another one.
        passes = _passes_back(fn(xs), at(xs), along)
        out = (out or list(map(_one, eqn.outvars))) if passes else [None] * len(eqn.outvars)
    assert out is not None
    return out


def _one(v: Any) -> Any:
    return np.ones(v.aval.shape, v.aval.dtype) if is_inexact(v) else None


def _passes_back(fn, at, along) -> bool:
    """Whether cotangents are not zero along the directions, for random ones of all outputs."""
    outs, pull = jax.vjp(lambda *ys: list(fn(*ys)), *at)
    rng, none = np.random.default_rng(0), jax.dtypes.float0
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    cts = pull([draw(x) if is_inexact(x) else np.zeros(np.shape(x), none) for x in outs])
    return any(is_alive(c * t) for c, t in zip(cts, along, strict=True))
