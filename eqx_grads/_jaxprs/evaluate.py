"""Trace functions, and evaluate traced programs.

The evaluator has a hook that may replace what an equation does. A hook defines the operations,
so the values need not be arrays: they may be `None` for known zeros, or PyTrees.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.api_util import debug_info
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.linear_util import wrap_init
from jax.extend.source_info_util import current_name_stack, user_context
from jax.interpreters import partial_eval as pe

from .current_trace import is_eager, setting
from .operands import at, restricted
from .structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    inner_programs,
    Scan,
    structure,
    While,
)
from .symbolic_sizes import as_length


Hook = Callable[[Any, list[Any]], Sequence[Any]]
Run = Callable[[ClosedJaxpr, list[Any], Any], Sequence[Any]]


_OF_OPERANDS = inspect.signature(lambda *operands: operands)


def trace(
    fn: Callable[..., list[Any]], types: Sequence[Any], source: str | None = None
) -> ClosedJaxpr:
    """`jax.make_jaxpr` of a function from arrays to a list of arrays. It takes less than half
    the time, as it makes no `jax.jit`.

    - `source`: the function and its line, for JAX's errors; by default those of `fn`.
    """
    info = debug_info("jit", fn, types, {}, sourceinfo=source, signature=_OF_OPERANDS)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrap_init(fn, debug_info=info), types)
    return ClosedJaxpr(jaxpr, consts)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of an equation for arrays."""
    if eqn.primitive.name.startswith("scatter"):
        # The transpose of `scatter_mul` reads the shape of what may be a number in the program
        # (JAX 0.10 to 0.12).
        values = list(map(jnp.asarray, values))
    run = lambda *values: eqn.primitive.bind(
        *values, **eqn.primitive.get_bind_params(eqn.params)
    )
    if eqn.primitive.name in ("scan", "while", "cond") and is_eager():
        # JAX keeps the compiled program of an eager loop for good. `jax.jit` forgets it.
        run = jax.jit(run)
    out = run(*values)
    return list(out) if eqn.primitive.multiple_results else [out]


def function_of(
    eqn: Any, values: Sequence[Any], indices: Sequence[int], outs: Sequence[int]
) -> Callable[..., list[Any]]:
    """The outputs `outs` of an equation, as a function of some of its operands."""

    return restricted(lambda *xs: at(bind(eqn, xs), outs), values, indices)


def evaluate(
    program: ClosedJaxpr,
    args: Sequence[Any],
    hook: Hook = bind,
    *,
    constant: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """The outputs of a program.

    - `hook`: called as `hook(eqn, values)` for each equation in order. Returns a value for each
        of `eqn.outvars`. It may call `bind`, compute something else, or evaluate the inner
        programs of the equation with `enter`. Whatever it binds has the name stack, the mesh
        and the compute type of the equation. `eqn.source_info` has the line in the user's code.
    - `constant`: makes a value of a constant of the program.
    """
    jaxpr, env = program.jaxpr, values_of_inputs(program, args, constant)
    return evaluate_equations(jaxpr.eqns, env, jaxpr.outvars, hook, constant=constant)


def values_of_inputs(
    program: ClosedJaxpr, args: Sequence[Any], constant: Callable[[Any], Any] = lambda x: x
) -> dict[Any, Any]:
    """The values of the inputs and the constants of a program, by variable."""
    env = dict(zip(program.jaxpr.constvars, map(constant, program.consts), strict=True))
    return {**env, **dict(zip(program.jaxpr.invars, args, strict=True))}


def evaluate_equations(
    eqns: Sequence[Any],
    env: dict[Any, Any],
    outputs: Iterable[Any],
    hook: Hook = bind,
    *,
    constant: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """The values of the variables `outputs`, given all free variables in `env`."""
    env = dict(env)
    read = lambda v: constant(v.val) if isinstance(v, Literal) else env[v]
    for eqn in eqns:
        with equation_context(eqn):
            out = hook(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in outputs]


def enter(
    eqn: Any, values: Sequence[Any], run: Run, extras: Sequence[Any] | None = None
) -> Sequence[Any]:
    """Run an equation with `run(program, values, extra)` instead of each inner program.

    The values may be any PyTrees; a carry has the same structure before and after a step. The
    derivative of a `CallWithRule` is dropped. `NotImplementedError` for an opaque equation.

    - `extras`: a PyTree for each of `inner_programs(eqn)`. For a scan it has a leading axis of
        time, and each step gets its slice.
    """
    values = list(values)
    extras = [None] * len(inner_programs(eqn)) if extras is None else extras
    match structure(eqn):
        case Call() | CallWithRule() as call:
            return run(*call.programs, values, *extras)
        case Checkpoint() as call:
            checkpoint = jax.checkpoint(
                lambda values, extra: run(*call.programs, values, extra),
                policy=call.policy,
                prevent_cse=call.prevent_cse,
            )
            return checkpoint(values, *extras)
        case Scan() as scan:
            return _run_scan(scan, values, run, *extras)
        case While() as loop:
            return _run_while(loop, values, run, extras)
        case Cond(by_platform=False) as cond:
            branches = [
                lambda values, extras, i=i: run(cond.programs[i], values, extras[i])
                for i in range(len(cond.programs))
            ]
            return jax.lax.switch(values[0], branches, values[1:], extras)
    raise NotImplementedError(f"The inner programs of `{eqn.primitive.name}` can't be entered.")


def _run_scan(scan: Scan, values: list[Any], run: Run, extra: Any) -> list[Any]:
    consts, rest = values[: scan.n_consts], values[scan.n_consts :]

    def body(carry, xs_and_extra):
        xs, extra = xs_and_extra
        out = list(run(*scan.programs, [*consts, *carry, *xs], extra))
        return with_fixed_dtypes(out[: scan.n_carry]), out[scan.n_carry :]

    carry, ys = jax.lax.scan(
        body,
        with_fixed_dtypes(rest[: scan.n_carry]),
        (rest[scan.n_carry :], extra),
        length=as_length(scan.length),
        reverse=scan.reverse,
        unroll=scan.unroll,
    )
    return [*carry, *ys]


def _run_while(loop: While, values: list[Any], run: Run, extras: Sequence[Any]) -> list[Any]:
    cond, body = loop.programs
    cond_consts, rest = values[: loop.n_cond_consts], values[loop.n_cond_consts :]
    body_consts, init = rest[: loop.n_body_consts], rest[loop.n_body_consts :]

    def is_on(carry):
        return run(cond, [*cond_consts, *carry], extras[0])[0]

    def step(carry):
        new = with_fixed_dtypes(list(run(body, [*body_consts, *carry], extras[1])))
        return where_on(is_on(carry), new, carry) if loop.is_batched else new

    any_on = (lambda carry: jnp.any(is_on(carry))) if loop.is_batched else is_on
    return jax.lax.while_loop(any_on, step, with_fixed_dtypes(init))


def where_on(on: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """The carry after a step of a batched loop: elements that are done keep theirs."""

    def leaf(new, old):
        shape = jnp.shape(new)
        if shape[: on.ndim] != on.shape:  # is not of an element
            return new
        return jnp.where(jnp.expand_dims(on, range(on.ndim, len(shape))), new, old)

    return jax.tree.map(leaf, new, old)


def with_fixed_dtypes(carry: list[Any]) -> list[Any]:
    """A carry that is a Python number before the first step has a weak dtype there, and another
    one after it: JAX would trace the step again."""
    is_weak = lambda x: getattr(x, "weak_type", False)
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_weak(x) else x, carry)


# ---------------------------------------------------------------- the place of an equation


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Compute what follows where the equation was computed, and under its name.

    This restores the mesh, the compute type, the metadata for XLA and the name stack. See also
    `keeping_tracebacks`.
    """
    names = current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback if _KEEPS_TRACEBACKS.get() else None
    with eqn.ctx.manager, user_context(traceback, name_stack=names):
        yield


def keeping_tracebacks() -> contextlib.AbstractContextManager[None]:
    """In this context, what an equation is evaluated to has its line in the user's code. Other
    code that evaluates may want to know the line of a rule that runs then."""
    return setting(_KEEPS_TRACEBACKS, True)


_KEEPS_TRACEBACKS = contextvars.ContextVar("eqx_grads_keeps_tracebacks", default=False)
