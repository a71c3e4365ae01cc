"""The derivatives of a carry that are carried along: the eligibility traces.

A trace holds, for each element of some arrays of the carry, its derivatives in those elements
of a parameter that the element depends on in a step. The derivative of the next carry in the
carry is diagonal, so that these elements are the same in all steps.

The name comes from e-prop (Bellec et al. 2020, https://doi.org/10.1038/s41467-020-17236-y), in
which the traces approximate real-time recurrent learning (Williams and Zipser 1989). They are
exact if the recurrence is elementwise (Zucchet et al. 2023, https://arxiv.org/abs/2305.15947).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._errors import rule_error, type_of
from .._jaxprs.dependence import are_in, depends, without_unused
from .._jaxprs.interpret import fixed_point
from .._jaxprs.linearity import output_statuses, surely_linear, why_nonlinear
from .._jaxprs.operands import at, fill, flagged
from .._jaxprs.structure import CallWithRule, found, inner_programs
from .._jaxprs.versions import function_name
from .._tangent_spaces import is_differentiable, sum_dtype
from .elementwise_jacobian import Term, terms_of_outputs, View


class _Trace(NamedTuple):
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


class StepJacobian:
    """The derivative of the next carry in the carry, which is diagonal, and in parameters, in
    reverse mode.

    - `traces`: which traces there are.
    - `leaves`: the leaves of the carry that have some.
    """

    def __init__(self, body, perturbed_consts, perturbed_init, options):
        self.body, self.options = body, options
        if body.has_symbolic_shapes:
            raise rule_error(
                "The derivative of an online `filter_scan` needs sizes that are known.",
                "a size in its steps is symbolic",
                options.where,
                do="Export the derivative for known sizes, or use `checkpoint=None`.",
            )
        flags = perturbed_consts, perturbed_init, [False] * len(body.x_types)
        of_consts = flagged(perturbed_consts)
        self.params = [i for i in of_consts if is_differentiable(body.const_types[i])]
        carried = body.carried(*flags)
        self.perturbed = [i for i in body.differentiable() if carried[i]]
        self.values = body.with_values_of_rules(*flags)
        self.traces: list[_Trace] = []
        initial = [i for i in self.perturbed if perturbed_init[i]]
        plan = lambda *inputs: self._find_traces(self._terms(*inputs)[1], initial)
        jax.eval_shape(plan, body.const_types, body.carry_types, body.x_types)
        self.leaves = sorted({leaf for trace in self.traces for leaf in trace.leaves})

    def select(self, consts: Sequence[Any]) -> list[Any]:
        return at(consts, self.params)

    def replace(self, consts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        return fill(consts, self.params, params)

    # ------------------------------------------------------------ in each step

    def first_traces(self) -> list[list[Any]]:
        """Zero; but each element of the first carry has the derivative one in itself."""
        first = lambda trace, leaf: 1 if trace.source == len(self.params) + leaf else 0
        return [
            [jnp.full(t.shape, first(t, b), d) for b, d in zip(t.leaves, t.dtypes, strict=True)]
            for t in self.traces
        ]

    def first_products(self) -> list[Any]:
        return [jnp.zeros(t.shape, sum_dtype(t.view.of.dtype)) for t in self.traces]

    def step(self, consts, carry, x, traces) -> tuple[list[Any], list[list[Any]]]:
        """The next carry, and its traces."""
        new, terms = self._terms(consts, carry, x)
        diagonal = _diagonal(self._carried(terms), self.body.carry_types)
        injected, out = _injections(terms, len(self.params)), []
        # dh'/dW = D dh/dW + K: `D` is diagonal, and `K` is what the step injects.
        for trace, values in zip(self.traces, traces, strict=True):
            inject = {} if trace.order is None else injected[trace.order][1]
            found = []
            for b, dtype in zip(trace.leaves, trace.dtypes, strict=True):
                total = jnp.zeros(trace.shape, dtype)
                for a, old in zip(trace.leaves, values, strict=True):
                    if (b, a) in diagonal:
                        total = total + diagonal[b, a].astype(dtype) * old.astype(dtype)
                found.append(total + inject[b].astype(dtype) if b in inject else total)
            out.append(found)
        return new, out

    def with_products(self, products, traces, ct_carry: dict[int, Any]) -> list[Any]:
        """`products`, and the traces multiplied with the cotangents of the carry."""
        sums = []
        for total, trace, values in zip(products, self.traces, traces, strict=True):
            for leaf, value in zip(trace.leaves, values, strict=True):
                if (ct := ct_carry.get(leaf)) is not None:
                    product = ct.astype(value.dtype)[..., None] * value
                    # The derivative in something real is real.
                    product = product if jnp.iscomplexobj(total) else jnp.real(product)
                    total = total + product.astype(total.dtype)
            sums.append(total)
        return sums

    def cotangents(self, products, sums, n_consts, n_carry) -> tuple[list[Any], list[Any]]:
        """The cotangents of the `consts`, to which `sums` belong, and of the first carry."""
        cts: list[Any] = [*sums, *([None] * n_carry)]
        for trace, product in zip(self.traces, products, strict=True):
            ct, old = trace.view.transpose(product), cts[trace.source]
            cts[trace.source] = ct if old is None else old + ct
        return self.replace([None] * n_consts, cts[: len(sums)]), cts[len(sums) :]

    # ------------------------------------------------------------ what depends on what

    def _terms(self, consts, carry, x) -> tuple[list[Any], dict[int, list[Term]]]:
        """The next carry, and the terms of the tangent of each of its leaves. Their sources are
        the parameters, and then the leaves of the carry."""
        n, leaves = len(self.params), self.perturbed
        next_carry = _next_carry(self.body, leaves)

        def of_perturbed(*values):
            consts_now = self.replace(consts, values[:n])
            return next_carry(consts_now, fill(carry, leaves, values[n:]), x)

        primals = [*self.select(consts), *at(carry, leaves)]
        program = reverse_tangents(of_perturbed, primals, self.options.where)
        sources = [*range(n), *(n + i for i in leaves)]
        new, _ = self.values(consts, carry, x)
        return new, dict(zip(leaves, terms_of_outputs(program, sources), strict=True))

    def _carried(self, terms: dict[int, list[Term]]):
        n = len(self.params)
        return [(b, t.source - n, t) for b, ts in terms.items() for t in ts if t.source >= n]

    def _find_traces(self, terms: dict[int, list[Term]], initial: Sequence[int]) -> None:
        types, n = self.body.carry_types, len(self.params)
        diagonal = _diagonal(self._carried(terms), types)

        def add(order, source, view, leaves, shape):
            # The leaves that the derivative reaches in later steps.
            and_next = lambda reached: reached | {b for b, a in diagonal if a in reached}
            leaves = tuple(sorted(fixed_point(and_next, set(leaves))))
            dtypes = tuple(sum_dtype(types[b].dtype) for b in leaves)
            self.traces.append(_Trace(order, source, view, leaves, shape, dtypes))

        # One trace for each way in which a parameter enters the carry.
        for order, (term, inject) in _injections(terms, n).items():
            if term.view is None:
                raise self._unknown_parameter(term)
            add(order, term.source, term.view, inject, next(iter(inject.values())).shape)
        # And one for each leaf of the first carry that is differentiated.
        for i in initial:
            view = View(lambda x: x[..., None], types[i])
            add(None, n + i, view, [i], (*types[i].shape, 1))
        reached = {leaf for trace in self.traces for leaf in trace.leaves}
        for b, a, term in self._carried(terms):
            if (
                not self.options.approximate
                and a in reached
                and not _is_diagonal(types[b], term)
            ):
                raise self._not_diagonal(b, a, term)

    def _unknown_parameter(self, term: Term):
        type_ = self.body.const_types[self.params[term.source]]
        return rule_error(
            "An online `filter_scan` can't follow a parameter into the carry.",
            f"an array {type_of(type_)} enters it by `{term.mixed_by.primitive.name}`",
            self.options.where,
            do="It follows elementwise operations, sums, matrix products and changes of "
            "layout. A lookup is the product of a one-hot vector and a matrix. Or use "
            "`truncate`.",
        )

    def _not_diagonal(self, b: int, a: int, term: Term):
        eqn, names = term.mixed_by, self.options.names
        by = "by their order" if eqn is None else f"by `{eqn.primitive.name}`"
        return rule_error(
            "The steps of an online `filter_scan` are not elementwise in the carry.",
            f"{names[b]} depends on other elements of {names[a]}, {by}",
            self.options.where,
            do='Use `online="e-prop"`, which drops this part of the derivative, or `truncate`.',
        )


def _next_carry(body: Any, leaves: Sequence[int]):
    """The leaves of the next carry with these indices, as a function of `consts, carry, x`."""
    used = [i in leaves for i in range(len(body.program.out_avals))]
    run = jaxpr_as_fun(without_unused(body.program, used))
    return lambda consts, carry, x: run(*consts, *carry, *x)


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


def reverse_tangents(
    fn: Callable[..., list[Any]], primals: Sequence[Any], where: str
) -> ClosedJaxpr:
    """The tangents of the outputs, as a program of the tangents of the inputs. An error names
    the rules, if the pullback is not seen to be linear."""
    step = jax.make_jaxpr(fn)(*primals)
    types = step.out_avals
    pull_back = lambda *cts: list(jax.vjp(fn, *primals)[1](list(cts)))
    backward = without_unused(jax.make_jaxpr(pull_back)(*types))
    reason = _why_not_linear(backward)
    if reason is not None:
        names = [f"`{_name_of(eqn)}`" for eqn in found(step, CallWithRule)]
        of = " or ".join(dict.fromkeys(names)) or "a step"
        raise rule_error(
            "A rule for reverse mode can't be followed online, because it is not linear in its "
            "cotangent.",
            f"the backward rule of {of}: {reason}",
            where,
            do="An online `filter_scan` computes the derivative of the carry before there is a "
            "cotangent. Apply the function to what only the outputs use, or use `checkpoint` "
            "or `truncate`.",
        )
    transposed = jax.linear_transpose(jaxpr_as_fun(backward), *types)
    return without_unused(jax.make_jaxpr(lambda *ts: transposed(list(ts)))(*primals))


# ---------------------------------------------------------------- linearity


def _why_not_linear(backward: ClosedJaxpr) -> str | None:
    """The reason why a pullback can't be transposed, as a predicate."""
    statuses = output_statuses(backward)
    if not surely_linear(statuses):
        # The words are those for a function of tangents.
        reason = why_nonlinear(statuses) or "it is not seen to be linear"
        return reason.replace("tangent", "cotangent")
    # A second derivative follows that rule, and would not find it in the transpose.
    dependent = depends(backward, [True] * len(backward.in_avals))
    eqns = [eqn for eqn in backward.eqns if any(are_in(eqn.invars, dependent))]
    applied = [call for eqn in eqns for call in found(eqn, CallWithRule)]
    return f"it applies `{_name_of(applied[0])}`, which has a rule" if applied else None


def _name_of(eqn: Any) -> str:
    """The user's name for a function with a rule."""
    call = eqn.params.get("call")  # of `_rules/call_primitive.py`
    return function_name(*inner_programs(eqn)) if call is None else call.name
