"""Straight-through quantization to the entries of a codebook, learned or fixed."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, DTypeLike

from .._errors import rule_error, type_of
from .._rules.explicit_sharding import rows
from .._rules.float_args import as_dtype, as_floats, as_levels, widen
from .._rules.nan_where import nan_where
from .._rules.replace_gradient import replace_gradient
from ._sign_and_step import nan_along


def vector_quantize(z: ArrayLike, codebook: ArrayLike) -> tuple[Array, Array]:
    r"""Quantize to the nearest entry of a codebook, straight through.

    [van den Oord et al. (2017)](https://arxiv.org/abs/1711.00937).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        codebook = jnp.array([[0.1, 0.0], [1.0, 1.0], [0.0, 2.0]])
        z = jnp.array([0.8, 0.7])
        quantized, index = eqg.ste.vector_quantize(z, codebook)
        print(index, quantized)
        grad = jax.grad(lambda z: eqg.ste.vector_quantize(z, codebook)[0].sum())(z)
        print(grad)

        # The codebook and the commitment are trained by separate losses.
        def vq_loss(z, codebook, commitment=0.25):
            index = eqg.ste.vector_quantize(z, codebook)[1]
            entry = codebook[index]
            to_z = jnp.mean((entry - jax.lax.stop_gradient(z)) ** 2)
            to_entry = jnp.mean((z - jax.lax.stop_gradient(entry)) ** 2)
            return to_z + commitment * to_entry

        print(jax.grad(vq_loss, argnums=1)(z, codebook).round(3))
        ```

        ```text
        1 [1. 1.]
        [1. 1.]
        [[0.  0. ]
         [0.2 0.3]
         [0.  0. ]]
        ```

    **Arguments:**

    - `z`: floats of shape `(..., size)`.
    - `codebook`: floats of shape `(entries, size)`.

    **Returns:**

    - The nearest entries in Euclidean distance, the first of equally near ones: an array
        like `z`. If the codebook has the dtype of `z`, they are exactly its entries. NaN for a
        `z` with a NaN, and everywhere if the codebook has one.
    - Their indices, of shape `(...)`.

    **Derivative:**

    The identity with respect to `z`: $\bar z = \bar y$. Zero with respect to the codebook, as
    published: train it by a loss as in the example. Linear, so both modes and all orders.

    **Raises:**

    [`eqx_grads.RuleError`][] if the shapes do not fit, or if an argument is not an array of
    floats.
    """
    z = as_floats("ste.vector_quantize", z, "z")
    codebook = as_floats("ste.vector_quantize", codebook, "codebook")
    fits = z.ndim >= 1 and codebook.ndim == 2 and z.shape[-1:] == codebook.shape[1:]
    if not fits or len(codebook) == 0:
        raise rule_error(
            "`ste.vector_quantize` was given a codebook that does not fit `z`.",
            f"`z` is {type_of(z)}, `codebook` is {type_of(codebook)}",
            do="Give it `z` of shape `(..., size)` and a codebook of shape `(entries, size)`.",
        )
    fixed, entries = jax.lax.stop_gradient((z, codebook))
    index = _nearest(fixed, entries)
    nearest = nan_along(fixed, -1, rows(entries, index).astype(z.dtype))
    return replace_gradient(nan_where(jnp.any(jnp.isnan(entries)), nearest), z), index


def _nearest(z, codebook):
    z = widen(z)
    codebook = codebook.astype(z.dtype)
    # The nearest entry has the largest `z @ c - |c|^2 / 2`. Subtract the mean of the codebook
    # first: if the entries are close together but far from zero, the differences between
    # these numbers are lost to rounding.
    center = jnp.mean(codebook, axis=0)
    z, codebook = z - center[(None,) * (z.ndim - 1)], codebook - center[None]
    products = jnp.einsum("...d,nd->...n", z, codebook, precision="highest")
    halves = 0.5 * jnp.sum(codebook**2, axis=1)
    return jnp.argmax(products - halves[(None,) * (z.ndim - 1)], axis=-1)


def fsq(z: ArrayLike, levels: Sequence[int]) -> tuple[Array, Array]:
    r"""Round each number to one of a few levels, straight through: finite scalar quantization.

    The codebook is fixed: its entries are all combinations of the levels.
    [Mentzer et al. (2024)](https://arxiv.org/abs/2309.15505).

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        levels = (8, 5, 5)
        z = jnp.array([0.3, -2.0, 0.1])
        code, index = eqg.ste.fsq(z, levels)
        print(code, index)
        print(eqg.ste.fsq_codebook(levels)[index])
        print(jax.grad(lambda z: eqg.ste.fsq(z, levels)[0].sum())(z).round(3))
        ```

        ```text
        [ 0.25 -1.    0.  ] 85
        [ 0.25 -1.    0.  ]
        [0.72200006 0.071      0.989     ]
        ```

    **Arguments:**

    - `z`: floats of shape `(..., len(levels))`.
    - `levels`: how many levels each number has; two or more. Five or more are recommended.

    **Returns:**

    - The codes: an array like `z`, of numbers from -1 to 1 (for an even $L$, to
        $1 - 2/L$). They are exactly entries of [`eqx_grads.ste.fsq_codebook`][]. NaN
        where `z` is.
    - Their indices in that codebook, of shape `(...)`.

    **Derivative:**

    The derivative of the bounded number before it is rounded:
    $f(z) = (h \tanh(z + \text{shift}) - o) / \lfloor L/2 \rfloor$ with
    $h = (1 - \varepsilon)(L - 1)/2$ and $\varepsilon = 10^{-3}$; for odd $L$ no shift and no
    offset, for even $L$ $o = 1/2$ and $\text{shift} = \tan(o / h)$. So
    $\dot y = h\,(1 - \tanh^2)\,\dot z / \lfloor L/2 \rfloor$. Both modes and all orders.

    This is the convention of the paper's own code, its appendix A.1 and the [Colab of its
    authors](https://github.com/google-research/google-research/tree/master/fsq). Some ports
    have $h = (1 + \varepsilon)(L - 1)/2$ and an arctanh instead of the tangent, so that $f(0)$
    is exactly zero: their codes differ near the borders between levels, and all their gradients
    do, by 0.2 % for odd $L$ and by more for even $L$.

    **Raises:**

    [`eqx_grads.RuleError`][] if `z` is not an array of floats, if the levels do not fit it,
    or if there are too many codes for an index of 32 bits.
    """
    z = as_floats("ste.fsq", z, "z")
    levels = as_levels("ste.fsq", levels)
    if z.shape[-1:] != (len(levels),):
        raise rule_error(
            "`ste.fsq` needs as many `levels` as the last axis of `z` is long.",
            f"`z` is {type_of(z)}, `levels` is {levels}",
            do="Give it `z` of shape `(..., len(levels))`.",
        )
    wide = widen(z)
    count = np.asarray(levels, wide.dtype).reshape((1,) * (z.ndim - 1) + (-1,))
    half_width = count // 2
    span = (count - 1) * (1 - 1e-3) / 2
    offset = np.where(count % 2 == 0, 0.5, 0).astype(count.dtype)
    bound = jnp.tanh(wide + np.tan(offset / span)) * span - offset
    # Integers, so that no code is minus zero.
    digits = jnp.round(bound).astype(jnp.int32) + half_width.astype(np.int32)
    codes = jnp.where(jnp.isnan(wide), wide, _codes(digits, half_width))
    index = jnp.sum(digits * _place_values(levels, z.ndim), axis=-1, dtype=jnp.int32)
    return replace_gradient(codes.astype(z.dtype), bound / half_width), index


def fsq_codebook(levels: Sequence[int], dtype: DTypeLike = float) -> Array:
    """Return all codes of [`eqx_grads.ste.fsq`][], in the order of their indices.

    !!! example

        ```python
        import eqx_grads as eqg

        codebook = eqg.ste.fsq_codebook((3, 2))
        print(codebook)
        ```

        ```text
        [[-1. -1.]
         [ 0. -1.]
         [ 1. -1.]
         [-1.  0.]
         [ 0.  0.]
         [ 1.  0.]]
        ```

    **Arguments:**

    - `levels`: as for [`eqx_grads.ste.fsq`][].
    - `dtype`: the dtype of the codes. With the dtype of `z`, they are exactly the codes of
        `fsq`.

    **Returns:**

    An array of shape `(prod(levels), len(levels))`. To decode, use
    `fsq_codebook(levels)[index]`.

    **Derivative:**

    None: it is a constant.
    """
    levels = as_levels("ste.fsq_codebook", levels)
    known = as_dtype(float if dtype is None else dtype)
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise rule_error(
            "The `dtype` of `ste.fsq_codebook` is not a floating one.",
            f"it is {dtype!r:.60}",
            do="Give one such as `jnp.float32`.",
        )
    index = jnp.arange(math.prod(levels), dtype=jnp.int32)[:, None]
    count = np.asarray(levels, np.int32)[None]
    digits = index // _place_values(levels, 2) % count
    wide = widen(jnp.zeros((), dtype)).dtype
    return _codes(digits, (count // 2).astype(wide)).astype(dtype)


def _codes(digits, half_width):
    return (digits - half_width.astype(np.int32)).astype(half_width.dtype) / half_width


def _place_values(levels, ndim):
    """The place values of an index in mixed radix; the first digit is the ones."""
    values = np.cumprod([1, *levels[:-1]]).astype(np.int32)
    return values.reshape((1,) * (ndim - 1) + (-1,))
