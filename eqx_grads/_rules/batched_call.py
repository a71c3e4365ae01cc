"""Default batching: a call under `vmap` without a batching rule of the user's."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._errors import rule_error
from .._jaxprs.current_trace import is_of_innermost_trace
from .._tangent_spaces import is_differentiable
from .abstract_call import AbstractCall, tangents_of_call
from .asked_rules import asking, AXES, is_asked
from .rule import try_to_trace


class BatchedCall(AbstractCall):
    """A call for a whole batch: `vmap` of the function, and `vmap` of its rule.

    `out_batched` says which outputs have the batch dimension: those whose value depends on a
    batched operand, and those whose tangent does. It is decided by the first trace of the
    function or of the rule, and kept for later ones.
    """

    def __init__(self, call, axis_data, batched, call_jaxpr, n_consts):
        self.name = call.name
        self.code = call.code
        self.n_operands = n_consts + call.n_operands
        self.n_args = n_consts + call.n_args
        self.is_reverse = call.is_reverse
        self.rules_key = call.rules_key
        self.out_batched: list[bool] | None = None
        self._call = call
        self._batched = batched
        self._n_consts = n_consts
        self._example: ClosedJaxpr | None = call_jaxpr  # the function of one example
        self._axes = [0 if b else None for b in batched]
        self._vmap = ft.partial(
            jax.vmap,
            axis_size=axis_data.size,
            axis_name=axis_data.name,
            spmd_axis_name=axis_data.spmd_name,
        )

    def primal(self, operands):
        result = try_to_trace(self._run, self._evaluate_example, self._axes, *operands)
        if result is None:  # it looks at operands that are not batched, which is fine eagerly
            out, moved = self._run(self._primal_of_example, self._axes, *operands)
            self.out_batched = [True] * len(out)
        else:
            out, moved = result
            if self.out_batched is None:
                self.out_batched = self._find_batched(moved, operands)
        return self._as_decided(out, moved)

    def jvp(self, primals, tangents):
        perturbed = [i for i, t in enumerate(tangents) if t is not None]
        has_tangent: list[bool] = []

        def one(xs, ts):
            full: list[Any] = [None] * len(xs)
            for i, t in zip(perturbed, ts, strict=True):
                full[i] = t
            out, t_out = self._call.jvp(xs[self._n_consts :], full[self._n_consts :])
            has_tangent[:] = [t is not None for t in t_out]
            return [*out, *(t for t in t_out if t is not None)]

        axes = (self._axes, [self._axes[i] for i in perturbed])
        values, moved = self._run(one, axes, list(primals), [tangents[i] for i in perturbed])
        n = len(has_tangent)
        out, ts, t_moves = values[:n], iter(values[n:]), iter(moved[n:])
        t_out = [next(ts) if has else None for has in has_tangent]
        t_moved = [has and next(t_moves) for has in has_tangent]
        if self.out_batched is None:
            if not any(self._batched):
                self.out_batched = [v or t for v, t in zip(moved[:n], t_moved, strict=True)]
            elif all(map(is_differentiable, out)) and (self.is_reverse or len(out) == 1):
                self.out_batched = [True] * len(out)
            else:
                evaluated = self._moves(self._evaluate_example, primals, self._axes)
                self.out_batched = self._find_batched(evaluated, primals)
        for has_batch, is_batched in zip(t_moved, self.out_batched, strict=True):
            if has_batch and not is_batched:
                raise self._depends_on_perturbed()
        return self._as_decided(out, moved[:n]), self._as_decided(t_out, t_moved)

    def _run(self, fn, axes, *operands) -> tuple[list[Any], list[bool]]:
        """The outputs of `fn` for the batch, and which of them `jax.vmap` gave the batch
        dimension.

        If no operand is batched, only the name of the axis matters. Outputs that do not depend
        on it are computed once, outside of `jax.vmap`, and returned as they are. Otherwise, all
        outputs have the batch dimension.
        """
        moved: list[bool] = []
        once: list[Any] = []

        def one(*xs):
            values = fn(*xs)
            moved[:] = map(is_of_innermost_trace, values)
            if any(self._batched):
                return list(values)
            pairs = list(zip(values, moved, strict=True))
            # No tracer of this `vmap` is kept. A literal of a jaxpr is no `jax.Array`.
            once[:] = [jnp.asarray(x) for x, is_moved in pairs if not is_moved]
            return [x for x, is_moved in pairs if is_moved]

        batches = self._vmap(one, axes)(*operands)
        if any(self._batched):
            return batches, moved
        with_batch, without = iter(batches), iter(once)
        return [next(with_batch if is_moved else without) for is_moved in moved], moved

    def _as_decided(self, values, moved) -> list[Any]:
        """The values of `_run` with the batch dimension where `out_batched` says so."""
        assert self.out_batched is not None
        found = []
        for x, is_moved, is_batched in zip(values, moved, self.out_batched, strict=True):
            has_batch = is_moved or any(self._batched)
            if x is not None and has_batch and not is_batched:
                x = x[0]
            elif x is not None and is_batched and not has_batch:
                x = self._vmap(lambda x: x, in_axes=None)(x)
            found.append(x)
        return found

    def _depends_on_perturbed(self):
        return rule_error(
            f"A tangent of `{self.name}` depends on a mapped axis, and only with some of its "
            "arguments perturbed.",
            "with all of them perturbed, it did not, and JAX was told so under a `jit`, "
            "`checkpoint` or loop",
            do="Let the tangent depend on the axis whichever arguments are perturbed, for "
            "example by adding `0 * jax.lax.axis_index(name)`.",
        )

    def vmap(self, axis_data, batched, operands):
        return None  # a batching rule of the user's has had its turn

    def _primal_of_example(self, *operands):
        return self._call.primal(operands[self._n_consts :])

    def _evaluate_example(self, *operands):
        """The outputs of one example. Traced inside `vmap`, where its axis has a name."""
        if self._example is None:
            self._example = jax.make_jaxpr(self._primal_of_example)(*map(jax.typeof, operands))
        return jaxpr_as_fun(self._example)(*operands)

    def _moves(self, fn, operands, axes) -> list[bool]:
        """Which outputs of `fn`, for one example, `jax.vmap` gives the batch dimension."""
        found: list[bool] = []

        def one(*xs):
            found[:] = map(is_of_innermost_trace, fn(*xs))
            return ()

        jax.eval_shape(self._vmap(one, axes), *operands)
        return found

    def _find_batched(self, values, operands) -> list[bool]:
        """Which outputs have the batch dimension, where `values` of them do. What `jax.vmap`
        does is asked, not guessed: collectives and `axis_index` depend on the axis, and not on
        an operand."""
        assert self._example is not None
        inexact = [is_differentiable(t) for t in self._example.out_avals]
        together = [v or x for v, x in zip(values, inexact, strict=True)]
        if (self.is_reverse and any(self._batched)) or values == together:
            return together
        if is_asked(self, AXES):  # by its own rule, for the value
            return values
        # The rule may say otherwise: the value of `replace_gradient` depends on one operand,
        # its tangent on the other.
        first, last = self._n_consts, self._n_consts + self._call.n_args
        args = [i for i in range(first, last) if is_differentiable(operands[i])]
        indices = [*range(len(operands)), *args]
        operands, axes = [operands[i] for i in indices], [self._axes[i] for i in indices]
        rule = ft.partial(tangents_of_call, self._call, first, args)
        traced = lambda *xs: jaxpr_as_fun(jax.make_jaxpr(rule)(*map(jax.typeof, xs)))(*xs)
        with asking(self, AXES):
            moves = try_to_trace(self._moves, traced, operands, axes)
        if moves is None:  # what the rule raises is for the one who differentiates
            return together
        return [v or t for v, t in zip(values, moves[len(values) :], strict=True)]
