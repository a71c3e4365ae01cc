"""Setup of every test: strict promotion, and keys that are the same in every run. And `--tier`
and `--part`, which choose tests."""

import collections
import functools
import gc
import importlib.metadata
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.random as jr
import jaxtyping
import pytest
from jaxtyping import install_import_hook


# Shapes and dtypes are checked at each call of the code whose annotations have them. Elsewhere
# they are those that pyright checks, and checking them here took a fifth of the time.
install_import_hook(
    ["eqx_grads._host", "eqx_grads._solvers", "eqx_grads.nn", "eqx_grads.safe"],
    "beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))",
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)
_make_mesh = jax.make_mesh


@functools.wraps(_make_mesh)
def _mesh_of_cpus(shape, *args, devices=None, **options):
    """Several devices are CPU devices, by name: a machine has one GPU, or none."""
    devices = jax.devices("cpu")[: math.prod(shape)] if devices is None else devices
    return _make_mesh(shape, *args, devices=devices, **options)


jax.make_mesh = _mesh_of_cpus
# Until all tests are collected: what imports make stays, and a fifth of the time was a search
# for garbage in it.
gc.disable()


# A test is in the first of these that it is marked with. Otherwise it is "thorough" if what it
# reaches is also reached by others that are faster (`make mutants ARGS=--choose`), or "quick".
TIERS = ("slow", "conformance", "cost", "thorough", "quick")
THOROUGH = set(Path(__file__).with_name("thorough.txt").read_text().splitlines())


def pytest_addoption(parser: pytest.Parser) -> None:
    every = ",".join(TIERS)
    parser.addoption("--tier", default=every, help=f"only tests of these: {every}")
    parser.addoption("--part", default="1/1", help="only the I-th of N parts: I/N")
    parser.addoption("--record-reports", action="store_true", help="see reports.py")


def pytest_configure(config: pytest.Config) -> None:
    record = config.getoption("record_reports")
    if not config.getoption("numprocesses", None):  # in the process of the tests
        from .reports import Reports

        config.pluginmanager.register(Reports(record))
    elif record:
        raise pytest.UsageError("`--record-reports` runs in one process: pass `-n 0`.")


def pytest_report_header() -> str:
    switches = list(filter(None, os.environ.get("SWITCHES", "").split(",")))
    assert all(getattr(jax.config, name) for name in switches)
    packages = ("jax", "jaxlib", "equinox", "numpy")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    return ", ".join([*versions, *switches, *["64 bits"] * jax.config.jax_enable_x64])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gc.enable()
    part, n_parts = map(int, config.getoption("part").split("/"))
    tiers, cases = config.getoption("tier").split(","), collections.Counter()
    if unknown := set(tiers) - {*TIERS}:
        raise pytest.UsageError(f"--tier: {', '.join(unknown)} is not known.")

    def is_chosen(item: pytest.Item) -> bool:
        if every := item.get_closest_marker("every"):
            function, _, _ = item.nodeid.partition("[")
            if cases[function] % every.args[0]:
                item.add_marker("slow")
            cases[function] += 1
        other = "thorough" if item.nodeid in THOROUGH else "quick"
        item.tier = next((t for t in TIERS if item.get_closest_marker(t)), other)
        # By a hash of its name, so that a test stays in its part when others come and go.
        in_part = zlib.crc32(item.nodeid.encode()) % n_parts == part % n_parts
        return in_part and item.tier in tiers

    chosen = list(filter(is_chosen, items))
    left = set(items) - set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = chosen


N_FILES = 16  # of which the caches are kept
_n_files = 0


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Garbage collection looks at what the tests of one file make, and not each time at all
    that was imported, traced and compiled before. The leak checker collects at each trace.

    What the caches of JAX hold at the end of a file is millions of objects and gigabytes after
    a hundred files, at which a collection takes seconds. It is dropped after every 16th file.
    """
    global _n_files
    _n_files += 1
    if _n_files % N_FILES == 0:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_type_checks():
    """As users have it: without the checks of types at run time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def cpu(monkeypatch):
    """Choices by platform are made as on a CPU, wherever the tests run."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")


@pytest.fixture
def gpu(monkeypatch):
    """The same as on a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


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
