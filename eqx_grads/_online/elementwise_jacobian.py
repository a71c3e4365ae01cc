"""Jacobians whose rows have few entries: for each element of an output, what it depends on.

A tangent program is linear in its tangents. Here it is evaluated with a list of terms instead
of each value `v` that depends on a tangent:

    v[i] = sum over terms, sum over j:  coefficient[i, j] * view(t)[i, j]

`t` is the tangent of one input of the program. `view` only moves the elements of `t`: it
broadcasts, slices and transposes them, to the shape of `v` and a last axis `j`. An elementwise
operation changes the coefficients, and a change of layout moves coefficients and view alike. A
sum (such as the sum of a matrix product) moves the axes that it sums over into `j`. So the
weight of `W @ x` has the coefficients `x[j]`, and no sum over `j` is computed.
"""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.primitives import kind_of
from .._jaxprs.structure import Call, CallWithRule, Checkpoint, LinearCall, structure
from .._jaxprs.varying import vary_alike, varying_types


class View:
    """How the elements of an input of this type are laid out, with a last axis.

    Two terms can be added if their view is the same object. So a view stores the views that
    it was moved to.
    """

    def __init__(self, apply: Callable[[Array], Array], of: Any):
        self.apply = apply
        self.of = of
        self._moved: dict[Any, View] = {}

    def moved(self, key: Any, move: Callable[[Array], Array]) -> "View":
        """The view after a change of layout, which `key` identifies."""
        if key not in self._moved:
            apply = self.apply
            self._moved[key] = View(lambda x: move(apply(x)), self.of)
        return self._moved[key]

    def is_identity(self, shape: tuple[int, ...]) -> bool:
        """Whether element `i` is element `i` of the array, which has this shape."""
        if self.of.shape != shape:
            return False
        indices = np.arange(math.prod(shape)).reshape(shape)
        with jax.ensure_compile_time_eval():
            seen = self.apply(jnp.asarray(indices))
        return np.array_equal(seen, indices[..., None])

    def transpose(self, ct: Array) -> Array:
        """The cotangent of the input, given the cotangent of its view."""
        (x,) = varying_types([jax.ShapeDtypeStruct(self.of.shape, ct.dtype)], ct)
        return jax.linear_transpose(self.apply, x)(ct)[0]


class Term(NamedTuple):
    """`sum over j: coefficient[i, j] * view(t)[i, j]`, with the tangent `t` of input `source`.

    `mixed_by` is the equation that made an element depend on several elements of `t`, or on
    `t` in a way that is not known. In the latter case `view` is `None`.
    """

    source: int
    view: View | None
    coefficient: Any
    is_complex: bool  # whether `t` is
    mixed_by: Any = None


Value = Any  # an array, or a list of terms


def terms_of_outputs(program: ClosedJaxpr, sources: Sequence[int]) -> list[list[Term]]:
    """The terms of each output of a program that is linear in its inputs, which are called
    `sources`."""
    start = [_whole(i, v.aval) for i, v in zip(sources, program.jaxpr.invars, strict=True)]
    return [x if _is_terms(x) else [] for x in evaluate(program, start, _evaluate_equation)]


def _whole(source: int, aval: Any) -> list[Term]:
    is_complex = jnp.issubdtype(aval.dtype, jnp.complexfloating)
    ones = jnp.ones((*aval.shape, 1), aval.dtype)
    return [Term(source, View(lambda x: x[..., None], aval), ones, is_complex)]


def _is_terms(value: Value) -> bool:
    return isinstance(value, list)


def _evaluate_equation(eqn: Any, values: list[Value]) -> Sequence[Value]:
    if not any(map(_is_terms, values)):
        return bind(eqn, values)
    known, kind, name = structure(eqn), kind_of(eqn), eqn.primitive.name
    if isinstance(known, Call | CallWithRule | Checkpoint):
        return evaluate(*known.programs, values, _evaluate_equation)
    if isinstance(known, LinearCall):  # tangents of a rule
        return evaluate(known.trace(), values, _evaluate_equation)
    if kind.identity:
        return values
    if kind.elementwise and _is_linear(eqn) and not (name in _OF_PARTS and _is_complex(values)):
        return [_elementwise(eqn, values)]
    if kind.layout and (kind.linear == "jointly" or name == "expand_dims"):
        return _layout(eqn, values)
    if name == "reduce_sum":
        return [_reduce_sum(eqn, values[0])]
    if name == "dot_general" and _is_terms(values[0]) != _is_terms(values[1]):
        return [_dot_general(eqn, values)]
    return _unknown(eqn, values)


def _is_linear(eqn: Any) -> bool:
    """Whether an elementwise equation is linear in each operand that can have a tangent. (A
    product of two tangents is not linear.)"""
    is_cast = eqn.primitive.name in ("select_n", "convert_element_type")
    return is_cast or kind_of(eqn).linear not in (None, "no")


def _unknown(eqn: Any, values: Sequence[Value]) -> list[Value]:
    terms: dict[int, Term] = {}
    for term in (term for value in values if _is_terms(value) for term in value):
        opaque = Term(term.source, None, None, term.is_complex, term.mixed_by or eqn)
        terms.setdefault(term.source, opaque)
    return [list(terms.values()) for _ in eqn.outvars]


# ---------------------------------------------------------------- elementwise


def _merge(terms: Sequence[Term]) -> list[Term]:
    merged: dict[Any, Term] = {}
    for term in terms:
        key = (term.source, id(term.view))
        if key in merged and term.view is not None:
            coefficient = merged[key].coefficient + term.coefficient
            merged[key] = term._replace(coefficient=coefficient)
        else:
            merged.setdefault(key, term)
    return list(merged.values())


def _scaled(term: Term, scale: Callable[[Array], Array]) -> Term:
    if term.view is None:
        return term
    return term._replace(coefficient=scale(term.coefficient))


_OF_PARTS = ("real", "imag", "conj", "complex")  # not linear over the complex numbers


def _elementwise(eqn: Any, values: Sequence[Value]) -> list[Term]:
    """Coefficients are computed from coefficients as tangents are from tangents."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    total: list[Term] = []
    for k, value in enumerate(values):
        if not _is_terms(value):
            continue
        if name in ("add", "add_any", "sub"):
            scale = jnp.negative if name == "sub" and k == 1 else lambda x: x
        else:
            others = [
                jnp.zeros(shape, v.aval.dtype) if _is_terms(x) else jnp.broadcast_to(x, shape)
                for x, v in zip(values, eqn.invars, strict=True)
            ]
            scale = ft.partial(_of_columns, eqn, others, k, 0)
        total += [_scaled(term, scale) for term in _broadcast(value, shape)]
    return _merge(total)


def _is_complex(values: Sequence[Value]) -> bool:
    """Whether there are terms of complex tangents."""
    return any(t.is_complex for x in values if _is_terms(x) for t in x)


def _of_columns(eqn: Any, operands: Sequence[Any], k: int, j: int, x: Array) -> Array:
    """Output `j` of the equation with `x` for operand `k`, whose last axis is mapped."""

    def of_column(column):
        return bind(eqn, vary_alike([*operands[:k], column, *operands[k + 1 :]]))[j]

    return jax.vmap(of_column, -1, -1)(x)


# ---------------------------------------------------------------- layout


def _layout(eqn: Any, values: Sequence[Value]) -> list[list[Term]]:
    outs: list[list[Term]] = [[] for _ in eqn.outvars]
    # How the elements of one operand move depends on the shapes of the others, too.
    shapes = tuple(v.aval.shape for v in eqn.invars)
    change = (eqn.primitive.name, tuple(sorted(eqn.params.items())), shapes)
    for k, value in enumerate(values):
        if not _is_terms(value):
            continue
        for term in value:
            for j, out in enumerate(outs):
                move = ft.partial(_move_columns, eqn, k, j)
                out.append(_moved(term, (change, k, j), move))
    return [_merge(out) for out in outs]


def _move_columns(eqn: Any, k: int, j: int, x: Array) -> Array:
    """Where the elements of the other operands would be, there is zero."""
    zeros = [jnp.zeros(v.aval.shape, x.dtype) for v in eqn.invars]
    return _of_columns(eqn, zeros, k, j, x)


def _moved(term: Term, key: Any, move: Callable[[Array], Array], mixed_by: Any = None) -> Term:
    if term.view is None:
        return term
    view, coefficient = term.view.moved(key, move), move(term.coefficient)
    mixed_by = term.mixed_by or mixed_by
    return term._replace(view=view, coefficient=coefficient, mixed_by=mixed_by)


def _broadcast(terms: list[Term], shape: tuple[int, ...]) -> list[Term]:
    """The terms of an operand that an elementwise operation broadcasts."""
    move = lambda x: jnp.broadcast_to(x, (*shape, x.shape[-1]))
    fits = lambda t: t.view is None or t.coefficient.shape[:-1] == shape
    return [t if fits(t) else _moved(t, ("broadcast", shape), move) for t in terms]


# ---------------------------------------------------------------- sums over axes


def _reduce_sum(eqn: Any, terms: list[Term]) -> list[Term]:
    axes = eqn.params["axes"]

    def move(x):
        kept = [i for i in range(x.ndim - 1) if i not in axes]
        shape = [x.shape[i] for i in kept]
        return jnp.transpose(x, [*kept, *axes, x.ndim - 1]).reshape(*shape, -1)

    moved = [_moved(t, ("reduce_sum", axes), move, eqn) for t in terms]
    return _merge(moved)


def _dot_general(eqn: Any, values: Sequence[Value]) -> list[Term]:
    """A product of matrices where one of them has terms."""
    numbers, dtype = eqn.params["dimension_numbers"], eqn.outvars[0].aval.dtype
    as_sum = lambda *operands: _product_as_sum(numbers, *(x.astype(dtype) for x in operands))
    program = jax.make_jaxpr(as_sum)(*(v.aval for v in eqn.invars))
    (terms,) = evaluate(program, values, _evaluate_equation)
    mixed = [id(t.mixed_by) for x in values if _is_terms(x) for t in x if t.mixed_by]
    by = lambda t: t.mixed_by if id(t.mixed_by) in mixed else eqn
    return [t._replace(mixed_by=by(t)) for t in terms]


def _product_as_sum(dimension_numbers: Any, a: Array, b: Array) -> Array:
    """A product of matrices: transposed, broadcast, multiplied, and summed."""
    contract, batch = dimension_numbers
    free = [
        [i for i in range(x.ndim) if i not in (*batch[k], *contract[k])]
        for k, x in enumerate((a, b))
    ]
    a, b = (jnp.transpose(x, [*batch[k], *free[k], *contract[k]]) for k, x in enumerate((a, b)))
    n, n_a, n_b = len(batch[0]), len(free[0]), len(free[1])
    a = jnp.expand_dims(a, range(n + n_a, n + n_a + n_b))
    product = jnp.multiply(a, jnp.expand_dims(b, range(n, n + n_a)))
    return jnp.sum(product, range(n + n_a + n_b, product.ndim))
