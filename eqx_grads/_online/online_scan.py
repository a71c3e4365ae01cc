"""A scan whose derivative is computed in the order of time: real-time recurrent learning.

Let `(h_{t+1}, y_t) = f(W, h_t, x_t)`. The derivative of the carry in the parameters obeys

    dh_{t+1}/dW = D_t dh_t/dW + K_t,   D_t = df/dh,  K_t = df/dW,

so it can be computed from the first step to the last, in the carry of a loop, and be multiplied
with the cotangent of each output in the same step:

    ct_W = sum over t:  (dy_t/dW)^T ct_y_t + (dh_{t+1}/dW)^T (dy_t/dh_{t+1})^T ct_y_t.

The outputs are taken as functions of the next carry, wherever the program of a step computes
them from it.

In general `dh_t/dW` has as many entries as the carry and the parameters multiplied. It has few
if `D_t` is diagonal: each element of the carry depends on itself only, and on the same element
of the other arrays of the carry. Then the entries that are not zero are the elements of the
carry, times the parameters that each of them depends on in a step: the eligibility traces.

The backward pass runs the steps once more, in the order in which they ran forward, with the
traces in its carry. The forward pass saves only the inputs. Forward mode is JAX's own.
"""

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from .._errors import rule_error, type_of
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.operands import at, fill
from .._jaxprs.varying import on_explicit_mesh, vary_alike
from .._rules.custom_vjp import custom_vjp
from .._tangent_spaces import add_terms, sum_dtype
from .eligibility_traces import StepJacobian


class OnlineOptions(NamedTuple):
    """How to run and to differentiate the steps.

    - `approximate`: e-prop, which drops the derivative of the carry that is not diagonal, in
        reverse mode.
    - `names`, `where`: the leaves of the carry and the step, as errors call them.
    """

    approximate: bool
    names: tuple[str, ...]
    where: str
    reverse: bool
    unroll: int | bool

    def scan(self, step: Any, init: Any, xs: Any, step_index: Any) -> tuple[Any, Any]:
        options = {"reverse": self.reverse, "unroll": self.unroll}
        return jax.lax.scan(step, init, xs, len(step_index), **options)


@custom_vjp
def online_scan(
    consts: list[Any],
    init: list[Any],
    xs: list[Any],
    step_index: Any,
    *,
    body: Any,
    options: OnlineOptions,
):
    """The last carry, and all `ys`. `body` is a traced step."""
    return options.scan(ft.partial(body, consts), init, xs, step_index)


# `ScanBody.varying_arrays` has cast the operands, and a constant must stay as `body` has it.
online_scan._rules.varies_alike = False


@online_scan.def_fwd
def _online_scan_fwd(
    consts, init, xs, step_index, *, body, options, perturbed: tuple[Any, ...]
):
    perturbed_consts, perturbed_init, perturbed_xs, _ = perturbed
    if any(perturbed_xs):
        x = next(x for x, flag in zip(xs, perturbed_xs, strict=True) if flag)
        raise rule_error(
            "The inputs of an online `filter_scan` can't be differentiated.",
            f"there is a derivative in an array {type_of(x)} of `xs`",
            do="The effect of an input on later steps is known only after these steps. Move "
            "the layers that compute `xs` into the step, or stop the gradient.",
        )
    values = body.with_values_of_rules(perturbed_consts, perturbed_init, perturbed_xs)
    out = online_scan(consts, init, xs, step_index, body=values, options=options)
    return out, (consts, init, xs, step_index)


@online_scan.def_bwd(symbolic_zeros=True)
def _online_scan_bwd(residuals, cts, *, body, options, perturbed: tuple[Any, ...]):
    consts, init, xs, step_index = residuals
    ct_last, ct_ys = cts
    perturbed_consts, perturbed_init, *_ = perturbed
    jacobian = StepJacobian(body, perturbed_consts, perturbed_init, options)
    ct_ys = {j: ct for j, ct in enumerate(ct_ys) if ct is not None}

    def one(state, inputs):
        carry, sums, traces, products = state
        x, ct_y = inputs
        new, new_traces = jacobian.step(consts, carry, x, traces)
        if ct_y:
            cts = _pull_back_outputs(body, jacobian, (consts, carry, x, new), ct_y)
            terms, ct_carry, ct_new = cts
            sums = add_terms(sums, terms)
            products = jacobian.with_products(products, traces, ct_carry)
            products = jacobian.with_products(products, new_traces, ct_new)
        return (new, sums, new_traces, products), None

    sums = [jnp.zeros(c.shape, sum_dtype(c.dtype)) for c in jacobian.select(consts)]
    state = (sums, jacobian.first_traces(), jacobian.first_products())
    zeros, treedef = jax.tree.flatten(jax.tree.map(on_explicit_mesh, state))
    state = (init, *jax.tree.unflatten(treedef, vary_alike(zeros, consts, init, xs, cts)))
    state, _ = options.scan(one, state, (xs, ct_ys), step_index)
    _, sums, traces, products = state
    products = jacobian.with_products(products, traces, dict(enumerate(ct_last)))
    return *jacobian.cotangents(products, sums, len(consts), len(init)), None, None


def _pull_back_outputs(body, jacobian, inputs, ct_y):
    """The cotangents of the parameters, of the carry that enters a step, and of the next carry,
    given the cotangents of the outputs of the step."""
    consts, carry, x, new = inputs
    leaves = jacobian.leaves

    def outputs(params, carried, returned):
        consts_now = jacobian.replace(consts, params)
        now = fill(carry, leaves, carried), x, fill(new, leaves, returned)
        ys = _outputs(body, consts_now, *now)
        return [ys[j] for j in ct_y]

    _, pull_back = jax.vjp(outputs, jacobian.select(consts), at(carry, leaves), at(new, leaves))
    terms, ct_carry, ct_new = pull_back(list(ct_y.values()))
    by_leaf = lambda cts: dict(zip(leaves, cts, strict=True))
    return terms, by_leaf(ct_carry), by_leaf(ct_new)


def _outputs(body: Any, consts, carry, x, new):
    """The outputs of a step, with `new` wherever they are computed from the next carry."""
    outvars = body.program.jaxpr.outvars[: len(carry)]
    given = {v: value for v, value in zip(outvars, new, strict=True) if isinstance(v, Var)}

    def hook(eqn, values):
        out = bind(eqn, values)
        return [given.get(v, value) for v, value in zip(eqn.outvars, out, strict=True)]

    return evaluate(body.program, [*consts, *carry, *x], hook)[len(carry) :]


@online_scan.def_vmap
def _online_scan_vmap(size, batched, *args, **options):
    return options.pop("body").scan_of_batch(online_scan, size, batched, *args, **options)
