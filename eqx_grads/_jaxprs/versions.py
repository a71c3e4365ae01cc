"""Differences between JAX versions, and details of jaxprs without a public API.

Each function says which JAX lets us delete it, or which of its cases.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


JAXPRS = (Jaxpr, ClosedJaxpr)


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, JAXPRS)


def as_closed(jaxpr: Any) -> ClosedJaxpr:
    """The same program, with its constants. If nothing says what these are, as in an equation
    of Equinox that is opaque, they become inputs.

    JAX 0.11 made `Jaxpr` and `ClosedJaxpr` one class (https://github.com/jax-ml/jax/pull/39009).
    When it is the oldest version, delete this function.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    if jaxpr.constvars:
        inputs = [*jaxpr.constvars, *jaxpr.invars]
        jaxpr = jaxpr.replace(constvars=(), invars=inputs)
    return ClosedJaxpr(jaxpr, ())


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many operands of a `scan` are constants, and how many are its carry; `None` if JAX
    has changed the parameters once more.

    JAX 0.11 replaced the first case by the second
    (https://github.com/jax-ml/jax/commit/08958bdfe2d0ccdf094fc020a24921b37336f6b2).
    """
    if "num_consts" in params and "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    # A scan that JAX transposed has them in a PyTree of another class than one that it traced.
    unpack = getattr(params.get("ft_in"), "unpack", tuple)
    groups = unpack()
    # A group may have groups in it: only the leaves count.
    counts = [len(tuple(group.vals)) for group in groups if hasattr(group, "vals")]
    if len(counts) != 3 or not is_jaxpr(params.get("jaxpr")):
        return None
    fits = sum(counts) == len(as_closed(params["jaxpr"]).in_avals)
    return (counts[0], counts[1]) if fits else None


def checkpoint_params(eqn: Any) -> tuple[tuple[ClosedJaxpr], Any, bool] | None:
    """The program, `policy` and `prevent_cse` of a `jax.checkpoint`, or `None` for any other
    equation.

    With the flag `jax_remat3`, a `jax.checkpoint` is an object in the parameter `_prim`, not a
    primitive. When the flag is the default in the oldest version, delete the first case. When
    that is JAX 0.11, delete the `getattr`: before, the object has no `prevent_cse`.
    """
    if eqn.primitive.name == "remat2":
        params = eqn.params
        return (as_closed(params["jaxpr"]),), params["policy"], params["prevent_cse"]
    remat = eqn.params.get("_prim")
    if hasattr(remat, "policy") and is_jaxpr(getattr(remat, "jaxpr", None)):
        return (as_closed(remat.jaxpr),), remat.policy, getattr(remat, "prevent_cse", True)
    return None


def program_with_rule(eqn: Any) -> ClosedJaxpr | None:
    """The program of a function with a rule, where that is an object in the parameter `_prim`.

    With the flags `jax_custom_jvp3` and `jax_custom_vjp3` it is one, and not a primitive.
    Needed as long as these flags exist.
    """
    call = eqn.params.get("_prim")
    jaxpr = getattr(getattr(call, "traced", None), "jaxpr", None)
    has_rule = hasattr(call, "jvp_rule") or hasattr(call, "bwd")
    return as_closed(jaxpr) if has_rule and is_jaxpr(jaxpr) else None


def jaxprs_in_object(param: Any) -> Iterator[Any]:
    """The programs in a parameter that is neither a program nor a container.

    The flags `jax_custom_jvp3`, `jax_custom_vjp3` and `jax_remat3` put an object into the
    parameter `_prim`, with the program in an attribute. Needed as long as these flags exist.
    """
    for owner in (param, getattr(param, "traced", None)):
        jaxpr = getattr(owner, "jaxpr", None)
        if is_jaxpr(jaxpr):
            yield jaxpr


def rule_of_custom_call(params: Mapping[str, Any]) -> Any:
    """The forward rule in a `custom_jvp_call`, or the backward rule in a `custom_vjp_call`.

    The same in all versions, but no public API returns it.
    """
    return params["jvp_jaxpr_fun"] if "jvp_jaxpr_fun" in params else params["bwd"]


def given_solver(eqn: Any) -> tuple[ClosedJaxpr, list[int]] | None:
    """The solver that was given to `jax.lax.custom_linear_solve` or `jax.lax.custom_root`, and
    the indices of its operands among the operands of the equation. `None` for another equation.

    No public API returns it. Until JAX 0.11 a `custom_root` is a call with a rule, whose
    program is all it computes: see `is_custom_root`.
    """
    if eqn.primitive.name == "custom_linear_solve":
        counts = eqn.params["const_lengths"]
        start = counts.matvec + counts.vecmat
        indices = [*range(start, start + counts.solve), *range(sum(counts), len(eqn.invars))]
        return as_closed(eqn.params["jaxprs"].solve), indices
    jaxpr: Any = getattr(eqn.params.get("_prim"), "solve_jaxpr", None)
    if not is_jaxpr(jaxpr):
        return None
    jaxpr = jaxpr if jaxpr.consts is not None else jaxpr.replace(consts=())
    return jaxpr, list(range(len(jaxpr.invars)))


def is_custom_root(program: ClosedJaxpr) -> bool:
    """Whether a program with a rule belongs to a `jax.lax.custom_root`. When JAX 0.11 is the
    oldest version, delete this function."""
    return function_name(program) == "_custom_root"


def function_name(program: ClosedJaxpr) -> str:
    """The name of the function that a program was traced from.

    The same in all versions, but no public API returns it.
    """
    return program.jaxpr.debug_info.func_name


def assigns_shardings(params: Mapping[str, Any]) -> bool:
    """Whether a `jit` says how its inputs or outputs are sharded.

    The same in all versions, but the value that says "no" has no public name.
    """
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(s).__name__ != "UnspecifiedValue" for s in shardings)


def varying_axes_of_type(aval: Any) -> frozenset[Any]:
    """The mesh axes of `shard_map` over which values of a type vary.

    The same in all versions, but an internal attribute: `jax.typeof(x).vma` is gone since JAX
    0.10 (https://github.com/jax-ml/jax/commit/6735ea09d34ec23ab0d9b99fa91d44cdc8e22de1).
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)
