"""Choices by platform: the program for a given platform, and its values on a CPU.

What `checkpoint="auto"` chooses is in `test_replay.py`.
"""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads._control_flow.accelerators import steps_of_chunk
from eqx_grads._jaxprs.structure import holds, Scan

from .helpers import assert_close


def bytes_kept(layer, xs):
    """By the derivative, for its backward pass."""
    arrays, static = eqx.partition(layer, eqx.is_array)
    pull_back = lambda arrays: jax.vjp(lambda a: eqx.combine(a, static)(xs)[0], arrays)[1]
    kept = jax.tree.leaves(jax.eval_shape(pull_back, arrays))
    return sum(x.size * x.dtype.itemsize for x in kept)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_what_gated_cells_keep(make, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    xs, key = jnp.ones((200, 4, 3)), jr.key(0)
    gates, states, auto = (
        bytes_kept(make(3, 16, keep=keep, time_major=True, key=key), xs)
        for keep in ("gates", "states", "auto")
    )
    assert states < 0.5 * gates
    assert auto == {"cpu": gates, "gpu": states}[platform]
    cell = make(3, 16, key=key).cells[0][0]
    for checkpoint, expected in (("auto", auto), (None, gates), ("replay", states)):
        run = nn.Recurrent(cell, checkpoint=checkpoint, time_major=True)
        assert bytes_kept(run, xs) == expected


@pytest.mark.usefixtures("cpu")
def test_steps_of_a_chunk(monkeypatch):
    assert steps_of_chunk(500, 2**20, 5) == 5
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert steps_of_chunk(500, 2**10, 5) == 500
    assert steps_of_chunk(500, 2**20, 5) == 50  # of 64 MB
    assert steps_of_chunk(500, 2**40, 5) == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("steps", [256, 1009])
def test_a_linear_recurrence_without_a_loop(steps, getkey):
    a, b = jr.uniform(getkey(), (steps, 3)), jr.normal(getkey(), (steps, 3))
    loss = lambda a, b: jnp.sum(jnp.sin(eqg.linear_recurrence(a, b)))
    gradient = jax.make_jaxpr(jax.grad(loss, (0, 1)))(a, b)
    assert not holds(gradient, Scan)
    assert len(gradient.eqns) < 100  # calls
    if steps == 256:
        assert "[16,16,3]" in str(gradient)

    h, expected = np.zeros(3), []
    for a_t, b_t in zip(np.asarray(a, "float64"), np.asarray(b, "float64"), strict=True):
        h = a_t * h + b_t
        expected.append(h)
    got = eqg.linear_recurrence(a, b, method="associative")
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("cpu")
def test_the_chunk_of_a_loss(monkeypatch, getkey):
    x, weight = jr.normal(getkey(), (4096, 8)), jr.normal(getkey(), (1000, 8))
    labels = jnp.arange(4096) % 1000

    def value_and_program():
        loss = lambda x, w: eqg.losses.linear_cross_entropy(x, w, labels)
        gradient = jax.value_and_grad(loss, (0, 1))
        return jax.jit(gradient)(x, weight), jax.make_jaxpr(gradient)(x, weight)

    expected, in_chunks = value_and_program()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got, at_once = value_and_program()
    assert holds(in_chunks, Scan)
    assert not holds(at_once, Scan)
    assert_close(got, expected, tolerance=1e-4)
