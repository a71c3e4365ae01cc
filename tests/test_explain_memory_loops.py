"""`explain_memory` of loops: in a `vmap`, by a replay, and several at one line."""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest


STATES = 32


def of_batch(cell, xs, checkpoint):
    """The `vmap` is around a loop that returns all states."""
    step = lambda h, x: (cell(x, h),) * 2
    run = lambda x: eqg.filter_scan(
        step, jnp.zeros(STATES, xs.dtype), x, checkpoint=checkpoint
    )[1]
    return jnp.mean(jax.vmap(run)(xs) ** 2)


def of_stack(cells, xs, checkpoint):
    """The loop is in a loop over layers."""

    def layer(xs, cell):
        step = lambda h, x: (cell(x, h),) * 2
        run = lambda x: eqg.filter_scan(
            step, jnp.zeros(STATES, xs.dtype), x, checkpoint=checkpoint
        )[1]
        return jax.vmap(run)(xs), None

    return jnp.mean(jax.lax.scan(layer, xs, cells)[0] ** 2)


@eqg.custom_vjp
def scaled(x):
    return 2 * jnp.sin(x)


scaled.def_fwd(lambda x: (2 * jnp.sin(x), jnp.cos(x)))
scaled.def_bwd(lambda residuals, ct: (2 * residuals * ct,))


def of_rule(cell, xs, checkpoint):
    """Only the loop is entered: the rule of a function in it stays."""
    return of_batch(lambda x, h: scaled(cell(x, h)), xs, checkpoint)


def of_layer(cell, xs, checkpoint):
    zeros = jnp.zeros(STATES, xs.dtype)
    layer = eqg.nn.Recurrent(cell, initial_state=zeros, checkpoint=checkpoint)
    return jnp.mean(layer(xs)[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [of_batch, of_stack, of_layer, of_rule])
def test_auto_that_is_plain_scan_has_the_report_of_plain_scan(loss):
    make = lambda key: eqx.nn.GRUCell(STATES, STATES, dtype="float32", key=key)
    cell = (
        eqx.filter_vmap(make)(jr.split(jr.key(0), 3)) if loss is of_stack else make(jr.key(0))
    )
    # In double precision, "auto" chooses a replay.
    xs = jnp.ones((32, 200, STATES), "float32")
    auto, plain = (
        eqg.explain_memory(loss, cell, xs, checkpoint, compiled=False)
        for checkpoint in ("auto", None)
    )
    assert auto.found == plain.found
    assert auto.advice == plain.advice
    assert any(a.kind == "layer" for a in auto.advice)
    assert ("scaled" in {r.primitive for r in auto.found}) == (loss is of_rule)


class TwoCells(eqx.Module):
    cell1: eqx.nn.GRUCell
    cell2: eqx.nn.GRUCell
    checkpoint: int | str | None = eqx.field(static=True, default=None)

    def run(self, cell, xs):
        def step(h, x):
            h = cell(x, h)
            return h, h

        return eqg.filter_scan(step, jnp.zeros(STATES), xs, checkpoint=self.checkpoint)[1]

    def __call__(self, xs):
        return self.run(self.cell2, self.run(self.cell1, xs))


def test_a_line_that_runs_a_loop_twice_has_one_advice():
    """One edit of this line changes both loops."""
    key1, key2 = jr.split(jr.key(0))
    cells = [eqx.nn.GRUCell(n, STATES, key=key) for n, key in ((3, key1), (STATES, key2))]
    loss = lambda model, xs: jnp.sum(model(xs) ** 2)
    xs = jnp.ones((400, 3))
    report = eqg.explain_memory(loss, TwoCells(*cells), xs, compiled=False)
    (advice,) = [a for a in report.advice if a.kind == "loop"]
    assert len({str(a) for a in report.advice}) == len(report.advice)
    (checkpoint,) = re.findall(r", called 2 times, by .*checkpoint=(\d+)", advice.cure)
    followed = TwoCells(*cells, checkpoint=int(checkpoint))
    left = eqg.explain_memory(loss, followed, xs, compiled=False).total
    # A few steps of one loop are computed again at one time.
    assert 0 < report.total - left - advice.saves < 0.1 * report.total
    assert advice.saves > 0.7 * report.total


def test_a_python_number_in_the_carry():
    """The advice reads the shapes of the carry."""

    def loss(w, xs):
        step = lambda c, x: ((c[0] + 1, jnp.tanh(w * c[1] + x)), None)
        return jnp.sum(jax.vmap(lambda xs: jax.lax.scan(step, (0, 0.0), xs)[0][1])(xs))

    report = eqg.explain_memory(loss, jnp.array(0.5), jnp.ones((8, 400)), compiled=False)
    assert [a for a in report.advice if a.kind == "loop"]
