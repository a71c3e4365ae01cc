"""Optimistix, for the files that define its solvers and adjoints, or an error that says how to
install it."""

from .optional_import import optional_import


optional_import("optimistix", "eqx_grads.solvers")

# isort: split
import optimistix as optimistix  # noqa: E402
