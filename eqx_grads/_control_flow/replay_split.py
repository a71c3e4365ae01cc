"""Splits the VJP of a scan body into the part that must run sequentially and the parts that can
be vectorized over time.

Let the body be `(h_{t+1}, y_t) = f(W, h_t, x_t)`, and `d_t` the cotangent of `h_t`. Its VJP at
the saved carry `h_t` is

    d_t    = (dh_{t+1}/dh_t)^T d_{t+1} + (dy_t/dh_t)^T ct_y_t         (1)
    ct_x_t = (dh_{t+1}/dx_t)^T d_{t+1} + (dy_t/dx_t)^T ct_y_t         (2)
    ct_W   = sum_t [(dh_{t+1}/dW)^T d_{t+1} + (dy_t/dW)^T ct_y_t]     (3)

Only (1) is a recurrence. So the equations of the traced VJP fall into three groups:

- Residual equations depend on no cotangent: activations, gates, all that the Jacobians consist
    of. As `h_t` and `x_t` are known, `vmap` computes them for all steps of a chunk at once.
- Sequential equations are needed for (1). They run in a `scan`, from the last step to
    the first, which saves the cotangents that the third group reads: call these `g_t`.
- Parallel equations are all others, for (2) and (3): a map `L_t` from `g_t` to `ct_x_t`
    and to the term of `ct_W`.

In nearly all cases `L_t` is linear. Then let `V` map `(ct_W, ct_x)` to `L_t^T (ct_W, ct_x_t)`
for all `t`, by a `vmap` over time. The transpose of `V` maps all `g_t` to (2) and to the sum in
(3). The transpose of a matrix-vector product under that `vmap` is one matrix product, instead
of a sum of outer products.

Two kinds of equations run sequentially, although (1) does not need them:

- Those that can't be transposed twice. The transpose of the transpose of a call with a rule
    has another second derivative than the call: what the rule says of its residuals is lost.
- All of the third group, where `L_t` is not known to be linear: a rule that clips the cotangent
    of a weight.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import rule_error, RuleError
from .._jaxprs.dependence import depends, free_variables, needed
from .._jaxprs.evaluate import evaluate_equations
from .._jaxprs.linearity import linear_in, surely_linear
from .._jaxprs.operands import flagged
from .._jaxprs.structure import CallWithRule, Cond, holds
from .._tangent_spaces import add_terms
from .traced_body import inlined, TracedBody


# Calls with rules, a linear map with a chosen transpose, and `cond`: JAX can't transpose one
# with a batched predicate (https://github.com/jax-ml/jax/issues/39219, open in JAX 0.12).
_NOT_TRANSPOSED_TWICE = (CallWithRule, "eqg_linear", Cond)


class SplitVjp:
    """The VJP of `body` in the perturbed `consts` and `xs`.

    - `carry_indices`: the parts of the carry through which gradients flow.
    - `y_indices`: the parts of `y` that have a cotangent.
    """

    def __init__(
        self,
        body: TracedBody,
        carry_indices: Sequence[int],
        y_indices: Sequence[int],
        perturbed_consts: Sequence[bool],
        perturbed_xs: Sequence[bool],
    ):
        self._x_indices, const_indices = flagged(perturbed_xs), flagged(perturbed_consts)
        self._n_consts = len(const_indices)
        n_consts, n_carry = len(body.const_types), len(body.carry_types)
        inputs = [
            *(n_consts + i for i in carry_indices),
            *const_indices,
            *(n_consts + n_carry + i for i in self._x_indices),
        ]
        outputs = [*carry_indices, *(n_carry + i for i in y_indices)]
        self.program = program = inlined(body.trace_vjp(inputs, outputs))
        jaxpr = program.jaxpr
        self._constants = dict(zip(jaxpr.constvars, program.consts, strict=True))
        n_inputs, n_carry = len(body.input_types), len(carry_indices)
        self._inputs, cts = jaxpr.invars[:n_inputs], jaxpr.invars[n_inputs:]
        self._ct_carry, self._ct_y = cts[:n_carry], cts[n_carry:]
        self._ct_carry_out = jaxpr.outvars[:n_carry]  # the left side of (1)
        self._parallel_out = jaxpr.outvars[n_carry:]  # (3), and then (2)

        no_ct = [False] * len(cts)
        depends_on_ct = depends(program, [*(False for _ in self._inputs), *(True for _ in cts)])
        after = [e for e in jaxpr.eqns if not depends_on_ct.isdisjoint(e.outvars)]
        after, _ = needed(after, jaxpr.outvars)
        before = [e for e in jaxpr.eqns if depends_on_ct.isdisjoint(e.outvars)]

        # The equations that run sequentially compute values for the others.
        kept = [v for e in after if holds(e, *_NOT_TRANSPOSED_TWICE) for v in e.outvars]
        self.sequential_eqns, computed = needed(after, [*self._ct_carry_out, *kept])
        self.parallel_eqns, _ = needed(after, self._parallel_out, computed)
        free = free_variables(self.parallel_eqns, self._parallel_out)
        self._parallel_cts = [v for v in free if v in depends_on_ct]  # `g_t`
        self._parallel_residuals = [v for v in free if v not in depends_on_ct]
        self.is_linear = self._are_parallel_eqns_linear()
        if not self.is_linear:
            self.sequential_eqns = after

        outputs = self._ct_carry_out if self.is_linear else jaxpr.outvars
        free = free_variables(self.sequential_eqns, outputs)
        self._sequential_residuals = [v for v in free if v not in depends_on_ct]
        # Deterministic order, so that the jaxpr (and the key of the compilation cache) is the
        # same in every process.
        residuals = dict.fromkeys([*self._sequential_residuals, *self._parallel_residuals])
        self._residuals = list(residuals)
        self.residual_eqns, _ = needed(before, self._residuals)
        # All else is the same at all steps, and is computed and stored once.
        self._varying = depends(program, [*body.varies, *no_ct])

    def _are_parallel_eqns_linear(self) -> bool:
        arguments = [*self._parallel_cts, *self._parallel_residuals]

        def parallel(*values):
            env = dict(zip(arguments, values, strict=True))
            return _run(self.parallel_eqns, {**self._constants, **env}, self._parallel_out)

        program = jax.make_jaxpr(parallel)(*(v.aval for v in arguments))
        is_ct = [v in set(self._parallel_cts) for v in arguments]
        return surely_linear(linear_in(program, is_ct))

    def pull_back(
        self, carry, consts, carries, xs, ct_ys, steps: int, *, reverse: bool
    ) -> tuple[Any, Any]:
        """Through a chunk of `steps`.

        `carry` is the cotangent of the last carry, and the sums of the cotangents of `consts`
        so far. Returns both, and the cotangents of `xs`.
        """
        residuals = self._run_residual_eqns(consts, carries, xs, steps)
        fixed, varying = self._split(self._sequential_residuals, residuals)
        saved = [v for v in self._parallel_cts if v not in self._ct_y]

        def step(carry, inputs):
            ct_carry, sums = carry
            varying, ct_y = inputs
            env = {**fixed, **self._varying_env(self._sequential_residuals, varying)}
            env.update(zip([*self._ct_carry, *self._ct_y], [*ct_carry, *ct_y], strict=True))
            if self.is_linear:
                out = _run(self.sequential_eqns, env, [*self._ct_carry_out, *saved])
                return (out[: len(ct_carry)], sums), out[len(ct_carry) :]
            outputs = [*self._ct_carry_out, *self._parallel_out]
            out = _run(self.sequential_eqns, env, outputs)
            ct_carry, terms = out[: len(ct_carry)], out[len(ct_carry) :]
            sums = add_terms(sums, terms[: self._n_consts])
            return (ct_carry, sums), terms[self._n_consts :]

        if not self.is_linear:
            return jax.lax.scan(step, carry, (varying, ct_ys), steps, reverse=reverse)
        # The sums are not carried: they are formed for all steps at once, below.
        ct_carry, sums = carry
        (ct_carry, _), cts = jax.lax.scan(
            step, (ct_carry, None), (varying, ct_ys), steps, reverse=reverse
        )
        if not self._parallel_out:
            return (ct_carry, sums), []
        env = {**residuals, **dict(zip(saved, cts, strict=True))}
        env.update(zip(self._ct_y, ct_ys, strict=True))
        terms, ct_xs = self._run_parallel_eqns(env, xs)
        return (ct_carry, add_terms(sums, terms)), ct_xs

    def _run_residual_eqns(self, consts, carries, xs, steps) -> dict[Any, Any]:
        def of_step(carry, x):
            inputs = dict(zip(self._inputs, [*consts, *carry, *x], strict=True))
            return _run(self.residual_eqns, {**self._constants, **inputs}, self._residuals)

        axes = [0 if v in self._varying else None for v in self._residuals]
        values = jax.vmap(of_step, 0, axes, axis_size=steps)(carries, xs)
        return dict(zip(self._residuals, values, strict=True))

    def _run_parallel_eqns(self, env, xs):
        """The cotangents of `consts`, summed over all steps, and the cotangents of `xs`.

        This is the transpose of `V` (see the top of this file), applied to `g_t`.
        """
        if not self._parallel_cts:  # no cotangent comes here
            zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self._parallel_out]
            ct_xs = [jnp.zeros_like(xs[i]) for i in self._x_indices]
            return zeros[: self._n_consts], ct_xs
        fixed, varying = self._split(self._parallel_residuals, env)

        def transposed(varying, terms, ct_x):
            """The transpose of `L_t`."""
            step_env = {**fixed, **self._varying_env(self._parallel_residuals, varying)}

            def parallel(*cts):
                cts = dict(zip(self._parallel_cts, cts, strict=True))
                return _run(self.parallel_eqns, {**step_env, **cts}, self._parallel_out)

            types = [v.aval for v in self._parallel_cts]
            return jax.linear_transpose(parallel, *types)([*terms, *ct_x])

        cts = tuple(env[v] for v in self._parallel_cts)
        steps = cts[0].shape[0]

        def all_transposed(terms, ct_xs):
            over_time = jax.vmap(transposed, (0, None, 0), axis_size=steps)
            return over_time(varying, terms, ct_xs)

        terms = [v.aval for v in self._parallel_out[: self._n_consts]]
        x_types = [jax.typeof(xs[i]) for i in self._x_indices]
        return jax.linear_transpose(all_transposed, terms, x_types)(cts)

    def _split(self, variables, values):
        """The values that are the same for all steps, by variable, and the list of the values
        that have a time axis."""
        fixed = {v: values[v] for v in variables if v not in self._varying}
        return {**self._constants, **fixed}, [
            values[v] for v in variables if v in self._varying
        ]

    def _varying_env(self, variables, values):
        return dict(zip([v for v in variables if v in self._varying], values, strict=True))


def cannot_replay(reason: str) -> RuleError:
    return rule_error(
        "`filter_scan` can't replay these steps.",
        reason,
        do='Use `checkpoint="auto"`, which then is plain scan. For steps without side effects, '
        '"sqrt" and a number of steps work too.',
    )


def _run(eqns, env, outputs):
    """The outputs of equations, as arrays even if they are constants."""
    out = evaluate_equations(eqns, env, outputs)
    return [jnp.asarray(x, v.aval.dtype) for x, v in zip(out, outputs, strict=True)]
