"""Random programs: one call of a random function, or a scan whose steps are its calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .formulas import mul
from .programs import flatten, Function, Leaf
from .rules import decorated, undecorated


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the function."""

    function: Function

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return self.function.leaves

    @property
    def differentiable(self) -> tuple[int, ...]:
        return self.function.differentiable

    @property
    def kind(self) -> "Call":
        return Call(self.function.kind)

    @property
    def plain(self) -> "Call":
        """The program whose derivative this one has to have. It is the key of the reference."""
        function = dataclasses.replace(self.function, style="", nested=False, by_keyword=0)
        return Call(function)

    def run(self, leaves: Sequence[Any], ours: bool) -> list[Any]:
        f = self.function
        make = decorated if ours else undecorated
        fn = make(f, [leaves[i] for i in f.closed])
        return f.numbers(f.call(fn, leaves))


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan whose step is a function of a carry, a slice of `xs`, and weights.

    - `function`: its first argument is the carry, the second the slice, and the others are the
        weights. Its output is a pair of a carry and a `y`.
    - `sliced`: the leaves of the second argument.
    """

    function: Function
    steps: int
    sliced: tuple[int, ...]
    reverse: bool = False
    checkpoint: int | str | None = None
    truncate: int | None = None
    unroll: int = 1
    halves_carry_gradient: bool = False

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(
            dataclasses.replace(leaf, shape=(self.steps, *leaf.shape))
            if i in self.sliced
            else leaf
            for i, leaf in enumerate(self.function.leaves)
        )

    @property
    def differentiable(self) -> tuple[int, ...]:
        return self.function.differentiable

    @property
    def kind(self) -> "Scan":
        return dataclasses.replace(self, function=self.function.kind)

    @property
    def plain(self) -> "Scan":
        """The steps without their rules, unless these have derivatives of their own: then the
        same steps in `jax.lax.scan`."""
        function = self.function
        if not function.has_own_derivative:
            function = dataclasses.replace(function, style="", nested=False)
        return dataclasses.replace(self, function=function, checkpoint=None, unroll=1)

    def run(self, leaves: Sequence[Any], ours: bool) -> list[Any]:
        f = self.function
        make = decorated if ours or f.has_own_derivative else undecorated
        fn = make(f, [leaves[i] for i in f.closed])
        init, xs, *weights = f.arguments(leaves)
        step = lambda carry, x: fn(carry, x, *weights)
        if ours:
            carry, ys = eqg.filter_scan(
                step,
                init,
                xs,
                self.steps,
                reverse=self.reverse,
                unroll=self.unroll,
                checkpoint=self.checkpoint,
                truncate=self.truncate,
                carry_gradient=_halve if self.halves_carry_gradient else None,
            )
            return f.numbers((carry, ys))
        return f.numbers(self._plain_scan(step, init, xs))

    def _plain_scan(self, step: Callable[..., Any], init: Any, xs: Any) -> Any:
        """`jax.lax.scan`, with a `stop_gradient` where the derivative is cut."""
        init = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float) else x, init)
        arrays, static = eqx.partition(init, eqx.is_array)
        sliced, same = eqx.partition(xs, eqx.is_array)
        index = jnp.arange(self.steps)
        index = index[::-1] if self.reverse else index
        found = []

        def body(arrays, inputs):
            index, sliced = inputs
            if self.truncate is not None:
                cut = (index % self.truncate == 0) & (index > 0)
                arrays = jax.tree.map(lambda x: _cut(cut, x), arrays)
            if self.halves_carry_gradient:
                arrays = jax.tree.map(_plainly_halved, arrays)
            carry, y = step(eqx.combine(arrays, static), eqx.combine(sliced, same))
            carry, _ = eqx.partition(carry, eqx.is_array)
            y, y_static = eqx.partition(y, eqx.is_array)
            found.append(y_static)
            return carry, y

        arrays, ys = jax.lax.scan(body, arrays, (index, sliced), self.steps, self.reverse)
        return eqx.combine(arrays, static), eqx.combine(ys, found[-1])


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _cut(cut: Any, x: Any) -> Any:
    return jnp.where(cut, jax.lax.stop_gradient(x), x) if _is_inexact(x) else x


@eqg.custom_jvp
def _half_gradient(x):
    return x


@_half_gradient.def_jvp
def _half_gradient_jvp(primals, tangents):
    # Not `eqg.scale_gradient`, whose second derivative is that of the scaled gradient.
    (x,), (t_x,) = primals, tangents
    return _half_gradient(x), mul(t_x, jax.lax.full_like(t_x, 0.5))


def _halve(carry: Any) -> Any:
    is_array = lambda x: eqx.is_array(x) and _is_inexact(x)
    return jax.tree.map(lambda x: _half_gradient(x) if is_array(x) else x, carry)


def _plainly_halved(x: Any) -> Any:
    if not _is_inexact(x):
        return x
    # Exact in the value: `x` and a difference that is zero.
    half = (0.5 * x).astype(x.dtype)
    return jax.lax.stop_gradient(x) + (half - jax.lax.stop_gradient(half))


def is_carry_like(function: Function) -> bool:
    """Whether a function can be the step of a scan: the carry keeps its structure and types."""
    carry = [k for k, _ in flatten(function.args[0], None)]
    kept = [k for k, _ in flatten(function.out[1], None)]
    return len(carry) == len(kept)
