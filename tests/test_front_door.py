"""`import eqx_grads` is quick, and what it leaves out is found when it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import eqx_grads as eqg
import pytest


SOURCE = ast.parse(Path(eqg.__file__).read_text())


def test_type_checkers_see_the_names_that_are_found_later():
    (block,) = [node for node in SOURCE.body if isinstance(node, ast.If)]
    seen = {(x.module, name.name) for x in block.body for name in x.names}
    found = {(None, name) for name in eqg._MODULES}
    assert seen == found | {(module, name) for name, module in eqg._MODULE_OF.items()}


def test_every_name_is_found():
    assert {"filter_scan", "implicit", "explain_nan", "nn", "testing"} <= set(dir(eqg))
    for name in dir(eqg):
        assert getattr(eqg, name) is getattr(eqg, name)
    with pytest.raises(AttributeError, match="'eqx_grads' has no attribute 'explain'"):
        eqg.explain  # noqa: B018


# What a module computes when it is imported, it would keep as a tracer of this program.
FIRST_USE = """
import sys

import jax
import eqx_grads as eqg

rooms = {name.split(".")[1] for name in sys.modules if name.startswith("eqx_grads.")}
assert not rooms & {"_diagnosis", "_drop_ins", "_host", "_solvers", "nn", "testing"}, rooms


@jax.jit
def program(x):
    for name in dir(eqg):
        getattr(eqg, name)
    return x


program(1.0)
for name, module in list(sys.modules.items()):
    if name.startswith("eqx_grads."):
        for key, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else [value]
            for x in values:
                assert not isinstance(x, jax.core.Tracer), (name, key)
                assert not isinstance(x, jax.Array), (name, key)
"""


def test_the_first_use_may_be_in_a_program():
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True)
