"""The faults of others in `UPSTREAM.md` are still there, and the patches fix them.

When a fault is gone, its test fails with the place of the work-around that can be deleted.
"""

import gc
import os
import pathlib
import re
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import pytest


pytestmark = pytest.mark.versions


ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "UPSTREAM.md"
FENCE = re.compile(r"^```(python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _sections():
    """The name of each section of the page, and its blocks by their language."""
    for section in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        blocks = dict(FENCE.findall(body))
        if blocks:
            yield title, blocks


(_, SHARED), *SECTIONS = _sections()
FAULTS = {title: blocks["python"] for title, blocks in SECTIONS if "diff" not in blocks}
PATCHES = {title: blocks for title, blocks in SECTIONS if "diff" in blocks}
# What a compiler does depends on its options: `make test MARK=cost` has those of users.
COMPILED = (
    "The gradient of a vmapped GRUCell in a scan",
    "The gradient of a maximum over two axes",
    "Checkpoints are undone",
    "Copies of arrays that have an axis of length one",
)
# With a switch of JAX 0.12, there is another error, or none.
OTHERWISE_WITH = {
    "jax_custom_vjp3": (
        "Equinox's rules and Python floats",
        "`jax_remat3`: the second derivative of a checkpoint",
    ),
    "jax_remat3": ("The cache of `filter_checkpoint`",),
}


def _marks(title):
    if title in COMPILED:
        return pytest.mark.cost
    return pytest.mark.slow if "subprocess" in FAULTS[title] else ()


@pytest.mark.parametrize(
    "title",
    [pytest.param(t, marks=_marks(t)) for t in FAULTS],
)
def test_fault(title):
    for switch, titles in OTHERWISE_WITH.items():
        if title in titles and getattr(jax.config, switch, False):
            pytest.skip(f"the page says what happens without `{switch}`")
    for library in ("lineax", "cloudpickle"):
        if f"import {library}" in FAULTS[title] or f" {library}," in FAULTS[title]:
            pytest.importorskip(library)
    program = f"{SHARED['python']}\n\n{FAULTS[title]}"
    names = {"__name__": "upstream", "__file__": str(PAGE)}
    gc.freeze()  # the leak checker looks at all objects that there are
    try:
        exec(compile(program, str(PAGE), "exec"), names)
    except AssertionError as error:
        pytest.fail(f"{title}: not as UPSTREAM.md says. Delete the work-around {error}?")
    finally:
        gc.unfreeze()


def test_places_exist():
    places = re.findall(r"`((?:eqx_grads|tests|benchmarks)/[\w/]+\.py)`", PAGE.read_text())
    assert len(places) > 30
    assert [p for p in places if not (ROOT / p).exists()] == []


def _patched(source, diff):
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    old, new = ("\n".join(x[1:] for x in lines if x[:1] in kept) for kept in (" -", " +"))
    assert source.count(old) == 1, "Equinox has changed there: is the patch in?"
    return source.replace(old, new)


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with a copy of Equinox with all patches."""
    folder = tmp_path_factory.mktemp("patched")
    shutil.copytree(pathlib.Path(eqx.__file__).parent, folder / "equinox")
    file = folder / "equinox" / "_ad.py"
    for blocks in PATCHES.values():
        file.write_text(_patched(file.read_text(), blocks["diff"]))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("title", PATCHES)
def test_patch(title, patched):
    test = PATCHES[title]["python"]
    (name,) = re.findall(r"^def (\w+)", test, re.MULTILINE)
    program = f"{SHARED['python']}\n\n{test}\n\nprint(eqx.__file__)\n{name}()\n"

    def run(**env):
        return subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )

    before, after = run(), run(PYTHONPATH=str(patched))
    assert before.returncode == 1
    assert "AssertionError" in before.stderr
    assert after.returncode == 0, after.stderr
    assert after.stdout.startswith(str(patched))
