"""Mathematics whose derivatives are finite wherever the true ones are, at all magnitudes."""

from ._angles import (
    arccos as arccos,
    arcsin as arcsin,
    arctan2 as arctan2,
    hypot as hypot,
)
from ._conjugate import conjugate_gradient as conjugate_gradient
from ._log_ndtr import log_ndtr as log_ndtr
from ._logs import (
    log as log,
    log_cosh as log_cosh,
    log_expm1 as log_expm1,
    log_sub_exp as log_sub_exp,
    softplus_inverse as softplus_inverse,
    xlog1py as xlog1py,
    xlogy as xlogy,
)
from ._powers import (
    divide as divide,
    power as power,
    reciprocal as reciprocal,
    sqrt as sqrt,
)
from ._ratios import (
    expm1_ratio as expm1_ratio,
    log1p_ratio as log1p_ratio,
    sinhc as sinhc,
)
from ._where import where as where
