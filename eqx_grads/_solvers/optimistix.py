"""Import Optimistix, for the files that define solvers and adjoints for it, or raise an error
that says how to install it."""

from .._errors import optional_import


optional_import("optimistix", "eqx_grads.solvers")

# isort: split
import optimistix as optimistix  # noqa: E402
