"""Every entry of the registry keeps every property of the contract."""

import jax
import pytest

from .contract import eager, orders_of, PROPERTIES
from .registry import ENTRIES


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("name", ENTRIES)
def test_contract(name):
    entry = ENTRIES[name]
    wrong = []
    if "float32" in entry.precisions:
        wrong += eager(entry)
    if "float64" in entry.precisions:
        jax.config.update("jax_enable_x64", True)
        wrong += orders_of(entry, "float64")
        for check in PROPERTIES:
            wrong += check(entry)
    else:
        wrong += orders_of(entry, "float32")
    assert not wrong, "\n".join([f"{name}:", *wrong])
