"""`tests.soak` for a minute, with some of the layers. By itself it takes twenty, with all."""

import os
import subprocess
import sys

import pytest

from .soak import rising, slopes


@pytest.mark.slow
def test_soak():
    command = [
        sys.executable,
        "-m",
        "tests.soak",
        "--laps",
        "8",
        "--every",
        "7",
        "--sizes",
        "2",
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr


def _records(n, **rises):
    return [
        {"arrays": 15 + i * rises.get("arrays", 0), "MiB": 400 + i * rises.get("MiB", 0)}
        for i in range(n)
    ]


def test_the_criterion():
    assert not rising(_records(20), {})
    assert set(rising(_records(20, arrays=1), {})) == {"arrays"}
    assert set(rising(_records(20, MiB=2.0), {})) == {"MiB"}
    assert not rising(_records(20, MiB=2.0), {"MiB": 1.5})  # JAX's own caches grow as fast
    assert abs(slopes(_records(20, MiB=2.0))["MiB"] - 2.0) < 1e-9
