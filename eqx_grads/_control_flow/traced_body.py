"""A scan body as a closed jaxpr, with the values that it closes over as arguments."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal

from .._jaxprs.dependence import are_in, depends, needed, without_unused
from .._jaxprs.evaluate import bind, evaluate
from .._jaxprs.interpret import fixed_point
from .._jaxprs.operands import at, flagged, restricted
from .._jaxprs.structure import Call, CallWithRule, holds, structure
from .._jaxprs.versions import assigns_shardings
from .._tangent_spaces import is_differentiable


class TracedBody:
    """A traced body: `consts, carry, x` to `carry, y`, all of them lists of arrays.

    The values that the user's function closes over are in `consts`, so it holds no tracer.
    """

    def __init__(self, given: ClosedJaxpr, n_consts: int, n_carry: int):
        self.program = inlined(given)
        in_types, n = self.program.in_avals, n_consts + n_carry
        self.const_types, self.carry_types = in_types[:n_consts], in_types[n_consts:n]
        self.x_types = in_types[n:]
        self.y_types = self.program.out_avals[n_carry:]

    @staticmethod
    def of(fn: Callable[..., Any], consts: Any, carry: Any, x: Any) -> "TracedBody":
        program = jax.make_jaxpr(fn)(list(consts), list(carry), list(x))
        return TracedBody(program, len(consts), len(carry))

    @property
    def input_types(self) -> list[Any]:
        return [*self.const_types, *self.carry_types, *self.x_types]

    @property
    def varies(self) -> list[bool]:
        """Which inputs are others at each step: the carry and `x`."""
        return [i >= len(self.const_types) for i in range(len(self.input_types))]

    @property
    def has_symbolic_shapes(self) -> bool:
        """Whether a dimension is unknown while tracing, as in `jax.export`."""
        return not all(isinstance(d, int) for t in self.input_types for d in t.shape)

    def __call__(self, consts, carry, x) -> tuple[list[Any], list[Any]]:
        return self._split(jaxpr_as_fun(self.program)(*consts, *carry, *x))

    def _split(self, out: list[Any]) -> tuple[list[Any], list[Any]]:
        n = len(self.carry_types)
        return out[:n], out[n:]

    def trace_vjp(
        self, inputs: Sequence[int] | None = None, outputs: Sequence[int] | None = None
    ) -> ClosedJaxpr:
        """The derivative of a step in the inputs at these indices, by default in all that have
        one: a program of all inputs, and of the cotangents of the outputs at these indices."""
        types, out_types = self.input_types, [*self.carry_types, *self.y_types]
        inputs = flagged(map(is_differentiable, types)) if inputs is None else inputs
        outputs = flagged(map(is_differentiable, out_types)) if outputs is None else outputs

        def vjp(*args):
            values, cts = args[: len(types)], list(args[len(types) :])
            run = lambda *xs: at(_run_flat(self.program, self.varies, xs), outputs)
            return jax.vjp(restricted(run, values, inputs), *at(values, inputs))[1](cts)

        return jax.make_jaxpr(vjp)(*types, *at(out_types, outputs))

    def differentiable(self) -> list[int]:
        """The indices of the parts of the carry that have a derivative."""
        return flagged(map(is_differentiable, self.carry_types))

    def y_of_carry(self) -> list[int | None]:
        """For each part of the new carry, the index of the `y` that is the same value."""
        outvars, n = self.program.jaxpr.outvars, len(self.carry_types)
        index = {v: j for j, v in enumerate(outvars[n:]) if not isinstance(v, Literal)}
        return [None if isinstance(v, Literal) else index.get(v) for v in outvars[:n]]

    def scan_of_batch(self, scan, size, batched, consts, init, xs, step_index, **options):
        """`scan` of the body for a whole batch, as its batching rule: the sum over the batch is
        then part of the matrix products."""
        batched_consts, batched_init, batched_xs, batched_index = batched
        if batched_index:
            return NotImplemented
        carried = self.carried(batched_consts, batched_init, batched_xs)
        flat, flags = jax.tree.leaves((consts, init, xs)), jax.tree.leaves(batched[:3])
        like = next(x for x, b in zip(flat, flags, strict=True) if b)
        # By `vmap`, as the batch may be sharded over a mesh.
        init = [
            jax.vmap(lambda _, c=c: c)(like) if b and not was else c
            for c, b, was in zip(init, carried, batched_init, strict=True)
        ]
        xs = [jnp.moveaxis(x, 0, 1) if b else x for x, b in zip(xs, batched_xs, strict=True)]
        parts = (batched_consts, carried, batched_xs)
        axes = [[0 if b else None for b in part] for part in parts]
        types = jax.eval_shape(lambda: (consts, init, [x[0] for x in xs]))
        body = TracedBody.of(jax.vmap(self, axes, (axes[1], 0), axis_size=size), *types)
        last, ys = scan(consts, init, xs, step_index, body=body, **options)
        return (last, [jnp.moveaxis(y, 1, 0) for y in ys]), (carried, True)

    def with_values_of_rules(self, consts: Any, carry: Any, x: Any) -> "TracedBody":
        """The body, which returns the values that its rules return, if the flagged inputs are
        differentiated.

        The numbers are the same, their derivatives need not be: the value that the rule of
        `reverse_gradient` returns is its argument. A second derivative differentiates that
        value, as the first one has replaced the call by the rule.
        """
        if not holds(self.program, CallWithRule):
            return self
        flags = zip(
            [*consts, *self.carried(consts, carry, x), *x], self.input_types, strict=True
        )
        indices = flagged(flag and is_differentiable(t) for flag, t in flags)

        def inexact_and_all(*inputs):
            out = jaxpr_as_fun(self.program)(*inputs)
            return list(filter(is_differentiable, out)), out

        def values(consts, carry, x):
            inputs = [*consts, *carry, *x]
            of_perturbed = restricted(inexact_and_all, inputs, indices)
            out = jax.vjp(of_perturbed, *at(inputs, indices), has_aux=True)[2]
            return self._split(out)

        body = TracedBody.of(values, self.const_types, self.carry_types, self.x_types)
        body.program = without_unused(body.program)  # the residuals
        return body

    def carried(self, consts: Any, carry: Any, x: Any) -> list[bool]:
        """Which parts of the carry come to depend on the inputs with these flags."""

        def after_a_step(carry):
            dependent = depends(self.program, [*consts, *carry, *x])
            outvars = self.program.jaxpr.outvars[: len(carry)]
            return list(map(operator.or_, carry, are_in(outvars, dependent)))

        return fixed_point(after_a_step, list(carry))

    def with_cotangents(self, of_last: Sequence[bool], of_ys: Sequence[bool]) -> list[bool]:
        """Which parts of the carry have a cotangent at some step, if the flagged parts of the
        last carry and the flagged `ys` have."""
        jaxpr, n, m = self.program.jaxpr, len(self.const_types), len(self.carry_types)

        def before_a_step(flags):
            _, used = needed(jaxpr.eqns, at(jaxpr.outvars, flagged([*flags, *of_ys])))
            return list(map(operator.or_, flags, are_in(jaxpr.invars[n : n + m], used)))

        return fixed_point(before_a_step, list(of_last))


def trace_body(
    body: Callable[..., Any], carry: Sequence[Any], x: Sequence[Any]
) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr of `body`, with what it closes over as constants, and the first carry.

    A carry with the weak dtype of a Python number is cast to the dtype that the body returns,
    as `jax.lax.scan` does.
    """
    program, (new, _) = jax.make_jaxpr(body, return_shape=True)(carry, x)
    if any(a.dtype != b.dtype for a, b in zip(carry, new, strict=True)):
        cast = [a.astype(b.dtype) for a, b in zip(carry, new, strict=True)]
        return trace_body(body, cast, x)
    return program, list(carry)


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program with `jax.jit` and the like inlined, so that no call hides an equation."""
    if not holds(program, Call):
        return program
    run = lambda *args: _run_flat(program, [False] * len(args), args)
    return jax.make_jaxpr(run)(*program.in_avals)


def _run_flat(program: ClosedJaxpr, varies: Sequence[bool], args: Sequence[Any]) -> list[Any]:
    """The outputs of a program without its calls.

    In a matrix product, the operand that varies comes first: `x @ w.T` instead of `w @ x`. The
    derivative of many steps is up to 1.5 times as fast on a CPU (JAX 0.10). A scan of the steps
    need not be.
    """
    dependent = depends(program, varies)

    def hook(eqn, values):
        known, varies = structure(eqn), are_in(eqn.invars, dependent)
        if isinstance(known, Call) and not assigns_shardings(eqn.params):
            return _run_flat(*known.programs, varies, values)
        if eqn.primitive is jax.lax.dot_general_p and varies == [False, True]:
            return [_swapped_product(eqn, *values)]
        return bind(eqn, values)

    return evaluate(program, args, hook)


def _swapped_product(eqn: Any, a, b):
    precision = eqn.params["precision"]
    differs = isinstance(precision, tuple) and len(set(precision)) > 1
    if differs or eqn.params.get("out_sharding") is not None:
        return bind(eqn, [a, b])[0]
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    numbers = ((contract_b, contract_a), (batch_b, batch_a))
    out = jax.lax.dot_general_p.bind(b, a, **{**eqn.params, "dimension_numbers": numbers})
    n = len(batch_a)
    n_b = b.ndim - len(contract_b) - n
    return jnp.transpose(out, (*range(n), *range(n + n_b, out.ndim), *range(n, n + n_b)))
