"""The function that was given as the option `reference`, as a function of the same arrays."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._errors import name_of, rule_error, type_of


if TYPE_CHECKING:
    from ._precision import Precision


def _outputs_of(subject, reference, leaves):
    args = subject.arguments(leaves)
    out = jax.tree.leaves(reference(*args, **subject.kwargs))
    return [x for x in out if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]


def with_self(subject, reference):
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


def with_reference(subject, reference):
    return lambda *xs: [*subject.arrays(*xs), *_outputs_of(subject, reference, xs)]


def check_outputs_of_reference(p: "Precision") -> None:
    """Raise if the reference returns other shapes than the function."""
    try:
        found = jax.eval_shape(lambda xs: p.compared(*xs), p.subject.leaves)[len(p.outputs) :]
    except Exception:  # it looks at values, or raises an error that a check reports
        return
    if [x.shape for x in found] != [x.shape for x in p.outputs]:
        name = name_of(p.subject.fn)
        raise rule_error(
            f"`reference` does not return what `{name}` returns.",
            f"`{name}`: {', '.join(map(type_of, p.outputs)) or 'no arrays of floats'}",
            f"`reference`: {', '.join(map(type_of, found)) or 'no arrays of floats'}",
            do="Pass a function with the same outputs, of which only the derivative differs.",
        )


def as_reference(subject, reference):
    def arrays(*leaves):
        out = _outputs_of(subject, reference, leaves)
        # The derivatives of the reference with the values of the function, as the second
        # derivative of a loss depends on the values of its arguments.
        values = jax.lax.stop_gradient(subject.arrays(*leaves))
        return [
            v + _like(v, x - jax.lax.stop_gradient(x)) for v, x in zip(values, out, strict=True)
        ]

    return arrays


def _like(v, x):
    """In the dtype of `v`, which the function may have fixed, as of a spike in float32."""
    is_complex = jnp.iscomplexobj(v), jnp.iscomplexobj(x)
    return x if is_complex[0] != is_complex[1] else x.astype(jnp.result_type(v))
