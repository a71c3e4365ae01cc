"""Evaluate a program operation by operation, and carry facts beside its values.

The walk enters calls, branches and loops. A carrier says what an operation does with the facts:
for `explain_nan`, which operations made an infinity; for `explain_zero`, where a tangent ended.
"""

import abc
import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from .._jaxprs.evaluate import equation_context, values_of_inputs
from .._jaxprs.structure import Cond, inner_programs, Scan, structure, While


class Place(NamedTuple):
    """An equation in a run of a program.

    - `around`: the place of the equation that `program` is in, if there is one.
    - `step`: the step of the run, if that equation is a loop.
    """

    eqn: Any
    program: ClosedJaxpr
    around: "Place | None" = None
    step: int | None = None


def outward(place: Place | None) -> Iterator[Place]:
    """The place itself, and those around it, innermost first."""
    while place is not None:
        yield place
        place = place.around


V = TypeVar("V", bound=Any)


class AbstractCarrier(abc.ABC, Generic[V]):
    """A value `V` is an array, `truth`, with what is carried beside it."""

    @abc.abstractmethod
    def constant(self, x: Any) -> V:
        """The value of a constant of the program."""

    @abc.abstractmethod
    def map(self, fn: Callable[..., Any], values: Sequence[V]) -> V:
        """One value of several. `fn` takes their arrays, and also the arrays beside these."""

    @abc.abstractmethod
    def visit(self, place: Place, values: Sequence[V]) -> Sequence[V] | None:
        """The outputs of an equation. `None` to `enter` its programs."""

    @abc.abstractmethod
    def decide(self, by: V, outs: Sequence[V]) -> Sequence[V]:
        """The carry of a `while_loop`, given the value that it is decided `by`."""


def walk(
    program: ClosedJaxpr,
    values: Sequence[V],
    carrier: AbstractCarrier[V],
    around: Place | None = None,
    step: int | None = None,
) -> list[V]:
    """The outputs of a program."""
    env = values_of_inputs(program, values, carrier.constant)
    read = lambda v: carrier.constant(v.val) if isinstance(v, Literal) else env[v]
    for eqn in program.eqns:
        with equation_context(eqn):
            place, ins = Place(eqn, program, around, step), list(map(read, eqn.invars))
            outs = carrier.visit(place, ins)
            outs = enter(place, ins, carrier) if outs is None else outs
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, program.jaxpr.outvars))


def enter(
    place: Place, values: Sequence[V], carrier: AbstractCarrier[V], done: Any = None
) -> Sequence[V]:
    """The outputs of an equation, by a walk through its programs.

    - `done`: the first steps of a scan: the carry after them, and the other outputs of each.
    """
    known = structure(place.eqn)
    match known:
        case Scan():
            return _scan(place, known, values, carrier, done)
        case While():
            return _while(place, known, values, carrier)
        case Cond():
            return walk(known.programs[int(values[0].truth)], values[1:], carrier, place)
    return walk(inner_programs(place.eqn)[0], values, carrier, place)


def _scan(place, loop: Scan, values, carrier, done):
    n, m = loop.n_consts, loop.n_consts + loop.n_carry
    consts, xs = values[:n], values[m:]
    carry, ys = done or (values[n:m], [])
    for i in indices_of(loop)[len(ys) :]:
        now = [carrier.map(lambda x, i=i: on_host(x)[i], [x]) for x in xs]
        outs = walk(*loop.programs, [*consts, *carry, *now], carrier, place, i)
        carry = outs[: loop.n_carry]
        ys.append(outs[loop.n_carry :])
    if not ys:
        types = loop.programs[0].out_avals[loop.n_carry :]
        return [*carry, *(carrier.constant(jnp.zeros((0, *t.shape), t.dtype)) for t in types)]
    in_order = ys[::-1] if loop.reverse else ys
    return [*carry, *(carrier.map(_stack, each) for each in zip(*in_order, strict=True))]


def _while(place, loop: While, values, carrier):
    n, m = loop.n_cond_consts, loop.n_before_carry
    carry, step = values[m:], 0
    while True:
        (on,) = walk(loop.programs[0], [*values[:n], *carry], carrier, place, step)
        carry = carrier.decide(on, carry)
        is_on = np.asarray(on.truth)
        if not is_on.any():
            return carry
        new = walk(loop.programs[1], [*values[n:m], *carry], carrier, place, step)
        if loop.is_batched:
            keep = ft.partial(_where_on, is_on)
            new = [carrier.map(keep, pair) for pair in zip(new, carry, strict=True)]
        carry, step = new, step + 1


def indices_of(loop: Scan) -> range:
    """The indices in `xs`, in the order of the steps."""
    return range(loop.length)[:: -1 if loop.reverse else 1]


def on_host(x: Any) -> Any:
    """A NumPy array: taking a part costs no compilation. A key stays as it is."""
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
    return x if is_key else np.asarray(x)


def _stack(*xs):
    return jnp.stack(xs) if isinstance(on_host(xs[0]), jax.Array) else np.stack(xs)


def _where_on(on, new, old):
    """The carry after a step of a batched loop: elements that are done keep theirs."""
    if np.shape(new)[: on.ndim] != on.shape:  # is not of an element
        return new
    return jnp.where(np.reshape(on, on.shape + (1,) * (np.ndim(new) - on.ndim)), new, old)
