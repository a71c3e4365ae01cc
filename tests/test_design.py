"""`docs/guides/how-it-works.md` says what the code does: the picture, the layers and the paths are right."""

import importlib.util
import pathlib
import re


ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "how-it-works.md").read_text()


def _rooms():
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    return rooms


ROOMS = _rooms()


def test_the_picture_is_that_of_the_imports():
    assert ROOMS.PICTURE.read_text() == ROOMS.draw(), "Run `python docs/rooms.py`."


def test_the_page_names_the_layers():
    _, table = PAGE.split("| layer |", 1)
    rows = re.findall(r"^\| (`.*?`) \|", table.split("\n\n")[0], re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == ROOMS.layers()


def test_every_room_has_a_layer():
    listing = {path.stem for path in (ROOT / "eqx_grads").iterdir()}
    listing -= {"__init__", "__pycache__", "py"}  # `py.typed`
    assert listing == {room for layer in ROOMS.layers() for room in layer}


def test_imports_go_down():
    layer = {room: i for i, rooms in enumerate(ROOMS.layers()) for room in rooms}
    arrows = ROOMS.imports()
    assert len(arrows) <= 78
    assert all(layer[a] < layer[b] for a, b in arrows)


def test_the_paths_exist():
    for path in set(re.findall(r"`(\w*/[\w/.]*|_\w+\.py)`", PAGE)):
        places = (
            ROOT,
            ROOT / "eqx_grads",
            ROOT / "eqx_grads" / "ste",
            ROOT / "eqx_grads/testing",
        )
        assert any((place / path).exists() for place in places), path
