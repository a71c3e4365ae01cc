"""Trace a rule with the precision of matrix products that its function was called with.

`jax.default_matmul_precision` holds while a program is traced, and JAX keeps it in each matrix
product. But a rule is traced where JAX differentiates, which may be outside of the context in
which the function was called. JAX's own rules get the precision that holds there: on a GPU,
the gradient of a function in "highest" precision has products in TF32. (No upstream issue was
found; `UPSTREAM.md` has a reproduction.)
"""

import contextlib
from typing import Any

import jax


CONFIG: Any = jax.config  # the flag is not in the declarations of types


def in_precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    if precision == CONFIG.jax_default_matmul_precision:
        return _NOTHING
    return jax.default_matmul_precision(precision)


_NOTHING = contextlib.nullcontext()
