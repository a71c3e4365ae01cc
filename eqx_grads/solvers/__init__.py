"""Solvers and adjoints for fixed points, which need the extra `solvers`.

Import it by name, `from eqx_grads import solvers`: without Optimistix, there is nothing in it.
"""

from .._solvers.optional_import import optional_import


# First, as the files below import Optimistix themselves.
optional_import("optimistix", "eqx_grads.solvers")

# isort: split
from .._solvers.adjoints import (  # noqa: E402
    AbstractFixedPointAdjoint as AbstractFixedPointAdjoint,
    FixedPointAdjoint as FixedPointAdjoint,
    ImplicitAdjoint as ImplicitAdjoint,
    NeumannAdjoint as NeumannAdjoint,
    OneStepAdjoint as OneStepAdjoint,
    PhantomAdjoint as PhantomAdjoint,
)
from .._solvers.anderson import Anderson as Anderson  # noqa: E402
