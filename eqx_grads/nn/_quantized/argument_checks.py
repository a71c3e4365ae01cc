"""Checks of the arguments of quantizers and quantized layers."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ... import ste
from ..._errors import name_of, rule_error, RuleError, type_of
from ..._rules.float_args import as_floats, as_integer, is_known, is_number
from ..._tangent_spaces import dtype_of_array, holds_numbers
from .._argument_checks import as_sizes, is_size
from .._dtypes import default_dtype


def integer_option(layer: str, what: str, x: Any, *, do: str) -> int:
    """A Python integer, which a static field has to be."""
    known = as_integer(x)
    if known is None:
        raise _refused(layer, what, x, do)
    return known


def as_number(layer: str, what: str, x: Any, *, positive: bool = False) -> float:
    if is_number(x) and math.isfinite(x) and (x > 0 if positive else x >= 0):
        return float(x)
    kind = "a positive number" if positive else "a number, zero or positive"
    raise _refused(layer, what, x, f"Give it {kind}.")


def as_scale(layer: str, scale: Any) -> Array | None:
    if scale is None:
        return None
    # What is given and not what JAX makes of it, which inside of `jit` is traced.
    given, scale = scale, jnp.asarray(scale, default_dtype()) if is_number(scale) else scale
    scale = as_floats(layer, scale, "scale")
    values = np.asarray(given, np.float64) if is_known(given) else np.ones(())
    if not np.all((values > 0) & np.isfinite(values)):
        raise rule_error(
            f"`{layer}` was given a scale that is not positive and finite.",
            f"the smallest is {np.min(values)}, the largest {np.max(values)}",
            do="Give it a positive scale.",
        )
    return scale


def check_examples(layer: str, x: Any, dtype: Any) -> None:
    """Check that a scale can be computed from numbers, as far as these are known."""
    largest = float(jnp.finfo(dtype).max)
    if np.size(x) == 0:
        raise rule_error(
            f"`{layer}.fit` was given nothing to fit a scale to.",
            f"`x` is {type_of(x)}",
            do="Give it numbers like those that it will quantize.",
        )
    if is_known(x) and not np.all(np.abs(np.asarray(x)) <= largest):
        raise rule_error(
            f"`{layer}.fit` was given numbers that are not finite.",
            f"`x` is {type_of(x)}, and its largest number is {np.max(np.asarray(x))}",
            do="Fit it to finite numbers. `eqx_grads.explain_nan` finds the origin of others.",
        )


def as_channel_axis(layer: str, axis: Any) -> int | None:
    do = "Give it an integer, or `None` for one scale for all."
    return None if axis is None else integer_option(layer, "channel_axis", axis, do=do)


def as_axis(layer: str, axis: Any) -> int:
    do = (
        "Give it a negative one, which is the same axis for a batch: -3 for images with "
        "channels first."
    )
    axis = integer_option(layer, "axis", axis, do=do)
    if axis >= 0:
        raise rule_error(
            f"`{layer}` was given an axis that is not counted from the end.",
            f"`axis` is {axis}",
            do=do,
        )
    return axis


def as_threshold(layer: str, threshold: Any) -> Any:
    if isinstance(threshold, str):
        if threshold == "mean":
            return threshold
    elif is_number(threshold) and 0 <= threshold < math.inf:
        return float(threshold)
    raise _refused(
        layer, "threshold", threshold, 'Give it a number, zero or positive, or "mean".'
    )


def check_function(layer: str, what: str, fn: Any) -> None:
    if not callable(fn):
        do = "Give it a function of one argument: `jnp.sign`, and not its name."
        raise _refused(layer, what, fn, do)


def check_backward(layer: str, backward: Any) -> None:
    try:
        ste.wrap(jnp.sign, backward=backward)
    except RuleError:
        do = "Give it a function, or one of the names that `eqx_grads.ste.wrap` lists."
        raise _refused(layer, "backward", backward, do) from None


def check_vectors(layer: str, z: Array, axis: int, size: int) -> None:
    """Check that there are vectors of the right size along an axis."""
    if z.ndim >= -axis and z.shape[axis] == size:
        return
    raise rule_error(
        f"`{layer}` was given an array without vectors of its size along its axis.",
        f"`z` is {type_of(z)}, `axis` is {axis}, and the size is {size}",
        do=f"Give it an array with {size} numbers along that axis, or make it with another "
        "`axis`.",
    )


def check_indices(layer: str, indices: Any, axis: int) -> None:
    dtype = dtype_of_array(indices)
    integers = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    if integers and jnp.ndim(indices) + 1 >= -axis:
        return
    raise rule_error(
        f"`{layer}.decode` was given something that is not an array of indices.",
        f"`indices` is {type_of(indices)}, `axis` is {axis}",
        do=f"Give it integers, with {-axis - 1} axes or more.",
    )


def check_layer(name: str, layer: Any, kind: type) -> None:
    """Check that a layer has the `__call__` of Equinox, and one array of weights."""
    alike = isinstance(layer, kind) and type(layer).__call__ is kind.__call__
    if not alike or not isinstance(layer.weight, jax.Array | np.ndarray):
        what, of = ("its weight", layer.weight) if alike else ("the layer", layer)
        raise rule_error(
            f"`{name}.from_layer` was given something that it can't quantize.",
            f"{what} is a `{type(of).__name__}`",
            do=f"Give it an `equinox.nn.{kind.__name__}` with an array for a weight. One that "
            "has a `__call__` of its own would lose it; one of `equinox.nn.Shared` has to be "
            "quantized before it is shared.",
        )


def check_quantizer(name: str, what: str, quantizer: Any) -> None:
    if quantizer is not None and (isinstance(quantizer, type) or not callable(quantizer)):
        raise rule_error(
            f"The `{what}_quantizer` of `{name}` is not a quantizer.",
            f"it is {quantizer!r:.80}",
            do="Give it a function of an array, for example `eqx_grads.nn.LSQ(bits=4)`.",
        )


def check_quantized(what: str, quantizer: Any, x: Any, out: Any) -> None:
    if jnp.shape(out) != x.shape or not jnp.issubdtype(jnp.asarray(out).dtype, jnp.floating):
        raise rule_error(
            f"The {what} quantizer did not return an array like the one that it was given.",
            f"`{name_of(quantizer)}` was given {type_of(x)} and returned {type_of(out)}",
            do="A quantizer is a function of an array that returns floats of the same shape.",
        )


def as_features(layer: str, argument: str, size: Any) -> Any:
    """The size of an input or output, or `"scalar"`."""
    if isinstance(size, str) and size == "scalar":
        return size
    return as_sizes(layer, **{argument: size})[0]


def check_input(name: str, layer: eqx.nn.Linear, x: Any) -> None:
    """Check that an input has the size that a linear layer takes."""
    scalar = layer.in_features == "scalar"
    shape = () if scalar else (layer.in_features,)
    if not holds_numbers(x) or jnp.shape(x) != shape:
        raise rule_error(
            f"`{name}` was given an input of the wrong size.",
            f"`x` is {type_of(x)}, `in_features` is {layer.in_features!r}",
            do=f"Give it {'a scalar' if scalar else f'a vector of shape {shape}'}, and use "
            "`jax.vmap` for a batch.",
        )


def _refused(layer, what, x, do):
    return rule_error(f"`{layer}` can't be made with this `{what}`.", f"it is {x!r:.80}", do=do)


def check_convolution(
    num_spatial_dims: Any, groups: Any, padding_mode: Any, **sizes: Any
) -> None:
    """Check what Equinox does not of the arguments of a convolution."""
    as_sizes("QuantizedConv", num_spatial_dims=num_spatial_dims, groups=groups)
    for name, given in sizes.items():
        each = given if isinstance(given, tuple | list) else (given,)
        if not each or not all(map(is_size, each)):
            raise rule_error(
                f"The `{name}` of `QuantizedConv` is not of positive integers.",
                f"it is {given!r:.60}",
                do="Give a positive integer, or one for each spatial dimension.",
            )
    if not isinstance(padding_mode, str):
        raise rule_error(
            "The `padding_mode` of `QuantizedConv` is not the name of one.",
            f"it is {padding_mode!r:.60}",
            do="Give one such as `'ZEROS'`, as to `equinox.nn.Conv`.",
        )


def check_image(name: str, layer: eqx.nn.Conv, x: Any) -> None:
    """Check that an input has the axes and the channels that a convolution takes."""
    axes = layer.num_spatial_dims + 1
    if not holds_numbers(x) or jnp.ndim(x) != axes or jnp.shape(x)[0] != layer.in_channels:
        raise rule_error(
            f"`{name}` was given an input of the wrong shape.",
            f"`x` is {type_of(x)}, `in_channels` is {layer.in_channels}",
            do=f"Give it {axes} axes, the channels first, and use `jax.vmap` for a batch.",
        )


def check_dtypes(name: str, x: Array, weight: Array) -> None:
    """Check that a convolution is given operands of one dtype, as it does not cast them."""
    if x.dtype != weight.dtype:
        raise rule_error(
            f"`{name}` was given an input of another dtype than its weight.",
            f"`x` is {type_of(x)}, the weight {type_of(weight)}",
            do=f"Pass `x.astype(jnp.{weight.dtype})`.",
        )
