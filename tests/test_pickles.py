"""Pickles and cloudpickles between processes."""

import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import equinox as eqx
import eqx_grads as eqg
import pytest

from .rules.pickled import LAYERS, OBJECTS


pytestmark = pytest.mark.versions


ROOT = pathlib.Path(__file__).parents[1]


def run(python, *args):
    """The output of a process, which computes in single precision."""
    process = subprocess.run(
        [python, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_ENABLE_X64": "0", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("name", LAYERS)
def test_leaves_and_structure(name):
    x = OBJECTS[name]()
    assert eqx.tree_equal(pickle.loads(pickle.dumps(x)), x)


@pytest.mark.slow
def test_in_another_process(tmp_path):
    """Both are processes of their own: the tests change promotion and precision."""
    file = tmp_path / "objects"
    writes = "import pathlib, sys; from tests.rules.pickled import write; "
    writes += "pathlib.Path(sys.argv[1]).write_bytes(write())"
    run(sys.executable, "-c", writes, str(file))
    run(sys.executable, "-m", "tests.rules.pickled", str(file))


BY_VALUE = """
    import pathlib, pickle, sys
    import cloudpickle, eqx_grads as eqg, jax, jax.numpy as jnp, numpy as np

    def make(scale):
        f = eqg.custom_vjp(lambda x: scale * x)
        f.def_fwd(lambda x: (f(x), None))
        f.def_bwd(lambda residuals, ct: (7 * ct,))
        f.def_jvp(lambda primals, tangents: (f(*primals), 7 * tangents[0]))
        f.def_vmap(lambda size, batched, x: (f(x), batched[0]))
        return f

    @eqg.custom_gradient
    def by_gradient(x):
        return x, lambda ct: 3 * ct

    class Scale:  # not a Module: cloudpickle loses the fields of these (UPSTREAM.md)
        @eqg.custom_jvp
        def __call__(self, x):
            return 2 * x

        @__call__.def_jvp
        def _jvp(primals, tangents):
            self, x = primals
            return self(x), 9 * tangents[1]

    on_host = eqg.host_function(lambda x: np.sin(x), out=lambda x: x)
    on_host.def_fwd(lambda x: (np.sin(x), None))
    on_host.def_bwd(lambda residuals, ct: (4 * ct,))
    elementwise = eqg.elementwise(lambda x: x * x, lambda out, x: 6 * jnp.ones_like(x))
    objects = make(2.0), by_gradient, Scale().__call__, on_host, elementwise
    pathlib.Path(sys.argv[1]).write_bytes(cloudpickle.dumps(objects))
"""
LOADS = """
    import pathlib, pickle, sys
    import jax

    objects = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
    for f, slope in zip(objects, (7, 3, 9, 4, 6), strict=True):
        assert jax.grad(f)(0.5) == slope, (f, slope)
        assert jax.jit(jax.grad(f))(0.5) == slope, (f, slope)
    assert jax.jvp(objects[0], (0.5,), (2.0,)) == (1.0, 14.0)
"""


@pytest.mark.slow
def test_cloudpickles_of_what_is_in_main(tmp_path):
    """Local functions and functions of `__main__`, with their rules, which are stored by
    value."""
    pytest.importorskip("cloudpickle")
    file = str(tmp_path / "objects")
    run(sys.executable, "-c", textwrap.dedent(BY_VALUE), file)
    run(sys.executable, "-c", textwrap.dedent(LOADS), file)


def test_who_stores_functions_of_main_gets_what_to_store(monkeypatch):
    """A wrapper asks its callers who they are: cloudpickle stores such functions whole, and
    pickle their names."""

    def fn(x):
        return x

    fn.__module__, fn.__qualname__ = "__main__", "eqg_function_of_main"
    f = eqg.custom_jvp(fn)
    monkeypatch.setattr(sys.modules["__main__"], fn.__qualname__, f, raising=False)
    asks = "def reduce(x): return x.__reduce__()"
    for module in ("pickle", "cloudpickled", "cloudpickle", "cloudpickle.fast", "dill._dill"):
        exec(asks, caller := {"__name__": module})
        reduced = caller["reduce"](f)
        stores = module.partition(".")[0] in ("cloudpickle", "dill")
        assert isinstance(reduced, tuple) == stores, module
        assert (reduced[2]["fn"] is fn) if stores else (reduced == fn.__qualname__)
