"""Errors of each diagnosis for a loss or a model that it can't look at."""

import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir


unknown = Primitive("mystery")
unknown.def_impl(lambda x: 2 * x)
unknown.def_abstract_eval(lambda x: x)
mlir.register_lowering(unknown, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

DIAGNOSES = {
    "explain_nan": eqg.explain_nan,
    "explain_zero": eqg.explain_zero,
    "explain_memory": eqg.explain_memory,
    "check_gradients": eqgt.check_gradients,
}
X = jnp.array([0.5, 2.0])


def gradient_of_zero_safe(loss, model):
    return eqx.filter_grad(eqg.zero_safe(loss))(model)


def on_the_host(x):
    return jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="expand_dims")


def host(x):
    return jnp.sum(on_the_host(x))


def stopped_host(x):
    return jnp.sum(x * on_the_host(jax.lax.stop_gradient(x)))


def mystery(x):
    return jnp.sum(unknown.bind(x))


def stopped_mystery(x):
    return jnp.sum(x * unknown.bind(jax.lax.stop_gradient(x)))


def decides(x):
    return jnp.sum(x) if x[0] > 0 else 0.0


def numpy(x):
    return jnp.sum(np.sin(x))


TEXTS = {
    "a vector": (
        lambda x: x,
        X,
        r"real scalar.*\n.*returned float(.*\n)+.*the mean or the sum",
    ),
    "a pair": (lambda x: (jnp.sum(x), x), X, r"real scalar.*\n.*\(float(.*\n)+.*: loss\(\*a, "),
    "a string": (lambda x: "loss", X, r"did not return a real scalar.*\n.*it returned 'loss'"),
    "a complex number": (
        lambda x: jax.lax.complex(x[0], x[1]),
        X,
        r"did not return a real scalar",
    ),
    "decides": (decides, X, r"can't trace the loss `decides`.*\n.*boolean conversion"),
    "numpy": (numpy, X, r"can't trace the loss `numpy`.*\n.*__array__"),
    "integers": (jnp.sum, jnp.arange(3), r"without inexact arrays.*\n.*it is int"),
    "Python numbers": (lambda m: m["a"] ** 2, {"a": 0.5}, r"A Python number is not an array"),
    "nothing": (lambda m: 1.0, None, r"without inexact arrays.*\n.*it is None"),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tool", DIAGNOSES)
def test_errors(tool, text):
    loss, model, match = TEXTS[text]
    with pytest.raises(eqg.RuleError, match=f"(?s){match}"):
        DIAGNOSES[tool](loss, model)


@pytest.mark.parametrize("loss", [decides, numpy])
def test_zero_safe_of_what_cannot_be_traced(loss):
    with pytest.raises(eqg.RuleError, match=f"`zero_safe` can't trace `{loss.__name__}`"):
        eqg.zero_safe(loss)(X)


@pytest.mark.parametrize("tool", ["explain_nan", "explain_zero", "check_gradients"])
@pytest.mark.parametrize(("loss", "name"), [(host, "pure_callback"), (mystery, "mystery")])
def test_an_operation_without_a_derivative(tool, loss, name):
    match = rf"(?s)`{loss.__name__}` has no derivative.*`{name}` at test_diagnosis_input.py:\d+"
    with pytest.raises(eqg.RuleError, match=match):
        DIAGNOSES[tool](loss, X)


@pytest.mark.parametrize("loss", [host, mystery])
def test_explain_memory_of_an_operation_without_a_derivative(loss):
    with pytest.raises(eqg.RuleError, match="has no derivative in reverse mode"):
        eqg.explain_memory(loss, X)


@pytest.mark.parametrize("loss", [stopped_host, stopped_mystery])
def test_opaque_operations_without_a_tangent(loss):
    """They have no part in the gradient."""
    assert not eqg.explain_nan(loss, X)
    assert not eqg.explain_zero(loss, X)
    assert sum(record.bytes for record in eqg.explain_memory(loss, X).found) > 0
    assert jnp.array_equal(gradient_of_zero_safe(loss, X), jax.grad(loss)(X))


@pytest.mark.parametrize("loss", [stopped_host, stopped_mystery])
def test_check_gradients_of_a_stopped_operation(loss):
    """Its value is held, as the loss asks for."""
    report = eqgt.check_gradients(loss, X)
    assert report["model"].verdict == "stopped"


def test_check_gradients_of_a_rule_around_an_operation_without_a_derivative():
    @jax.custom_jvp
    def sin(x):
        return on_the_host(x)

    def loss(x, factor):
        sin.defjvp(lambda xs, ts: (sin(*xs), factor * jnp.cos(*xs) * ts[0]))
        return jnp.sum(sin(x))

    assert not eqgt.check_gradients(loss, X, 1.0)
    (fault,) = eqgt.check_gradients(loss, X, 2.0, raises=False).found
    assert re.search(
        r"The rule of `sin` at test_diagnosis_input.py:\d+ can't be removed",
        fault.cure,
    )


@pytest.mark.parametrize("tool", ["explain_nan", "explain_zero", "explain_memory"])
def test_side_effects_do_not_multiply(tool):
    seen = []

    def loss(x):
        jax.debug.callback(lambda x: seen.append(x), x)
        return jnp.sum(x**2)

    DIAGNOSES[tool](loss, X)
    jax.effects_barrier()
    assert len(seen) <= 1
    jax.block_until_ready(gradient_of_zero_safe(loss, X))
    jax.effects_barrier()
    assert len(seen) <= 2


def _writes_to_a_reference(x):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] = jnp.sqrt(x)
    return jnp.sum(ref[...])


_OUTSIDE = []


def _writes_to_a_reference_outside(x):
    _OUTSIDE[0][...] = x
    return jnp.sum(jnp.sqrt(x))


@pytest.mark.parametrize("explain", [eqg.explain_nan, eqg.explain_zero])
@pytest.mark.parametrize(
    "loss",
    [
        _writes_to_a_reference,
        jax.jit(_writes_to_a_reference),
        _writes_to_a_reference_outside,
    ],
)
def test_a_reference_is_not_followed(explain, loss):
    """`explain_nan` raised "Out of bound indexer", and `explain_zero` said "never used"."""
    _OUTSIDE[:] = [jax.new_ref(jnp.zeros(3))]
    with pytest.raises(eqg.RuleError, match=r"can't follow(?s:.)*new_ref(?s:.)*in `_writes"):
        explain(loss, jnp.arange(3.0))
