"""The ways to give a random function its derivative: every kind of rule."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .formulas import mul, NESTED, sum_of, UNARY
from .programs import build, flatten, Function


def undecorated(function: Function, closed: Sequence[Any] = ()) -> Callable[..., Any]:
    return _value(function, closed, UNARY)


def decorated(function: Function, closed: Sequence[Any] = ()) -> Callable[..., Any]:
    if function.closed:
        return STYLES[function.style](function, closed)
    return _decorated_once(function.kind)


@ft.lru_cache(1000)
def _decorated_once(function: Function):
    return STYLES[function.style](function, ())


def _value(function: Function, closed: Sequence[Any], unary: Any = None):
    unary = unary or (NESTED if function.nested else UNARY)

    def value(args):
        leaves = function.leaves_of(args, closed)
        return function.outputs([f.value(leaves, unary) for f in function.formulas], leaves)

    return _with_named_arguments(value, len(function.args))


def _with_named_arguments(fn: Callable[..., Any], n: int) -> Callable[..., Any]:
    return (
        lambda: fn(()),
        lambda a: fn((a,)),
        lambda a, b: fn((a, b)),
        lambda a, b, c: fn((a, b, c)),
    )[n]


@eqg.custom_vjp
def _bent(t, w):
    """`t` times a number, with a derivative that is not the one of autodiff."""
    return mul(t, jax.lax.convert_element_type(jax.lax.cos(w), t.dtype))


@_bent.def_fwd
def _bent_fwd(t, w):
    return _bent(t, w), (t, w)


@_bent.def_bwd
def _bent_bwd(residuals, ct):
    t, w = residuals
    return mul(_bent(ct, w), jax.lax.full_like(ct, 0.5)), jnp.real(sum_of(_bent(mul(ct, t), w)))


def _with_own_derivative(function: Function, leaves: Sequence[Any], t: Any) -> Any:
    """A tangent or a cotangent, or what takes its place if the rule is not autodiff's."""
    if t is None or not function.has_own_derivative:
        return t
    leaf = jnp.asarray(leaves[function.differentiable[0]])
    return _bent(t, sum_of(jnp.real(leaf)).astype(jnp.real(t).dtype))


def _tangents(function: Function, closed, value, *, zeros: bool):
    """The forward rule. `zeros`: some tangents are `None`."""
    unary = NESTED if function.nested else UNARY

    def jvp(primals, tangents):
        leaves = function.leaves_of(primals, closed)
        t_leaves = function.leaves_of(tangents, [None] * len(closed))
        if not zeros:
            assert all(t_leaves[i] is not None for i in function.differentiable)
        outs = [f.tangent(leaves, t_leaves, unary) for f in function.formulas]
        outs = [_with_own_derivative(function, leaves, t) for t in outs]
        return value(*primals), function.tangents_out(outs)

    return jvp


def _pull_back(function: Function, leaves: Any, cts: Any, wanted: Any = None):
    unary = NESTED if function.nested else UNARY
    found: list[Any] = [None] * len(function.leaves)
    for i in function.differentiable:
        if wanted is not None and not wanted[i]:
            continue
        for formula, ct in zip(function.formulas, cts, strict=True):
            part = formula.cotangent(leaves, i, ct, unary)
            part = _with_own_derivative(function, leaves, part)
            if part is not None:
                part = _to_leaf(part, function.leaves[i])
                found[i] = part if found[i] is None else found[i] + part
    return found


def _to_leaf(ct: Any, leaf: Any) -> Any:
    """The cotangent in the shape and dtype of the leaf, so that those of several outputs can be
    added."""
    extra = ct.ndim - len(leaf.shape)
    ct = jnp.sum(ct, axis=tuple(range(extra)))
    axes = tuple(i for i, n in enumerate(leaf.shape) if n == 1 and ct.shape[i] != 1)
    ct = jnp.sum(ct, axis=axes, keepdims=True)
    if jnp.iscomplexobj(ct) and not leaf.dtype.startswith("complex"):
        ct = jnp.real(ct)
    return ct.astype("float32" if leaf.dtype == "float" else leaf.dtype)


def _reverse(function: Function, closed, value, *, perturbed_only: bool):
    """The forward pass and the backward rule."""

    def fwd(*args):
        # Residuals of any kind: here a Module that holds the arguments.
        return value(*args), _Residuals(args, tuple(closed))

    def bwd(residuals, ct):
        leaves = function.leaves_of(residuals.args, residuals.closed)
        return function.cotangents(_pull_back(function, leaves, function.formula_leaves(ct)))

    def bwd_of_perturbed(residuals, ct, *, perturbed):
        leaves = function.leaves_of(residuals.args, residuals.closed)
        flags = [bool(flag) for flag in function.leaves_of(perturbed, [False] * len(closed))]
        cts = function.formula_leaves(ct)
        return function.cotangents(_pull_back(function, leaves, cts, flags))

    return fwd, bwd_of_perturbed if perturbed_only else bwd


class _Residuals(eqx.Module):
    args: Any
    closed: tuple[Any, ...]


def _batched(function: Function, closed, *, decline: bool):
    """A batching rule: `jax.vmap` of the function without its rules. With `decline`, it returns
    `NotImplemented` if all arguments are batched."""
    plain = _value(function, closed, UNARY)
    of_args = [i for i in range(len(function.leaves)) if i not in function.closed]

    def vmap_rule(axis_size, batched, *args):
        if decline and all(jax.tree.leaves(batched)):
            return NotImplemented
        flags = function.leaves_of(batched, [False] * len(closed))
        leaves = function.leaves_of(args, [None] * len(closed))

        def one(*xs):
            found = dict(zip(of_args, xs, strict=True))
            leaves = [found.get(i) for i in range(len(flags))]
            return [x for _, x in flatten(function.out, plain(*function.arguments(leaves)))]

        in_axes = [0 if flags[i] else None for i in of_args]
        outs = jax.vmap(one, in_axes, axis_size=axis_size)(*(leaves[i] for i in of_args))
        order = [k for k, _ in flatten(function.out, None)]
        return build(function.out, [outs[order.index(k)] for k in sorted(order)]), True

    return vmap_rule


def _forward_style(function, closed, *, zeros=False, vmap=None):
    f = eqg.custom_jvp(_value(function, closed))
    f.def_jvp(_tangents(function, closed, f, zeros=zeros), symbolic_zeros=zeros)
    if vmap is not None:
        f.def_vmap(_batched(function, closed, decline=vmap == "declines"))
    return f


def _reverse_style(function, closed, *, zeros=False, perturbed=False, jvp=False, vmap=None):
    f = eqg.custom_vjp(_value(function, closed))
    fwd, bwd = _reverse(function, closed, f, perturbed_only=perturbed)
    f.def_fwd(fwd)
    f.def_bwd(bwd, symbolic_zeros=zeros)
    if jvp:
        f.def_jvp(_tangents(function, closed, f, zeros=zeros), symbolic_zeros=zeros)
    if vmap is not None:
        f.def_vmap(_batched(function, closed, decline=vmap == "declines"))
    return f


def _custom_gradient(function, closed):
    value = _value(function, closed)

    def f(args):
        leaves = function.leaves_of(args, closed)

        def gradient(ct):
            cts = function.formula_leaves(ct)
            return function.cotangents(_pull_back(function, leaves, cts))

        return value(*args), gradient

    return eqg.custom_gradient(_with_named_arguments(f, len(function.args)))


def _elementwise(function, closed, *, how):
    """For one formula and arguments that are arrays."""
    unary = NESTED if function.nested else UNARY
    (formula,) = function.formulas
    of_args = [i for i in range(len(function.leaves)) if i not in function.closed]
    value = _value(function, closed)

    def partial(i, args):
        return formula.partial(function.leaves_of(args, closed), i, unary)

    if how == "tuple":
        return eqg.elementwise(
            value, tuple((lambda out, *args, i=i: partial(i, args)) for i in of_args)
        )
    if how == "setup":
        setup = lambda out, *args: [partial(i, args) for i in of_args]
        return eqg.elementwise(
            value,
            tuple((lambda out, *args, k=k: args[-1][k]) for k in range(len(of_args))),
            setup=setup,
        )
    return eqg.elementwise(value, lambda out, *args: tuple(partial(i, args) for i in of_args))


class _ForwardModel(eqx.Module):
    part: Any
    closed: tuple[Any, ...]
    function: Function = eqx.field(static=True)

    @eqg.custom_jvp
    def __call__(self, *rest):
        return _value(self.function, self.closed)(self.part, *rest)

    @__call__.def_jvp
    def _call_jvp(primals, tangents):
        self, *rest = primals
        t_self, *t_rest = tangents
        f = self.function
        rule = _tangents(f, self.closed, lambda _, *rest: self(*rest), zeros=True)
        return rule((self.part, *rest), (t_self.part, *t_rest))


class _ReverseModel(eqx.Module):
    part: Any
    closed: tuple[Any, ...]
    function: Function = eqx.field(static=True)

    @eqg.custom_vjp
    def __call__(self, *rest):
        return _value(self.function, self.closed)(self.part, *rest)

    @__call__.def_fwd
    def _call_fwd(self, *rest):
        return self(*rest), (self, rest)

    @__call__.def_bwd
    def _call_bwd(residuals, ct):
        self, rest = residuals
        f = self.function
        leaves = f.leaves_of((self.part, *rest), self.closed)
        ct_part, *cts = f.cotangents(_pull_back(f, leaves, f.formula_leaves(ct)))
        return eqg.tangents.of(self, part=ct_part), *cts


def _method(model, function, closed):
    return lambda part, *rest: model(part, tuple(closed), function)(*rest)


class _Callable(eqx.Module):
    closed: tuple[Any, ...]
    function: Function = eqx.field(static=True)

    def __call__(self, *args):
        return _value(self.function, self.closed)(*args)


def _decorated_module(function, closed):
    f = eqg.custom_jvp(_Callable(tuple(closed), function))
    f.def_jvp(_tangents(function, closed, f, zeros=False))
    return f


STYLES: dict[str, Callable[[Function, Sequence[Any]], Callable[..., Any]]] = {
    "jvp": _forward_style,
    "jvp, zeros": ft.partial(_forward_style, zeros=True),
    "jvp, vmap": ft.partial(_forward_style, vmap="applies"),
    "vjp": _reverse_style,
    "vjp, zeros": ft.partial(_reverse_style, zeros=True),
    "vjp, perturbed": ft.partial(_reverse_style, perturbed=True),
    "vjp, jvp": ft.partial(_reverse_style, jvp=True),
    "vjp, jvp, zeros": ft.partial(_reverse_style, jvp=True, zeros=True),
    "vjp, vmap": ft.partial(_reverse_style, vmap="applies"),
    "vjp, jvp, vmap": ft.partial(_reverse_style, jvp=True, vmap="declines"),
    "custom_gradient": _custom_gradient,
    "method, jvp": ft.partial(_method, _ForwardModel),
    "method, vjp": ft.partial(_method, _ReverseModel),
    "module": _decorated_module,
    "own, jvp": _forward_style,
    "own, jvp, zeros": ft.partial(_forward_style, zeros=True),
    "own, vjp": _reverse_style,
    "own, vjp, jvp": ft.partial(_reverse_style, jvp=True),
    "own, method, vjp": ft.partial(_method, _ReverseModel),
    "elementwise": ft.partial(_elementwise, how="function"),
    "elementwise, tuple": ft.partial(_elementwise, how="tuple"),
    "elementwise, setup": ft.partial(_elementwise, how="setup"),
}
