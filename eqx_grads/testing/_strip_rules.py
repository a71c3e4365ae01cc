"""The function without its rules, whose autodiff is the reference derivative.

Plain autodiff of the undecorated function gives the derivative that a rule should return, in
the user's dtype and without a step size. The function is traced, and every call with a rule in
its jaxpr, at any depth, is replaced by the primal computation. Rules of JAX itself
(`jax.nn.relu`) are kept.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal


_WITH_RULE = ("custom_jvp_call", "custom_vjp_call")
_INLINED = ("pjit", "jit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
_JAX = str(pathlib.Path(jax.__file__).parent)


def without_rules(
    fn: Callable[..., Sequence[Any]], is_decorated: bool = False
) -> Callable[..., list[Any]]:
    """The same function of arrays, differentiated as it is written.

    `is_decorated`: whether `fn` is nothing but the call of a function that the user gave a
    rule, and which may otherwise look like one of JAX's own.
    """

    def undecorated(*arrays):
        jaxpr = jax.make_jaxpr(lambda *xs: list(fn(*xs)))(*arrays)
        return _run(jaxpr, arrays, is_decorated)

    return undecorated


def has_rules(fn: Callable[..., Sequence[Any]], *arrays: Any) -> bool:
    """Whether a rule of the user's is at work anywhere in `fn`."""
    return _holds_rule(jax.make_jaxpr(lambda *xs: list(fn(*xs)))(*arrays))


def _run(closed: ClosedJaxpr, args: Sequence[Any], is_decorated=False) -> list[Any]:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
        env.update(zip(eqn.outvars, _apply(eqn, ins, is_decorated), strict=True))
    return [x.val if isinstance(x, Literal) else env[x] for x in jaxpr.outvars]


def _apply(eqn, ins, is_decorated) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if (
        name == "eqg_call"
    ):  # the call with a batching rule of its own, `_rules/call_primitive.py`
        return without_rules(params["call"].primal)(*ins)
    if name in _WITH_RULE and (is_decorated or not _is_of_jax(params)):
        return _run(_closed(params["call_jaxpr"]), ins)
    if _eqn_holds_rule(eqn):
        if name in _INLINED:
            inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            return _run(_closed(inner), ins)
        params = {k: _replace(v) for k, v in params.items()}
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _replace(param):
    if isinstance(param, tuple | list):
        return type(param)(_replace(p) for p in param)
    if not _is_jaxpr(param) or not _holds_rule(param):
        return param
    closed = _closed(param)
    try:
        new = jax.make_jaxpr(lambda *xs: _run(closed, xs))(*closed.in_avals)
    except NameError as e:  # an axis of a mesh, which is only known inside of the program
        raise NotImplementedError("A rule inside of a `shard_map`.") from e
    if isinstance(param, ClosedJaxpr):
        return new
    if new.consts:
        raise NotImplementedError("A rule inside of a program that can't hold constants.")
    return new.jaxpr


def _is_of_jax(params) -> bool:
    """Whether both the function and its rule were written in JAX."""
    rule = params["jvp_jaxpr_fun"] if "jvp_jaxpr_fun" in params else params["bwd"]
    return all(_JAX in _source(x) for x in (_closed(params["call_jaxpr"]).jaxpr, rule))


def _source(x) -> str:
    info = getattr(x, "debug_info", None)
    return str(getattr(info, "func_src_info", None))


def _is_jaxpr(x) -> bool:
    return (hasattr(x, "eqns") and hasattr(x, "outvars")) or isinstance(x, ClosedJaxpr)


def _closed(jaxpr) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def _holds_rule(jaxpr) -> bool:
    return any(_eqn_holds_rule(eqn) for eqn in _closed(jaxpr).jaxpr.eqns)


def _eqn_holds_rule(eqn) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "eqg_call":
        return True
    if name in _WITH_RULE:
        return not _is_of_jax(params) or _holds_rule(params["call_jaxpr"])
    inner = jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr)
    return any(_is_jaxpr(p) and _holds_rule(p) for p in inner)
