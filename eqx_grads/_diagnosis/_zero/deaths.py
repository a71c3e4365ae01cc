"""Where the tangents of leaves end, by one pass of forward mode along random directions.

Beside each value, the pass carries the tangents of some leaves. For each leaf, it also carries
the operations at which a tangent that is not zero became zero on the way to the value: its
deaths. A value that still moves has none. The deaths of the loss are the causes. A value is
computed when a tangent needs it: what no tangent reaches costs nothing.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._jaxprs.dependence import variables
from ..._jaxprs.evaluate import evaluate
from ..._jaxprs.primitives import kind_of
from ..._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    holds,
    Scan,
    ShardMap,
    structure,
    While,
)
from .._programs.pairs import differentiable_pairs, operands_of_outputs
from ..carried import index_of_step, Place
from ..source_lines import is_of_jax
from .facts import (
    Death,
    Died,
    Fact,
    has_backward,
    is_alive,
    is_inexact,
    jvp,
    NONE,
    push,
    value_of,
)


class TooManyOperations(Exception):
    pass


class Deaths:
    """The pass through a loss.

    - `opaque`: the operations that JAX can't differentiate, which are taken to move.
    - `most`: `TooManyOperations` after so many that a tangent passes.
    """

    def __init__(self, most: int | None = None):
        self.opaque: list[Place] = []
        self._left = most
        self._found: dict[tuple[Any, ...], Death] = {}
        self._needed: dict[int, set[Any]] = {}

    def run(
        self,
        program: ClosedJaxpr,
        facts: Sequence[Fact],
        around=None,
        step=None,
        *,
        is_known=True,
    ) -> list[Fact]:
        """The outputs of a program.

        - `is_known`: whether the values are. If not, only operations without a derivative end
            a tangent.
        """

        needed = self._needed.setdefault(id(program.jaxpr), _needed(program))

        def hook(eqn, facts):
            place = Place(eqn, program, around, step)
            wanted = [k for k, v in enumerate(eqn.outvars) if v in needed]
            if not wanted:
                return self._outputs(place, facts)
            return self._visit(place, facts, wanted, is_known)

        return evaluate(program, facts, hook, constant=lambda x: Fact(jnp.asarray(x)))

    def _visit(self, place: Place, facts, wanted, is_known) -> Sequence[Fact]:
        eqn, known = place.eqn, structure(place.eqn)
        enter = lambda program, facts=facts, step=None: self.run(
            program, facts, place, step, is_known=is_known
        )
        moving = set().union(*(f.tangents for f in facts))
        dead = any(f.died for f in facts)
        outs = self._outputs(place, facts)
        if not moving and not dead:
            return outs
        is_unit = isinstance(known, Call) and is_of_jax(eqn)
        if isinstance(known, Call | Checkpoint) and not (is_unit and is_known and moving):
            return enter(*known.programs)
        if isinstance(known, Cond) and not known.by_platform:
            return self._branch(place, known, facts, enter, is_known)
        if (
            moving
            and is_known
            and isinstance(known, Scan | While)
            and any(map(_holds_backward, known.programs))
        ):
            # Its forward mode may be another one: step by step, the backward pass is asked.
            for out, f in zip(outs, self._loop(place, known, facts, True), strict=True):
                out.tangents, out.died = f.tangents, f.died
            return outs
        is_solver = isinstance(known, CallWithRule) and holds(eqn, While)
        if (
            moving and is_known and is_solver
        ):  # what it loses is known without running its steps
            self._push_by_structure(eqn, facts, outs)
        elif moving and is_known:
            self._push(place, facts, outs, moving, wanted)
        elif moving:
            zero = kind_of(eqn).derivative == "zero"
            for out, v in zip(outs, eqn.outvars, strict=True):
                out.tangents = dict.fromkeys(moving if is_inexact(v) and not zero else (), 1)
        reads = (
            operands_of_outputs(eqn) if known is not None else [range(len(facts))] * len(outs)
        )
        lost = [
            set().union(*(facts[i].tangents for i in read)) - set(out.tangents)
            for read, out in zip(reads, outs, strict=True)
        ]
        inside: Sequence[Fact] | None = None
        if dead or any(lost):
            match known:
                case Call():  # of JAX
                    inside = enter(*known.programs)
                case Scan() | While():
                    inside = self._loop(place, known, facts, is_known and bool(moving))
                case ShardMap() | CallWithRule() if is_solver or isinstance(known, ShardMap):
                    inside = self.run(*known.programs, facts, place, is_known=False)
        before = _all_died(_used(eqn, facts)) if inside is None else {}
        for k in wanted:
            out = outs[k]
            died = dict(before if inside is None else inside[k].died)
            for leaf in lost[k]:
                died[leaf] = self._causes(place, k, facts, leaf, died.get(leaf, NONE), inside)
            out.died = {leaf: d for leaf, d in died.items() if leaf not in out.tangents}
        return outs

    def _causes(self, place, k, facts, leaf, died: Died, inside) -> Died:
        """The deaths of a leaf that is lost in an operation. A function of JAX is one
        operation, unless a single one in it is the cause."""
        within = {d for d, _ in died if inside is not None and _is_in(d, place)}
        is_unit = isinstance(structure(place.eqn), Call)
        if within and not (is_unit and len(within) > 1):
            return died
        before = {pair for pair in died if pair[0] not in within}
        return frozenset([*before, (self._death(place, k, facts, leaf), "")])

    def _outputs(self, place: Place, facts) -> list[Fact]:
        is_random = any(f.is_random for f in facts) or any(
            jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
            for v in place.eqn.invars
            if hasattr(v.aval, "dtype")
        )
        is_random = is_random or place.eqn.primitive.name in _RANDOM_BITS
        outs: list[Fact] = []
        outs.extend(
            Fact(made=(place, facts, outs), is_random=is_random) for _ in place.eqn.outvars
        )
        return outs

    def _push_by_structure(self, eqn, facts, outs):
        moving = {i for i, f in enumerate(facts) if f.tangents}
        pairs = differentiable_pairs(eqn, moving) or [moving] * len(outs)
        for out, operands, v in zip(outs, pairs, eqn.outvars, strict=True):
            leaves = set().union(*(facts[i].tangents for i in operands))
            if is_inexact(v):
                ones = np.ones(v.aval.shape, v.aval.dtype)
                out.tangents = dict.fromkeys(leaves, ones)

    def _push(self, place: Place, facts, outs, moving, wanted):
        if self._left is not None:
            self._left -= 1
            if self._left < 0 or holds(place.eqn, "gather"):  # the rows of a table are no units
                raise TooManyOperations
        xs = [value_of(f) for f in facts]
        for leaf in moving:
            try:
                ts = push(place.eqn, xs, [f.tangents.get(leaf) for f in facts], wanted)
            except Exception:  # JAX has no one type of error for an opaque operation
                self.opaque.append(place)
                ts = [
                    np.ones(v.aval.shape, v.aval.dtype) if is_inexact(v) else None
                    for v in place.eqn.outvars
                ]
            for out, t in zip(outs, ts, strict=True):
                if is_alive(t):
                    out.tangents[leaf] = t

    def _death(self, place: Place, k: int, facts, leaf: int) -> Death:
        around = list(place.outward())
        key = (k, leaf, *(id(p.eqn) for p in around))
        death = self._found.setdefault(key, Death(place, k, facts, leaf))
        death.step = tuple(p.step for p in reversed(around) if p.step is not None)
        return death

    # ------------------------------------------------------------ branches and loops

    def _branch(self, place, cond: Cond, facts, enter, is_known) -> Sequence[Fact]:
        index, rest = facts[0], facts[1:]
        decided = _all_died([_with_use(index, "cond")])
        if not is_known or value_of(index) is None:
            branches = [enter(p, rest) for p in cond.programs]
            outs = [
                Fact(
                    tangents={k: t for f in each for k, t in f.tangents.items()},
                    died=_all_died(each),
                )
                for each in zip(*branches, strict=True)
            ]
        else:
            k = int(np.clip(np.asarray(value_of(index)), 0, len(cond.programs) - 1))
            outs = enter(cond.programs[k], rest)
        moving = set().union(*(f.tangents for f in rest))
        for i, out in enumerate(outs):
            died = _merged(out.died, decided)
            for leaf in moving - set(out.tangents) - set(out.died):
                died[leaf] = frozenset([(self._death(place, i, facts, leaf), "")])
            out.died = {leaf: d for leaf, d in died.items() if leaf not in out.tangents}
        return outs

    def _loop(self, place, loop: Scan | While, facts, is_known) -> Sequence[Fact]:
        if isinstance(loop, Scan):
            return self._scan(place, loop, facts, is_known)
        return self._while(place, loop, facts, is_known)

    def _scan(self, place, loop: Scan, facts, is_known) -> Sequence[Fact]:
        n, m = loop.n_consts, loop.n_consts + loop.n_carry
        consts, carry, xs = facts[:n], facts[n:m], facts[m:]
        (program,) = loop.programs
        if not is_known or not loop.length:
            return self._until_stable(place, program, consts, carry, xs)
        stacks = [np.asarray(value_of(f)) if _is_array(f) else value_of(f) for f in xs]
        pattern = _Patterns(loop, facts)
        ys: list[Sequence[Fact]] = []
        for s in range(loop.length):
            i = index_of_step(loop, s)
            same = pattern.seen(s)
            if same is None:
                now = [_slice(f, x, i) for f, x in zip(xs, stacks, strict=True)]
                outs = self.run(program, [*consts, *carry, *now], place, i)
                pattern.note(s, outs, _deaths_in_step(outs, place, i))
            else:
                outs = pattern.outputs(s, same, carry)
                for death, depth in pattern.deaths(s):
                    death.step = (*death.step[:depth], i, *death.step[depth + 1 :])
            carry = outs[: loop.n_carry]
            ys.append(outs[loop.n_carry :])
        ys = ys[::-1] if loop.reverse else ys
        return [*carry, *map(_stacked, zip(*ys, strict=True))]

    def _while(self, place, loop: While, facts, is_known) -> Sequence[Fact]:
        """The steps until all leaves have died, and two more, for what the condition uses."""
        n, m = loop.n_cond_consts, loop.n_before_carry
        carry, decided, step, still = facts[m:], {}, 0, 0
        while still < 2 and step < _MOST_STEPS:
            (on,) = self.run(
                loop.programs[0], [*facts[:n], *carry], place, step, is_known=is_known
            )
            decided = _merged(decided, _all_died([_with_use(on, "while")]))
            if is_known and not np.any(np.asarray(value_of(on))):
                break
            new = self.run(
                loop.programs[1], [*facts[n:m], *carry], place, step, is_known=is_known
            )
            for f, old in zip(new, carry, strict=True):
                f.died = _merged(f.died, {} if f.tangents else old.died)
            still = still + 1 if not any(f.tangents for f in new) else 0
            carry, step = new, step + 1
        for f in carry:
            f.died = {k: d for k, d in _merged(f.died, decided).items() if k not in f.tangents}
        return carry

    def _until_stable(self, place, program, consts, carry, xs) -> list[Fact]:
        """A scan with unknown values: all steps have the deaths of two."""
        outs: list[Fact] = []
        for _ in range(2):
            outs = self.run(program, [*consts, *carry, *xs], place, is_known=False)
            for f, old in zip(outs, carry, strict=False):
                f.died = _merged(f.died, old.died)
            carry = outs[: len(carry)]
        return outs


def _needed(program: ClosedJaxpr) -> set[Any]:
    """The variables that the outputs of a program depend on."""
    needed = set(variables(program.jaxpr.outvars))
    for eqn in reversed(program.eqns):
        if needed.intersection(eqn.outvars):
            needed.update(variables(eqn.invars))
    return needed


_RANDOM_BITS = ("random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32")
_MOST_STEPS = 64


class _Patterns:
    """Which values move after each step of a scan, by one compiled run of its derivative. Steps
    with the same pattern have the same deaths, and only the first is looked at."""

    def __init__(self, loop: Scan, facts: Sequence[Fact]):
        self._loop = loop
        self._seen: dict[Any, Sequence[Fact]] = {}
        self._deaths: dict[Any, list[tuple[Death, int]]] = {}
        self._alive: dict[int, list[np.ndarray]] = {}
        self._ts: dict[int, list[Any]] = {}
        self._outs: list[Any] = []
        if loop.length < 4 or _holds_backward(*loop.programs):
            return
        for leaf in set().union(*(f.tangents for f in facts)):
            self._outs, ts = _all_steps(loop, facts, leaf)
            self._ts[leaf] = ts
            self._alive[leaf] = [
                np.any(np.reshape(np.asarray(t) != 0, (loop.length, -1)), 1)
                if is_inexact(t)
                else np.zeros(loop.length, bool)
                for t in ts
            ]

    def _key(self, s: int):
        n = self._loop.n_carry
        now = lambda alive, s: tuple(bool(a[s]) for a in alive)
        return tuple(
            (leaf, now(alive[:n], s - 1) if s else None, now(alive, s))
            for leaf, alive in self._alive.items()
        )

    def seen(self, s: int) -> Sequence[Fact] | None:
        return self._seen.get(self._key(s)) if self._alive else None

    def note(self, s: int, outs: Sequence[Fact], deaths: list[tuple[Death, int]]) -> None:
        if self._alive:
            self._seen[self._key(s)] = outs
            self._deaths[self._key(s)] = deaths

    def deaths(self, s: int) -> list[tuple[Death, int]]:
        """The deaths of the first such step, and the position of this loop in their `step`."""
        return self._deaths[self._key(s)]

    def outputs(self, s: int, same: Sequence[Fact], carry: Sequence[Fact]) -> list[Fact]:
        facts = []
        for j, (f, stack) in enumerate(zip(same, self._outs, strict=True)):
            ts = {leaf: t[j][s] for leaf, t in self._ts.items() if self._alive[leaf][j][s]}
            before = carry[j].died if j < len(carry) else {}
            died = _merged(f.died, before)
            died = {leaf: d for leaf, d in died.items() if leaf not in ts}
            facts.append(Fact(stack[s], tangents=ts, died=died, is_random=f.is_random))
        return facts


def _all_steps(loop: Scan, facts: Sequence[Fact], leaf: int):
    """The outputs after each step, in the order in which the steps run, and their tangents."""
    n, m = loop.n_consts, loop.n_consts + loop.n_carry
    (program,) = loop.programs
    xs = [value_of(f) for f in facts]
    zero = lambda x: np.zeros(np.shape(x), jax.dtypes.float0)
    tangent = lambda f, x: jnp.zeros_like(x) if leaf not in f.tangents else f.tangents[leaf]
    ts = [tangent(f, x) if is_inexact(x) else None for f, x in zip(facts, xs, strict=True)]

    def run(xs, ts):
        def body(state, inputs):
            (c, ct), (x, xt) = state, inputs
            fn = lambda *values: evaluate(program, values)
            outs, t = jvp(fn, [*xs[:n], *c, *x], [*ts[:n], *ct, *xt])
            t = [None if t is None or not is_inexact(o) else t[i] for i, o in enumerate(outs)]
            strong = lambda values: [None if v is None else jnp.asarray(v) for v in values]
            return (
                (_like(outs[: loop.n_carry], c), strong(t[: loop.n_carry])),
                (outs, [zero(o) if v is None else v for o, v in zip(outs, t, strict=True)]),
            )

        init = [jnp.asarray(x) for x in xs[n:m]], ts[n:m]
        return jax.lax.scan(body, init, (xs[m:], ts[m:]), loop.length, reverse=loop.reverse)[1]

    outs, out_ts = jax.jit(run)(xs, ts)
    order = slice(None, None, -1 if loop.reverse else 1)
    in_order = lambda arrays: [
        np.asarray(x)[order] if _is_plain(x) else x[order] for x in arrays
    ]
    return in_order(outs), in_order(out_ts)


def _like(outs, carry):
    return [o.astype(c.dtype) for o, c in zip(outs, carry, strict=True)]


def _is_plain(x) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _is_array(f: Fact) -> bool:
    return _is_plain(value_of(f))


def _holds_backward(program: ClosedJaxpr) -> bool:
    """Whether a function in it has a backward pass of its own."""
    return any(map(has_backward, equations(program)))


def _stacked(steps: Sequence[Fact]) -> Fact:
    leaves = set().union(*(f.tangents for f in steps))
    shape = next((np.shape(t) for f in steps for t in f.tangents.values()), ())
    at = lambda f, leaf: np.asarray(f.tangents.get(leaf, np.zeros(shape)))
    ts = {leaf: np.stack([at(f, leaf) for f in steps]) for leaf in leaves}
    died = {leaf: d for leaf, d in _all_died(steps).items() if leaf not in ts}
    return Fact(tangents=ts, died=died)


def _slice(f: Fact, x: Any, i: int) -> Fact:
    ts = {leaf: t[i] for leaf, t in f.tangents.items() if is_alive(t[i])}
    return Fact(x[i], f.made, ts, {k: d for k, d in f.died.items() if k not in ts}, f.is_random)


def _is_in(death: Death, place: Place) -> bool:
    return any(p.eqn is place.eqn for p in death.place.outward())


def _deaths_in_step(outs: Sequence[Fact], loop: Place, i: int) -> list[tuple[Death, int]]:
    depth = sum(p.step is not None for p in loop.outward())
    deaths = {d for f in outs for each in f.died.values() for d, _ in each}
    return [(d, depth) for d in deaths if d.step[depth : depth + 1] == (i,) and _is_in(d, loop)]


# ---------------------------------------------------------------- what has died


def _merged(a: dict[int, Died], b: dict[int, Died]) -> dict[int, Died]:
    return {leaf: a.get(leaf, NONE) | b.get(leaf, NONE) for leaf in {**a, **b}}


def _all_died(facts: Iterable[Fact]) -> dict[int, Died]:
    result: dict[int, Died] = {}
    for f in facts:
        result = _merged(result, f.died)
    return result


def _with_use(f: Fact, use: str) -> Fact:
    """The first use of a value without a tangent counts. JAX selects between an index and what
    is counted from the end before it uses the index."""
    again = ("", "where") if use == "an index" else ("",)
    died = {
        leaf: frozenset((d, use if u in again else u) for d, u in each)
        for leaf, each in f.died.items()
    }
    return dataclasses.replace(f, died=died)


def _used(eqn: Any, facts: Sequence[Fact]) -> list[Fact]:
    """The operands, with what each is used for."""
    name = eqn.primitive.name
    if name == "select_n":
        uses = {0: "where"}
    elif name == "gather" or name.startswith("scatter"):
        uses = {1: "an index"}
    elif name in ("dynamic_slice", "dynamic_update_slice"):
        uses = dict.fromkeys(range(1 if name == "dynamic_slice" else 2, len(facts)), "an index")
    elif name in ("argmax", "argmin") and not is_inexact(eqn.invars[0]):
        uses = {0: "a first crossing"}
    else:
        return list(facts)
    return [_with_use(f, uses[i]) if i in uses else f for i, f in enumerate(facts)]
