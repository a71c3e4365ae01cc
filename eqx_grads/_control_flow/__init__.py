"""Scans, branches, loops and rematerialization, with a chosen backward pass."""

from .._jaxprs.eager_calls import compile_eager_calls as compile_eager_calls
