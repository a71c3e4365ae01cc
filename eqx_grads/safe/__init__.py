"""Mathematics whose derivatives are finite wherever the true ones are, at all magnitudes."""

from ._angles import (
    arccos as arccos,
    arcsin as arcsin,
    arctan2 as arctan2,
    hypot as hypot,
)
from ._decompositions import (
    eigh as eigh,
    EighResult as EighResult,
    svd as svd,
    SVDResult as SVDResult,
)
from ._log_ndtr import log_ndtr as log_ndtr
from ._logsumexp import (
    cumlogsumexp as cumlogsumexp,
    entropy as entropy,
    log_softmax as log_softmax,
    logaddexp as logaddexp,
    logsumexp as logsumexp,
    softmax as softmax,
)
from ._norms import (
    cosine_similarity as cosine_similarity,
    norm as norm,
    normalize as normalize,
    pairwise_distance as pairwise_distance,
    std as std,
)
from ._powers_and_logs import (
    divide as divide,
    log as log,
    log_cosh as log_cosh,
    log_expm1 as log_expm1,
    log_sub_exp as log_sub_exp,
    power as power,
    sqrt as sqrt,
    xlog1py as xlog1py,
    xlogy as xlogy,
)
from ._ratios import (
    expm1_ratio as expm1_ratio,
    log1p_ratio as log1p_ratio,
    sinhc as sinhc,
)
from ._where import where as where
