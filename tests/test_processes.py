"""Training by several processes, as `examples/data_parallel.py` does, even if one is killed."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[1]


def _python(*args, cwd, **environment):
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def _train(out, *args, **environment):
    script = ROOT / "examples" / "data_parallel.py"
    return _python(script, "--out", out, *args, cwd=out.parent, **environment)


def _trained(out, processes, steps):
    return np.load(out / f"{steps}-steps-{processes}-processes" / "trained.npz")


# `jax.distributed.initialize` has the same condition as this option: it comes before JAX's
# backend starts, which an array does.
IMPORT = """
import eqx_grads as eqg
import eqx_grads.nn, eqx_grads.testing, pytest_eqx_grads
import jax

@eqg.custom_vjp
def f(x):
    return x

@f.def_fwd
def f_fwd(x):
    return f(x), None

@f.def_bwd
def f_bwd(_, ct):
    return (ct,)

g = eqg.elementwise(jax.numpy.sin, jax.numpy.cos)
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3 and jax.grad(f)(2.0) == 1
"""


@pytest.mark.thorough
def test_neither_the_import_nor_a_decorator_starts_jax(tmp_path):
    result = _python("-c", IMPORT, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(tmp_path):
    for x64, rounding in (("0", 1e-6), ("1", 1e-14)):
        out = tmp_path / x64
        result = _train(out, "--quick", JAX_ENABLE_X64=x64)
        assert result.returncode == 0, result.stderr
        one, two = (_trained(out, n, 6)["losses"] for n in (1, 2))
        assert one.dtype == ("float64" if x64 == "1" else "float32")
        assert one[-1] < 0.9 * one[0]
        np.testing.assert_allclose(two, one, rtol=rounding)
        assert json.loads((out / "result.json").read_text())["difference"] < rounding


@pytest.mark.slow
def test_a_killed_run_that_goes_on_ends_with_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert _train(whole, "--steps", "12").returncode == 0
    shutil.copytree(whole / "12-steps-1-processes", killed / "12-steps-1-processes")
    # Checkpoints are of steps 2, 4, ..., and may still be written one step later: the save of
    # step 6 waits for that of step 4.
    result = _train(killed, "--steps", "12", "--kill", "7")
    assert result.returncode == 1
    assert re.search(
        r"Of 2 processes,.* process 1 ended with SIGKILL; the others were stopped\. "
        r"The same command goes on from the last checkpoint in ",
        result.stderr,
    )
    folder = killed / "12-steps-2-processes"
    assert not (folder / "trained.npz").exists()
    assert (folder / "checkpoints" / "4").exists()
    result = _train(killed, "--steps", "12")
    assert result.returncode == 0, result.stderr
    expected, found = _trained(whole, 2, 12), _trained(killed, 2, 12)
    assert expected.files == found.files
    for name in found.files:
        assert found[name].tobytes() == expected[name].tobytes(), name
