"""A quantizer encodes an array as integers and a scale."""

import abc
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Key

from ..._errors import bad_argument, name_of, rule_error, type_of
from ..._rules.float_args import as_floats, is_known, is_number


Floats: TypeAlias = Float[Array, "..."]
Quantizer: TypeAlias = Callable[[Array], Array]
# Integers, and the scale by which they are multiplied. Zero points, if there are any, are
# subtracted before.
Encoded: TypeAlias = (
    tuple[Integer[Array, "..."], Floats]
    | tuple[Integer[Array, "..."], Floats, Integer[Array, "..."]]
)


class AbstractQuantizer(eqx.Module):
    """A quantizer that can return its integers.

    A quantizer of [`eqx_grads.nn.Quantized`][] or [`eqx_grads.nn.quantize_model`][] may be any
    function of an array. Derive yours from this class if its parameters depend on the weights,
    or if [`eqx_grads.nn.to_integers`][] should store its integers. A quantizer that can't be
    called before it is fitted also has a property `needs_fit`.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        class Multiples(eqg.nn.AbstractQuantizer):
            step: float
            bits: int = 8

            def fit(self, x):
                return self

            def encode(self, x):
                n = jnp.clip(jnp.round(x / self.step), -128, 127)
                return n.astype(jnp.int8), jnp.asarray(self.step, x.dtype)

            def __call__(self, x, *, key=None):
                return self.step * jnp.clip(eqg.ste.round(x / self.step), -128, 127)

        x = jnp.array([0.3, 0.8])
        print(Multiples(0.5)(x), jax.grad(lambda x: Multiples(0.5)(x).sum())(x))

        model = eqx.nn.MLP(2, 1, width_size=4, depth=1, key=jax.random.key(0))
        model, _ = eqg.nn.quantize_model(model, {"*": Multiples(0.5)})
        stored, _ = eqg.nn.to_integers(model)
        print(stored.layers[0].weight.dtype)
        ```

        ```text
        [0.5 1. ] [1. 1.]
        int8
        ```

    **Derivative:**

    The derivative of your `__call__`. Make it straight through, as with
    [`eqx_grads.ste.round`][]: the derivative of rounding is zero.
    """

    bits: eqx.AbstractVar[int | float]  # of the integers: up to four are stored two in a byte

    @abc.abstractmethod
    def fit(self, x: Array) -> "AbstractQuantizer":
        """Return this quantizer, with its missing parameters chosen for `x`. A layer calls this
        method with its weights when it is made."""

    @abc.abstractmethod
    def encode(self, x: Floats) -> Encoded:
        """Integers, and the scale by which a call multiplies them. If zero is not represented
        by zero, a third array: the zero points, which are subtracted before."""

    @abc.abstractmethod
    def __call__(self, x: Floats, *, key: Key[Array, ""] | None = None) -> Floats:
        """An array like `x`, of few different values."""


class Stored(eqx.Module):
    """The floats that integers represent: what is left of a quantizer where they are stored."""

    scale: Floats
    zero_point: Integer[Array, "..."] | None
    bits: int | float = eqx.field(static=True)
    signed: bool | None = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    # The axis whose second half is in the upper four bits of each byte, and what the fourth bit
    # counts, if it is a sign.
    packed: int | None = eqx.field(static=True)
    sign: int = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        if self.packed is not None:
            x = jnp.concatenate([x & 15, x >> 4], self.packed).astype(jnp.int8)
            x = (x ^ self.sign) - self.sign
        scale = spread(self.scale, x)
        x = x.astype(scale.dtype)
        x = x if self.zero_point is None else x - spread(self.zero_point, x).astype(x.dtype)
        largest = float(jnp.finfo(self.dtype).max)  # rounded up, a product may be infinite
        return jnp.clip(x * scale, -largest, largest).astype(self.dtype)


def stored(quantizer: AbstractQuantizer, weight: Array) -> tuple[Array, Stored]:
    """The integers of a weight, two of four bits in a byte, and what gives its floats."""
    integers, scale, *zero = quantizer.encode(weight)
    sign = 8 if jnp.issubdtype(integers.dtype, jnp.signedinteger) else 0
    even = [i - weight.ndim for i, size in enumerate(weight.shape) if size % 2 == 0]
    axis = even[-1] if even and quantizer.bits <= 4 else None
    if axis is not None:
        known = np.asarray(integers) if is_known(integers) else np.zeros(1)
        if known.min(initial=0) < -sign or known.max(initial=0) > 15 - sign:
            raise rule_error(
                f"`{type(quantizer).__name__}.encode` returned integers beyond four bits.",
                f"they are from {known.min()} to {known.max()}, and `bits` is {quantizer.bits}",
                do="Clip them, or give the quantizer more `bits`.",
            )
        low, high = jnp.split(integers.astype(jnp.uint8) & 15, 2, axis)
        integers = low | high << 4
    signed = getattr(quantizer, "signed", None)
    zero_point = zero[0] if zero else None
    return integers, Stored(scale, zero_point, quantizer.bits, signed, weight.dtype, axis, sign)


def spread(scale: Any, x: Array) -> Any:
    """A scale that broadcasts to `x`. One of groups along the last axis is repeated."""
    if jnp.ndim(scale) == 0 or jnp.ndim(x) == 0 or scale.shape[-1] in (1, x.shape[-1]):
        return scale
    return jnp.repeat(scale, max(x.shape[-1] // scale.shape[-1], 1), axis=-1)


def needs_fit(quantizer: Any) -> bool:
    """Whether it can't be called yet."""
    return isinstance(quantizer, AbstractQuantizer) and getattr(quantizer, "needs_fit", False)


def describe(quantizer: Quantizer | None) -> str:
    """The bits of a quantizer, or its name, for a report."""
    if quantizer is None:
        return ""
    bits = getattr(quantizer, "bits", None)
    if bits is None:
        return name_of(quantizer)
    text = f"{bits:.3g} bit" + "s" * (bits != 1)
    signed = getattr(quantizer, "signed", None)
    return text if signed is None else f"{text} {'signed' if signed else 'unsigned'}"


# ---------------------------------------------------------------- arguments


def as_number(
    layer: str, what: str, x: Any, *, positive: bool = False, less_than: float = math.inf
) -> float:
    if is_number(x) and (x > 0 if positive else x >= 0) and x < less_than:
        return float(x)
    wanted = "a positive number" if positive else "a number, zero or positive"
    wanted += ", that is finite" if less_than == math.inf else f", less than {less_than}"
    raise bad_argument(layer, what, wanted, x, do=f"Give {wanted}.")


def as_scale(layer: str, scale: Any) -> Array | None:
    if scale is None:
        return None
    # The given array, and not JAX's version, which is traced inside of `jit`.
    given, scale = scale, jnp.asarray(scale, float) if is_number(scale) else scale
    scale = as_floats(layer, scale, "scale")
    values = np.asarray(given) if is_known(given) else np.ones(())
    if not np.all((values > 0) & np.isfinite(values)):
        raise rule_error(
            f"`{layer}` was given a scale that is not positive and finite.",
            f"the smallest is {np.min(values)}, the largest {np.max(values)}",
            do="Give it a positive scale.",
        )
    return scale


def check_examples(name: str, x: Any) -> None:
    """Check that a scale can be computed from numbers, as far as these are known."""
    known = np.asarray(x) if is_known(x) else np.ones(1)
    if np.size(x) == 0 or not np.all(np.isfinite(known)):
        raise rule_error(
            f"`{name}` was given no numbers, or numbers that are not finite.",
            f"`x` is {type_of(x)}, and its largest magnitude is "
            f"{np.max(np.abs(known), initial=0.0)}",
            do="Give it finite numbers like the ones that it will quantize. "
            "`eqx_grads.explain_nan` finds the origin of others.",
        )
