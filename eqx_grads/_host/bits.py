"""Arrays of 64 bits as arrays of 32 bits, which every thread can take.

`jax.enable_x64` as a context is one of a thread, and XLA may run a callback on another thread.
There, JAX casts the arguments and the results of the callback to 32 bits, or raises
(JAX 0.10 to 0.12). In such a context, the callback gets the bits, as integers.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


_HALF = np.dtype(np.uint32)
_WIDE = tuple(map(np.dtype, (np.float64, np.complex128, np.int64, np.uint64)))


def needs_bits(types: Any) -> bool:
    """Whether arrays of the given types are cast on a thread that is not this one."""
    if not any(map(_is_wide, types)):
        return False
    with ThreadPoolExecutor(1) as other:
        return not other.submit(getattr, jax.config, "jax_enable_x64").result()


def bits_type(t: Any) -> Any:
    n = np.dtype(t.dtype).itemsize // _HALF.itemsize
    return jax.ShapeDtypeStruct((*t.shape, n), _HALF) if _is_wide(t) else t


def to_bits(x: Any) -> jax.Array:
    """In a JAX program."""
    if not _is_wide(x):
        return x
    parts = jnp.stack([jnp.real(x), jnp.imag(x)], -1) if jnp.iscomplexobj(x) else x
    return jax.lax.bitcast_convert_type(parts, _HALF).reshape(bits_type(x).shape)


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == dtype:
        return x
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.bitcast_convert_type(x, dtype)
    parts = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], 2, 2), np.dtype(float))
    return jax.lax.complex(*jnp.unstack(parts, axis=-1))


def to_bits_on_host(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, order="C")[..., None].view(_HALF) if _is_wide(x) else x


def from_bits_on_host(x: np.ndarray, dtype: Any) -> np.ndarray:
    return x if x.dtype == dtype else np.asarray(x, order="C").view(np.dtype(dtype))[..., 0]


def _is_wide(x: Any) -> bool:
    return np.dtype(x.dtype) in _WIDE
