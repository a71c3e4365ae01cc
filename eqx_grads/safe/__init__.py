"""Mathematics whose derivatives are finite wherever the true ones are, at all magnitudes."""

from ._distances import (
    cosine_similarity as cosine_similarity,
    pairwise_distance as pairwise_distance,
)
from ._eigh import eigh as eigh, EighResult as EighResult
from ._logsumexp import (
    cumlogsumexp as cumlogsumexp,
    logaddexp as logaddexp,
    logsumexp as logsumexp,
)
from ._norms import norm as norm, normalize as normalize
from ._softmax import entropy as entropy, log_softmax as log_softmax, softmax as softmax
from ._std import std as std
from ._svd import svd as svd, SVDResult as SVDResult
