"""What a derivative is expected to be: autodiff of the function without its rule, autodiff of
`reference`, or the formula of the user, each as functions of the same arrays."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import name_of, rule_error, type_of
from ._options import Options
from ._outcome import outcome
from ._subject import FlatFunction


_Arrays = list[Any]
PLAIN = "autodiff of the function without its rule"


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
    autodiff = lambda fn, name, binding=True: (
        [Reference(name, lambda x, t: jvp(fn, x, t), True, binding)],
        [Reference(name, lambda x, w: vjp(fn, x, w), True, binding)],
    )
    found = autodiff(plain, PLAIN)
    if options.reference is not None:
        given = as_reference(subject, with_self(subject, options.reference))
        found = autodiff(given, "autodiff of `reference`")
    elif options.expected_tangent or options.expected_cotangent:
        found = autodiff(plain, PLAIN, False)
    pushed, pulled = options.expected_tangent, options.expected_cotangent
    tangents = lambda x, t: _of_tangents(subject, pushed, x, t)
    cotangents = lambda x, w: _of_cotangents(subject, pulled, x, w)
    transposes = options.reference is None and not options.nonlinear
    if pulled is not None and transposes:
        name = "the transpose of `expected_cotangent`"
        zeros = lambda: [jnp.zeros(o.shape, o.dtype) for _, o in subject.named_outputs()]
        transpose = lambda x, t: _transposed(lambda w: cotangents(x, w), zeros(), t)
        found[0].insert(0, Reference(name, transpose))
    if pushed is not None and transposes:
        name = "the transpose of `expected_tangent`"
        transpose = lambda x, w: _transposed(
            lambda t: tangents(x, t), list(map(jnp.zeros_like, x)), w
        )
        found[1].insert(0, Reference(name, transpose))
    if pushed is not None:
        found[0][:] = [Reference("`expected_tangent`", tangents)]
    if pulled is not None:
        found[1][:] = [Reference("`expected_cotangent`", cotangents)]
    return found


def _transposed(linear, space, direction):
    """The transpose of a linear function is its derivative in reverse mode, at any point."""
    (out,) = jax.vjp(linear, space)[1](list(direction))
    return out


def _of_tangents(subject: FlatFunction, formula, xs, ts):
    out = formula(subject.arguments(xs), subject.tangents_of_arguments(ts))
    outputs = subject.named_outputs()
    return _like([o for _, o in outputs], subject.by_output("expected_tangent", out, outputs))


def _of_cotangents(subject: FlatFunction, formula, xs, ws):
    out = formula(subject.arguments(xs), subject.like_output(ws))
    return _like(xs, subject.cotangents_by_leaf(out))


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
    def arrays(*leaves):
        out = _outputs_of(subject, reference, leaves)
        # The derivatives of the reference with the values of the function, as the second
        # derivative of a loss depends on the values of its arguments.
        values = jax.lax.stop_gradient(subject.arrays(*leaves))
        moved = _like(values, [x - jax.lax.stop_gradient(x) for x in out])
        return [v + x for v, x in zip(values, moved, strict=True)]

    return arrays


def _outputs_of(subject: FlatFunction, reference, leaves):
    args = subject.arguments(leaves)
    out = jax.tree.leaves(reference(*args, **subject.kwargs))
    return [x for x in out if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]


def with_self(subject: FlatFunction, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The reference as a function of the Module that is differentiated, too."""
    if not subject.has_self:
        return reference
    unbound = subject.of_self(reference)
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


def check_outputs_of_reference(
    subject: FlatFunction, outputs: Sequence[Any], reference
) -> None:
    """Raise if the reference returns other shapes than the function."""
    given = with_self(subject, reference)
    run = lambda xs: _outputs_of(subject, given, xs)
    found = outcome(jax.eval_shape, run, subject.leaves)
    if isinstance(found, Exception):  # it looks at values, or a check reports the error
        return
    if [x.shape for x in found] != [x.shape for x in outputs]:
        name = name_of(subject.fn)
        raise rule_error(
            f"`reference` does not return what `{name}` returns.",
            f"`{name}`: {', '.join(map(type_of, outputs)) or 'no arrays of floats'}",
            f"`reference`: {', '.join(map(type_of, found)) or 'no arrays of floats'}",
            do="Pass a function with the same outputs, of which only the derivative differs.",
        )
