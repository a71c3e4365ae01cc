"""The ways to give a random function its derivative: every kind of rule."""

import functools as ft
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .formulas import Formula, mul, NESTED, sum_of, UNARY
from .functions import build, flatten, Function


def undecorated(function: Function, closed: Sequence[Any] = ()) -> Callable[..., Any]:
    return _value(function, closed, UNARY)


def reference(function: Function, closed: Sequence[Any] = ()) -> Callable[..., Any]:
    """Without this library, except for a rule "own", which then runs in loops of JAX."""
    if function.is_raw:
        return _by_flat(function, RAW[function.style][1])
    if function.has_own_derivative:
        return decorated(function, closed)
    return undecorated(function, closed)


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
        outs = [function.psum(f.value(leaves, unary)) for f in function.formulas]
        return function.outputs(outs, leaves)

    return _with_named_arguments(value, len(function.args))


def _with_named_arguments(fn: Callable[..., Any], n: int) -> Callable[..., Any]:
    return (
        lambda: fn(()), lambda a: fn((a,)), lambda a, b: fn((a, b)),
        lambda a, b, c: fn((a, b, c)),
    )[n]  # fmt: skip


@eqg.custom_vjp
def _bent(t, w):
    """`t` times a number, with a derivative that differs from autodiff."""
    return mul(t, jax.lax.convert_element_type(jax.lax.cos(w), t.dtype))


@_bent.def_fwd
def _bent_fwd(t, w):
    return _bent(t, w), (t, w)


@_bent.def_bwd
def _bent_bwd(residuals, ct):
    t, w = residuals
    return mul(_bent(ct, w), jax.lax.full_like(ct, 0.5)), jnp.real(sum_of(_bent(mul(ct, t), w)))


def _with_own_derivative(
    function: Function, formula: Formula, leaves: Sequence[Any], t: Any
) -> Any:
    """A tangent or a cotangent, or what takes its place if the rule is not autodiff's."""
    if t is None or not (function.has_own_derivative or function.is_raw):
        return t
    # JAX's own rule may not depend on a leaf in a batch that the value does not depend on.
    first = formula.terms[0].factors[0][0] if function.is_raw else function.differentiable[0]
    number = sum_of(jnp.real(jnp.asarray(leaves[first]))).astype(jnp.real(t).dtype)
    if function.is_raw:
        factor = jax.lax.cos(number).astype(t.dtype)
        return mul(t, jnp.broadcast_to(factor, t.shape))
    return _bent(t, number)


def _tangents(function: Function, closed, value, *, zeros: bool):
    """The forward rule. `zeros`: some tangents are `None`."""
    unary = NESTED if function.nested else UNARY

    def jvp(primals, tangents):
        leaves = function.leaves_of(primals, closed)
        t_leaves = function.leaves_of(tangents, [None] * len(closed))
        if not zeros:
            assert all(t_leaves[i] is not None for i in function.differentiable)
        outs = []
        for formula in function.formulas:
            t = function.psum(formula.tangent(leaves, t_leaves, unary))
            outs.append(_with_own_derivative(function, formula, leaves, t))
        return value(*primals), function.tangents_out(outs)

    return jvp


def _pull_back(function: Function, leaves: Any, cts: Any, wanted: Any = None):
    unary = NESTED if function.nested else UNARY
    found: list[Any] = [None] * len(function.leaves)
    cts = [function.psum(ct) for ct in cts]
    for i in function.differentiable:
        if wanted is not None and not wanted[i]:
            continue
        for formula, ct in zip(function.formulas, cts, strict=True):
            part = formula.cotangent(leaves, i, ct, unary)
            part = _with_own_derivative(function, formula, leaves, part)
            if part is not None:
                part = _to_leaf(part, function.leaves[i])
                found[i] = part if found[i] is None else found[i] + part
    return found


def _to_leaf(ct: Any, leaf: Any) -> Any:
    """The cotangent in the shape and dtype of the leaf, so that cotangents of several outputs
    can be added."""
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

    partial = lambda i, args: formula.partial(function.leaves_of(args, closed), i, unary)

    if how == "tuple":
        return eqg.elementwise(
            value, tuple((lambda out, *args, i=i: partial(i, args)) for i in of_args)
        )
    if how == "setup":
        setup = lambda out, *args: [partial(i, args) for i in of_args]
        return eqg.elementwise(
            value, tuple((lambda out, *args, k=k: args[-1][k]) for k in range(len(of_args))),
            setup=setup,
        )  # fmt: skip
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


# ---------------------------------------------------------------- the rules of JAX's forms


class _FlatRules:
    """A function of arrays, and rules in the forms of `jax.custom_jvp` and `jax.custom_vjp`,
    with a derivative that differs from autodiff."""

    def __init__(self, function: Function):
        self.function = function

    def value(self, *xs):
        return tuple(formula.value(xs) for formula in self.function.formulas)

    def jvp(self, primals, tangents):
        f = self.function
        ts = [t if i in f.differentiable else None for i, t in enumerate(tangents)]
        outs = [
            _with_own_derivative(f, formula, primals, formula.tangent(primals, ts))
            for formula in f.formulas
        ]
        return self.value(*primals), tuple(outs)

    def term(self, index):
        """For `defjvps`."""
        n = len(self.function.leaves)
        alone = lambda t: [t if i == index else None for i in range(n)]
        zeros = lambda outs: tuple(map(jnp.zeros_like, outs))

        def jvp(t, out, *xs):
            found = self.jvp(xs, alone(t))[1]
            pairs = zip(found, zeros(out), strict=True)
            return tuple(zero if t is None else t for t, zero in pairs)

        return jvp if index in self.function.differentiable else None

    def fwd(self, *xs):
        return self.value(*xs), xs

    def bwd(self, xs, cts):
        found = _pull_back(self.function, xs, cts)
        pairs = zip(found, xs, strict=True)
        return tuple(ct if ct is None else ct.astype(x.dtype) for ct, x in pairs)

    def with_gradient(self, *xs):
        return self.value(*xs), lambda cts: self.bwd(xs, cts)


class _MixedRules(_FlatRules):
    """The same, but all outputs depend on all inputs. JAX counts the cotangent of an output
    that is not batched once for each example, if other outputs are batched (`UPSTREAM.md`)."""

    def value(self, *xs):
        sums = [jnp.sum(jnp.real(x)) for x in xs if eqx.is_inexact_array(x)]
        zero = lambda dtype: sum(0 * x.astype(dtype) for x in sums)
        return tuple(out + zero(out.dtype) for out in super().value(*xs))


def _flat_jvp(decorator, rules: _FlatRules):
    f = decorator(rules.value)
    (f.def_jvp if hasattr(f, "def_jvp") else f.defjvp)(rules.jvp)
    return f


def _flat_terms(decorator, rules: _FlatRules):
    f = decorator(rules.value)
    f.defjvps(*(rules.term(i) for i in range(len(rules.function.leaves))))
    return f


def _flat_vjp(decorator, rules: _FlatRules):
    f = decorator(rules.value)
    if hasattr(f, "def_fwd"):
        f.def_fwd(rules.fwd)
        f.def_bwd(rules.bwd)
    else:
        f.defvjp(rules.fwd, rules.bwd)
    return f


def _scaled(outs, low, high):
    return tuple(
        out if out is None else mul(out, jax.lax.full_like(out, high - low)) for out in outs
    )


def _flat_nondiff_jvp(decorator, rules: _FlatRules):
    """With two numbers that are not differentiated, around the first argument."""

    @ft.partial(decorator, nondiff_argnums=(0, 2))
    def f(low, x, high, *xs):
        return _scaled(rules.value(x, *xs), low, high)

    @f.defjvp
    def _(low, high, primals, tangents):
        out, t_out = rules.jvp(primals, tangents)
        return _scaled(out, low, high), _scaled(t_out, low, high)

    return lambda x, *xs: f(-0.25, x, 0.5, *xs)


def _flat_nondiff_vjp(decorator, rules: _FlatRules):
    f = decorator(
        lambda low, x, high, *xs: _scaled(rules.value(x, *xs), low, high),
        nondiff_argnums=(0, 2),
    )
    f.defvjp(
        lambda low, x, high, *xs: (_scaled(rules.value(x, *xs), low, high), (x, *xs)),
        lambda low, high, xs, cts: rules.bwd(xs, _scaled(cts, low, high)),
    )
    return lambda x, *xs: f(-0.25, x, 0.5, *xs)


def _flat_custom_gradient(decorator, rules: _FlatRules):
    return decorator(rules.with_gradient)


def _flat_equinox_vjp(decorator, rules: _FlatRules, *, deprecated: bool):
    """Equinox's form: only the first argument is differentiated."""
    n, chosen = len(rules.function.leaves), rules.function.differentiable

    def joined(xs, others):
        found = dict(zip(chosen, xs, strict=True))
        rest = iter(others)
        return [found[i] if i in found else next(rest) for i in range(n)]

    def bwd(residuals, cts):
        found = rules.bwd(residuals, cts)
        return tuple(found[i] for i in chosen)

    f = decorator(lambda xs, *others: rules.value(*joined(xs, others)))
    if deprecated:
        with warnings.catch_warnings(action="ignore"):
            f.defvjp(
                lambda xs, *others: rules.fwd(*joined(xs, others)),
                lambda residuals, cts, xs, *others: bwd(residuals, cts),
            )
    else:
        f.def_fwd(lambda perturbed, xs, *others: rules.fwd(*joined(xs, others)))
        f.def_bwd(lambda residuals, cts, perturbed, xs, *others: bwd(residuals, cts))

    def call(*xs):
        return f(tuple(xs[i] for i in chosen), *(xs[i] for i in range(n) if i not in chosen))

    return call


def _flat_equinox_jvp(decorator, rules: _FlatRules):
    f = decorator(rules.value)
    with warnings.catch_warnings(action="ignore"):
        f.defjvp(rules.jvp)
    return f


def _by_flat(function: Function, decorate: Callable[[_FlatRules], Callable[..., Any]]):
    flat = decorate(_FlatRules(function))

    def call(args):
        leaves = function.leaves_of(args)
        return function.outputs(flat(*map(jnp.asarray, leaves)), leaves)

    return _with_named_arguments(call, len(function.args))


_JVP = ft.partial(_flat_jvp, jax.custom_jvp)
_VJP = lambda rules: _flat_vjp(jax.custom_vjp, _MixedRules(rules.function))
_NONDIFF_JVP = ft.partial(_flat_nondiff_jvp, jax.custom_jvp)
_NONDIFF_VJP = lambda rules: _flat_nondiff_vjp(jax.custom_vjp, _MixedRules(rules.function))
_EQX_VJP = ft.partial(_flat_equinox_vjp, eqg.filter_custom_vjp)
# Rules of which JAX has the same, by its own decorator: ours, and JAX's.
RAW: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "raw, jvp": (ft.partial(_flat_jvp, eqg.custom_jvp), _JVP),
    "raw, jax_custom_jvp": (ft.partial(_flat_jvp, eqg.jax_custom_jvp), _JVP), "raw, defjvps": (
        ft.partial(_flat_terms, eqg.jax_custom_jvp), ft.partial(_flat_terms, jax.custom_jvp),
    ), "raw, nondiff jvp": (ft.partial(_flat_nondiff_jvp, eqg.jax_custom_jvp), _NONDIFF_JVP),
    "raw, filter_custom_jvp": (ft.partial(_flat_jvp, eqg.filter_custom_jvp), _JVP),
    "raw, filter defjvp": (ft.partial(_flat_equinox_jvp, eqg.filter_custom_jvp), _JVP),
    "raw, vjp": (ft.partial(_flat_vjp, eqg.custom_vjp), _VJP),
    "raw, jax_custom_vjp": (ft.partial(_flat_vjp, eqg.jax_custom_vjp), _VJP),
    "raw, nondiff vjp": (ft.partial(_flat_nondiff_vjp, eqg.jax_custom_vjp), _NONDIFF_VJP),
    "raw, custom_gradient": (ft.partial(_flat_custom_gradient, eqg.custom_gradient), _VJP),
    "raw, filter_custom_vjp": (ft.partial(_EQX_VJP, deprecated=False), _VJP),
    "raw, filter defvjp": (ft.partial(_EQX_VJP, deprecated=True), _VJP),
}  # fmt: skip


def only_in_reverse(style: str) -> bool:
    """Whether the reference is a `jax.custom_vjp`, which has no forward mode."""
    return style in RAW and RAW[style][1] in (_VJP, _NONDIFF_VJP)


STYLES: dict[str, Callable[[Function, Sequence[Any]], Callable[..., Any]]] = {
    "jvp": _forward_style, "jvp, zeros": ft.partial(_forward_style, zeros=True),
    "jvp, vmap": ft.partial(_forward_style, vmap="applies"), "vjp": _reverse_style,
    "vjp, zeros": ft.partial(_reverse_style, zeros=True),
    "vjp, perturbed": ft.partial(_reverse_style, perturbed=True),
    "vjp, jvp": ft.partial(_reverse_style, jvp=True),
    "vjp, jvp, zeros": ft.partial(_reverse_style, jvp=True, zeros=True),
    "vjp, vmap": ft.partial(_reverse_style, vmap="applies"),
    "vjp, jvp, vmap": ft.partial(_reverse_style, jvp=True, vmap="declines"),
    "custom_gradient": _custom_gradient, "method, jvp": ft.partial(_method, _ForwardModel),
    "method, vjp": ft.partial(_method, _ReverseModel), "module": _decorated_module,
    "own, jvp": _forward_style, "own, jvp, zeros": ft.partial(_forward_style, zeros=True),
    "own, vjp": _reverse_style, "own, vjp, jvp": ft.partial(_reverse_style, jvp=True),
    "own, method, vjp": ft.partial(_method, _ReverseModel), **{
        style: lambda function, _, ours=ours: _by_flat(function, ours)
        for style, (ours, _) in RAW.items()
    }, "elementwise": ft.partial(_elementwise, how="function"),
    "elementwise, tuple": ft.partial(_elementwise, how="tuple"),
    "elementwise, setup": ft.partial(_elementwise, how="setup"),
}  # fmt: skip
