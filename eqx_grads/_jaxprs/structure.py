"""Equations that contain jaxprs (calls, cond, scan, while): one table, one traversal."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from .versions import (
    as_closed,
    checkpoint_params,
    given_solver,
    is_jaxpr,
    JAXPRS,
    jaxprs_in_object,
    program_with_rule,
    scan_counts,
)


class Call(NamedTuple):
    """Runs its program, for example `jax.jit`."""

    programs: tuple[ClosedJaxpr]


class CallWithRule(NamedTuple):
    """Runs its program, but has a derivative of its own. The rule is not among the programs.

    `transposes`: a call with a tangent is transposed by the rule, whatever the program does.
    """

    programs: tuple[ClosedJaxpr]
    transposes: bool = False


class LinearCall(NamedTuple):
    """A linear map with a transpose of its own. The first operands are residuals, and it is
    linear in the others. It has no program until it is asked to `trace` one."""

    n_residuals: int
    trace: Callable[[], ClosedJaxpr]
    programs: tuple[()] = ()


class Checkpoint(NamedTuple):
    """`jax.checkpoint`."""

    programs: tuple[ClosedJaxpr]
    policy: Any
    prevent_cse: bool


class ShardMap(NamedTuple):
    """`jax.shard_map`: runs its program on a part of each operand."""

    programs: tuple[ClosedJaxpr]


class Scan(NamedTuple):
    """`jax.lax.scan`. The operands are constants, carry and `xs`, in this order."""

    programs: tuple[ClosedJaxpr]
    n_consts: int
    n_carry: int
    length: int
    reverse: bool
    unroll: int | bool

    @property
    def n_before_carry(self) -> int:
        return self.n_consts


class While(NamedTuple):
    """`jax.lax.while_loop`, whose programs are the condition and the body. The operands are the
    constants of the condition, the constants of the body, and the carry."""

    programs: tuple[ClosedJaxpr, ClosedJaxpr]
    n_cond_consts: int
    n_body_consts: int

    @property
    def is_batched(self) -> bool:
        """Whether the condition is an array, as it may be under `vmap`: the loop runs while any
        element is true, and leaves the others as they are."""
        return self.programs[0].out_avals[0].ndim > 0

    @property
    def n_before_carry(self) -> int:
        return self.n_cond_consts + self.n_body_consts

    @property
    def n_carry(self) -> int:
        return len(self.programs[1].out_avals)


class Cond(NamedTuple):
    """`jax.lax.cond` and `jax.lax.switch`, whose programs are the branches. The operands are
    the index of a branch, and then the operands of the branches.

    `by_platform`: it is a `jax.lax.platform_dependent`, and the index is only known when the
    program is compiled.
    """

    programs: tuple[ClosedJaxpr, ...]
    by_platform: bool


Structure = Call | CallWithRule | LinearCall | Checkpoint | ShardMap | Scan | While | Cond


Reader = Callable[[Any], Structure | None]


def read_call(kind: Callable[..., Structure], key: str, **options: Any) -> Reader:
    """Read a primitive that runs the program in the parameter `key` on its operands."""

    def read(eqn):
        jaxpr = eqn.params.get(key)
        if not isinstance(jaxpr, ClosedJaxpr):
            jaxpr = as_closed(jaxpr) if is_jaxpr(jaxpr) else None
        fits = jaxpr is not None and len(jaxpr.in_avals) == len(eqn.invars)
        return kind((jaxpr,), **options) if fits else None

    return read


def _read_scan(eqn: Any) -> Scan | None:
    params, counts = eqn.params, scan_counts(eqn.params)
    options = [params.get(key) for key in ("length", "reverse", "unroll")]
    if counts is None or None in options or not is_jaxpr(params.get("jaxpr")):
        return None
    return Scan((as_closed(params["jaxpr"]),), *counts, *options)


def _read_while(eqn: Any) -> While | None:
    keys = ("cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts")
    if not all(key in eqn.params for key in keys):
        return None
    cond, body, *counts = (eqn.params[key] for key in keys)
    return While((as_closed(cond), as_closed(body)), *counts)


def _read_cond(eqn: Any) -> Cond | None:
    branches = tuple(map(as_closed, eqn.params.get("branches", ())))
    return Cond(branches, "branches_platforms" in eqn.params) if branches else None


def _read_object(eqn: Any) -> Structure | None:
    program = program_with_rule(eqn)
    if program is not None:
        return CallWithRule((program,)) if len(program.in_avals) == len(eqn.invars) else None
    checkpoint = checkpoint_params(eqn)
    return None if checkpoint is None else Checkpoint(*checkpoint)


_READERS: dict[str, Reader] = {
    "jit": read_call(Call, "jaxpr"),
    "closed_call": read_call(Call, "call_jaxpr"),  # until JAX 0.11
    "custom_jvp_call": read_call(CallWithRule, "call_jaxpr"),
    "custom_vjp_call": read_call(CallWithRule, "call_jaxpr"),
    "shard_map": read_call(ShardMap, "jaxpr"),
    "remat2": _read_object,
    "scan": _read_scan,
    "while": _read_while,
    "cond": _read_cond,
}


def register(name: str, read: Reader) -> None:
    """Say how the equations of a primitive of this library run their inner programs."""
    _READERS[name] = read


def structure(eqn: Any) -> Structure | None:
    """How an equation runs its inner programs.

    `None` if it has no inner programs or is opaque: if it is not in the table, or JAX has
    changed its parameters.
    """
    # A function or a `jax.checkpoint` may be an object in `_prim` (`versions.py`).
    read = _READERS.get(eqn.primitive.name, _read_object if "_prim" in eqn.params else None)
    return None if read is None else read(eqn)


def inner_programs(eqn: Any) -> tuple[ClosedJaxpr, ...]:
    """The programs in an equation, even in an opaque equation."""
    known = structure(eqn)
    if known is not None:
        return known.programs
    return tuple(as_closed(j) for param in eqn.params.values() for j in _jaxprs_in(param))


def _jaxprs_in(param: Any) -> Iterator[Any]:
    if isinstance(param, JAXPRS):
        yield param
    elif isinstance(param, dict):
        yield from _jaxprs_in(list(param.values()))
    elif isinstance(param, tuple | list):
        for part in param:
            yield from _jaxprs_in(part)
    else:
        yield from jaxprs_in_object(param)


def equations(program: ClosedJaxpr) -> Iterator[Any]:
    """All equations of a program and of its inner programs."""
    for eqn in program.eqns:
        yield from _with_inner(eqn)


def is_reference(aval: Any) -> bool:
    """Whether a type is the type of a `jax.new_ref`, which has no public name."""
    return type(aval).__name__ == "AbstractRef"


def _with_inner(eqn: Any) -> Iterator[Any]:
    yield eqn
    for inner in inner_programs(eqn):
        yield from equations(inner)


def holds(part: ClosedJaxpr | Any, *kinds: str | type) -> bool:
    """Whether a program, or an equation, has an equation of one of these kinds."""
    return bool(found(part, *kinds))


def found(part: ClosedJaxpr | Any, *kinds: str | type) -> list[Any]:
    """All equations of the given kinds, at any depth: the name of a primitive, or a class of
    this file."""
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    eqns = equations(part) if isinstance(part, ClosedJaxpr) else _with_inner(part)
    fits = lambda eqn: eqn.primitive.name in kinds or isinstance(structure(eqn), types)
    return list(filter(fits, eqns))


def primal_program(eqn: Any) -> ClosedJaxpr | None:
    """The program of a call with a rule. `None` for another equation."""
    known = structure(eqn)
    return known.programs[0] if isinstance(known, CallWithRule) else None


def primal_call(eqn: Any) -> tuple[ClosedJaxpr, list[int]] | None:
    """The program of a call with a rule, or of a solver that was given to JAX, and the indices
    of its operands among the operands of the equation. `None` for another equation."""
    program = primal_program(eqn)
    return given_solver(eqn) if program is None else (program, list(range(len(eqn.invars))))
