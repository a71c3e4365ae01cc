"""A scan body as a closed jaxpr, with the values that it closes over as arguments."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal

from .._jaxprs.dependence import are_in, consts_as_inputs, depends, needed, without_unused
from .._jaxprs.interpret import fixed_point
from .._jaxprs.operands import at, flagged, restricted
from .._jaxprs.structure import CallWithRule, holds
from .._tangent_spaces import as_array_list, is_differentiable
from .matmul_layout import inlined
from .vectorize import why_not_vectorizable


class TracedBody:
    """A traced body: `consts, carry, x` to `carry, y`, all of them lists of arrays.

    The values that the user's function closes over are in `consts`, so it holds no tracer.
    `given` is the program of the function that was traced, and `program` the same with calls
    inlined and the operands of matrix products swapped.
    """

    def __init__(self, given: ClosedJaxpr, n_consts: int, n_carry: int):
        self.given = given
        self.program = inlined(given, [i >= n_consts for i in range(len(given.in_avals))])
        in_types, n = self.program.in_avals, n_consts + n_carry
        self.const_types, self.carry_types = in_types[:n_consts], in_types[n_consts:n]
        self.x_types = in_types[n:]
        self.y_types = self.program.out_avals[n_carry:]

    @staticmethod
    def of(fn: Callable[..., Any], consts: Any, carry: Any, x: Any) -> "TracedBody":
        return TracedBody(_trace(fn, consts, carry, x), len(consts), len(carry))

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

    def as_given(self, consts, carry, x) -> tuple[list[Any], list[Any]]:
        """The outputs of a call, by the program that plain scan runs."""
        return self._split(jaxpr_as_fun(self.given)(*consts, *carry, *x))

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
            run = lambda *xs: at(jaxpr_as_fun(self.program)(*xs), outputs)
            return jax.vjp(restricted(run, values, inputs), *at(values, inputs))[1](cts)

        return jax.make_jaxpr(vjp)(*types, *at(out_types, outputs))

    def differentiable(self) -> list[int]:
        """The indices of the parts of the carry that have a derivative."""
        return flagged(map(is_differentiable, self.carry_types))

    def y_of_carry(self) -> list[int | None]:
        """For each part of the new carry, the index of the `y` that is the same value."""
        outvars = self.program.jaxpr.outvars
        n = len(self.carry_types)

        def find(new):
            return next((j for j, y in enumerate(outvars[n:]) if y is new), None)

        return [None if isinstance(v, Literal) else find(v) for v in outvars[:n]]

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
        vectorized = lambda fn: jax.vmap(fn, axes, (axes[1], 0), axis_size=size)
        types = jax.eval_shape(lambda: (consts, init, [x[0] for x in xs]))
        body = TracedBody.of(vectorized(self), *types)
        body.given = _trace(vectorized(self.as_given), *types)
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


def _trace(fn: Callable[..., Any], consts, carry, x) -> ClosedJaxpr:
    types, treedef = jax.tree.flatten((list(consts), list(carry), list(x)))

    def flat(*args):
        new, y = fn(*jax.tree.unflatten(treedef, args))
        return [*new, *y]

    return jax.make_jaxpr(flat)(*types)


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


def close_body(program: ClosedJaxpr, n_carry: int) -> tuple[TracedBody, list[Any]]:
    """The traced body without constants, and these constants."""
    consts = as_array_list(program.consts)
    return TracedBody(consts_as_inputs(program), len(consts), n_carry), consts


# ---------------------------------------------------------------- what can't be done with it
# The reasons are predicates: "a step has side effects".


def why_not_recomputed(effects: Iterable[Any], mesh_axes: bool = False) -> str | None:
    """Why a program with these effects must run once and as it is; `None` if it may be run
    again, or in part. Sums over the axes of the mesh are allowed if `mesh_axes`."""
    allowed = jax.sharding.get_abstract_mesh().axis_names if mesh_axes else ()
    names = [getattr(effect, "name", None) for effect in effects]
    names = [name for name in names if name not in allowed]
    if not names:
        return None
    for name in names:
        if _is_axis(name):
            return f"communicates over the named axis {name!r}"
    return "has side effects, each of which has to happen once"


def _is_axis(name: Any) -> bool:
    """Whether an effect is named after an axis. The effect of a `jax.new_ref` is not."""
    try:
        jax.lax.axis_size(name)
    except (NameError, TypeError):
        return False
    return True


def why_not_vectorized(program: ClosedJaxpr) -> str | None:
    """Why `jax.vmap` over time does not compute what the steps compute one after another;
    `None` if it does."""
    if holds(program, "pure_callback"):
        return "calls the host (`jax.pure_callback`)"
    return why_not_vectorizable(program)
