"""What a derivative is expected to be: autodiff of the function without its rule, autodiff of
`reference`, or the formula of the user, each as functions of the same arrays."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import name_of, rule_error, type_of
from .._rules.custom_jvp import custom_jvp
from .._rules.custom_vjp import custom_vjp
from ._options import Options
from ._subject import FlatFunction, is_output


_Arrays = list[Any]


class Reference(NamedTuple):
    """An expected derivative in one mode.

    - `name`: what computes it, in words.
    - `derivative`: of the leaves and a direction.
    - `is_autodiff`: whether rounding is its only error.
    - `is_binding`: whether a rule that disagrees with it is wrong.
    """

    name: str
    derivative: Callable[[Sequence[Any], Sequence[Any]], _Arrays]
    is_autodiff: bool = False
    is_binding: bool = True


def jvp(fn: Callable[..., Any], xs: Sequence[Any], ts: Sequence[Any]) -> _Arrays:
    return jax.jvp(fn, list(xs), list(ts))[1]


def vjp(fn: Callable[..., Any], xs: Sequence[Any], ws: Sequence[Any]) -> _Arrays:
    return list(jax.vjp(fn, *xs)[1](list(ws)))


def references(
    subject: FlatFunction, plain: Callable[..., Any], options: Options
) -> tuple[list[Reference], list[Reference]]:
    """The expected derivatives in forward and in reverse mode. Where the user gave the formula
    of the other mode only, a rule may have its transpose, or the derivative of the function: a
    `custom_vjp` of this library has the latter in forward mode."""
    pushed, pulled = options.expected_tangent, options.expected_cotangent
    fn, name = plain, "autodiff of the function without its rule"
    if options.reference is not None:
        fn, name = as_reference(subject, options.reference), "autodiff of `reference`"
    is_binding = options.reference is not None or not (pushed or pulled)
    ahead, back = (
        [Reference(name, ft.partial(derive, fn), True, is_binding)] for derive in (jvp, vjp)
    )
    has_transpose = options.reference is None and not options.nonlinear
    if pulled is not None:
        pull = ft.partial(vjp, _with_formula(subject, pulled, is_forward=False))
        # The transpose of a linear function is its derivative in reverse mode, at any point.
        zeros = lambda: [jnp.zeros(o.shape, o.dtype) for _, o in subject.named_outputs()]
        transpose = lambda x, t: vjp(lambda *w: pull(x, w), zeros(), t)
        if has_transpose:
            ahead.insert(0, Reference("the transpose of `expected_cotangent`", transpose))
        back = [Reference("`expected_cotangent`", pull)]
    if pushed is not None:
        of_formula = _with_formula(subject, pushed, is_forward=True)
        ahead = [Reference("`expected_tangent`", ft.partial(jvp, of_formula))]
        transpose = ft.partial(vjp, of_formula)
        if has_transpose and pulled is None:
            back.insert(0, Reference("the transpose of `expected_tangent`", transpose))
    return ahead, back


def _with_formula(subject: FlatFunction, formula, is_forward: bool) -> Callable[..., _Arrays]:
    """The function with a formula as its rule."""
    call = subject.unbound()

    def expected_tangent(primals, tangents):
        return call(*primals), formula(primals, tangents)

    def expected_cotangent(primals, ct):
        return formula(primals, ct)

    if is_forward:
        rule = custom_jvp(call)
        rule.def_jvp(expected_tangent)
    else:
        rule = custom_vjp(call)
        rule.def_fwd(lambda *primals: (call(*primals), primals))
        rule.def_bwd(expected_cotangent)
    return lambda *xs: list(filter(is_output, jax.tree.leaves(rule(*subject.arguments(xs)))))


def _like(space, xs):
    """In the dtypes of a space: the function may have fixed one, as of a spike in float32."""
    return [
        x.astype(like.dtype) if jnp.iscomplexobj(x) == jnp.iscomplexobj(like) else x
        for like, x in zip(space, xs, strict=True)
    ]


# ---------------------------------------------------------------- `reference`


def as_reference(
    subject: FlatFunction, reference: Callable[..., Any]
) -> Callable[..., _Arrays]:
    unbound = _with_self(subject, reference)

    def arrays(*leaves):
        found = jax.tree.leaves(unbound(*subject.arguments(leaves), **subject.kwargs))
        out = [x for x in found if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        # The derivatives of the reference with the values of the function, as the second
        # derivative of a loss depends on the values of its arguments.
        values = jax.lax.stop_gradient(subject.arrays(*leaves))
        if [jnp.shape(x) for x in out] != [jnp.shape(x) for x in values]:
            show = lambda xs: ", ".join(map(type_of, xs)) or "no arrays of floats"
            raise rule_error(
                f"`reference` does not return what `{subject.name}` returns.",
                f"`{subject.name}`: {show(values)}",
                f"`reference`: {show(out)}",
                do="Pass a function with the same outputs, and with another derivative.",
            )
        moved = _like(values, [x - jax.lax.stop_gradient(x) for x in out])
        return [v + x for v, x in zip(values, moved, strict=True)]

    return arrays


def _with_self(subject: FlatFunction, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference as a function of the Module that is differentiated, too."""
    unbound = subject.of_self(reference) if subject.has_self else reference
    if unbound is None:
        first = next(n for n, i in zip(subject.names, subject.groups, strict=True) if i < 0)
        raise rule_error(
            f"`reference` is not a function of {first}, in which `{subject.name}` is "
            "differentiated.",
            f"`reference` is `{name_of(reference)}`",
            do="Pass another method of the same object as `reference`. Or check a function of "
            "the object and the arguments, with a `reference` of both: "
            "`check_rule(lambda layer, x: layer(x), layer, x, reference=...)`. To leave the "
            "arrays of the object out, check `lambda x: layer(x)`.",
        )
    return unbound
