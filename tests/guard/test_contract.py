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


def runs_eagerly(name, entry):
    """One entry of each op: each operation of an eager call is a program to compile."""
    is_first = next(other for other in ENTRIES if other.split(":")[0] == name.split(":")[0])
    return "float32" in entry.precisions and name == is_first


@pytest.mark.parametrize("name", ENTRIES)
def test_contract(name):
    entry = ENTRIES[name]
    wrong = []
    of_eager = eager(entry) if runs_eagerly(name, entry) else None
    if "float64" not in entry.precisions or entry.draws:
        wrong += orders_of(in_float32(entry), "float32", of_eager)
        of_eager = None
    if "float64" in entry.precisions:
        jax.config.update("jax_enable_x64", True)
        wrong += orders_of(entry, "float64", of_eager)
        for check in PROPERTIES:
            wrong += check(entry)
    assert not wrong, "\n".join([f"{name}:", *wrong])
