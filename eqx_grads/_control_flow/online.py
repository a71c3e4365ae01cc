"""A scan whose derivative is computed in the order of time: real-time recurrent learning.

Let `(h_{t+1}, y_t) = f(W, h_t, x_t)`. The derivative of the carry in the parameters obeys

    dh_{t+1}/dW = D_t dh_t/dW + K_t,   D_t = df/dh,  K_t = df/dW,

so it can be computed from the first step to the last, in the carry of a loop, and be multiplied
with the cotangent of each output in the same step:

    ct_W = sum over t:  (dy_t/dW)^T ct_y_t + (dh_{t+1}/dW)^T (dy_t/dh_{t+1})^T ct_y_t.

The outputs are taken as functions of the next carry, wherever the program of a step computes
them from it.

In general `dh_t/dW` has as many entries as the carry and the parameters multiplied. It has few
if `D_t` is diagonal, that is, if each element of the carry depends on itself only (and on the
same element of the other arrays of the carry). Then the entries that are not zero are the
elements of the carry, times the parameters that each of them depends on in a step: the
eligibility traces.

The backward pass runs the steps once more, in the order in which they ran forward, with the
traces in its carry. Of the forward pass, only the inputs are saved.
"""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from .._errors import rule_error, type_of
from .._jaxprs.dependence import without_unused
from .._jaxprs.elementwise_jacobian import Term, terms_of_outputs, View
from .._jaxprs.evaluate import bind, evaluate
from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import is_differentiable, sum_dtype
from .progress import ProgressLine
from .replay import scan_of_batch
from .replay_split import add_terms
from .scan_backward import AbstractMethod, Loop, Plain
from .traced_body import TracedBody, why_not_recomputed
from .truncated import replace, select


@dataclasses.dataclass(frozen=True)
class Online(AbstractMethod):
    """Save the inputs only, and compute the derivatives of the carry forward in time.

    - `approximate`: e-prop. What is not diagonal in the derivative of the carry is dropped.
    - `names`, `where`: the leaves of the carry and the step, as errors call them.
    """

    approximate: bool
    names: tuple[str, ...] = ()
    where: str = ""

    def unsupported(self, loop: Loop) -> str | None:
        if not isinstance(loop.steps, int):
            return "the number of steps is symbolic"
        program, _ = loop.program
        reason = why_not_recomputed(program.effects)
        return None if reason is None else f"a step {reason}"

    def run(self, loop: Loop) -> tuple[list[Any], list[Any]]:
        body, consts, init = loop.traced
        return online_scan(
            consts,
            init,
            loop.xs,
            loop.step_index,
            body=body,
            approximate=self.approximate,
            names=self.names,
            where=self.where,
            reverse=loop.reverse,
            unroll=loop.unroll,
            progress=loop.progress,
        )


@custom_vjp
def online_scan(
    consts: list[Any],
    init: list[Any],
    xs: list[Any],
    step_index: Any,
    *,
    body: TracedBody,
    approximate: bool,
    names: tuple[str, ...],
    where: str,
    reverse: bool,
    unroll: int | bool,
    progress: ProgressLine | None,
):
    """The last carry, and all `ys`."""
    del approximate, names, where
    steps, step = step_index.shape[0], ft.partial(body, consts)
    return Plain().run(Loop(step, init, xs, steps, reverse, unroll, progress))


@online_scan.def_fwd
def _online_scan_fwd(
    consts, init, xs, step_index, *, body, perturbed: tuple[Any, ...], **options
):
    perturbed_consts, perturbed_init, perturbed_xs, _ = perturbed
    if any(perturbed_xs):
        x = next(x for x, flag in zip(xs, perturbed_xs, strict=True) if flag)
        raise rule_error(
            "The inputs of an online `filter_scan` can't be differentiated.",
            f"there is a derivative in an array {type_of(x)} of `xs`",
            do="What an input does to later steps is only known after them. Move the layers "
            "that compute `xs` into the step, or stop the gradient.",
        )
    values = body.with_values_of_rules(perturbed_consts, perturbed_init, perturbed_xs)
    out = online_scan(consts, init, xs, step_index, body=values, **options)
    return out, (consts, init, xs, step_index)


@online_scan.def_bwd(symbolic_zeros=True)
def _online_scan_bwd(
    residuals,
    cts,
    *,
    body,
    approximate,
    names,
    where,
    reverse,
    unroll,
    progress,
    perturbed: tuple[Any, ...],
):
    del progress
    consts, init, xs, _ = residuals
    ct_last, ct_ys = cts
    perturbed_consts, perturbed_init, *_ = perturbed
    jacobian = _StepJacobian(body, perturbed_consts, perturbed_init, approximate, names, where)
    plan = jacobian.plan
    ct_ys = {j: ct for j, ct in enumerate(ct_ys) if ct is not None}

    def one(state, inputs):
        carry, sums, traces, products = state
        x, ct_y = inputs
        new, new_traces = jacobian.step(consts, carry, x, traces)
        if ct_y:
            cts = _pull_back_outputs(body, jacobian, (consts, carry, x, new), ct_y)
            terms, ct_carry, ct_new = cts
            sums = add_terms(sums, terms)
            products = plan.with_products(products, traces, ct_carry)
            products = plan.with_products(products, new_traces, ct_new)
        return (new, sums, new_traces, products), None

    sums = [jnp.zeros(c.shape, sum_dtype(c.dtype)) for c in jacobian.select(consts)]
    state = (init, sums, plan.first_traces(), plan.first_products())
    state, _ = jax.lax.scan(one, state, (xs, ct_ys), reverse=reverse, unroll=unroll)
    _, sums, traces, products = state
    products = plan.with_products(products, traces, dict(enumerate(ct_last)))
    return *plan.cotangents(products, sums, len(consts), len(init)), None, None


def _pull_back_outputs(body, jacobian, inputs, ct_y):
    """The cotangents of the parameters, of the carry that enters a step, and of the next one,
    given those of the outputs of the step."""
    consts, carry, x, new = inputs
    leaves = jacobian.plan.leaves

    def outputs(params, carried, returned):
        consts_now = jacobian.replace(consts, params)
        now = _put(carry, leaves, carried), x, _put(new, leaves, returned)
        ys = _outputs(body, consts_now, *now)
        return [ys[j] for j in ct_y]

    moving = lambda values: [values[i] for i in leaves]
    _, pull_back = jax.vjp(outputs, jacobian.select(consts), moving(carry), moving(new))
    terms, ct_carry, ct_new = pull_back(list(ct_y.values()))
    by_leaf = lambda cts: dict(zip(leaves, cts, strict=True))
    return terms, by_leaf(ct_carry), by_leaf(ct_new)


def _outputs(body: TracedBody, consts, carry, x, new):
    """The outputs of a step, with `new` wherever they are computed from the next carry."""
    outvars = body.program.jaxpr.outvars[: len(carry)]
    given = {v: value for v, value in zip(outvars, new, strict=True) if isinstance(v, Var)}

    def hook(eqn, values):
        out = bind(eqn, values)
        return [given.get(v, value) for v, value in zip(eqn.outvars, out, strict=True)]

    return evaluate(body.program, [*consts, *carry, *x], hook)[len(carry) :]


def _put(values: Sequence[Any], indices: Sequence[int], new: Sequence[Any]) -> list[Any]:
    values = list(values)
    for i, value in zip(indices, new, strict=True):
        values[i] = value
    return values


# ---------------------------------------------------------------- traces


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
        of_consts = _put([None] * n_consts, self.params, cts[: len(sums)])
        return of_consts, cts[len(sums) :]


def _as(x, dtype):
    """In this dtype. The derivative in something real is real."""
    is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return (jnp.real(x) if is_real else x).astype(dtype)


class _StepJacobian:
    """The derivative of the next carry in the carry, which is diagonal, and in parameters."""

    def __init__(self, body, perturbed_consts, perturbed_init, approximate, names, where):
        self.body: TracedBody = body
        self.names = names
        self.where = where
        self.approximate = approximate
        self.params = [
            i
            for i, (flag, t) in enumerate(zip(perturbed_consts, body.const_types, strict=True))
            if flag and is_differentiable(t)
        ]
        self.initial = [i for i in body.differentiable() if perturbed_init[i]]
        self.plan = self._make_plan()

    def select(self, consts: Sequence[Any]) -> list[Any]:
        return [consts[i] for i in self.params]

    def replace(self, consts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
        return _put(consts, self.params, params)

    def step(self, consts, carry, x, traces) -> tuple[list[Any], list[list[Any]]]:
        """The next carry, and its traces."""
        new, terms = self._terms(consts, carry, x)
        diagonal, injected = self._diagonal(terms), _injections(terms, len(self.params))
        out = []
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

    def diagonal(self, consts, carry, x) -> dict[tuple[int, int], Any]:
        """The derivative of leaf `b` of the next carry in leaf `a`, by `(b, a)`."""
        return self._diagonal(self._terms(consts, carry, x)[1])

    def _terms(self, consts, carry, x) -> tuple[list[Any], dict[int, list[Term]]]:
        """The next carry, and the terms of the tangent of each of its leaves. Their sources are
        the parameters, and then the leaves of the carry."""
        leaves = self.body.differentiable()

        def next_carry(params, carried):
            new, _ = self.body(self.replace(consts, params), _put(carry, leaves, carried), x)
            return [new[i] for i in leaves]

        def tangents(*t_primals):
            return jax.jvp(next_carry, primals, t_primals)[1]

        primals = (self.select(consts), [carry[i] for i in leaves])
        program = without_unused(jax.make_jaxpr(tangents)(*primals))
        n = len(program.in_avals)
        found = terms_of_outputs(program, [None] * n, [True] * n)
        sources = [*range(len(self.params)), *(len(self.params) + i for i in leaves)]
        renamed = lambda t: dataclasses.replace(t, source=sources[t.source])
        new, _ = self.body(consts, carry, x)
        return new, {b: list(map(renamed, f)) for b, f in zip(leaves, found, strict=True)}

    def _diagonal(self, terms: dict[int, list[Term]]) -> dict[tuple[int, int], Any]:
        found: dict[tuple[int, int], Any] = {}
        for b, a, term in self._carried(terms):
            if self._is_diagonal(b, term):
                known = found.get((b, a))
                coefficient = term.coefficient
                found[b, a] = coefficient if known is None else known + coefficient
        return found

    def _carried(self, terms: dict[int, list[Term]]):
        n = len(self.params)
        return [(b, t.source - n, t) for b, ts in terms.items() for t in ts if t.source >= n]

    def _is_diagonal(self, b: int, term: Term) -> bool:
        shape = self.body.carry_types[b].shape
        return term.view is not None and term.view.is_identity(shape)

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
        for order, (term, inject) in injected.items():
            if term.view is None:
                raise self._unknown_parameter(term)
            leaves = reached(inject)
            shape = next(iter(inject.values())).shape
            dtypes = tuple(sum_dtype(types[b].dtype) for b in leaves)
            traces.append(_Trace(order, term.source, term.view, leaves, shape, dtypes))
        for i in self.initial:
            leaves = reached([i])
            view = View(lambda x: x[..., None], types[i])
            dtypes = tuple(sum_dtype(types[b].dtype) for b in leaves)
            source = len(self.params) + i
            traces.append(_Trace(None, source, view, leaves, (*types[i].shape, 1), dtypes))
        moving = sorted({leaf for trace in traces for leaf in trace.leaves})
        for b, a, term in self._carried(terms):
            if not self.approximate and a in moving and not self._is_diagonal(b, term):
                raise self._not_diagonal(b, a, term)
        return _Plan(traces, moving, self.params)

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
    reached = set(leaves)
    while True:
        more = {b for b, a in diagonal if a in reached} - reached
        if not more:
            return tuple(sorted(reached))
        reached |= more


# ---------------------------------------------------------------- forward mode


@online_scan.def_jvp
def _online_scan_jvp(
    primals, tangents, *, body, approximate, names, where, reverse, unroll, progress
):
    del progress
    *primals, _ = primals
    *tangents, _ = tangents
    options = {"reverse": reverse, "unroll": unroll}
    if not approximate:
        scan = lambda consts, init, xs: jax.lax.scan(
            ft.partial(body, consts), init, xs, **options
        )
        return _jvp(scan, primals, tangents)
    (consts, init, xs), (t_consts, t_init, t_xs) = primals, tangents
    nothing = [False] * len(consts), [False] * len(init)
    jacobian = _StepJacobian(body, *nothing, approximate, names, where)

    def step(state, inputs):
        (carry, t_carry), (x, t_x) = state, inputs
        fixed = lambda consts, x: body(consts, carry, x)[0]
        new, t_new = _jvp(fixed, (consts, x), (t_consts, t_x))
        diagonal = jacobian.diagonal(consts, carry, x)
        for (b, a), factor in diagonal.items():
            dtype = t_new[b].dtype
            t_new[b] = t_new[b] + factor[..., 0].astype(dtype) * t_carry[a].astype(dtype)
        inputs, tangents = (consts, carry, x, new), (t_consts, t_carry, t_x, t_new)
        return (new, t_new), _jvp(ft.partial(_outputs, body), inputs, tangents)

    (last, t_last), (ys, t_ys) = jax.lax.scan(step, (init, t_init), (xs, t_xs), **options)
    return (last, ys), (t_last, t_ys)


def _jvp(fn, primals, tangents):
    """`jax.jvp` for lists of arrays of which some, of integers, have no tangent."""
    has_tangent = [[is_differentiable(x) for x in part] for part in primals]
    of_moving = lambda *moving: fn(*replace(primals, has_tangent, moving))
    out, t_out = jax.jvp(of_moving, select(has_tangent, primals), select(has_tangent, tangents))
    no_tangent = lambda x, t: t if is_differentiable(x) else None
    return out, jax.tree.map(no_tangent, out, t_out)


@online_scan.def_vmap
def _online_scan_vmap(size, batched, *args, **options):
    return scan_of_batch(online_scan, size, batched, *args, **options)
