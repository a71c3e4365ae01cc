"""Follow one element of a value back through a program to what made it non-finite, or zero."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.elementwise import ELEMENTWISE
from ..._jaxprs.evaluate import bind
from ..._jaxprs.linearity import JOINTLY_LINEAR, linear_operands, MULTILINEAR
from ..._jaxprs.structure import Cond, Scan, structure, While
from .cures import INFINITE_INPUT, INPUT
from .replay import Frame, is_inexact, step_of


Index = tuple[int, ...]

# Those of which the derivative at ones says which elements an element depends on.
_BY_DERIVATIVE = JOINTLY_LINEAR | frozenset(
    """
    dot_general conv_general_dilated reduce_max reduce_min reduce_prod cummax cummin cumprod
    cumlogsumexp gather dynamic_slice dynamic_update_slice scatter scatter-add scatter_add
    reduce_window_max reduce_window_min
    """.split()  # noqa: SIM905
)
_LAYOUT = ("broadcast_in_dim", "convert_element_type", "reshape")
_LIMIT = 400  # elements that are looked at


@dataclasses.dataclass(frozen=True)
class Spot:
    """An element of an output of an equation."""

    frame: Frame
    position: int
    output: int
    index: Index

    @property
    def eqn(self) -> Any:
        return self.frame.node.eqns[self.position]

    @property
    def operands(self) -> Sequence[Any]:
        return self.frame.operands[self.position]

    @property
    def value(self) -> Any:
        """Before a replacement of bad values by zero."""
        return np.asarray(self.frame.outputs[self.position][self.output])[self.index]

    @property
    def value_shape(self) -> Index:
        return np.shape(self.frame.outputs[self.position][self.output])

    @property
    def place(self) -> tuple[int, ...]:
        """In the order in which the equations run: the position in each program, from the
        outermost one, and how often the body of the loop was run before."""
        place, frame = (self.position,), self.frame
        while frame.parent is not None:
            place = (frame.node.position, frame.iteration, *place)
            frame = frame.parent
        return place

    def is_cotangent(self, k: int) -> bool:
        return _is_in(self.eqn.invars[k], self.frame.node.cotangents)

    def is_active(self, k: int) -> bool:
        """Whether an operand depends on the model."""
        return _is_in(self.eqn.invars[k], self.frame.node.active)


@dataclasses.dataclass(frozen=True)
class Input:
    """An element of an input of the whole program that is not finite."""

    number: int
    index: Index
    value: Any

    @property
    def kind(self) -> str:
        return INPUT if np.isnan(self.value) else INFINITE_INPUT


def _is_in(atom: Any, flagged: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in flagged


def is_nonfinite(x: Any) -> Any:
    return ~np.isfinite(np.asarray(x))


def is_zero(x: Any) -> Any:
    return np.asarray(x) == 0


def origin_of_value(
    frame: Frame, atom: Any, index: Index, holds: Callable[[Any], Any]
) -> Spot | Input | None:
    """The equation by itself, or the input, that computes an element. `None`: a constant.

    Where the element is a carry of a loop, it is followed to a step before which it is not so,
    that is, where `holds(element)` is false.
    """
    while True:
        node = frame.node
        if isinstance(atom, Literal) or atom in node.program.jaxpr.constvars:
            return None
        if atom in node.producers:
            i, k = node.producers[atom]
            if not node.inner[i]:
                return Spot(frame, i, k, index)
            frame, atom, index = _into(frame, i, k, index, holds)
            continue
        k = node.program.jaxpr.invars.index(atom)
        if frame.parent is None:
            return Input(k, index, np.asarray(frame.inputs[k])[index])
        frame, atom, index = _out_of(frame, k, index, holds)


def _into(frame: Frame, i: int, k: int, index: Index, holds):
    """The same element as an output of an inner program."""
    known = structure(frame.node.eqns[i])
    if not isinstance(known, Scan | While):
        child = frame.child(i)
        return child, child.node.program.jaxpr.outvars[k], index
    if isinstance(known, Scan) and k >= known.n_carry:
        child = frame.body(i, step_of(known, index[0]))
        return child, child.node.program.jaxpr.outvars[k], index[1:]
    return _carry(frame, i, k, index, frame.lengths[i], holds)


def _out_of(frame: Frame, k: int, index: Index, holds):
    """An input of an inner program, as an operand of the equation around it."""
    parent, i = frame.parent, frame.node.position
    assert parent is not None
    eqn, known = parent.node.eqns[i], structure(parent.node.eqns[i])
    if isinstance(known, Scan):
        if k >= known.n_consts + known.n_carry:
            return parent, eqn.invars[k], (frame.steps[-1], *index)
        if k >= known.n_consts:
            return _carry(parent, i, k - known.n_consts, index, frame.iteration, holds)
    elif isinstance(known, While):
        # A carry can only be looked at from inside the body.
        if k >= known.n_body_consts:
            return _carry(parent, i, k - known.n_body_consts, index, frame.iteration, holds)
        k += known.n_cond_consts
    elif isinstance(known, Cond):
        k += 1
    return parent, eqn.invars[k], index


def _carry(frame: Frame, i: int, k: int, index: Index, iteration: int, holds):
    """Where an element of the carry before `iteration` comes from: an output of the step that
    made it so, or an operand of the loop."""
    eqn, known = frame.node.eqns[i], structure(frame.node.eqns[i])
    assert isinstance(known, Scan | While)
    is_so = lambda n: bool(holds(np.asarray(frame.carry_before(i, n)[k])[index]))
    if iteration == 0 or is_so(0):
        return frame, eqn.invars[known.n_before_carry + k], index
    low, high = 0, iteration  # it is not so after `low` steps, and it is after `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_so(middle) else (middle, high)
    body = frame.body(i, high - 1)
    return body, body.node.program.jaxpr.outvars[k], index


# ---------------------------------------------------------------- one equation


def contributors(spot: Spot, holds: Callable[[Any], Any]) -> Iterator[tuple[int, list[Index]]]:
    """For each operand, the elements of it on which the element depends and for which `holds`.

    Nothing for an operand that is not inexact.
    """
    for k, x in enumerate(spot.operands):
        if not is_inexact(x):
            continue
        x = np.asarray(x)
        depends_on = elements_of(spot, k)
        found = np.argwhere(holds(x) & depends_on) if x.ndim else None
        if found is None:
            yield k, [()] if bool(holds(x)) and bool(depends_on) else []
        else:
            yield k, [tuple(map(int, at)) for at in found[:8]]


def elements_of(spot: Spot, k: int) -> Any:
    """The elements of operand `k`, as a mask, on which the element depends."""
    eqn, operands = spot.eqn, spot.operands
    x = np.asarray(operands[k])
    name = eqn.primitive.name
    mask = np.zeros(x.shape, bool)
    if name == "select_n":
        which = np.asarray(operands[0])
        chosen = int(which[index_into(which, spot.index)])
        if k == chosen + 1:
            mask[spot.index] = True
    elif name in ELEMENTWISE:
        mask[index_into(x, spot.index)] = True
    elif name in _BY_DERIVATIVE:
        mask = _dependence_by_derivative(spot, k)
    else:
        mask[...] = True
    return mask


def index_into(x: Any, index: Sequence[int]) -> tuple[int, ...]:
    """The index into an operand of an elementwise operation, which may be a scalar, or have
    axes of size one."""
    return tuple(min(i, n - 1) for i, n in zip(index, np.shape(x), strict=False))


def _dependence_by_derivative(spot: Spot, k: int) -> Any:
    # With respect to all of them: JAX can't transpose a `pad` in its second operand alone.
    inexact = [i for i, x in enumerate(spot.operands) if is_inexact(x)]

    def output(xs):
        values = list(spot.operands)
        for i, x in zip(inexact, xs, strict=True):
            values[i] = x
        return bind(spot.eqn, values)[spot.output]

    ones = [jnp.ones_like(spot.operands[i]) for i in inexact]
    out, pullback = jax.vjp(output, ones)
    seed = jnp.zeros_like(out).at[spot.index].set(1)
    return np.asarray(pullback(seed)[0][inexact.index(k)]) != 0


# ---------------------------------------------------------------- the two questions


def sources_of_nonfinite(
    frame: Frame, atom: Any, index: Index, value: Any
) -> list[Spot | Input]:
    """The equations of which all operands are finite and an element is not, or the inputs, that
    an element is non-finite because of. In the order in which they are found.

    - `value`: that of the element.

    If there are none because all is made from constants, these are the equations that make a
    NaN of two infinities; and if there are none of these, the ones that use such a constant.
    """
    found: dict[Any, Spot | Input] = {}
    first_nans: dict[Any, Spot] = {}
    users: dict[Any, Spot] = {}
    todo: list[tuple[Frame, Any, Index, Spot | None, bool]] = [
        (frame, atom, index, None, bool(np.isnan(value)))
    ]
    seen = set()
    while todo and len(seen) < _LIMIT:
        frame, atom, index, user, is_nan = todo.pop(0)
        # A carry that begins with infinities may become NaN later.
        place = origin_of_value(frame, atom, index, np.isnan if is_nan else is_nonfinite)
        if place is None:
            if user is not None:
                users.setdefault(_key(user), user)
            continue
        if isinstance(place, Input):
            found.setdefault(place.number, place)
            continue
        key = (id(place.frame), place.position, place.output, place.index)
        if key in seen:
            continue
        seen.add(key)
        operands = list(contributors(place, is_nonfinite))
        if not any(elements for _, elements in operands):
            found.setdefault(_key(place), place)
        elif np.isnan(place.value) and not any(
            np.isnan(np.asarray(place.operands[k])[at])
            for k, found_at in operands
            for at in found_at
        ):
            first_nans.setdefault(_key(place), place)
        # A constant is put into the layout of what uses it.
        used_by = user if user and place.eqn.primitive.name in _LAYOUT else place
        for k, elements in operands:
            # A NaN and an infinity may have different causes.
            values = np.asarray(place.operands[k])
            chosen = {bool(np.isnan(values[at])): at for at in elements[::-1]}
            todo.extend(
                (place.frame, place.eqn.invars[k], at, used_by, is_nan)
                for is_nan, at in chosen.items()
            )
    return list((found or first_nans or users).values())


def _key(spot: Spot) -> tuple[int, int]:
    return id(spot.frame.node), spot.position


# Why an element of a cotangent is zero.
NOT_SELECTED = "not selected"
FACTOR = "multiplied by zero"
CANCELS = "sum that cancels"
UNDERFLOWS = "underflow"
REPLACED = "replaced"  # it was bad, see `replay.py`


@dataclasses.dataclass(frozen=True)
class Zero:
    """Where an element of a cotangent becomes zero, and why."""

    spot: Spot
    why: str


def sources_of_zero(
    frame: Frame, atom: Any, index: Index, is_selection: Callable[[Spot], bool]
) -> list[Zero]:
    """The equations that make an element of a cotangent zero, for which not all that it depends
    on is. In the order in which they are found.

    - `is_selection`: whether an equation is the derivative of an operation that selects, such
        as a maximum. It makes zeros of what it does not select also where zeros arrive.
    """
    todo, seen, found = [(frame, atom, index)], set(), []
    while todo and len(seen) < _LIMIT:
        frame, atom, index = todo.pop(0)
        place = origin_of_value(frame, atom, index, is_zero)
        if not isinstance(place, Spot):
            continue
        key = (id(place.frame), place.position, place.output, place.index)
        if key in seen or place.eqn.outvars[place.output] not in place.frame.node.cotangents:
            continue
        seen.add(key)
        arrived = {
            k: depends
            for k, x in enumerate(place.operands)
            if place.is_cotangent(k)
            and is_inexact(x)
            and (depends := elements_of(place, k)).any()
        }
        if is_selection(place) and _has_zero_factor(place):
            found.append(Zero(place, NOT_SELECTED))
        elif all(is_zero(np.asarray(place.operands[k])[d]).all() for k, d in arrived.items()):
            if not arrived:
                found.append(Zero(place, NOT_SELECTED))
            todo.extend(
                (place.frame, place.eqn.invars[k], index)
                for k, depends in arrived.items()
                for index in _some(depends)
            )
        elif (why := _why_zero(place)) is not None:
            found.append(Zero(place, why))
    return found


_MOST_TERMS = 8


def _some(mask: Any) -> list[Index]:
    """Indices of a mask from its first to its last: the zeros of a sum may have several
    causes."""
    found = np.argwhere(mask)
    chosen = np.unique(np.linspace(0, len(found) - 1, min(len(found), _MOST_TERMS)).astype(int))
    return [tuple(map(int, found[i])) for i in chosen]


def _why_zero(spot: Spot) -> str | None:
    """Why an element is zero though a cotangent that it depends on is not. `None` if that is
    not known."""
    if is_nonfinite(spot.value):
        return REPLACED
    name = spot.eqn.primitive.name
    is_product = name in MULTILINEAR
    if is_product and not _with_operands(spot, lambda x: x != 0):
        return FACTOR
    if not is_product and name != "convert_element_type" and linear_operands(spot.eqn) is None:
        return None
    return CANCELS if _with_operands(spot, jnp.abs) else UNDERFLOWS


def _has_zero_factor(spot: Spot) -> bool:
    """Whether it is a product that is zero for each cotangent."""
    if spot.eqn.primitive.name != "mul":
        return False
    factors = [x for k, x in enumerate(spot.operands) if not spot.is_cotangent(k)]
    return any(bool(is_zero(np.asarray(x)[index_into(x, spot.index)])) for x in factors)


def _with_operands(spot: Spot, change: Callable[[Any], Any]) -> bool:
    """Whether the element is not zero for operands that are changed, by which none cancels."""
    operands = [
        jnp.asarray(change(x)).astype(x.dtype) if is_inexact(x) else x for x in spot.operands
    ]
    return bool(bind(spot.eqn, operands)[spot.output][spot.index] != 0)
