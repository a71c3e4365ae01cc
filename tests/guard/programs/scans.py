"""Random programs: one call of a random function, or a scan whose steps are its calls."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp

from .formulas import mul
from .functions import Function, Leaf
from .rules import decorated, reference


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
        style = self.function.style if self.function.is_raw else ""
        function = dataclasses.replace(self.function, style=style, nested=False, by_keyword=0)
        return Call(function)

    def run(self, leaves: Sequence[Any], ours: bool) -> list[Any]:
        f = self.function
        make = decorated if ours else reference
        fn = make(f, [leaves[i] for i in f.closed])
        return f.numbers(f.call(fn, leaves))


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan whose step is a function of a carry, a slice of `xs`, and weights.

    - `function`: its first argument is the carry, the second the slice, and the others are the
        weights. Its output is a pair of a carry and a `y`.
    - `sliced`: the leaves of the second argument.
    - `emits`: whether the steps return their carry as an output, too.
    - `elementwise`: whether an element of the next carry depends on the same element only, as
        `online` needs it. Then the slices are not differentiated.
    """

    function: Function
    steps: int
    sliced: tuple[int, ...]
    reverse: bool = False
    checkpoint: int | str | None = None
    truncate: int | None = None
    unroll: int = 1
    halves_carry_gradient: bool = False
    elementwise: bool = False
    emits: bool = False
    online: bool = False

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
        found = self.function.differentiable
        return tuple(i for i in found if not (self.elementwise and i in self.sliced))

    @property
    def kind(self) -> "Scan":
        return dataclasses.replace(self, function=self.function.kind)

    @property
    def plain(self) -> "Scan":
        """The steps without their rules, unless these have derivatives of their own: then the
        same steps in `jax.lax.scan`."""
        function = self.function
        if not function.has_own_derivative:
            style = function.style if function.is_raw else ""
            function = dataclasses.replace(function, style=style, nested=False)
        return dataclasses.replace(
            self, function=function, checkpoint=None, unroll=1, online=False
        )

    def run(self, leaves: Sequence[Any], ours: bool) -> list[Any]:
        f = self.function
        make = decorated if ours else reference
        fn = make(f, [leaves[i] for i in f.closed])
        init, xs, *weights = f.arguments(leaves)

        def step(carry, x):
            carry, y = fn(carry, x, *weights)
            inexact = [c for c in jax.tree.leaves(carry) if eqx.is_array(c) and _is_inexact(c)]
            return carry, (y, inexact if self.emits else [])

        if ours:
            carry, (ys, carries) = eqg.filter_scan(
                step, init, xs, self.steps, reverse=self.reverse, unroll=self.unroll,
                checkpoint=self.checkpoint, truncate=self.truncate, online=self.online,
                carry_gradient=_halve if self.halves_carry_gradient else None,
            )  # fmt: skip
        else:
            carry, (ys, carries) = self._plain_scan(step, init, xs)
        return f.numbers((carry, ys)) + carries

    def _plain_scan(self, step: Callable[..., Any], init: Any, xs: Any) -> Any:
        """`jax.lax.scan`, with a `stop_gradient` where the derivative is cut."""
        init = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, float) else x, init)
        arrays, with_arrays = _split(init)
        sliced, with_slices = _split(xs)
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
            carry, y = step(with_arrays(arrays), with_slices(sliced))
            ys, with_ys = _split(y)
            found.append(with_ys)
            return _split(carry)[0], ys

        arrays, ys = jax.lax.scan(body, arrays, (index, sliced), self.steps, self.reverse)
        return with_arrays(arrays), found[-1](ys)


def _split(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a tree, and a function that replaces them. Not `eqx.partition`, which calls
    constructors of users with booleans."""
    leaves, treedef = jax.tree.flatten(tree)

    def with_arrays(arrays):
        rest = iter(arrays)
        found = [next(rest) if eqx.is_array(x) else x for x in leaves]
        return jax.tree.unflatten(treedef, found)

    return [x for x in leaves if eqx.is_array(x)], with_arrays


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
