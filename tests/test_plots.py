"""`docs/plots.py`: each surrogate, straight-through function and gradient op has its plot."""

import importlib.util
import pathlib

import eqx_grads as eqg
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


@pytest.mark.slow
def test_all_plots_can_be_drawn(tmp_path):
    PLOTS.save(tmp_path)
    drawn = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.svg")}
    assert drawn == {path.relative_to(PLOTS.FOLDER) for path in PLOTS.FOLDER.rglob("*.svg")}
