"""Checks of the arguments of quantizers and quantized layers."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._errors import bad_argument, rule_error, type_of
from ..._rules.float_args import as_floats, as_integer, is_known, is_number
from .._dtypes import default_dtype


def optional_integer(layer: str, what: str, x: Any, *, least: int | None = None) -> int | None:
    """A Python integer, which a static field has to be, or `None`."""
    known = as_integer(x)
    if x is not None and (known is None or (least is not None and known < least)):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise bad_argument(layer, what, wanted, x, do="Give an integer, or `None`.")
    return known


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
    largest = np.max(np.abs(np.asarray(x)), initial=0.0) if is_known(x) else 0.0
    if np.size(x) == 0 or not largest <= float(jnp.finfo(dtype).max):
        raise rule_error(
            f"`{layer}` was given nothing to fit a scale to, or numbers that are not finite.",
            f"`x` is {type_of(x)}, and its largest magnitude is {largest}",
            do="Give it finite numbers like the ones that it will quantize. "
            "`eqx_grads.explain_nan` finds the origin of others.",
        )


def check_no_nan(name: str, x: Array) -> None:
    if is_known(x) and np.any(np.isnan(np.asarray(x))):
        raise rule_error(
            f"`{name}` was given numbers that include NaN.",
            f"`x` is {type_of(x)}",
            do="No integer represents NaN. `eqx_grads.explain_nan` finds its origin.",
        )
