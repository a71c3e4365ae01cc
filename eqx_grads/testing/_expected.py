"""What a derivative is expected to be: the user's formula, its transpose, or autodiff."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np


if TYPE_CHECKING:
    from ._case import Options
    from ._precision import Precision


class Witness(NamedTuple):
    """An expected derivative.

    - `name`: what computes it, in words.
    - `derivative`: `derivative(precision, direction)`, a list of arrays.
    - `is_autodiff`: whether rounding is its only error.
    - `is_binding`: whether a rule that disagrees with it is wrong.
    """

    name: str
    derivative: Callable[["Precision", Sequence[Any]], list[Any]]
    is_autodiff: bool = False
    is_binding: bool = True


def is_given(mode: str, options: "Options") -> bool:
    """Whether the user said what the derivative in this mode is."""
    formulas = {"forward": options.expected_tangent, "reverse": options.expected_cotangent}
    return formulas[mode] is not None or options.reference is not None


def witnesses(mode: str, options: "Options") -> list[Witness]:
    """The expected derivatives of a mode. Where the user gave the formula of the other mode
    only, a rule may have its transpose, or the derivative of the function: a `custom_vjp` of
    this library has the latter in forward mode.

    `mode`: `"forward"` or `"reverse"`.
    """
    is_forward = mode == "forward"
    formula = options.expected_tangent if is_forward else options.expected_cotangent
    other = options.expected_cotangent if is_forward else options.expected_tangent
    name, other_name = "`expected_tangent`", "`expected_cotangent`"
    if not is_forward:
        name, other_name = other_name, name
    autodiff = _forward_autodiff if is_forward else _reverse_autodiff
    if formula is not None:
        by_formula = _tangents if is_forward else _cotangents
        return [Witness(name, lambda p, direction: by_formula(p, formula, direction))]
    if options.reference is not None:
        return [Witness("autodiff of `reference`", autodiff, is_autodiff=True)]
    plain = Witness("autodiff of the function without its rule", autodiff, is_autodiff=True)
    if other is None:
        return [plain]
    plain = plain._replace(is_binding=False)
    if options.nonlinear:
        return [plain]
    transpose = _transposed_cotangents if is_forward else _transposed_tangents
    text = f"the transpose of {other_name}"
    return [Witness(text, lambda p, direction: transpose(p, other, direction)), plain]


def _forward_autodiff(p: "Precision", tangents):
    return p.reference.jvp(tangents)


def _reverse_autodiff(p: "Precision", cotangents):
    return p.reference.vjp(cotangents)


def _tangents(p: "Precision", formula, tangents):
    with p.context():
        return [np.asarray(x) for x in _of_tangents(p, formula)(_arrays(tangents))]


def _cotangents(p: "Precision", formula, cotangents):
    with p.context():
        return [np.asarray(x) for x in _of_cotangents(p, formula)(_arrays(cotangents))]


def _transposed_cotangents(p: "Precision", formula, tangents):
    return _transposed(p, _of_cotangents(p, formula), p.outputs, tangents)


def _transposed_tangents(p: "Precision", formula, cotangents):
    return _transposed(p, _of_tangents(p, formula), p.subject.leaves, cotangents)


def _transposed(p: "Precision", linear, space, direction):
    """The transpose of a linear function is its derivative in reverse mode, at any point."""
    with p.context():
        zeros = [jnp.zeros(x.shape, x.dtype) for x in space]
        (out,) = jax.vjp(linear, zeros)[1](_arrays(direction))
        return [np.asarray(x) for x in out]


def _arrays(xs):
    return [jnp.asarray(x) for x in xs]


def _of_tangents(p: "Precision", formula):
    """The user's formula as a function of arrays."""
    primals = p.subject.arguments(p.subject.leaves)

    def of_tangents(tangents):
        out = formula(primals, p.subject.tangents_of_arguments(tangents))
        return _like(p.outputs, p.subject.by_output("expected_tangent", out, p.named_outputs))

    return of_tangents


def _of_cotangents(p: "Precision", formula):
    """The user's formula as a function of arrays."""
    primals = p.subject.arguments(p.subject.leaves)

    def of_cotangents(cotangents):
        out = formula(primals, p.subject.like_output(cotangents))
        return _like(p.subject.leaves, p.subject.cotangents_by_leaf(out))

    return of_cotangents


def _like(space, xs):
    """In the dtypes of a space: the function may have fixed one, as of a spike in float32."""
    return [
        x.astype(like.dtype) if jnp.iscomplexobj(x) == jnp.iscomplexobj(like) else x
        for like, x in zip(space, xs, strict=True)
    ]
