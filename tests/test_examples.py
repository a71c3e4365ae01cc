"""Every example runs, as a reader would run it."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _run(path, cwd, *args):
    result = subprocess.run(
        [sys.executable, str(path), *args],
        cwd=cwd,
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# The main one for every day, and all of them with the slow tests.
SOME = [
    path if path.name == "spiking_digits.py" else pytest.param(path, marks=pytest.mark.slow)
    for path in EXAMPLES
]


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    out = tmp_path / "out"
    printed = _run(path, tmp_path, "--quick", "--out", str(out))
    left = [p.name for p in tmp_path.iterdir() if p != out]
    assert not left, f"Wrote outside of `--out`: {left}"
    page = ROOT / "docs" / "examples" / f"{path.stem.replace('_', '-')}.md"
    # The lines of code in a report that the page shows. What is rounded depends on the machine.
    places = lambda text: re.findall(rf"{path.stem}\.py:\d+", text)
    shown = page.read_text().split("```text\n")[1:]
    assert not shown or places(shown[0]) == places(printed)


@pytest.mark.slow
def test_the_spiking_network_learns_and_only_with_the_rule(tmp_path):
    _run(ROOT / "examples" / "spiking_digits.py", tmp_path, "--seeds", "3")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["spike"] >= 0.95
    assert result["plain_step"] < 0.3  # guessing: 0.1
    picture = (tmp_path / "out" / "spiking-digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


def test_the_yin_yang_points_are_the_published_ones(monkeypatch):
    """Those in `publication_data` of github.com/lkriener/yin_yang_data_set, and their sums."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    yin_yang = importlib.import_module("yin_yang").yin_yang
    points, labels = yin_yang(1000, seed=40)
    first = [[0.23409665, 0.40172498], [0.75132902, 0.46824252], [0.13832531, 0.57095397]]
    np.testing.assert_allclose(points[:3], first, rtol=1e-6)
    np.testing.assert_allclose(points.sum(0), [498.25698935, 488.78023568], rtol=1e-6)
    assert list(labels[:8]) == [2, 2, 1, 1, 1, 2, 2, 0]
    assert list(np.bincount(labels)) == [350, 316, 334]


@pytest.mark.slow
def test_yin_and_yang_are_learned_and_only_with_a_surrogate(tmp_path):
    _run(ROOT / "examples" / "yin_yang.py", tmp_path, "--seeds", "5")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["surrogate"] >= 0.96
    assert result["zero_gradient"] <= 0.7  # guessing: 0.33


def test_expected_transitions_sum_to_the_number_of_steps(monkeypatch):
    """Of every utterance, in a left-right model: in the example, JAX's are NaN."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("hidden_markov")
    training, _ = example.load()
    model = jax.tree.map(lambda x: x[0], example.first_guess(training))
    expect = jax.jit(jax.vmap(example.expect, (None, 0, 0)))
    counts = expect(model, training.frames, training.lengths)
    steps = np.asarray(training.lengths) - 1
    np.testing.assert_allclose(counts.transitions.sum((1, 2)), steps, rtol=1e-6)
    np.testing.assert_allclose(counts.states.sum((1, 2)), steps + 1, rtol=1e-6)
    assert (counts.transitions[:, np.tri(5, k=-1, dtype=bool)] == 0).all()


@pytest.mark.slow
def test_hidden_markov_models_tell_speakers_apart(tmp_path):
    _run(ROOT / "examples" / "hidden_markov.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["accuracy"] >= 0.97
    assert np.all(np.diff(result["likelihoods"]) > 0)
    assert abs(result["transitions"] - (result["frames"] - 1)) < 1e-4
    assert np.isnan(result["plain"])


@pytest.mark.slow
def test_the_ball_hits_the_target_and_only_with_the_events(tmp_path):
    _run(ROOT / "examples" / "bouncing_ball.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["error"] < 1e-4  # of the gradient, to the closed form
    assert result["wrong_sign"] > 0.4
    assert result["event_time and jump"] < 1e-3  # meters
    assert result["jax.grad"] > 1e-2


@pytest.mark.slow
def test_speakers_are_told_apart_and_only_with_a_surrogate(tmp_path):
    _run(ROOT / "examples" / "speech.py", tmp_path, "--seeds", "3")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["surrogate"] >= 0.96
    assert result["plain_step"] <= 0.25  # guessing: 0.11


@pytest.mark.slow
def test_the_error_bars_of_a_solver_are_those_of_simulated_data(tmp_path):
    _run(ROOT / "examples" / "host_solver.py", tmp_path, "--out", str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    for name in ("start", "rate per year", "capacity"):
        of_hessian, of_first_order, simulated = result[name]["deviations"]
        assert abs(of_hessian / of_first_order - 1) < 0.1
        assert abs(of_hessian / simulated - 1) < 0.25
    assert result["inside"] >= 20
