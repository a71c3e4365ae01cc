"""`custom_jvp`: a function with its own forward rule."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._errors import name_of, place_of, rule_error, RuleError, show_path
from .._jaxprs.dependence import needed
from .._jaxprs.linearity import DEPENDS, output_statuses, why_nonlinear, why_not_transposable
from .._jaxprs.operands import at, fill, flagged
from .._tangent_spaces import fit_leaves, is_differentiable, is_none, tangent_leaf
from .linear_primitive import linear_call, LinearMap
from .rule import (
    AbstractRules,
    check_outputs,
    check_zeros,
    Rule,
    running_rule,
    trace_rule,
    TracedRule,
)
from .tree_split import OutputSpec, RuleCall
from .wrapper import AbstractDecorated, check_options, decorate, P, T


class custom_jvp(AbstractDecorated[P, T]):
    """Give a function a forward rule.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.custom_jvp
        def log1pexp(x):
            return jnp.logaddexp(x, 0.0)

        @log1pexp.def_jvp
        def log1pexp_jvp(primals, tangents):
            (x,) = primals
            (t_x,) = tangents
            return log1pexp(x), jax.nn.sigmoid(x) * t_x

        print(jax.grad(log1pexp)(0.0))
        print(jax.hessian(log1pexp)(0.0))
        ```

        ```text
        0.5
        0.25
        ```

    **Arguments:**

    - `fn`: a function, a method, or any callable PyTree. Every floating or complex leaf of a
        positional parameter can be differentiated, `self` included. You may pass such a
        parameter by keyword. A keyword-only parameter is configuration: differentiating it
        is an error.
    - `**options`: none. If you pass an option of JAX's decorator, the error says what to do.

    `fn` and its rule may close over traced values.

    **Derivative:**

    Forward mode calls your rule (see `def_jvp`). Reverse mode transposes it, so the rule must
    be linear in its tangents. The library raises an error if it sees that the rule is not.
    Higher orders differentiate the rule. Both modes and all orders are available.

    Another rule may apply a linear function to a tangent. Reverse mode and
    `jax.linear_transpose` then transpose the rule of that function, at zero. If a rule applies
    its own function to a tangent, JAX transposes the function.
    """

    _rules: "ForwardRules" = eqx.field(static=True)

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod, **options: Any):
        check_options("custom_jvp", options)
        decorate(self, fn, ForwardRules())

    def def_jvp(
        self, rule: Callable[..., Any] | None = None, *, symbolic_zeros: bool = False
    ) -> Callable[..., Any]:
        """Define the forward rule. Use it as a decorator, with or without options.

        **Arguments:**

        - `rule`: called as `rule(primals, tangents, **kwargs)`; returns `out, t_out`.
            `primals` is the tuple of all positional arguments, defaults included. `tangents`
            has the same structure, with an array for each floating or complex leaf and
            `None` for all others. `kwargs` are the keyword-only arguments; a default is
            passed only if the rule has a parameter for it. `t_out` has the structure of
            `out`, and may have `None` for any part that is zero.
        - `symbolic_zeros`: by default all tangents are arrays, and the terms of arguments
            that are not being differentiated are dropped, whatever their value. With `True`,
            these tangents are `None`, and the rule may skip the work. `eqx_grads.tangents`
            has arithmetic for them.

        **Returns:**

        `rule`.
        """
        if rule is None:
            return lambda rule: self.def_jvp(rule, symbolic_zeros=symbolic_zeros)
        self._rules.set_jvp(Rule(rule, symbolic_zeros))
        return rule


class ForwardRules(AbstractRules):
    def check_complete(self, fn):
        if self.jvp_rule is None:
            name = name_of(fn)
            raise rule_error(
                f"`{name}` has no forward rule.",
                place_of(fn),
                do=f"Define one with `@{name}.def_jvp`.",
            )

    def differentiate(self, call, expected):
        assert self.jvp_rule is not None
        outputs, arrays, t_arrays = apply_forward_rule(self.jvp_rule, call)
        check_outputs(call, self.jvp_rule, outputs, expected)
        return outputs, arrays, t_arrays


def apply_forward_rule(rule: Rule, call: RuleCall) -> tuple[OutputSpec, list[Any], list[Any]]:
    """Call a forward rule: the outputs, their arrays, and their tangents (`None`: zero)."""
    perturbed, n_ts = call.perturbed(), len(call.tangents)
    inexact = flagged(map(is_differentiable, call.operands[:n_ts]))
    if rule.symbolic_zeros or perturbed == inexact:
        # With symbolic zeros a rule may be another one for each pattern of zeros.
        trace = ft.partial(_trace, rule, call, perturbed)
        reasons = _check_linear(rule, call, perturbed, trace)
        outputs, arrays, ts = _run(rule, call, perturbed, at(call.tangents, perturbed))
    elif (traced := _trace(rule, call, inexact))[0] is None:  # its tangents are zeros
        pairs = zip(at(call.operands, inexact), at(call.tangents, inexact), strict=True)
        given = [jnp.zeros_like(x) if t is None else t for x, t in pairs]
        outputs, arrays, ts = _run(rule, call, inexact, given)
        reasons = {}
    else:
        program, outputs = traced
        reasons = _check_linear(rule, call, inexact, lambda: traced)
        out = program.evaluate(at(call.tangents, inexact))
        n = len(outputs.types)
        ts, arrays = out[:n], out[n:]
    return outputs, arrays, _not_transposable(rule, call, ts, reasons)


def _run(rule, call, indices, given):
    """The rule, with `given` for the tangents at these indices: all that there can be, unless
    the rule knows of symbolic zeros."""
    ts = fill([None] * len(call.tangents), indices, given)
    t_args = call.flat.args.without_static().tree(ts)
    with running_rule(call.fn, call.rules):
        result = rule(call.args, t_args, **rule.keywords(call.kwargs, call.flat.filled))
    return _take_result(call, rule, result)


def _trace(rule, call, indices) -> tuple[Any, Any]:
    """The rule as a program of the tangents at these indices: first the output tangents, then
    the value."""
    found: list[Any] = [None]

    def of_tangents(*ts):
        found[0], arrays, t_arrays = _run(rule, call, indices, ts)
        return [*t_arrays, *arrays]

    types = [jax.typeof(call.operands[i]).to_tangent_aval() for i in indices]
    return trace_rule(of_tangents, *types), found[0]


def _not_transposable(rule, call, ts, reasons):
    """The tangents `ts`, where transposing a tangent that has a reason is an error.
    JAX's own error does not say whose tangent it is."""

    def checked(t, reason):
        # Without a reference to `call`, which holds tracers.
        error = rule_error(
            f"The forward rule `{rule.name}` of `{name_of(call.fn)}` was used in reverse mode, "
            f"and has no transpose: {reason}.",
            rule.place,
            do="Apply such an operation to primals only, and multiply the tangents by the "
            "result. A host function of a tangent has to be an "
            "`eqx_grads.linear_host_function`, which knows its adjoint. Or use "
            "`eqx_grads.custom_vjp`: give a backward rule, and this rule by `def_jvp`.",
        )
        text = str(error)

        def transpose(residuals, cts):
            raise RuleError(text)

        same = LinearMap(rule.name, lambda residuals, t: t, transpose, [jax.typeof(t)])
        return linear_call(same, [], [t])[0]

    is_checked = lambda i, t: i in reasons and t is not None  # a zero has a transpose
    return [checked(t, reasons[i]) if is_checked(i, t) else t for i, t in enumerate(ts)]


def _check_linear(rule, call, indices, trace) -> dict[int, str]:
    """Raise if the rule is seen not to be linear in the tangents at these indices, or ignores
    one that it must not. Returns why output tangents are not transposable, by index."""
    if rule.surely_linear:
        return {}
    check = lambda: _reasons_and_ignored(rule, call, indices, *trace())
    reasons, ignored = call.rules.cache.get(call, ("linear", *indices), check)
    ignored = [i for i in ignored if call.tangents[i] is not None]
    if ignored:
        check_zeros(rule, call, ignored)
    return reasons


def _reasons_and_ignored(rule, call, indices, traced: TracedRule | None, outputs):
    if traced is None:  # of an eager rule that looks at values, nothing is seen
        return {}, []
    program, n = traced.program, traced.n // 2  # as many tangents as values
    live = [i for i in traced.live if i < n]
    statuses = output_statuses(program)
    for i, status in zip(traced.live[len(live) :], statuses[len(live) :], strict=True):
        if status.rank in DEPENDS:
            path = outputs.split.path(outputs.split.indices[i - n])
            raise rule_error(
                f"The forward rule `{rule.name}` of `{name_of(call.fn)}` returned a value that "
                "depends on its tangents.",
                f"at out{show_path(path)}",
                rule.place,
                do="The value must not depend on the tangents: reverse mode computes it before "
                f"they exist. Return `{name_of(call.fn)}(*primals)`, or a value computed from "
                "the primals alone.",
            )
    statuses = statuses[: len(live)]
    reason = why_nonlinear(statuses)
    if reason is None:
        reasons = why_not_transposable(program, statuses)
        _, used = needed(program.eqns, program.jaxpr.outvars[: len(live)])
        inputs = zip(indices, program.jaxpr.invars, strict=True)
        ignored = [i for i, v in inputs if v not in used]
        return {live[i]: reason for i, reason in reasons.items()}, ignored
    raise rule_error(
        f"The forward rule `{rule.name}` of `{name_of(call.fn)}` is not linear in its "
        f"tangents: {reason}.",
        rule.place,
        do="A derivative is a linear map: every term has exactly one tangent in it, "
        "multiplied by something that depends on primals only. A non-linear map of "
        "gradients (clipping, say) is a backward rule: use `eqx_grads.custom_vjp`.",
    )


def _take_result(call, rule, result) -> tuple[OutputSpec, list[Any], list[Any]]:
    do = "Return `out, t_out`: the value and its tangent."
    out, t_out = rule.pair(result, "The forward rule", call.fn, do)
    outputs, arrays = OutputSpec.of(out, call.rules.convention.outputs)

    def fail(*where, do):
        # A tangent that fits the function does not fit a wrong value: say that first.
        check_outputs(call, rule, outputs, None)
        what = f"The forward rule `{rule.name}` of `{name_of(call.fn)}`"
        does = "returned a tangent that does not fit its output."
        return rule_error(f"{what} {does}", *where, rule.place, do=do)

    leaves = jax.tree.leaves(out, is_leaf=is_none)
    ts = fit_leaves(tangent_leaf, "tangent", t_out, out, leaves, "out", fail, value="output")
    ts = [t for t, leaf in zip(ts, leaves, strict=True) if leaf is not None]
    return outputs, arrays, at(ts, outputs.split.indices)
