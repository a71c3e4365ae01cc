"""Reports of newcomers: calibration, rules of a quantization, rows that are all `-inf`."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import nn


# ---------------------------------------------------------------- quantize_model


class _Tokens(eqx.Module):
    """A layer for each token, as in a transformer."""

    layer: eqx.nn.Linear

    def __call__(self, tokens):
        return jax.vmap(self.layer)(tokens)


@pytest.mark.slow
def test_the_program_of_a_calibration_does_not_grow_with_the_batch(getkey, monkeypatch):
    programs, run = [], jax.lax.map

    def spy(model, batch):
        programs.append(str(eqx.filter_make_jaxpr(run)(model, batch)[0]))
        return run(model, batch)

    monkeypatch.setattr(jax.lax, "map", spy)
    model = _Tokens(eqx.nn.Linear(2, 2, key=getkey()))
    rules = {eqx.nn.Linear: (nn.LSQ(4), nn.LSQ(4))}
    batch = jr.normal(getkey(), (9, 3, 2))
    for size in (2, 9):
        got, _ = nn.quantize_model(model, rules, calibrate=batch[:size])
        want = 2 * jnp.mean(jnp.abs(batch[:size])) / 7**0.5
        np.testing.assert_allclose(got.layer.input_quantizer.scale, want, rtol=1e-5)
    few, many = (program.count("pure_callback") for program in programs)
    assert 0 < few == many
    assert len(programs[0].splitlines()) == len(programs[1].splitlines())


@pytest.mark.thorough
def test_calibration_by_the_default_is_that_by_a_vmap(getkey):
    model = eqx.nn.MLP(3, 2, 4, 1, key=getkey())
    options = {"calibrate": jr.normal(getkey(), (5, 3))}
    rules = {"*": (nn.LSQ(4), nn.FakeQuantize(8, learn_scale=True))}
    got, _ = nn.quantize_model(model, rules, **options)
    call = lambda model, batch: jax.vmap(model)(batch)
    want, _ = nn.quantize_model(model, rules, call=call, **options)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_function_of_the_weight_without_a_pair(getkey):
    model = [eqx.nn.Linear(2, 2, key=getkey())]
    new, _ = nn.quantize_model(model, {eqx.nn.Linear: jnp.abs})
    np.testing.assert_array_equal(new[0].quantized_weight(), jnp.abs(model[0].weight))


# ---------------------------------------------------------------- explain_nan


def _masked(x):
    return jnp.where(jnp.array([[True, True], [False, False]]), x, -jnp.inf)


def _softmax(x):
    return jnp.sum(jax.nn.softmax(_masked(x)) ** 2)


def _log_softmax(x):
    return jnp.sum(jnp.exp(jax.nn.log_softmax(_masked(x))))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (_softmax, "softmax"),
        (_log_softmax, "log_softmax"),
        (jax.jit(_softmax), "softmax"),
    ],
)
def test_rows_without_an_entry(loss, name):
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    report = eqg.explain_nan(loss, x)
    assert f"`eqg.safe.{name}(x)`" in report.found[0].cure, str(report)


def _by_hand(x):
    """The maximum belongs to other numbers."""
    y = _masked(x)
    return jnp.sum(jnp.exp(y - jnp.max(_masked(x + 1), 1, keepdims=True)))


def _difference(x):
    y = _masked(x)
    return jnp.sum(jnp.tanh(y - jnp.max(y, 1, keepdims=True)))


@pytest.mark.parametrize("loss", [_by_hand, _difference])
def test_other_operations_are_not_called_a_softmax(loss):
    report = eqg.explain_nan(loss, jnp.ones((2, 2)))
    assert report.found, str(report)
    assert "softmax" not in str(report)
    assert "safe.logsumexp" not in str(report)


def test_a_shift_that_overflows_is_no_empty_row():
    big = jnp.finfo(jnp.ones(()).dtype).max
    (record,) = eqg.explain_nan(lambda x: x[0] - x[1], jnp.array([big, -big])).found
    assert "too large" in record.cure
