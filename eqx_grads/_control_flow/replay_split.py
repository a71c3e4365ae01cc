"""The derivative of a step of a scan, cut into what has to wait and what does not.

- `known`: what does not depend on any cotangent. For all steps of a chunk at once.
- `backward`: what the cotangent of the carry needs. One step after another.
- `rest`: what only the cotangents of weights and inputs need. Again for all steps at once, if
    it is linear: the transpose of the transpose for all steps is the sum over these, and the
    gradient of a weight is one matrix product. If not, part of `backward`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from .._jaxprs.dependence import depends, free_variables, needed
from .._jaxprs.evaluate import evaluate_equations
from .._jaxprs.linearity import linear_in, surely_linear
from .._jaxprs.matmul_layout import inlined, with_materialized_transposes
from .._jaxprs.structure import Cond, holds
from .traced_body import ArrayStep


class Pieces:
    """The derivative of `step` in those `consts` and `xs` that are wanted.

    `places` says which parts of the carry that comes to by way of, and `used` which of `ys`
    have a cotangent.
    """

    def __init__(
        self,
        step: ArrayStep,
        places: Sequence[int],
        used: Sequence[int],
        want_consts: Sequence[bool],
        want_xs: Sequence[bool],
    ):
        n_consts, n_carry = len(step.const_types), len(step.carry_types)
        inputs = step.input_types
        sums = [i for i, want in enumerate(want_consts) if want]
        xs = [n_consts + n_carry + i for i, want in enumerate(want_xs) if want]
        live = [*(n_consts + i for i in places), *sums, *xs]

        def derivative(*args):
            values, cts = args[: len(inputs)], list(args[len(inputs) :])

            def outputs(*of_live):
                new, y = step.of_some(live, values)(*of_live)
                return [*(new[i] for i in places), *(y[j] for j in used)]

            return jax.vjp(outputs, *(values[i] for i in live))[1](cts)

        ct_types = [*(step.carry_types[i] for i in places), *(step.y_types[j] for j in used)]
        no_input, no_ct = [False] * len(inputs), [False] * len(ct_types)
        program = inlined(derivative, [*no_input, *no_ct], *inputs, *ct_types)
        jaxpr = program.jaxpr
        self._consts = dict(zip(jaxpr.constvars, program.consts, strict=True))
        self._inputs, cts = jaxpr.invars[: len(inputs)], jaxpr.invars[len(inputs) :]
        self._wanted_xs = [i for i, want in enumerate(want_xs) if want]
        self._n_sums = len(sums)
        self._d, self._ct_y = cts[: len(places)], cts[len(places) :]
        self._d_out, self._rest_out = jaxpr.outvars[: len(places)], jaxpr.outvars[len(places) :]

        waits = depends(program, [*no_input, *(True for _ in cts)])
        waiting = [e for e in jaxpr.eqns if not waits.isdisjoint(e.outvars)]
        backward, there = needed(waiting, self._d_out)
        rest, _ = needed(waiting, self._rest_out, there)
        free = free_variables(rest, self._rest_out)
        self._given = [v for v in free if v in waits]
        self._known_by_rest = [v for v in free if v not in waits]
        self._rest = rest
        self.rest_is_linear = self._find_linear()
        if not self.rest_is_linear:
            backward = waiting
        self._backward = backward
        outputs = self._d_out if self.rest_is_linear else [*self._d_out, *self._rest_out]
        free = free_variables(backward, outputs)
        self._known_by_backward = [v for v in free if v not in waits]
        # In an order that is the same in each process, for the sake of compilation caches.
        asked = list(dict.fromkeys([*self._known_by_backward, *self._known_by_rest]))
        known = [e for e in jaxpr.eqns if waits.isdisjoint(e.outvars)]
        self._known, _ = needed(known, asked)
        self._known_out = asked
        moves = [*(i >= n_consts for i in range(len(inputs))), *no_ct]
        self._moving = depends(program, moves)

    def _find_linear(self):
        arguments = [*self._given, *self._known_by_rest]
        rest = jax.make_jaxpr(lambda *values: self._run_rest(values))
        flags = [v in set(self._given) for v in arguments]
        program = rest(*(v.aval for v in arguments))
        # JAX can't transpose the choice between branches for many steps at once.
        return surely_linear(linear_in(program, flags)) and not holds(program, Cond)

    def _run_rest(self, values):
        env = dict(zip([*self._given, *self._known_by_rest], values, strict=True))
        return _run(self._rest, {**self._consts, **env}, self._rest_out)

    def pull_back(self, carry, consts, carries, xs, ct_ys, *, reverse: bool):
        """Through a chunk of steps.

        `carry` is the cotangent of the last carry, and the sums of the cotangents of `consts`
        so far. Returns both, and the cotangents of `xs`.
        """
        known = self._run_known(consts, carries, xs)
        fixed, moving = self._split(self._known_by_backward, known)
        steps = xs[0].shape[0]  # `moving` and `ct_ys` may be empty
        if not self.rest_is_linear:
            return self._pull_back_one_by_one(carry, fixed, moving, ct_ys, steps, reverse)
        kept = [v for v in self._given if v not in self._ct_y]

        def one(d, inputs):
            env = {**fixed, **self._environment(inputs, d)}
            out = _run(self._backward, env, [*self._d_out, *kept])
            return out[: len(d)], out[len(d) :]

        d, sums = carry
        d, values = jax.lax.scan(one, d, (moving, ct_ys), steps, reverse=reverse)
        if not self._rest_out:
            return (d, sums), []
        known.update(zip(kept, values, strict=True))
        known.update(zip(self._ct_y, ct_ys, strict=True))
        terms, ct_xs = self._sum_rest(known, xs)
        return (d, add_terms(sums, terms)), ct_xs

    def _pull_back_one_by_one(self, carry, fixed, moving, ct_ys, steps, reverse):
        def one(carry, inputs):
            d, sums = carry
            env = {**fixed, **self._environment(inputs, d)}
            out = _run(self._backward, env, [*self._d_out, *self._rest_out])
            d, terms = out[: len(d)], out[len(d) :][: len(sums)]
            sums = add_terms(sums, terms)
            return (d, sums), out[len(d) + len(sums) :]

        return jax.lax.scan(one, carry, (moving, ct_ys), steps, reverse=reverse)

    def _environment(self, inputs, d):
        """What a step of the loop knows."""
        moving, ct_y = inputs
        variables = [v for v in self._known_by_backward if v in self._moving]
        return dict(zip([*variables, *self._d, *self._ct_y], [*moving, *d, *ct_y], strict=True))

    def _run_known(self, consts, carries, xs) -> dict[Any, Any]:
        def known(carry, x):
            env = {
                **self._consts,
                **dict(zip(self._inputs, [*consts, *carry, *x], strict=True)),
            }
            return _run(self._known, env, self._known_out)

        axes = [0 if v in self._moving else None for v in self._known_out]
        steps = jax.tree.leaves((carries, xs))[0].shape[0]
        values = jax.vmap(known, 0, axes, axis_size=steps)(carries, xs)
        return dict(zip(self._known_out, values, strict=True))

    def _split(self, variables, known):
        """The values that are the same for all steps, and those that have a time axis."""
        fixed = {v: known[v] for v in variables if v not in self._moving}
        return {**self._consts, **fixed}, [known[v] for v in variables if v in self._moving]

    def _sum_rest(self, known, xs):
        """The sum over all steps of the cotangents of `consts`, and those of `xs`."""
        if not self._given:  # no cotangent comes here
            zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self._rest_out]
            zeros[self._n_sums :] = [jnp.zeros_like(xs[i]) for i in self._wanted_xs]
            return zeros[: self._n_sums], zeros[self._n_sums :]
        fixed, moving = self._split(self._known_by_rest, known)
        variables = [v for v in self._known_by_rest if v in self._moving]

        def transposed(moving, terms, ct_x):
            env = {**fixed, **dict(zip(variables, moving, strict=True))}

            def rest(*given):
                given = dict(zip(self._given, given, strict=True))
                return _run(self._rest, {**env, **given}, self._rest_out)

            return jax.linear_transpose(rest, *(v.aval for v in self._given))([*terms, *ct_x])

        given = tuple(known[v] for v in self._given)
        steps = given[0].shape[0]

        def all_transposed(terms, ct_xs):
            many = jax.vmap(transposed, (0, None, 0), axis_size=steps)
            return many(moving, terms, ct_xs)

        terms = [v.aval for v in self._rest_out[: self._n_sums]]
        x_types = [jax.typeof(xs[i]) for i in self._wanted_xs]
        summed = lambda given: jax.linear_transpose(all_transposed, terms, x_types)(given)
        p = with_materialized_transposes(lambda *g: jax.tree.leaves(summed(g)), *given)
        out = jaxpr_as_fun(p)(*given)
        return out[: self._n_sums], out[self._n_sums :]


def _run(eqns, env, outputs):
    out = evaluate_equations(eqns, env, outputs)
    return [jnp.asarray(x, v.aval.dtype) for x, v in zip(out, outputs, strict=True)]


def add_terms(sums, terms):
    return [s + term.astype(s.dtype) for s, term in zip(sums, terms, strict=True)]
