"""What users read. The reports and the errors of each quick or thorough test are compared with
those in `reports.json`, so a test need not repeat them. So is what a test gives to `record`.

Numbers may differ by a tenth. The lines of places are left out, as reports have the code too.
To accept new texts: `make test JOBS=0 MARK=quick,thorough ARGS=--record-reports TESTS=...`.
"""

import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import eqx_grads
import eqx_grads.testing
import jax
import pytest


FILE, ROOT = Path(__file__).with_suffix(".json"), Path(__file__).parents[1]
RECORDED = re.compile("explain_.*|check_.*|gradient_flow")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
_made: list[str] = []


def record(text: str) -> None:
    """A text of this test is compared too."""
    _made.append(text)


def _recorded(function):
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            record(f"{function.__name__}: {type(error).__name__}: {error}")
            raise
        record(f"{function.__name__}: {result}")
        return result

    return recorded


for module in (eqx_grads, eqx_grads.testing):
    for name in dir(module):
        if RECORDED.fullmatch(name):
            setattr(module, name, _recorded(getattr(module, name)))


def _versions() -> str:
    """Texts are compared where they were recorded: elsewhere, programs are compiled to others,
    and rounded otherwise."""
    packages = [f"{p} {importlib.metadata.version(p)}" for p in ("jax", "equinox", "numpy")]
    python = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
    x64, quick = jax.config.jax_enable_x64, "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ
    return ", ".join([python, *packages, f"{x64=}, {quick=}", jax.default_backend()])


def _plain(text: str) -> list[str]:
    text = text.replace(sys.prefix, "").replace(f"{ROOT}/", "")
    text = re.sub(r"(\.py:|\.py\", line )\d+", r"\1*", text)
    text = re.sub(r"0x[0-9a-f]+|(?<![.\d])\d{12,}", "0", text)  # addresses
    lines = (" ".join(re.sub("--+", "--", line).split()) for line in text.splitlines())
    return list(filter(None, lines))


def _agree(a: str, b: str) -> bool:
    """They are the same but for the place of line breaks, and for rounding."""
    numbers = [list(map(float, NUMBER.findall(text))) for text in (a, b)]
    tiny = lambda *pair: all(0 < abs(x) < 1e-4 for x in pair)
    return NUMBER.sub("0", a) == NUMBER.sub("0", b) and all(
        math.isclose(x, y, rel_tol=0.1) or tiny(x, y) for x, y in zip(*numbers, strict=True)
    )


class Reports:
    """A pytest plugin."""

    def __init__(self, record: bool):
        self.record = record
        self.texts = json.loads(FILE.read_text()) if FILE.exists() else {}
        self.is_compared = record or self.texts.get("versions") == [_versions()]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        _made.clear()
        result = yield
        is_page = "test_docs.py" in item.nodeid  # which has its output
        if self.is_compared and item.tier in ("quick", "thorough") and not is_page:
            made = [line for text in _made for line in _plain(text)]
            expected = self.texts.get(item.nodeid, [])
            if self.record:
                self.texts[item.nodeid] = made
            elif not _agree(" ".join(made), " ".join(expected)):
                assert made == expected
        return result

    def pytest_collection_finish(self, session: Any) -> None:
        """Drop the recorded texts of the files that run. Those of other files stay."""
        if self.record:
            files = {item.nodeid.partition("::")[0] for item in session.items}
            others = {k: v for k, v in self.texts.items() if k.partition("::")[0] not in files}
            self.texts = others

    def pytest_sessionfinish(self) -> None:
        if self.record:
            texts = {k: v for k, v in sorted(self.texts.items()) if v}
            texts["versions"] = [_versions()]
            FILE.write_text(json.dumps(texts, indent=0, ensure_ascii=False) + "\n")
