"""Every example runs, as a reader would run it."""

import ast
import importlib
import importlib.util
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


def _page(path):
    return ROOT / "docs" / "examples" / f"{path.stem.replace('_', '-')}.md"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_have_one_form(path):
    """One script to read in one go, a page with its picture, and a place in the gallery."""
    source, name = path.read_text(), _page(path).stem
    assert ast.get_docstring(ast.parse(source)), "A docstring says what is shown."
    assert 40 <= len(source.splitlines()) <= 150
    for part in ('"--quick"', '"--out"', "tqdm", '"result.json"', f'"{name}.png"', "print("):
        assert part in source, f"{path.name} has no {part}."
    page, gallery = _page(path).read_text(), (_page(path).parent / "index.md").read_text()
    assert f'--8<-- "examples/{path.name}"' in page
    assert f"../images/{name}.png" in page
    assert f"../images/{name}.png" in gallery
    assert f"]({name}.md)" in gallery
    assert f"examples/{name}.md" in (ROOT / "mkdocs.yml").read_text()
    assert (ROOT / "docs" / "images" / f"{name}.png").exists()


def _run(path, cwd, *args):
    result = subprocess.run(
        [sys.executable, str(path), *args],
        cwd=cwd,
        # A reader's JAX computes in single precision.
        env={**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _marker(path):
    """The main one, and the one whose page shows a report, for every day; all of them with the
    slow tests."""
    return "thorough" if path.name in ("spiking_digits.py", "nan_hunt.py") else "slow"


SOME = [pytest.param(path, marks=getattr(pytest.mark, _marker(path))) for path in EXAMPLES]


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    out = tmp_path / "out"
    printed = _run(path, tmp_path, "--quick", "--out", str(out))
    left = [p.name for p in tmp_path.iterdir() if p != out]
    assert not left, f"Wrote outside of `--out`: {left}"
    page = _page(path)
    assert (out / f"{page.stem}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "result.json").read_text())
    # The lines of code in a report that the page shows. What is rounded depends on the machine.
    places = lambda text: re.findall(rf"{path.stem}\.py:\d+", text)
    shown = page.read_text().split("```text\n")[1:]
    assert not shown or places(shown[0]) == places(printed)


@pytest.mark.slow
def test_the_spiking_network_learns_and_only_with_the_rule(tmp_path):
    _run(ROOT / "examples" / "spiking_digits.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["spike"] >= 0.95
    assert result["plain step"] < 0.3  # guessing: 0.1


@pytest.mark.slow
def test_a_spiking_convolutional_network_learns_with_a_surrogate(tmp_path):
    _run(ROOT / "examples" / "spiking_convolution.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["surrogate"] >= 0.95
    assert result["zero gradient"] < 0.3  # guessing: 0.1


@pytest.mark.slow
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
    _run(ROOT / "examples" / "yin_yang.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["surrogate"] >= 0.96
    assert result["zero gradient"] <= 0.7  # guessing: 0.33


@pytest.mark.slow
def test_expected_transitions_sum_to_the_number_of_steps(monkeypatch):
    """Of every utterance, in a left-right model: in the example, JAX's are NaN."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("hidden_markov")
    training = example.load("TRAIN")
    model = jax.tree.map(lambda x: x[0], example.first_guess(training))
    expect = jax.jit(jax.vmap(example.expect, (None, 0, 0)))
    _, (transitions, states) = expect(model, training.frames, training.lengths)
    steps = np.asarray(training.lengths) - 1
    np.testing.assert_allclose(transitions.sum((1, 2)), steps, rtol=1e-6)
    np.testing.assert_allclose(states.sum((1, 2)), steps + 1, rtol=1e-6)
    assert (transitions[:, np.tri(5, k=-1, dtype=bool)] == 0).all()


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
    _run(ROOT / "examples" / "speech.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["surrogate"] >= 0.96
    assert result["plain step"] <= 0.25  # guessing: 0.11


@pytest.mark.slow
def test_the_error_bars_of_a_solver_are_those_of_simulated_data(tmp_path):
    _run(ROOT / "examples" / "host_solver.py", tmp_path, "--out", str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    for name in ("start", "rate per year", "capacity"):
        of_hessian, of_first_order, simulated = result[name]["deviations"]
        assert abs(of_hessian / of_first_order - 1) < 0.1
        assert abs(of_hessian / simulated - 1) < 0.25
    assert result["inside"] >= 20


@pytest.mark.slow
def test_four_bits_are_enough_and_only_straight_through(tmp_path):
    _run(ROOT / "examples" / "character_model.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["float"] < 2.4  # bits per character
    assert result["4 bits, straight-through"] < result["float"] + 0.1
    assert abs(result["4 bits, without"] - np.log2(96)) < 0.05  # guessing


@pytest.mark.slow
def test_sunspots_are_forecast_better_than_by_the_last_number(tmp_path):
    _run(ROOT / "examples" / "forecast.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert abs(result["the number of this year"] - 0.381) < 1e-3
    assert 0.07 < result["LRU"] < 0.13
    assert 0.07 < result["plain RNN"] < 0.13
    assert 0.16 < result["minGRU"] < 0.26


@pytest.mark.slow
def test_the_delta_rule_recalls_and_a_gated_unit_does_not(tmp_path):
    _run(ROOT / "examples" / "associative_recall.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["GRU"] < 0.2
    assert result["Gated DeltaNet"] > 0.9


@pytest.mark.slow
def test_a_model_continues_a_text(tmp_path):
    printed = _run(ROOT / "examples" / "continue_text.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["bits"] < 2.9
    assert result["characters"] == 240
    assert "The value of the " in printed


@pytest.mark.slow
def test_a_model_from_pytorch_has_its_numbers(tmp_path):
    _run(ROOT / "examples" / "port_from_pytorch.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result.pop("logits") < 1e-5
    assert len(result) == 6  # weights
    assert max(result.values()) < 2e-6


@pytest.mark.slow
def test_the_equilibrium_is_learned_by_every_backward_pass_but_one_step(tmp_path):
    _run(ROOT / "examples" / "equilibrium_digits.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    accuracies, errors = result["accuracies"], result["errors"]
    assert accuracies.pop("one_step") < 0.9
    assert min(accuracies.values()) > 0.95
    assert max(errors["fixed_point"]) < 1e-3
    assert errors["neumann"][-1] < 0.1 * errors["neumann"][0]


def _notebooks():
    path = ROOT / "docs" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("notebooks", path)
    notebooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebooks)
    return notebooks


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_cells_of_a_notebook_are_the_whole_script(path):
    source = path.read_text()
    docstring, code = _notebooks().cells(source)
    *before, _ = ast.parse(source).body  # the call of `main`
    assert docstring == ast.get_docstring(ast.parse(source))
    together = ast.parse("\n".join(code)).body
    assert [ast.dump(node) for node in together] == [ast.dump(node) for node in before[1:]]
    comments = lambda text: re.findall(r"^# .*", text, re.MULTILINE)
    assert comments("\n".join(code)) == comments(source)
