"""A rule runs later than the function: in the precision of matrix products of the function.

`jax.default_matmul_precision` holds while a program is traced, and JAX keeps it in each matrix
product. But a rule is traced where JAX differentiates, outside a context that the function was
in. (JAX's own custom rules run in the precision that holds there: on a GPU, a gradient of a
function "in float32" has products in TF32. No upstream issue was found.)
"""

import contextlib
from typing import Any

import jax


def matmul_precision() -> Any:
    return jax.config.jax_default_matmul_precision  # pyright: ignore


def in_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    if precision == matmul_precision():
        return _NOTHING
    return jax.default_matmul_precision(precision)


_NOTHING = contextlib.nullcontext()
