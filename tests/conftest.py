"""What every test has: strict promotion, and keys that are the same in every run."""

import zlib
from collections.abc import Callable

import jax
import jax.random as jr
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)  # for `shard_map`


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """Fresh keys, different in every test but the same in every run."""
    key = jr.key(zlib.crc32(request.node.nodeid.encode()))
    count = 0

    def getkey() -> jax.Array:
        nonlocal count
        count += 1
        return jr.fold_in(key, count)

    return getkey
