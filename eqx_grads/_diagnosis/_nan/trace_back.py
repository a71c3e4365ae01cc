"""Follow elements of a value back through a program: what they depend on, what made it zero."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..._jaxprs.evaluate import bind
from ..._jaxprs.primitives import ELEMENTWISE, JOINTLY_LINEAR
from ..._jaxprs.structure import Cond, Scan, structure, While
from .cures import INFINITE_INPUT, INPUT
from .layouts import IN_NUMPY, pull_back, push_forward
from .replay import Frame, is_inexact, spread, step_of


Index = tuple[int, ...]

# Those of which the derivative at ones says which elements an element depends on.
_BY_DERIVATIVE = JOINTLY_LINEAR | frozenset(
    """
    dot_general conv_general_dilated reduce_max reduce_min reduce_prod cummax cummin cumprod
    cumlogsumexp gather dynamic_slice dynamic_update_slice scatter scatter-add scatter_add
    """.split()  # noqa: SIM905
)
_LIMIT = 400  # elements that are looked at


@dataclasses.dataclass(frozen=True)
class _AbstractPlace:
    """In an output of an equation."""

    frame: Frame
    position: int
    output: int

    @property
    def eqn(self) -> Any:
        return self.frame.node.eqns[self.position]

    @property
    def operands(self) -> Sequence[Any]:
        return self.frame.operands[self.position]


@dataclasses.dataclass(frozen=True)
class Spot(_AbstractPlace):
    """An element of an output of an equation."""

    index: Index

    @property
    def value(self) -> Any:
        """Before a replacement of bad values by zero."""
        return np.asarray(self.frame.outputs[self.position][self.output])[self.index]

    @property
    def value_shape(self) -> Index:
        return np.shape(self.frame.outputs[self.position][self.output])

    @property
    def alone(self) -> "Elements":
        mask = _one(self.value_shape, self.index)
        return Elements(self.frame, self.position, self.output, mask)

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
        return self.frame.node.is_cotangent(self.eqn.invars[k])

    def is_active(self, k: int) -> bool:
        """Whether an operand depends on the model."""
        return self.frame.node.is_active(self.eqn.invars[k])


@dataclasses.dataclass(frozen=True, eq=False)
class Elements(_AbstractPlace):
    """Some elements of an output of an equation.

    - `is_part`: whether others, which come from a loop as well, were not followed.
    - `others`: those of the same equation at other steps of the loops around it.
    """

    mask: Any
    is_part: bool = False
    others: tuple["Elements", ...] = ()

    @property
    def values(self) -> Any:
        """Of the whole output, before a replacement of bad values by zero."""
        return np.asarray(self.frame.outputs[self.position][self.output])

    @property
    def first(self) -> Spot:
        return self.at(indices(self.mask)[0])

    def at(self, index: Index) -> Spot:
        return Spot(self.frame, self.position, self.output, index)

    def among(self, mask: Any) -> "Elements":
        return dataclasses.replace(self, mask=self.mask & mask)


@dataclasses.dataclass(frozen=True, eq=False)
class Input:
    """Elements of an input of the whole program that are not finite; `is_part` as above."""

    number: int
    array: Any
    mask: Any
    is_part: bool = False

    @property
    def index(self) -> Index:
        return indices(self.mask)[0]

    @property
    def value(self) -> Any:
        return self.array[self.index]

    @property
    def kind(self) -> str:
        return INPUT if np.isnan(self.value) else INFINITE_INPUT


def indices(mask: Any, most: int | None = None) -> list[Index]:
    """Those of a mask, or some of them from the first to the last."""
    found = list(np.argwhere(mask) if np.ndim(mask) else np.zeros((int(mask), 0), int))
    return [tuple(map(int, index)) for index in spread(found, most or len(found))]


def _one(shape: Index, index: Index) -> Any:
    mask = np.zeros(shape, bool)
    mask[index] = True
    return mask


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
            array = np.asarray(frame.inputs[k])
            return Input(k, array, _one(array.shape, index))
        frame, atom, index = _out_of(frame, k, index, holds)


_MOST_IN_LOOPS = 3  # elements that are followed through a loop, each to its own step


def origins_of_elements(
    frame: Frame, atom: Any, mask: Any, holds: Callable[[Any], Any]
) -> Iterator[Elements | Input | None]:
    """The same for elements of a value; in loops for a few of them."""
    while True:
        node = frame.node
        if isinstance(atom, Literal) or atom in node.program.jaxpr.constvars:
            yield None
            return
        is_made = atom in node.producers
        if is_made:
            i, k = node.producers[atom]
            if not node.inner[i]:
                yield Elements(frame, i, k, mask)
                return
            eqn = node.eqns[i]
        else:
            i, k = 0, node.program.jaxpr.invars.index(atom)
            if frame.parent is None:
                yield Input(k, np.asarray(frame.inputs[k]), mask)
                return
            eqn = frame.parent.node.eqns[node.position]
        if isinstance(structure(eqn), Scan | While):
            chosen = indices(mask, _MOST_IN_LOOPS)
            is_part = np.sum(mask) > len(chosen)
            for index in chosen:
                place = origin_of_value(frame, atom, index, holds)
                place = place.alone if isinstance(place, Spot) else place
                yield place and dataclasses.replace(place, is_part=bool(is_part))
            return
        # An inner program of another equation has the same elements.
        into = _into(frame, i, k, mask, holds) if is_made else _out_of(frame, k, mask, holds)
        frame, atom, mask = into


def _into(frame: Frame, i: int, k: int, index: Any, holds):
    """The same element as an output of an inner program."""
    known = structure(frame.node.eqns[i])
    if not isinstance(known, Scan | While):
        child = frame.child(i)
        return child, child.node.program.jaxpr.outvars[k], index
    if isinstance(known, Scan) and k >= known.n_carry:
        child = frame.body(i, step_of(known, index[0]))
        return child, child.node.program.jaxpr.outvars[k], index[1:]
    return _carry(frame, i, k, index, frame.lengths[i], holds)


def _out_of(frame: Frame, k: int, index: Any, holds):
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


def elements_of(spot: Spot, k: int) -> Any:
    """The elements of operand `k`, as a mask, on which the element depends."""
    return depends_on(spot.alone, k)


def depends_on(elements: Elements, k: int) -> Any:
    """The elements of operand `k`, as a mask, on which some of the elements depend."""
    x, mask = np.asarray(elements.operands[k]), elements.mask
    name = elements.eqn.primitive.name
    if name == "select_n":
        return mask & _is_chosen(elements, k)
    if name in ELEMENTWISE:
        # An operand may be a scalar, or have axes of size one.
        axes = [i for i, n in enumerate(mask.shape) if not x.ndim or x.shape[i] < n]
        return np.any(mask, axis=tuple(axes), keepdims=bool(x.ndim))
    if name in IN_NUMPY:
        return pull_back(elements.eqn, k, x.shape, mask, elements.output)
    if name in _BY_DERIVATIVE:
        return _pull_back(elements, k)
    return np.full(x.shape, mask.any())


def reached_by(elements: Elements, k: int, mask: Any) -> Any:
    """Those of the elements, as a mask, that depend on some elements of operand `k`."""
    name, shape = elements.eqn.primitive.name, elements.mask.shape
    if name == "select_n":
        reached = mask & _is_chosen(elements, k)
    elif name in ELEMENTWISE:
        reached = np.broadcast_to(mask, shape)
    elif name in IN_NUMPY:
        reached = push_forward(elements.eqn, k, mask, shape, elements.output)
    elif name in _BY_DERIVATIVE and elements.mask.sum() > 1:
        reached = _push_forward(elements, k, mask)
    else:
        reached = np.full(shape, mask.any())
    return reached & elements.mask


def _is_chosen(select: Elements, k: int) -> Any:
    return np.broadcast_to(np.asarray(select.operands[0]), select.mask.shape) == k - 1


def index_into(x: Any, index: Sequence[int]) -> tuple[int, ...]:
    """The index into an operand of an elementwise operation, which may be a scalar, or have
    axes of size one."""
    return tuple(min(i, n - 1) for i, n in zip(index, np.shape(x), strict=False))


def element(x: Any, index: Sequence[int]) -> Any:
    x = np.asarray(x)
    return x[index_into(x, index)]


def _pull_back(elements: Elements, k: int) -> Any:
    output, ones, k = _at_ones(elements, k)
    out, pullback = jax.vjp(output, ones)
    return np.asarray(pullback(jnp.asarray(elements.mask, out.dtype))[0][k]) != 0


def _push_forward(elements: Elements, k: int, mask: Any) -> Any:
    output, ones, k = _at_ones(elements, k)
    tangents = [jnp.zeros_like(x) for x in ones]
    tangents[k] = jnp.asarray(mask, ones[k].dtype)
    return np.asarray(jax.jvp(output, (ones,), (tangents,))[1]) != 0


def _at_ones(elements: Elements, k: int) -> tuple[Callable[..., Any], list[Any], int]:
    """The output as a function of all inexact operands, ones for these, and the position of
    operand `k` among them. JAX can't transpose a `pad` in its second operand alone."""
    operands = elements.operands
    inexact = [i for i, x in enumerate(operands) if is_inexact(x)]

    def output(xs):
        values = list(operands)
        for i, x in zip(inexact, xs, strict=True):
            values[i] = x
        return bind(elements.eqn, values)[elements.output]

    return output, [jnp.ones_like(operands[i]) for i in inexact], inexact.index(k)
