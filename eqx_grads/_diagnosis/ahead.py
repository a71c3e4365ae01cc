"""Compute a part of a program ahead of a walk through it, as one compiled program.

To compile each operation by itself takes most of the time of a diagnosis. A barrier after each
operation keeps XLA from fusing operations. Values agree with those of single operations up to
the last digit.
"""

import functools as ft
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from .._jaxprs.current_trace import outside_of_transformations
from .._jaxprs.dependence import free_variables
from .._jaxprs.evaluate import bind, evaluate_equations, values_of_inputs
from .._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    found,
    holds,
    inner_programs,
    Scan,
    ShardMap,
    structure,
    While,
)


# For the short compilation of a program that runs only a few times, on every platform: as the
# flag `JAX_DISABLE_MOST_OPTIMIZATIONS` does.
SHORT_COMPILATION: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# Fusion emitters take most of the time on a CPU. Later versions have no option for them.
if jax.__version_info__ < (0, 11):
    SHORT_COMPILATION["xla_cpu_use_fusion_emitters"] = False
# The most equations that are compiled together, with those of calls.
_MOST = 100
# If a smaller part of the equations is distinct, to compile each operation takes less time.
_LEAST_DISTINCT = 0.1
CALLBACKS = ("pure_callback", "io_callback", "debug_callback")
_NOT_AHEAD = (Scan, While, Cond, ShardMap, *CALLBACKS)


class Known(NamedTuple):
    """The outputs of an equation; and, if it is a call, what is known of its equations."""

    outs: Sequence[Any]
    inner: Sequence["Known"]


class Part:
    """The first equations of some, up to one that can't be computed ahead: a loop, a branch, a
    backward pass of its own, or an effect.

    - `compute`: the outputs of an equation for its operands, which may be PyTrees.
    - `constant`: such an operand, of a constant of the program.
    """

    def __init__(self, eqns: Iterable[Any], compute: Callable, constant: Callable):
        part: list[Any] = []
        inside: list[Any] = []  # of calls too
        for eqn in eqns:
            rules = found(eqn, CallWithRule)
            has_backward = any(e.primitive.name != "custom_jvp_call" for e in rules)
            more = [eqn, *(e for program in inner_programs(eqn) for e in equations(program))]
            is_long = len(inside) + len(more) > _MOST
            if is_long or eqn.effects or has_backward or holds(eqn, *_NOT_AHEAD):
                break
            part.append(eqn)
            inside += more
        self._unknown: list[Known | None] = [None] * max(len(part), 1)
        is_distinct = len(set(map(_operation_of, inside))) >= _LEAST_DISTINCT * len(inside)
        self._is_run = bool(part) and is_distinct
        self.free = free_variables(part, ()) if self._is_run else []
        trace = lambda values: _known(
            part, dict(zip(self.free, values, strict=True)), (), compute, constant
        )
        self._run = jax.jit(lambda x: trace(x)[0], compiler_options=SHORT_COMPILATION)

    def __call__(self, values: Sequence[Any]) -> Sequence[Known | None]:
        """What is known of each equation, given the values of the `free` variables."""
        try:
            return self._run(values) if self._is_run else self._unknown
        except Exception:  # each operation is computed alone then, and raises where it fails
            return self._unknown


def _known(eqns, env, outputs, compute, constant) -> tuple[list[Known], list[Any]]:
    """What is known of equations, and the values of the variables `outputs`."""
    known = []

    def constant_now(x):
        with outside_of_transformations():
            return constant(x)

    def hook(eqn, values):
        if isinstance(structure(eqn), Call | Checkpoint):
            (program,) = inner_programs(eqn)
            inside = values_of_inputs(program, values, constant_now)
            outputs = program.jaxpr.outvars
            inner, outs = _known(program.eqns, inside, outputs, compute, constant)
        else:
            inner, outs = [], jax.lax.optimization_barrier(compute(eqn, values))
        known.append(Known(outs, inner))
        return outs

    return known, evaluate_equations(eqns, env, outputs, hook, constant=constant_now)


# ---------------------------------------------------------------- one equation


class _Operation(NamedTuple):
    """An equation without its place: equal for equations that compute the same."""

    primitive: Any
    items: tuple[tuple[str, Any], ...]

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.items)


def _operation_of(eqn: Any) -> Any:
    """Equal for equations that compute the same, for operands of the same types."""
    key = _Operation(eqn.primitive, tuple(eqn.params.items())), *(v.aval for v in eqn.invars)
    try:
        hash(key)
    except TypeError:
        return id(eqn)
    return key


@ft.cache
def _run() -> Callable[..., list[Any]]:
    return jax.jit(bind, static_argnums=0, compiler_options=SHORT_COMPILATION)


def bind_alone(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of an equation, as `bind`, after a shorter compilation."""
    operation = _Operation(eqn.primitive, tuple(eqn.params.items()))
    try:
        hash(operation)
    except TypeError:
        return bind(eqn, values)
    # JAX would keep a program that is a parameter.
    return bind(eqn, values) if inner_programs(eqn) else _run()(operation, list(values))
