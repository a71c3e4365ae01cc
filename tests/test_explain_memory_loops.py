"""`explain_memory` of a loop in a `vmap`: its advice, against a model that follows it."""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest


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
@pytest.mark.parametrize("axis", [0, 1])
def test_advice_on_a_loop_in_a_vmap_can_be_followed(axis, returns_all):
    """JAX transposes `xs` and `ys` of a `vmap` of a loop in chunks. That is counted."""
    model, xs = network(returns_all=returns_all), data(axis)
    advice = [a for a in eqg.explain_memory(outside(axis), model, xs).advice if a.line]
    assert advice
    for one in advice:
        checkpoint = checkpoint_of(one)
        if "into its step" in one.cure:
            report = eqg.explain_memory(inside(checkpoint), model, data(1))
            # The data may be transposed once before.
            assert one.predicted - (axis == 0) * xs.nbytes <= 1.2 * report.compiled
            assert one.predicted >= 0.8 * report.compiled
        else:
            followed = network(returns_all=returns_all, checkpoint=checkpoint)
            report = eqg.explain_memory(outside(axis), followed, xs)
            assert one.predicted == pytest.approx(report.compiled, rel=0.2)


@pytest.mark.cost
def test_the_advice_is_measured_as_it_would_be_followed():
    report = eqg.explain_memory(outside(1), network(), data(1)).verify()
    stays, moves = sorted((a for a in report.advice if a.line), key=lambda a: -a.measured)
    assert "into its step" in moves.cure
    assert "into its step" not in stays.cure
    for one, loss, model in (
        (stays, outside(1), network(checkpoint=checkpoint_of(stays))),
        (moves, inside(checkpoint_of(moves)), network()),
    ):
        followed = eqg.explain_memory(loss, model, data(1))
        assert one.measured == pytest.approx(followed.compiled, rel=0.1)
    assert stays.measured > 2 * moves.measured


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [20, 23])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_in_a_vmap_in_chunks_is_the_same_loop(steps, reverse):
    """What the advice is measured with: also of a last chunk that is shorter."""
    from eqx_grads._diagnosis._memory.loop_with_checkpoints import run_loop
    from eqx_grads._jaxprs.structure import structure

    def loop(w, xs):
        step = lambda h, x: (jnp.sin(w * h + x[0]), (h * x, x[1]))
        return jax.lax.scan(step, xs[0, 0], xs, reverse=reverse)

    w, xs = jnp.array(0.7), jr.normal(jr.key(0), (5, steps, 2))
    program = jax.make_jaxpr(jax.vmap(loop, in_axes=(None, 0)))(w, xs)
    (position,) = [i for i, e in enumerate(program.eqns) if e.primitive.name == "scan"]
    eqn = program.eqns[position]
    values = [jr.normal(jr.key(i), v.aval.shape) for i, v in enumerate(eqn.invars)]

    def run(checkpoint, is_outside):
        fn = lambda *xs: run_loop(structure(eqn), xs, checkpoint, is_outside)
        out, pullback = jax.vjp(fn, *values)
        return out, pullback([jnp.cos(x) for x in out])

    expected, got = run(None, False), run(4, True)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert jnp.allclose(a, b, atol=1e-5)


@pytest.mark.thorough
def test_what_else_saves_memory_in_a_loop():
    model, xs = network(), jnp.ones((BATCH, 6 * STEPS, INPUTS))
    report = eqg.explain_memory(outside(0), model, xs, compiled=False)
    layer, transposed = report.remarks
    assert 'eqg.nn.GRU.from_cell(cell, keep="states")(xs)' in layer
    assert "keeps `xs` a second time, transposed" in transposed
    # Data with the time axis first is kept once.
    report = eqg.explain_memory(outside(1), model, jnp.swapaxes(xs, 0, 1), compiled=False)
    assert len(report.remarks) == 1
    assert not any(r.primitive == "transpose" for r in report.found)

    # The remark on the layer is a call that runs, and keeps less.
    def with_layer(model, xs):
        layer = eqg.nn.GRU.from_cell(model.cell, keep="states")
        return jnp.mean(jax.vmap(model.readout)(layer(xs)[0][:, -1]) ** 2)

    followed = eqg.explain_memory(with_layer, model, xs, compiled=False)
    assert followed.estimated < 0.5 * report.estimated
    assert not [remark for remark in followed.remarks if "from_cell" in remark]
    # With so few states the layer keeps no less.
    report = eqg.explain_memory(outside(1), model, data(1)[: STEPS // 2], compiled=False)
    assert not report.remarks


def test_a_step_that_does_more_than_its_cell_is_no_layer():
    def loss(cell, xs):
        step = lambda h, x: (jnp.tanh(2 * cell(x, h)), None)
        return jnp.sum(eqg.filter_scan(step, jnp.zeros(STATES), xs)[0])

    cell = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0))
    report = eqg.explain_memory(loss, cell, jnp.ones((4000, INPUTS)), compiled=False)
    assert not report.remarks


def test_a_step_that_does_more_than_its_cell_with_the_inputs_and_outputs():
    """The state is that of the cell: the rest is computed before and after the layer."""

    def loss(model, xs, keys):
        def step(h, x):
            x, key = x
            h = model.cell(jnp.tanh(x) * jr.uniform(key, x.shape), h)
            return h, model.readout(h)

        return jnp.mean(eqg.filter_scan(step, jnp.zeros(STATES), (xs, keys))[1] ** 2)

    keys = jr.split(jr.key(0), 4000)
    xs = jnp.ones((4000, INPUTS))
    report = eqg.explain_memory(loss, network(), xs, keys, compiled=False)
    (remark,) = report.remarks
    assert "from_cell(cell" in remark
    assert "before and after the layer" in remark

    def uses_state(model, xs):
        step = lambda h, x: (model.cell(x, h), model.readout(h))
        return jnp.mean(eqg.filter_scan(step, jnp.zeros(STATES), xs)[1] ** 2)

    assert not eqg.explain_memory(uses_state, network(), xs, compiled=False).remarks


def test_auto_that_is_plain_scan():
    """The loop is a call with a rule, into which no checkpoint is put for a measurement."""

    def loss(checkpoint):
        def of_sequence(cell, xs):
            step = lambda h, x: (cell(x, h),) * 2
            return eqg.filter_scan(step, jnp.zeros(STATES), xs, checkpoint=checkpoint)[1]

        return lambda cell, xs: jnp.mean(jax.vmap(of_sequence, (None, 0))(cell, xs) ** 2)

    cell, xs = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0)), jnp.ones((32, 200, INPUTS))
    reports = {
        checkpoint: eqg.explain_memory(loss(checkpoint), cell, xs, compiled=False)
        for checkpoint in ("auto", "replay", 5)
    }
    is_named = lambda report: any('`checkpoint="auto"`' in r for r in report.remarks)
    is_plain = reports["auto"].estimated > 2 * reports["replay"].estimated
    assert is_named(reports["auto"]) == is_plain
    assert not is_named(reports["replay"])
    assert not is_named(reports[5])
    if is_plain:
        assert reports[5].estimated < reports["auto"].estimated / 2


def test_a_loop_that_is_replayed_is_not_called_plain():
    cell, xs = eqx.nn.GRUCell(4, 32, key=jr.key(0)), jnp.ones((2000, 4))

    def loss(cell, xs, checkpoint):
        step = lambda h, x: (cell(x, h), None)
        return jnp.sum(eqg.filter_scan(step, jnp.zeros(32), xs, checkpoint=checkpoint)[0])

    report, of_16 = (
        eqg.explain_memory(loss, cell, xs, checkpoint, compiled=False)
        for checkpoint in ("replay", 16)
    )
    (remark,) = report.remarks
    assert "is replayed" in remark
    assert "Nothing but what is noted" in str(report)
    assert of_16.estimated < report.estimated / 2  # as it says


@pytest.mark.parametrize("layer", [eqg.nn.GRU, eqg.nn.LSTM])
def test_a_layer_that_keeps_its_gates(layer):
    loss = lambda layer, x: jnp.sum(layer(x)[0])
    gates, states = (
        eqg.explain_memory(
            loss, layer(4, 32, key=jr.key(0), keep=keep), jnp.ones((8, 500, 4)), compiled=False
        )
        for keep in ("gates", "states")
    )
    assert [r for r in gates.remarks if 'keep="states"' in r]
    assert not [r for r in states.remarks if 'keep="states"' in r]
    assert states.estimated < 0.7 * gates.estimated


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
