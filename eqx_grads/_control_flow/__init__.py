"""Scans, branches, loops and rematerialization, with a chosen backward pass."""

from .._jaxprs.eager_calls import (
    call_compiled as call_compiled,
    compile_eager_calls as compile_eager_calls,
)
from .._jaxprs.plain_scan import lax_fori_loop as lax_fori_loop, lax_scan as lax_scan
