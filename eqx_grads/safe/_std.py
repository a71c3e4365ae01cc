"""The standard deviation."""

import functools as ft
import math
import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from .._errors import check_flags, rule_error, type_of
from .._rules.nan_where import nan_where
from ._polar import as_pairs, polar
from ._reduction_arguments import as_inexact, as_mask, axes_of, Axis, in_single, squeeze


def std(
    x: ArrayLike,
    axis: Axis = None,
    *,
    ddof: float | int = 0,
    keepdims: bool = False,
    where: ArrayLike | None = None,
) -> Float[Array, "..."]:
    r"""The standard deviation, with the derivative zero where all numbers are equal.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        print(jax.grad(eqg.safe.std)(jnp.full(3, 0.1)))  # JAX: NaN or noise
        print(f"{eqg.safe.std(jnp.array([-1e30, 1e30])):.1e}")  # JAX: inf
        ```

        ```text
        [0. 0. 0.]
        1.0e+30
        ```

    The variance needs no such function: the derivative of `jnp.var` is right.

    **Arguments:**

    - `x`: an array of numbers, real or complex.
    - `axis`: the axis or axes to reduce; `None` takes all.
    - `ddof`: the divisor is the number of elements minus `ddof`.
    - `keepdims`: whether the axes that were reduced are kept, with length one.
    - `where`: booleans that broadcast to `x`: which elements to include. The others may
        be infinite or NaN.

    **Returns:**

    The standard deviations, real. NaN where the divisor is not positive, as in NumPy, with the
    derivative zero.

    **Derivative:**

    With $c = x - \operatorname{mean}(x)$ and $m$ for the divisor:
    $\dot y = c^\top \dot x / (\lVert c \rVert \sqrt m)$, the reverse rule being its transpose.
    Zero where $c$ is, which is the minimum. Both modes and all orders; second derivatives are
    NaN there, except of one number, whose deviation is a constant.

    **Raises:**

    [`eqx_grads.RuleError`][] if `x` does not hold numbers, for an axis that `x` does not have,
    a `where` that does not fit, or a `ddof` that is not a Python number.
    """
    check_flags("safe.std", keepdims=keepdims)
    x = as_inexact("std", x)
    mask = None if where is None else as_mask("std", where, x)
    axes = axes_of("std", axis, x)
    is_number = isinstance(ddof, numbers.Real) and not isinstance(ddof, bool)
    if not is_number or not math.isfinite(ddof):
        raise rule_error(
            "The `ddof` of `safe.std` is not a number.",
            f"it is {type_of(ddof)}",
            do="Give a number of Python: 1 for the unbiased variance.",
        )
    return _std(x, mask, axes=axes, ddof=float(ddof), keepdims=keepdims)


@ft.partial(jax.jit, static_argnames=("axes", "ddof", "keepdims"))
def _std(x, mask, *, axes, ddof, keepdims):
    y = in_single(x)
    mask = jnp.ones(x.shape, bool) if mask is None else mask
    y = jnp.where(mask, y, 0)
    divisor = jnp.sum(mask, axes, keepdims=True).astype(jnp.finfo(y.dtype).dtype) - ddof
    pair = ()
    if jnp.iscomplexobj(x):
        y, pair, divisor = as_pairs(y), (x.ndim,), divisor[..., None]
        mask = jnp.broadcast_to(mask[..., None], y.shape)
    factor = jax.lax.rsqrt(jnp.where(divisor > 0, divisor, 1))
    out, _ = polar(y, mask, factor, axes=axes + pair, center=axes)
    out = jnp.squeeze(nan_where(divisor <= 0, out), pair)
    return squeeze(out, axes, keepdims).astype(jnp.finfo(x.dtype).dtype)
