"""Pickles of layers and reports, and cloudpickles between processes. The guard pickles
functions that have rules."""

import os
import pathlib
import pickle
import subprocess
import sys
import textwrap

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads import surrogates


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


OPTIONS = {"key": jr.key(0), "dtype": jnp.float32}
LAYERS = {
    "FakeQuantize": lambda: nn.FakeQuantize(4, scale=0.2, learn_scale=True),
    "FixedPoint": lambda: nn.FixedPoint(eqx.nn.GRUCell(3, 2, **OPTIONS), 2),
    "GRU": lambda: nn.GRU(3, 2, dropout=0.5, num_layers=2, **OPTIONS),
    "LIF": lambda: nn.LIF(3, 2, 0.9, surrogate=surrogates.atan(), **OPTIONS),
    "LRU": lambda: nn.LRU(3, 2, 2, bidirectional=True, **OPTIONS),
    "Quantized": lambda: nn.Quantized(eqx.nn.Linear(3, 2, **OPTIONS), nn.LSQ(4, scale=0.2)),
    "QuantizationReport": lambda: nn.quantize_model(
        eqx.nn.Linear(3, 2, **OPTIONS), {eqx.nn.Linear: (nn.FakeQuantize(4), None)}
    )[1],
    "VectorQuantizer": lambda: nn.VectorQuantizer(4, 3, **OPTIONS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_leaves_and_structure(name):
    x = LAYERS[name]()
    assert eqx.tree_equal(pickle.loads(pickle.dumps(x)), x)


def _error():
    f = eqg.custom_jvp(lambda x: x)
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.ones(2)))
    try:
        jax.grad(f)(1.0)
    except eqg.RuleError as error:
        return error
    raise AssertionError


_dead = lambda m: jnp.sum(jnp.where(m.weight > 9, jnp.sqrt(m.weight - 3), 0.0))
LINEAR = eqx.nn.Linear(3, 2, **OPTIONS)
REPORTS = {
    "NaNReport": lambda: eqg.explain_nan(_dead, LINEAR),
    "ZeroReport": lambda: eqg.explain_zero(lambda m: jnp.sum(jnp.round(m.weight)), LINEAR),
    "MemoryReport": lambda: eqg.explain_memory(lambda m: jnp.sum(jnp.sin(m.weight)), LINEAR),
    "GradientReport": lambda: eqgt.check_gradients(lambda m: jnp.sum(m.weight), LINEAR),
    "Report": lambda: eqgt.check_rule(jnp.sin, 0.3, checks=("primal",), raises=False),
    "RuleError": _error,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPORTS)
def test_texts_of_reports(name):
    x = REPORTS[name]()
    assert str(pickle.loads(pickle.dumps(x))) == str(x)


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


@eqg.custom_jvp
def doubled(x):
    return 2 * x


doubled.def_jvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def test_a_rebuilt_function_without_a_docstring_is_pickled_by_name():
    rebuilt = jax.tree.map(lambda x: x, doubled)
    assert pickle.loads(pickle.dumps(rebuilt))(3.0) == 6.0
