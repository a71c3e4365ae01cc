"""Scans, branches, loops and rematerialization, with a chosen backward pass."""

from .._jaxprs.plain_scan import lax_fori_loop as lax_fori_loop, lax_scan as lax_scan
