"""Checks of rules: derivatives, linearity, transformations, leaks and residuals."""

from ._check_gradients import check_gradients as check_gradients
from ._check_rule import (
    check_adjoint as check_adjoint,
    check_forward as check_forward,
    check_leaks as check_leaks,
    check_linear as check_linear,
    check_residuals as check_residuals,
    check_reverse as check_reverse,
    check_rule as check_rule,
    check_transforms as check_transforms,
)
from ._compare import assert_trees_close as assert_trees_close
from ._differences import numerical_jacobian as numerical_jacobian
from ._gradient_report import (
    GradientCheckError as GradientCheckError,
    GradientFault as GradientFault,
    GradientReport as GradientReport,
    LeafVerdict as LeafVerdict,
)
from ._random_tangents import random_tangent as random_tangent
from ._report import Report as Report, RuleCheckError as RuleCheckError
