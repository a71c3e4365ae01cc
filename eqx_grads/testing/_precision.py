"""A function with its rule and its reference derivative, in one precision."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from .._diagnosis._programs.lowest_precision import lowest_precisions
from .._jaxprs.structure import equations
from ._compare import difference, tolerance_of
from ._compiled import Program
from ._flat_function import FlatFunction
from ._reference import as_reference, with_reference, with_self
from ._strip_rules import without_rules


__tracebackhide__ = True  # pytest shows the user's call, and not the functions in here


# What the unrounded program may still be rounded to, by a host function.
_SINGLE = (None, np.dtype("float32"))


class Precision:
    """The rule and its reference derivative in one precision.

    - `rule`: the function with its rule.
    - `plain`: the function without its rule.
    - `reference`: the function whose autodiff is the expected derivative: `plain`, or the
        one given as the option `reference`.
    - `compared`: the outputs of the function, and those of a given `reference` after them.
    - `is_unrounded`: whether the conversions to lower precision in the function and its
        derivatives are left out. Differences of a function that rounds its values to float32
        say little about its derivative, and those of one that rounds them to bfloat16 nothing.
    """

    def __init__(
        self,
        subject: FlatFunction,
        given_reference: Callable[..., Any] | None,
        context: Callable[[], Any],
        is_unrounded: bool = False,
    ):
        self.subject = subject
        self.context = context
        self.is_unrounded = is_unrounded
        self._given_reference = given_reference
        self.rule = self._program(subject.arrays)
        is_decorated = isinstance(subject.fn, jax.custom_jvp | jax.custom_vjp)
        self.plain = self._program(without_rules(subject.arrays, is_decorated))
        self.reference = self.plain
        self.compared: Callable[..., list[Any]] = self.rule.fn
        if given_reference is not None:
            reference = with_self(subject, given_reference)
            self.reference = self._program(as_reference(subject, reference))
            self.compared = with_reference(subject, reference)

    def _program(self, fn: Callable[..., list[Any]]) -> Program:
        return Program(fn, self.subject.leaves, self.context, self.is_unrounded)

    def without_rounding(self) -> "Precision":
        """The same without conversions to lower precision, if there are any, and if the
        function has the same values without them. To be called in float64."""
        if self.lowest is None:
            return self
        other = Precision(self.subject, self._given_reference, self.context, True)
        try:
            values, unrounded = self.rule.value(), other.rule.value()
        except Exception:  # a check says what the function raises
            return self
        error = difference(values, unrounded, self.output_names).error
        is_same = error <= tolerance_of(_of(self.lowest)) and other.rounded_to in _SINGLE
        has_derivative = other.has_reverse_mode or not self.has_reverse_mode
        return other if is_same and has_derivative else self

    @ft.cached_property
    def has_reverse_mode(self) -> bool:
        try:
            self.pull_zeros()
        except Exception:
            return False
        return True

    def pull_zeros(self) -> None:
        self.rule.vjp([np.zeros(x.shape, x.dtype) for x in self.outputs])

    @ft.cached_property
    def lowest(self) -> np.dtype | None:
        """The dtype of lowest precision that an output is computed in, be it an intermediate
        result or the output itself; `None` if that is float64."""
        return self._lowest(opaque=False)

    @ft.cached_property
    def rounded_to(self) -> np.dtype | None:
        """The dtype that the values of `plain` are rounded to on their way: `lowest`, or that
        of a host function if the other conversions are left out."""
        return self._lowest(opaque=True) if self.is_unrounded else self.lowest

    def _lowest(self, *, opaque: bool) -> np.dtype | None:
        try:
            with self.context():
                program = jax.make_jaxpr(self.rule.fn)(*self.subject.leaves)
            dtypes = lowest_precisions(program, opaque=opaque)
        except Exception:  # it looks at values: the dtypes of the outputs are all that is known
            dtypes = [] if opaque else [jnp.finfo(x.dtype).dtype for x in self.outputs]
        dtypes = [dtype for dtype in dtypes if dtype is not None and dtype != np.float64]
        return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)

    @property
    def where_rounded(self) -> str:
        """What is in lower precision than float64, for a report; empty if nothing is."""
        if self.lowest is None:
            return ""
        is_output = any(jnp.finfo(x.dtype).dtype == self.lowest for x in self.outputs)
        return f"{'the output is' if is_output else 'it computes in'} {self.lowest}"

    def tolerance(self) -> float:
        """The relative error that rounding explains."""
        if self.is_unrounded:
            of_constants = float(jnp.finfo(self.lowest).eps)
            return max(self.tolerance_without_constants(), of_constants)
        low = [_of(self.lowest)] if self.lowest is not None else []
        return tolerance_of(self.outputs, low)

    def tolerance_without_constants(self) -> float:
        return tolerance_of([] if self.rounded_to is None else [_of(self.rounded_to)])

    @ft.cached_property
    def rounds_constants(self) -> bool:
        """Whether a number in the function or its rule was rounded to 8 or 11 bits, such as the
        0.1 in `0.1 * x` for an `x` in bfloat16: the rule may have the number itself."""

        def derivative(fn):
            def run(*xs):
                out, pull = jax.vjp(fn, *xs)
                return pull([jnp.ones_like(x) for x in out])

            return run

        try:
            with self.context():
                programs = [
                    jax.make_jaxpr(derivative(fn))(*self.subject.leaves)
                    for fn in (self.rule.fn, self.plain.fn)
                ]
        except Exception:  # it looks at values, or has no reverse mode
            return True
        atoms = [v for p in programs for eqn in equations(p) for v in eqn.invars]
        numbers = [v.val for v in atoms if isinstance(v, Literal)]
        numbers += [x for p in programs for x in p.consts if np.ndim(x) == 0]
        return any(map(_is_rounded, numbers))

    @ft.cached_property
    def named_outputs(self) -> list[tuple[str, Any]]:
        with self.context():
            return self.subject.named_outputs()

    @property
    def output_names(self) -> list[str]:
        return [name for name, _ in self.named_outputs]

    @property
    def outputs(self) -> list[Any]:
        """The shapes and dtypes of the outputs."""
        return [shape for _, shape in self.named_outputs]

    def like_leaves(self, vectors: Sequence[Any]) -> list[Any]:
        pairs = zip(vectors, self.subject.leaves, strict=True)
        return [_cast(v, x.dtype) for v, x in pairs]

    def like_outputs(self, vectors: Sequence[Any]) -> list[Any]:
        return [_cast(v, x.dtype) for v, x in zip(vectors, self.outputs, strict=True)]


def _is_rounded(number: Any) -> bool:
    """Whether a number in half precision has many significant bits, and so is not what a user
    wrote: 0.75 has two of them, and 0.1 has all that the dtype has."""
    dtype = np.dtype(getattr(number, "dtype", float))
    if dtype not in (np.dtype(jnp.bfloat16), np.dtype(np.float16)):
        return False
    fraction, _ = np.frexp(np.float64(number))
    return bool(np.isfinite(fraction) and fraction * 16 % 1)


def _of(dtype) -> np.ndarray:
    return np.zeros((), dtype)


def _cast(v, dtype):
    return np.asarray(v).astype(dtype)
