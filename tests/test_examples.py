"""Every example runs, as a reader would run it."""

import ast
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


GALLERY = (ROOT / "docs" / "examples.md").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_have_one_form(path):
    """One script to read in one go, with its picture and its code in the gallery."""
    source, picture = path.read_text(), f"{path.stem.replace('_', '-')}.png"
    assert ast.get_docstring(ast.parse(source)), "A docstring says what is shown."
    assert 40 <= len(source.splitlines()) <= 150
    for part in ('"--quick"', '"--out"', "tqdm", '"result.json"', f'"{picture}"', "print("):
        assert part in source, f"{path.name} has no {part}."
    assert f'--8<-- "examples/{path.name}"' in GALLERY
    assert f"](images/{picture})" in GALLERY
    assert (ROOT / "docs" / "images" / picture).exists()


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
    """The main example and the NaN example run every day; all run with the slow tests."""
    return "thorough" if path.name in ("spiking_digits.py", "nan_hunt.py") else "slow"


SOME = [pytest.param(path, marks=getattr(pytest.mark, _marker(path))) for path in EXAMPLES]


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    out = tmp_path / "out"
    _run(path, tmp_path, "--quick", "--out", str(out))
    left = [p.name for p in tmp_path.iterdir() if p != out]
    assert not left, f"Wrote outside of `--out`: {left}"
    picture = out / f"{path.stem.replace('_', '-')}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "result.json").read_text())


@pytest.mark.slow
def test_a_network_of_bits_learns_and_only_straight_through(tmp_path):
    """Medians of three seeds, on digits that were not trained with."""
    _run(ROOT / "examples" / "binary_network.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["straight-through"] >= 0.965
    assert result["plain sign"] <= 0.3  # guessing: 0.1
    assert result["two bits"] >= 0.975


@pytest.mark.slow
def test_hidden_markov_models_tell_speakers_apart(tmp_path):
    _run(ROOT / "examples" / "hidden_markov.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["accuracy"] >= 0.97
    assert np.all(np.diff(result["likelihoods"]) > 0)
    assert abs(result["transitions"] - (result["frames"] - 1)) < 1e-4
    assert np.isnan(result["plain"])


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
def test_the_equilibrium_is_learned_by_every_backward_pass_but_one_step(tmp_path):
    _run(ROOT / "examples" / "equilibrium_digits.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    accuracies, errors = result["accuracies"], result["errors"]
    assert accuracies.pop("one_step") < 0.9
    assert min(accuracies.values()) > 0.95
    assert max(errors["fixed_point"]) < 1e-3
    assert errors["neumann"][-1] < 0.1 * errors["neumann"][0]


# Of the whole run: what is learned with the rule, and not without it.
CLAIMS = {
    "spiking_digits": lambda r: r["spike"] >= 0.95 and r["plain step"] < 0.3,  # guessing: 0.1
    "spiking_convolution": lambda r: r["surrogate"] >= 0.95 and r["zero gradient"] < 0.3,
    "yin_yang": lambda r: r["surrogate"] >= 0.96 and r["zero gradient"] <= 0.7,
    "speech": lambda r: r["surrogate"] >= 0.96 and r["plain step"] <= 0.25,
    "bouncing_ball": lambda r: (
        r["error"] < 1e-4  # of the gradient, to the closed form
        and r["wrong_sign"] > 0.4
        and r["event_time and jump"] < 1e-3  # meters
        and r["jax.grad"] > 1e-2
    ),
    "character_model": lambda r: (
        r["float"] < 2.4  # bits per character
        and r["4 bits, straight-through"] < r["float"] + 0.1
        and abs(r["4 bits, without"] - np.log2(96)) < 0.05  # guessing
    ),
    "forecast": lambda r: (
        abs(r["the number of this year"] - 0.381) < 1e-3
        and 0.07 < r["LRU"] < 0.13
        and 0.07 < r["plain RNN"] < 0.13
        and 0.16 < r["minGRU"] < 0.26
    ),
    "port_from_pytorch": lambda r: (
        r.pop("logits") < 1e-5 and len(r) == 6 and max(r.values()) < 2e-6
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_what_an_example_claims(name, tmp_path):
    _run(ROOT / "examples" / f"{name}.py", tmp_path)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert CLAIMS[name](result), result
