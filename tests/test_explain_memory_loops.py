"""`explain_memory` of a loop in a `vmap`: its advice, against a model that follows it."""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._diagnosis._memory.checkpoints import run_loop
from eqx_grads._jaxprs.structure import structure


BATCH, STEPS, INPUTS, STATES = 16, 96, 32, 32


class Network(eqx.Module):
    cell: eqx.nn.GRUCell
    readout: eqx.nn.Linear
    returns_all: bool = eqx.field(static=True, default=False)
    checkpoint: int | str | None = eqx.field(static=True, default=None)

    def step(self, h, x):
        h = self.cell(x, h)
        return h, h if self.returns_all else None

    def __call__(self, xs):
        h, hs = eqg.filter_scan(
            self.step, jnp.zeros(STATES), xs, checkpoint=self.checkpoint
        )  # the loop
        return jax.vmap(self.readout)(hs) if self.returns_all else self.readout(h)


def network(**options):
    key1, key2 = jr.split(jr.key(0))
    cell = eqx.nn.GRUCell(INPUTS, STATES, key=key1)
    return Network(cell, eqx.nn.Linear(STATES, 1, key=key2), **options)


def outside(axis):
    """The `vmap` is around the loop, and the axis of the batch this one."""
    return lambda model, xs: jnp.mean(jax.vmap(model, in_axes=axis)(xs) ** 2)


def inside(checkpoint):
    """The `vmap` is in the step."""

    def loss(model, xs):
        step = lambda h, x: jax.vmap(model.step)(h, x)
        init = jnp.zeros((BATCH, STATES))
        h, hs = eqg.filter_scan(step, init, xs, checkpoint=checkpoint)
        of_step = jax.vmap(model.readout)
        return jnp.mean((jax.vmap(of_step)(hs) if model.returns_all else of_step(h)) ** 2)

    return loss


def data(axis):
    return jnp.ones((BATCH, STEPS, INPUTS) if axis == 0 else (STEPS, BATCH, INPUTS))


def checkpoint_of(advice):
    found = re.search(r"checkpoint=('sqrt'|\d+)\)", advice.cure)[1]
    return "sqrt" if found == "'sqrt'" else int(found)


@pytest.mark.cost
@pytest.mark.parametrize("returns_all", [False, True])
def test_advice_on_a_loop_in_a_vmap_can_be_followed(returns_all):
    """The estimate is for a `vmap` in the step, as the advice says if there are outputs."""
    model, xs = network(returns_all=returns_all), data(1)
    (one, *_) = [
        a for a in eqg.explain_memory(outside(1), model, xs).advice if a.kind == "loop"
    ]
    assert ("into its step" in one.cure) == returns_all
    followed = eqg.explain_memory(inside(checkpoint_of(one)), model, xs)
    assert one.predicted == pytest.approx(followed.compiled, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, 23])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_in_chunks_is_the_same_loop(steps, reverse):
    """What the advice is measured with: also of a last chunk that is shorter."""

    def loop(w, xs):
        step = lambda h, x: (jnp.sin(w * h + x[0]), (h * x, x[1]))
        return jax.lax.scan(step, xs[0, 0], xs, reverse=reverse)

    w, xs = jnp.array(0.7), jr.normal(jr.key(0), (5, steps, 2))
    program = jax.make_jaxpr(jax.vmap(loop, in_axes=(None, 0)))(w, xs)
    (eqn,) = [e for e in program.eqns if e.primitive.name == "scan"]
    values = [jr.normal(jr.key(i), v.aval.shape) for i, v in enumerate(eqn.invars)]

    def run(checkpoint):
        out, pullback = jax.vjp(lambda *xs: run_loop(structure(eqn), xs, checkpoint), *values)
        return out, pullback([jnp.cos(x) for x in out])

    for a, b in zip(jax.tree.leaves(run(None)), jax.tree.leaves(run(4)), strict=True):
        assert jnp.allclose(a, b, atol=1e-5)


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


def of_layer(cell, xs, checkpoint):
    zeros = jnp.zeros(STATES, xs.dtype)
    layer = eqg.nn.Recurrent(cell, initial_state=zeros, checkpoint=checkpoint)
    return jnp.mean(layer(xs)[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [of_batch, of_stack, of_layer])
def test_auto_that_is_plain_scan_has_the_report_of_plain_scan(loss):
    make = lambda key: eqx.nn.GRUCell(INPUTS, STATES, dtype="float32", key=key)
    cell = (
        eqx.filter_vmap(make)(jr.split(jr.key(0), 3)) if loss is of_stack else make(jr.key(0))
    )
    # In double precision, "auto" chooses a replay.
    xs = jnp.ones((32, 200, INPUTS), "float32")
    auto, plain = (
        eqg.explain_memory(loss, cell, xs, checkpoint, compiled=False)
        for checkpoint in ("auto", None)
    )
    assert auto.found == plain.found
    assert auto.estimated == plain.estimated
    assert auto.advice == plain.advice
    assert any(a.kind == "layer" for a in auto.advice)


@pytest.mark.slow
def test_auto_of_a_step_with_a_rule_of_another_function():
    """Only the loop is entered: the rule of a function in it stays."""

    @eqg.custom_vjp
    def scaled(x):
        return 2 * jnp.sin(x)

    @scaled.def_fwd
    def _scaled_fwd(x):
        return 2 * jnp.sin(x), jnp.cos(x)

    @scaled.def_bwd
    def _scaled_bwd(residuals, ct):
        return (2 * residuals * ct,)

    def loss(cell, xs, checkpoint):
        return of_batch(lambda x, h: scaled(cell(x, h)), xs, checkpoint)

    cell = eqx.nn.GRUCell(INPUTS, STATES, dtype="float32", key=jr.key(0))
    xs = jnp.ones((32, 200, INPUTS), "float32")
    auto, plain = (
        eqg.explain_memory(loss, cell, xs, checkpoint, compiled=False)
        for checkpoint in ("auto", None)
    )
    assert auto.found == plain.found
    assert "scaled" in {r.primitive for r in auto.found}


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
    left = eqg.explain_memory(loss, followed, xs, compiled=False).estimated
    assert advice.predicted == pytest.approx(left, rel=0.05)
    assert advice.predicted < 0.3 * report.estimated


def test_a_python_number_in_the_carry():
    """The advice reads the shapes of the carry."""

    def loss(w, xs):
        step = lambda c, x: ((c[0] + 1, jnp.tanh(w * c[1] + x)), None)
        return jnp.sum(jax.vmap(lambda xs: jax.lax.scan(step, (0, 0.0), xs)[0][1])(xs))

    report = eqg.explain_memory(loss, jnp.array(0.5), jnp.ones((8, 400)), compiled=False)
    assert [a for a in report.advice if a.kind == "loop"]
