"""The expected derivative: autodiff of the function without its rule, or of `reference`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._errors import name_of, rule_error, type_of
from ._subject import FlatFunction


_Arrays = list[Any]


def jvp(fn: Callable[..., Any], xs: Sequence[Any], ts: Sequence[Any]) -> _Arrays:
    return jax.jvp(fn, list(xs), list(ts))[1]


def vjp(fn: Callable[..., Any], xs: Sequence[Any], ws: Sequence[Any]) -> _Arrays:
    return list(jax.vjp(fn, *xs)[1](list(ws)))


def _like(space, xs):
    """In the dtypes of a space: the function may have fixed one, as of a spike in float32."""
    return [
        x.astype(like.dtype) if jnp.iscomplexobj(x) == jnp.iscomplexobj(like) else x
        for like, x in zip(space, xs, strict=True)
    ]


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
