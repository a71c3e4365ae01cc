"""A step of a scan as a traced program: what it closes over is an argument."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, Literal

from .._jaxprs.dependence import depends
from .._jaxprs.matmul_layout import inlined
from .._jaxprs.structure import holds
from .._jaxprs.vectorize import why_not_vectorizable
from .._tangent_spaces import as_array_list, is_differentiable


class ArrayStep:
    """A traced step: `consts, carry, x` to `carry, y`, all of them lists of arrays.

    What the step closes over is in `consts`, so that there is no tracer in it.
    """

    def __init__(self, step: Callable[..., Any], consts, carry, x):
        types, treedef = jax.tree.flatten((list(consts), list(carry), list(x)))

        def flat(*args):
            new, y = step(*jax.tree.unflatten(treedef, args))
            return *new, *y

        moves = [False] * len(consts) + [True] * (len(carry) + len(x))
        self.program = inlined(flat, moves, *types)
        in_types = self.program.in_avals
        self.const_types, self.carry_types = (
            in_types[: len(consts)],
            in_types[len(consts) :][: len(carry)],
        )
        self.x_types = in_types[len(consts) + len(carry) :]
        self.y_types = self.program.out_avals[len(carry) :]

    @property
    def input_types(self) -> list[Any]:
        return [*self.const_types, *self.carry_types, *self.x_types]

    def of_some(self, places: Sequence[int], inputs: Sequence[Any]) -> Callable[..., Any]:
        """The step as a function of the inputs (`consts`, carry and `x`) at these places."""
        n_consts, n_carry = len(self.const_types), len(self.carry_types)

        def step(*values):
            full = list(inputs)
            for i, value in zip(places, values, strict=True):
                full[i] = value
            consts, rest = full[:n_consts], full[n_consts:]
            return self(consts, rest[:n_carry], rest[n_carry:])

        return step

    def trace_vjp(self, run_backward: bool) -> ClosedJaxpr:
        """What a step leaves for its derivative in all of its inputs; or that derivative."""
        places = [i for i, t in enumerate(self.input_types) if is_differentiable(t)]

        def vjp(*inputs):
            def floats(*values):
                out = jax.tree.leaves(self.of_some(places, inputs)(*values))
                return [x for x in out if is_differentiable(x)]

            out, pull = jax.vjp(floats, *(inputs[i] for i in places))
            return pull(out) if run_backward else jax.tree.leaves(pull)

        return jax.make_jaxpr(vjp)(*self.input_types)

    def can_be_replayed(self) -> bool:
        """Whether it is all the same how often steps are computed, how many at once, and
        whether all of a step is."""
        if self.program.effects or holds(self.program, "pure_callback"):
            return False
        try:
            effects = self.trace_vjp(run_backward=True).effects
        except Exception:
            # Something has no derivative. Whether one is asked for is yet to be seen: plain
            # scan will say so, in JAX's words.
            return False
        # The sum over devices that have copies of a weight is there wherever they are.
        axes = jax.sharding.get_abstract_mesh().axis_names
        return all(getattr(effect, "name", None) in axes for effect in effects)

    def can_be_vectorized(self) -> bool:
        """Whether `vmap` over time computes what the steps compute one after another."""
        return why_not_vectorizable(self.program) is None

    def __call__(self, consts, carry, x) -> tuple[list[Any], list[Any]]:
        out = jaxpr_as_fun(self.program)(*consts, *carry, *x)
        return out[: len(carry)], out[len(carry) :]

    def differentiable(self) -> list[int]:
        """Which parts of the carry have a derivative."""
        return [i for i, t in enumerate(self.carry_types) if is_differentiable(t)]

    def y_of_carry(self) -> list[int | None]:
        """For each part of the new carry, which `y` is the same."""
        outvars = self.program.jaxpr.outvars
        n = len(self.carry_types)

        def find(new):
            return next((j for j, y in enumerate(outvars[n:]) if y is new), None)

        return [None if isinstance(v, Literal) else find(v) for v in outvars[:n]]

    def batched(self, size: int, batched: Any, consts, carry, xs) -> "ArrayStep":
        """The step for a whole batch."""
        axes = [[0 if b else None for b in part] for part in batched]
        out_axes = ([0 if b else None for b in batched[1]], 0)
        many = jax.vmap(self, axes, out_axes, axis_size=size)
        return ArrayStep(many, *jax.eval_shape(lambda: (consts, carry, [x[0] for x in xs])))

    def carried(self, consts: Any, carry: Any, x: Any) -> list[bool]:
        """Which parts of the carry come to depend on inputs with these flags."""
        carry = list(carry)
        while True:
            flagged = depends(self.program, [*consts, *carry, *x])
            outvars = self.program.jaxpr.outvars[: len(carry)]
            new = [
                flag or (not isinstance(v, Literal) and v in flagged)
                for flag, v in zip(carry, outvars, strict=True)
            ]
            if new == carry:
                return carry
            carry = new


def close_step(
    step: Callable[..., Any], carry, x
) -> tuple[ArrayStep, list[Any], list[Any]] | None:
    """A step that closes over arrays. Returns it, these arrays, and the first carry; `None`
    if it has effects.

    A carry without a dtype of its own (a Python number) is given that which the step returns.
    """
    program, (new, _) = jax.make_jaxpr(step, return_shape=True)(carry, x)
    if program.effects:  # on what it closes over, for one
        return None
    if any(a.dtype != b.dtype for a, b in zip(carry, new, strict=True)):
        cast = [a.astype(b.dtype) for a, b in zip(carry, new, strict=True)]
        return close_step(step, cast, x)

    def of_consts(consts, carry, x):
        out = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, consts))(*carry, *x)
        return out[: len(carry)], out[len(carry) :]

    consts = as_array_list(program.consts)
    return ArrayStep(of_consts, consts, carry, x), consts, carry
