"""`docs/plots.py`: each surrogate, straight-through function and gradient op has its plot."""

import importlib.util
import pathlib

import eqx_grads as eqg
import numpy as np
import pytest


DOCS = pathlib.Path(__file__).parents[1] / "docs"
pytest.importorskip("matplotlib")


def _plots():
    spec = importlib.util.spec_from_file_location("plots", DOCS / "plots.py")
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    return plots


PLOTS = _plots()


def _public(module, room):
    names = [name for name in vars(module) if not name.startswith("_")]
    return {
        name
        for name in names
        if str(getattr(getattr(module, name), "__module__", "")).startswith(room)
    }


PROBES = {"GradientStatistics", "probe", "tap_gradient", "watch_gradient"}


@pytest.mark.parametrize(
    ("page", "module", "room", "without"),
    [
        # A spike is drawn with each surrogate.
        ("surrogates", eqg.surrogates, "eqx_grads.surrogates.", {"AbstractSurrogate", "spike"}),
        ("ste", eqg.ste, "eqx_grads.ste.", set()),
        # Probes do not change a gradient.
        ("gradient-ops", eqg, "eqx_grads._gradient_ops.", PROBES),
    ],
)
def test_every_name_has_its_plot(page, module, room, without):
    names = _public(module, room) - without
    assert len(names) >= 8
    assert set(PLOTS.PLOTS[page]) == names, "Add it to `docs/plots.py`."
    assert {path.stem for path in (PLOTS.FOLDER / page).glob("*")} == names, (
        "Run `python docs/plots.py`."
    )
    text = (DOCS / "api" / f"{page}.md").read_text()
    for name in names:
        assert f"](../images/plots/{page}/{name}.svg)](#{module.__name__}.{name})" in text


def test_a_plot_is_the_same_each_time_and_has_no_background(tmp_path):
    texts = []
    for path in (tmp_path / "a.svg", tmp_path / "b.svg"):
        PLOTS.save_one(path, *PLOTS.PLOTS["ste"]["round"])
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert "date" not in texts[0]
    assert "#ffffff" not in texts[0]


def test_an_op_is_drawn_as_jax_computes_it():
    _, lines = PLOTS.PLOTS["gradient-ops"]["clip_gradient"]
    g, value, slope, _ = lines()
    np.testing.assert_array_equal(value, g)
    np.testing.assert_allclose(slope, np.clip(g, -1, 1))


@pytest.mark.slow
def test_all_plots_can_be_drawn(tmp_path):
    PLOTS.save(tmp_path)
    drawn = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")}
    assert drawn == {path.relative_to(PLOTS.FOLDER) for path in PLOTS.FOLDER.rglob("*.svg")}
