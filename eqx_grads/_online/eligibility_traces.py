"""The derivatives of a carry that are carried along: the eligibility traces.

A trace holds, for each element of some arrays of the carry, its derivatives in those elements
of a parameter that the element depends on in a step. The derivative of the next carry in the
carry is diagonal, so that these elements are the same in all steps.

The name is that of e-prop (Bellec et al. 2020, https://doi.org/10.1038/s41467-020-17236-y), in
which the traces approximate real-time recurrent learning (Williams and Zipser 1989). They are
exact if the recurrence is elementwise (Zucchet et al. 2023, https://arxiv.org/abs/2305.15947).
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._errors import rule_error, type_of
from .._jaxprs.dependence import without_unused
from .._jaxprs.interpret import fixed_point
from .._jaxprs.operands import at, fill, flagged
from .._tangent_spaces import is_differentiable, sum_dtype
from .elementwise_jacobian import Term, terms_of_outputs, View
from .step_tangents import forward_tangents, reverse_tangents


@dataclasses.dataclass(frozen=True)
class _Trace:
    """The derivatives of some `leaves` of the carry in one input, as `view` lays it out.

    There is one array for each of `leaves`, all of the same `shape`. `source` is the index of
    the input, among the parameters and then the leaves of the first carry. `order` is the index
    of its injection, and `None` for a leaf of the first carry.
    """

    order: int | None
    source: int
    view: View
    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dtypes: tuple[Any, ...]

    @property
    def product_dtype(self) -> Any:
        return sum_dtype(self.view.of.dtype)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which traces there are, the leaves of the carry that have some, and the indices of the
    parameters among the `consts`."""

    traces: Sequence[_Trace]
    leaves: Sequence[int]
    params: Sequence[int]

    def first_traces(self) -> list[list[Any]]:
        """Zero; but each element of the first carry has the derivative one in itself."""
        return [list(map(ft.partial(self._first, t), t.leaves, t.dtypes)) for t in self.traces]

    def _first(self, trace: _Trace, leaf: int, dtype: Any) -> Any:
        is_own = trace.order is None and trace.source == len(self.params) + leaf
        return jnp.full(trace.shape, 1 if is_own else 0, dtype)

    def first_products(self) -> list[Any]:
        return [jnp.zeros(trace.shape, trace.product_dtype) for trace in self.traces]

    def with_products(self, products, traces, ct_carry: dict[int, Any]) -> list[Any]:
        """`products`, and the traces multiplied with the cotangents of the carry."""
        sums = []
        for total, trace, values in zip(products, self.traces, traces, strict=True):
            for leaf, value in zip(trace.leaves, values, strict=True):
                if (ct := ct_carry.get(leaf)) is not None:
                    product = ct.astype(value.dtype)[..., None] * value
                    total = total + _as(product, total.dtype)
            sums.append(total)
        return sums

    def cotangents(self, products, sums, n_consts, n_carry) -> tuple[list[Any], list[Any]]:
        """The cotangents of the `consts`, to which `sums` belong, and of the first carry."""
        cts: list[Any] = [*sums, *([None] * n_carry)]
        for trace, product in zip(self.traces, products, strict=True):
            ct = trace.view.transpose(product)
            old = cts[trace.source]
            cts[trace.source] = ct if old is None else old + ct
        of_consts = fill([None] * n_consts, self.params, cts[: len(sums)])
        return of_consts, cts[len(sums) :]


def _as(x, dtype):
    """In this dtype. The derivative in something real is real."""
    is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return (jnp.real(x) if is_real else x).astype(dtype)


class StepJacobian:
    """The derivative of the next carry in the carry, which is diagonal, and in parameters: that
    of reverse mode."""

    def __init__(self, body, perturbed_consts, perturbed_init, options):
        self.body = body
        self.names = options.names
        self.where = options.where
        self.approximate = options.approximate
        if body.has_symbolic_shapes:
            raise self._symbolic_shapes()
        flags = perturbed_consts, perturbed_init, [False] * len(body.x_types)
        of_consts = flagged(perturbed_consts)
        self.params = [i for i in of_consts if is_differentiable(body.const_types[i])]
        carried = body.carried(*flags)
        self.perturbed = [i for i in body.differentiable() if carried[i]]
        self.initial = [i for i in self.perturbed if perturbed_init[i]]
        self.values = body.with_values_of_rules(*flags)
        self.plan = self._make_plan()

    def select(self, consts: Sequence[Any]) -> list[Any]:
        return at(consts, self.params)

    def replace(self, consts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        return fill(consts, self.params, params)

    def step(self, consts, carry, x, traces) -> tuple[list[Any], list[list[Any]]]:
        """The next carry, and its traces."""
        new, terms = self._terms(consts, carry, x)
        diagonal, injected = self._diagonal(terms), _injections(terms, len(self.params))
        out = []
        # dh'/dW = D dh/dW + K: `D` is diagonal, and `K` is what the step injects.
        for trace, values in zip(self.plan.traces, traces, strict=True):
            old = dict(zip(trace.leaves, values, strict=True))
            inject = {} if trace.order is None else injected[trace.order][1]
            found = []
            for b, dtype in zip(trace.leaves, trace.dtypes, strict=True):
                parts = [
                    diagonal[b, a].astype(dtype) * old[a].astype(dtype)
                    for a in trace.leaves
                    if (b, a) in diagonal
                ]
                parts += [inject[b]] if b in inject else []
                zero = jnp.zeros(trace.shape, dtype)
                found.append(sum((part.astype(dtype) for part in parts), zero))
            out.append(found)
        return new, out

    def _terms(self, consts, carry, x) -> tuple[list[Any], dict[int, list[Term]]]:
        """The next carry, and the terms of the tangent of each of its leaves. Their sources are
        the parameters, and then the leaves of the carry."""
        n, leaves = len(self.params), self.perturbed
        next_carry = _next_carry(self.body, leaves)

        def of_perturbed(*values):
            consts_now = self.replace(consts, values[:n])
            return next_carry(consts_now, fill(carry, leaves, values[n:]), x)

        primals = [*self.select(consts), *(carry[i] for i in leaves)]
        program = reverse_tangents(of_perturbed, primals, self.where)
        sources = [*range(n), *(n + i for i in leaves)]
        new, _ = self.values(consts, carry, x)
        return new, dict(zip(leaves, _terms_of(program, sources), strict=True))

    def _diagonal(self, terms: dict[int, list[Term]]) -> dict[tuple[int, int], Any]:
        return _diagonal(self._carried(terms), self.body.carry_types)

    def _carried(self, terms: dict[int, list[Term]]):
        n = len(self.params)
        return [(b, t.source - n, t) for b, ts in terms.items() for t in ts if t.source >= n]

    def _make_plan(self) -> _Plan:
        plans: list[_Plan] = []

        def trace(consts, carry, x):
            _, terms = self._terms(consts, carry, x)
            plans.append(self._plan_of(terms))

        body = self.body
        jax.eval_shape(trace, body.const_types, body.carry_types, body.x_types)
        return plans[0]

    def _plan_of(self, terms: dict[int, list[Term]]) -> _Plan:
        diagonal = self._diagonal(terms)
        reached = lambda leaves: _closure(leaves, diagonal)
        types = self.body.carry_types
        traces = []
        injected = _injections(terms, len(self.params))
        # One trace for each way in which a parameter enters the carry, with the leaves that its
        # derivative reaches in later steps.
        for order, (term, inject) in injected.items():
            if term.view is None:
                raise self._unknown_parameter(term)
            leaves = reached(inject)
            shape = next(iter(inject.values())).shape
            dtypes = tuple(sum_dtype(types[b].dtype) for b in leaves)
            traces.append(_Trace(order, term.source, term.view, leaves, shape, dtypes))
        # And one for each leaf of the first carry that is differentiated.
        for i in self.initial:
            leaves = reached([i])
            view = View(lambda x: x[..., None], types[i])
            dtypes = tuple(sum_dtype(types[b].dtype) for b in leaves)
            source = len(self.params) + i
            traces.append(_Trace(None, source, view, leaves, (*types[i].shape, 1), dtypes))
        perturbed = sorted({leaf for trace in traces for leaf in trace.leaves})
        for b, a, term in self._carried(terms):
            if not self.approximate and a in perturbed and not _is_diagonal(types[b], term):
                raise self._not_diagonal(b, a, term)
        return _Plan(traces, perturbed, self.params)

    def _symbolic_shapes(self):
        return rule_error(
            "The derivative of an online `filter_scan` needs sizes that are known.",
            "a size in its steps is symbolic",
            self.where,
            do="Export the derivative for known sizes, or use `checkpoint=None`.",
        )

    def _unknown_parameter(self, term: Term):
        type_ = self.body.const_types[self.params[term.source]]
        return rule_error(
            "An online `filter_scan` can't follow a parameter into the carry.",
            f"an array {type_of(type_)} enters it by `{term.mixed_by.primitive.name}`",
            self.where,
            do="It follows elementwise operations, sums, matrix products and changes of "
            "layout. A lookup is the product of a one-hot vector and a matrix. Or use "
            "`truncate`.",
        )

    def _not_diagonal(self, b: int, a: int, term: Term):
        by = "by their order" if term.mixed_by is None else f"by `{_name(term.mixed_by)}`"
        return rule_error(
            "The steps of an online `filter_scan` are not elementwise in the carry.",
            f"{self.names[b]} depends on other elements of {self.names[a]}, {by}",
            self.where,
            do='Use `online="e-prop"`, which drops this part of the derivative, or `truncate`.',
        )


def forward_diagonal(
    body: Any, leaves: Sequence[int], consts, carry, x
) -> dict[tuple[int, int], Any]:
    """The diagonal of the derivative of the next carry in the carry, of these leaves: that of
    forward mode. Key `(b, a)` is for leaf `b` of the next carry and leaf `a` of the carry."""
    next_carry = _next_carry(body, leaves)
    of_perturbed = lambda *values: next_carry(consts, fill(carry, leaves, values), x)
    program = forward_tangents(of_perturbed, [carry[i] for i in leaves])
    terms = zip(leaves, _terms_of(program, leaves), strict=True)
    carried = [(b, t.source, t) for b, of_leaf in terms for t in of_leaf]
    return _diagonal(carried, body.carry_types)


def _next_carry(body: Any, leaves: Sequence[int]):
    """The leaves of the next carry with these indices, as a function of `consts, carry, x`."""
    used = [i in leaves for i in range(len(body.program.out_avals))]
    run = jaxpr_as_fun(without_unused(body.program, used))
    return lambda consts, carry, x: run(*consts, *carry, *x)


def _terms_of(tangents: ClosedJaxpr, sources: Sequence[int]) -> list[list[Term]]:
    """The terms of the outputs of a program of tangents. The source of an input is in
    `sources`."""
    n = len(tangents.in_avals)
    found = terms_of_outputs(tangents, [None] * n, [True] * n)
    renamed = lambda t: dataclasses.replace(t, source=sources[t.source])
    return [list(map(renamed, terms)) for terms in found]


def _diagonal(carried, types: Sequence[Any]) -> dict[tuple[int, int], Any]:
    found: dict[tuple[int, int], Any] = {}
    for b, a, term in carried:
        if _is_diagonal(types[b], term):
            known = found.get((b, a))
            coefficient = term.coefficient
            found[b, a] = coefficient if known is None else known + coefficient
    return found


def _is_diagonal(type_: Any, term: Term) -> bool:
    return term.view is not None and term.view.is_identity(type_.shape)


def _name(eqn: Any) -> str:
    return eqn.primitive.name


def _injections(terms: dict[int, list[Term]], n_params: int) -> dict[int, Any]:
    """The terms of parameters, in an order that is the same in each trace of the step: one term
    for each view, and the coefficients for each leaf of the carry that it enters."""
    order: dict[Any, int] = {}
    found: dict[int, Any] = {}
    for b, of_leaf in terms.items():
        for term in of_leaf:
            if term.source < n_params:
                k = order.setdefault((term.source, id(term.view)), len(order))
                found.setdefault(k, (term, {}))[1][b] = term.coefficient
    return found


def _closure(leaves, diagonal) -> tuple[int, ...]:
    """These leaves of the carry, and all that depend on them."""
    and_next = lambda reached: reached | {b for b, a in diagonal if a in reached}
    return tuple(sorted(fixed_point(and_next, set(leaves))))
