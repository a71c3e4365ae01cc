"""Custom derivatives for Equinox: `import eqx_grads as eqg`."""

from . import tangents as tangents
from ._custom_gradient import custom_gradient as custom_gradient
from ._custom_jvp import custom_jvp as custom_jvp
from ._custom_vjp import custom_vjp as custom_vjp
from ._elementwise import elementwise as elementwise
from ._errors import RuleError as RuleError
from ._nondifferentiable import nondifferentiable as nondifferentiable
from ._replace_gradient import (
    replace_gradient as replace_gradient,
    with_gradient_of as with_gradient_of,
)
