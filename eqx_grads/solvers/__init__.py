"""Solvers and adjoints for fixed points, which need the extra `solvers`.

Import it by name, `from eqx_grads import solvers`: without Optimistix, there is nothing in it.
"""

from .._solvers.adjoints import (
    AbstractFixedPointAdjoint as AbstractFixedPointAdjoint,
    FixedPointAdjoint as FixedPointAdjoint,
    ImplicitAdjoint as ImplicitAdjoint,
    NeumannAdjoint as NeumannAdjoint,
    OneStepAdjoint as OneStepAdjoint,
    PhantomAdjoint as PhantomAdjoint,
)
from .._solvers.anderson import Anderson as Anderson
