"""Every entry of the registry keeps every property of the contract."""

import dataclasses

import jax
import pytest

from .contract import eager, orders_of, PROPERTIES
from .registry import ENTRIES


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.config.update("jax_enable_x64", False)


def in_float32(entry):
    """The checks in float32, if the op runs in float64 too."""
    if "float64" not in entry.precisions:
        return entry
    orders = [order for order in ("value", "vjp") if order in entry.orders]
    return dataclasses.replace(entry, orders=orders, transforms=False)


@pytest.mark.parametrize("name", ENTRIES)
def test_contract(name):
    entry = ENTRIES[name]
    wrong = []
    of_eager = eager(entry) if "float32" in entry.precisions else None
    if "float64" not in entry.precisions or entry.draws:
        wrong += orders_of(in_float32(entry), "float32", of_eager)
        of_eager = None
    if "float64" in entry.precisions:
        jax.config.update("jax_enable_x64", True)
        wrong += orders_of(entry, "float64", of_eager)
        for check in PROPERTIES:
            wrong += check(entry)
    assert not wrong, "\n".join([f"{name}:", *wrong])
