"""Mathematics whose derivatives are finite wherever the true ones are, at all magnitudes."""

from ._angles import (
    arccos as arccos,
    arcsin as arcsin,
    arctan2 as arctan2,
    hypot as hypot,
)
from ._conjugate import conjugate_gradient as conjugate_gradient
from ._distances import (
    cosine_similarity as cosine_similarity,
    pairwise_distance as pairwise_distance,
)
from ._eigh import eigh as eigh, EighResult as EighResult
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
from ._logsumexp import (
    cumlogsumexp as cumlogsumexp,
    logaddexp as logaddexp,
    logsumexp as logsumexp,
)
from ._norms import norm as norm, normalize as normalize
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
from ._softmax import entropy as entropy, log_softmax as log_softmax, softmax as softmax
from ._std import std as std
from ._svd import svd as svd, SVDResult as SVDResult
from ._where import where as where
