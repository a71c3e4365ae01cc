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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert not [remark for remark in report.remarks if "from_cell" in remark]


def test_a_step_that_does_more_than_its_cell_is_no_layer():
    def loss(cell, xs):
        step = lambda h, x: (jnp.tanh(2 * cell(x, h)), None)
        return jnp.sum(eqg.filter_scan(step, jnp.zeros(STATES), xs)[0])

    cell = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0))
    assert not layer_remark(loss, cell, jnp.ones((4000, INPUTS)))


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

    assert not layer_remark(uses_state, network(), xs)


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
    if jax.default_backend() != "cpu":  # where it is plain scan from the start
        assert auto.remarks == plain.remarks
        return
    (note,) = set(auto.remarks) - set(plain.remarks)
    assert '`checkpoint="auto"`, which chose plain scan' in note
    assert set(plain.remarks) < set(auto.remarks)
    if loss is of_batch:
        measured, expected = ([a.measured for a in r.verify().advice] for r in (auto, plain))
        assert measured == expected
        for checkpoint in ("replay", 5):  # what the remarks say
            report = eqg.explain_memory(loss, cell, xs, checkpoint, compiled=False)
            assert report.estimated < auto.estimated / 2
            assert not any('`checkpoint="auto"`' in r for r in report.remarks)


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


class Unit(eqx.Module):
    """A gated unit of the user's own."""

    forget: eqx.nn.Linear
    new: eqx.nn.Linear

    def __init__(self, key):
        key1, key2 = jr.split(key)
        self.forget = eqx.nn.Linear(INPUTS + STATES, STATES, key=key1)
        self.new = eqx.nn.Linear(INPUTS + STATES, STATES, key=key2)

    def __call__(self, x, h):
        gate = jax.nn.sigmoid(self.forget(jnp.concatenate([x, h])))
        return (1 - gate) * h + gate * jnp.tanh(self.new(jnp.concatenate([x, gate * h])))


def replay_remark(report):
    return "".join(r for r in report.remarks if "can be replayed" in r)


def test_a_loop_that_can_be_replayed():
    cell, xs = Unit(jr.key(0)), jnp.ones((8, 200, INPUTS))
    report, replayed = (
        eqg.explain_memory(of_batch, cell, xs, checkpoint, compiled=False)
        for checkpoint in (None, "replay")
    )
    remark = replay_remark(report)
    assert "`eqg.nn.Recurrent` runs any cell" in remark
    assert not replay_remark(replayed)
    number, unit = re.search(r"By the estimate, ([\d.]+) (KiB|MiB) are left", remark).groups()
    left = float(number) * {"KiB": 2**10, "MiB": 2**20}[unit]
    assert left == pytest.approx(replayed.estimated, rel=0.1)
    # The layer is there already, or no Module is called.
    layer = eqg.nn.Recurrent(cell, initial_state=jnp.zeros(STATES), checkpoint=None)
    of_outputs = lambda layer, xs: jnp.mean(layer(xs)[0] ** 2)
    remark = replay_remark(eqg.explain_memory(of_outputs, layer, xs, compiled=False))
    assert remark
    assert "Recurrent" not in remark
    bare = lambda w, xs: of_batch(lambda x, h: jnp.tanh(w @ jnp.tanh(x + jnp.sin(h))), xs, None)
    remark = replay_remark(eqg.explain_memory(bare, jnp.eye(STATES), xs, compiled=False))
    assert remark
    assert "Recurrent" not in remark


def test_a_loop_that_is_better_not_replayed():
    xs = jnp.ones((8, 200, INPUTS))
    with_host = lambda x: jax.pure_callback(lambda x: x, x, jax.lax.stop_gradient(x))
    with_branch = lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    for change in (with_host, with_branch):
        step = lambda cell, x, h, change=change: jnp.tanh(cell(change(x), h))
        loss = lambda cell, xs, step=step: jnp.mean(
            jax.lax.scan(lambda h, x: (step(cell, x, h),) * 2, jnp.zeros(STATES), xs)[1] ** 2
        )
        report = eqg.explain_memory(loss, Unit(jr.key(0)), xs[0], compiled=False)
        assert [a for a in report.advice if a.kind == "loop"]
        assert not replay_remark(report)


@pytest.mark.slow
def test_a_vmap_to_be_moved_where_the_outputs_are_as_large():
    """To move it saves nothing if the loss swaps the axes of the outputs back."""
    report = eqg.explain_memory(
        of_batch, Unit(jr.key(0)), jnp.ones((8, 200, INPUTS)), None, compiled=False
    )
    first, moves = (one for one in report.advice if one.line)
    assert "into its step" in moves.cure
    assert moves.predicted < first.predicted  # by the outputs that are not copied
    assert first.cure.startswith("Run the loop")
    assert "uses the outputs with the time axis first" in moves.cure
    assert "each step twice" in moves.cure
    assert "each step twice" in first.cure
    measured = {one.cure: one.measured for one in report.verify().advice}
    assert measured[first.cure] <= measured[moves.cure]
    # Without outputs, nothing is said of them.
    last = eqg.explain_memory(outside(1), network(), data(1), compiled=False)
    (moves,) = [one for one in last.advice if "into its step" in one.cure]
    assert "outputs" not in moves.cure


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


def test_a_layer_that_is_made_in_the_call_of_a_model():
    """As `from_cell` is used: the layer is not among those of the model."""

    class Model(eqx.Module):
        cell: eqx.nn.GRUCell
        keep: str = eqx.field(static=True)

        def __call__(self, x):
            return eqg.nn.GRU.from_cell(self.cell, keep=self.keep)(x)[0]

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x))

    cell = eqx.nn.GRUCell(4, 32, key=jr.key(0))
    remarks = {
        keep: eqg.explain_memory(
            loss, Model(cell, keep), jnp.ones((8, 500, 4)), compiled=False
        ).remarks
        for keep in ("gates", "states")
    }
    (remark,) = [r for r in remarks["gates"] if 'keep="states"' in r]
    assert remark.startswith("The `GRU` at test_explain_memory_loops.py:")
    assert not [r for r in remarks["states"] if 'keep="states"' in r]


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


# ---------------------------------------------------------------- loops that a layer replaces


def by_where(on, new, old):
    return jax.tree.map(lambda n, o: jnp.where(on, n, o), new, old)


def by_select(on, new, old):
    return jax.tree.map(lambda n, o: jax.lax.select(jnp.full(n.shape, on), n, o), new, old)


def by_other_case(on, new, old):
    return jax.tree.map(lambda n, o: jnp.where(~on, o, n), new, old)


def zero_state(cell):
    zeros = jnp.zeros(STATES)
    return (zeros, zeros) if isinstance(cell, eqx.nn.LSTMCell) else zeros


def with_counter(masked, cell, xs, length):
    """The index of the step is in the carry."""

    def step(carry, x):
        t, state = carry
        state = masked(t < length, cell(x, state), state)
        return (t + 1, state), None

    return jax.lax.scan(step, (0, zero_state(cell)), xs)[0][1]


def with_times(masked, cell, xs, length):
    """The index of the step is an input."""

    def step(state, inputs):
        t, x = inputs
        return masked(t < length, eqx.filter_jit(cell)(x, state), state), None

    return eqg.filter_scan(step, zero_state(cell), (jnp.arange(len(xs)), xs))[0]


def with_mask(masked, cell, xs, length):
    """The mask is an input."""

    def step(state, inputs):
        on, x = inputs
        state = masked(on, cell(x, state), state)
        return state, jax.tree.leaves(state)[0]

    return jax.lax.scan(step, zero_state(cell), (jnp.arange(len(xs)) < length, xs))


def one_state(loop):
    return lambda cell, xs, length: jnp.sum(jax.tree.leaves(loop(cell, xs, length))[0] ** 2)


def states_of_batch(loop):
    run = jax.vmap(loop, (None, 0, 0))
    return lambda cell, xs, lengths: jnp.sum(jax.tree.leaves(run(cell, xs, lengths))[0] ** 2)


def states_of_filtered_batch(loop):
    run = eqx.filter_vmap(loop, in_axes=(None, 0, 0))
    return lambda cell, xs, lengths: jnp.sum(jax.tree.leaves(run(cell, xs, lengths))[0] ** 2)


def batch_in_step(cell, xs, lengths):
    """The `vmap` is in the step, and the mask has an axis for the units."""

    def step(state, inputs):
        t, x = inputs
        new = jax.vmap(cell)(x, state)
        return by_where((t < lengths)[:, None], new, state), None

    init = jax.tree.map(lambda s: jnp.zeros((len(xs), STATES)), zero_state(cell))
    times = jnp.arange(xs.shape[1])
    last, _ = jax.lax.scan(step, init, (times, jnp.swapaxes(xs, 0, 1)))
    return jnp.sum(jax.tree.leaves(last)[0] ** 2)


def layer_remark(loss, cell, *args):
    remarks = eqg.explain_memory(loss, cell, *args, compiled=False).remarks
    return "".join(remark for remark in remarks if "from_cell" in remark)


SEQUENCE = jnp.ones((1200, INPUTS)), jnp.array(700)
SEQUENCES = jnp.ones((BATCH, 100, INPUTS)), jnp.arange(BATCH) * 6 + 1


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
@pytest.mark.parametrize("loop", [with_counter, with_times, with_mask])
@pytest.mark.parametrize(
    ("batched", "masked", "args"),
    [
        (one_state, by_where, SEQUENCE),
        (one_state, by_select, SEQUENCE),
        (states_of_batch, by_where, SEQUENCES),
        (states_of_batch, by_other_case, SEQUENCES),
        (states_of_filtered_batch, by_select, SEQUENCES),
    ],
)
def test_a_loop_with_a_mask_of_lengths_is_a_layer(batched, masked, args, loop, cell):
    cell = cell(INPUTS, STATES, key=jr.key(0))
    loss = batched(lambda *args: loop(masked, *args))
    remark = layer_remark(loss, cell, *args)
    name = "GRU" if isinstance(cell, eqx.nn.GRUCell) else "LSTM"
    assert f'eqg.nn.{name}.from_cell(cell, keep="states")(xs, lengths=lengths)' in remark
    assert "If these are the steps after the end" in remark
    assert "does more" not in remark
    assert "`state` is the first state" not in remark


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
def test_the_layer_with_lengths_is_the_loop_with_a_mask(cell):
    """What the remark says: the same last state, and zeros after the end; it keeps less."""
    cell = cell(INPUTS, STATES, key=jr.key(0))
    xs, lengths = jr.normal(jr.key(1), SEQUENCES[0].shape), SEQUENCES[1]
    loop = jax.vmap(lambda *args: with_mask(by_where, *args), (None, 0, 0))
    layer = {"GRUCell": eqg.nn.GRU, "LSTMCell": eqg.nn.LSTM}[type(cell).__name__]
    run = lambda cell, xs, lengths: layer.from_cell(cell, keep="states")(xs, lengths=lengths)
    last, outputs = loop(cell, xs, lengths)
    ys, state = run(cell, xs, lengths)
    for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(state), strict=True):
        assert jnp.allclose(a, b, atol=1e-5)
    is_on = jnp.arange(xs.shape[1])[None, :, None] < lengths[:, None, None]
    assert jnp.allclose(jnp.where(is_on, outputs, 0), ys, atol=1e-5)
    losses = [
        lambda cell, *args, fn=fn, i=i: jnp.sum(jax.tree.leaves(fn(cell, *args)[i])[0] ** 2)
        for fn, i in ((loop, 0), (run, 1))
    ]
    before, after = (
        eqg.explain_memory(loss, cell, xs, lengths, compiled=False) for loss in losses
    )
    assert after.estimated < 0.6 * before.estimated


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
def test_a_mask_with_an_axis_for_the_units(cell):
    cell = cell(INPUTS, STATES, key=jr.key(0))
    assert "(xs, lengths=lengths)" in layer_remark(batch_in_step, cell, *SEQUENCES)


def test_a_cell_under_cond_in_a_vmap_is_a_layer():
    def loop(cell, xs, length):
        def step(h, inputs):
            t, x = inputs
            return jax.lax.cond(t < length, lambda: cell(x, h), lambda: h), None

        return jax.lax.scan(step, jnp.zeros(STATES), (jnp.arange(len(xs)), xs))[0]

    cell = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0))
    remark = layer_remark(states_of_batch(loop), cell, *SEQUENCES)
    assert "(xs, lengths=lengths)" in remark
    assert "does more" not in remark


def zoneout(cell, h, x):
    return jnp.where(jr.bernoulli(jr.key(0), 0.9, h.shape), cell(x, h), h)


def mask_of_the_state(cell, h, x):
    new = cell(x, h)
    return jnp.where(jnp.max(new) > 0.5, new, h)


def mask_of_the_old_state(cell, h, x):
    return jnp.where(jnp.max(h) < 0.5, cell(x, h), h)


def reset(cell, h, x):
    return jnp.where(x[0] > 0, cell(x, h), 0.0)


def two_calls(cell, h, x):
    return cell(2 * x, cell(x, h))


def multiplied(cell, h, x):
    """This may be a mask of lengths, but so may be a gate of another kind."""
    m = (x[0] > 0).astype(h.dtype)
    return m * cell(x, h) + (1 - m) * h


@pytest.mark.parametrize(
    "step", [multiplied, zoneout, mask_of_the_state, mask_of_the_old_state, reset, two_calls]
)
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_mask_that_is_not_one_of_lengths(step, is_batch):
    def loop(cell, xs, _):
        return jax.lax.scan(lambda h, x: (step(cell, h, x), None), jnp.zeros(STATES), xs)[0]

    cell = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0))
    batched, args = (states_of_batch, SEQUENCES) if is_batch else (one_state, SEQUENCE)
    assert not layer_remark(batched(loop), cell, *args)


def test_a_mask_of_a_part_of_the_state():
    def loop(cell, xs, length):
        def step(state, inputs):
            t, x = inputs
            h, c = cell(x, state)
            return (jnp.where(t < length, h, state[0]), c), None

        zeros = jnp.zeros(STATES)
        return jax.lax.scan(step, (zeros, zeros), (jnp.arange(len(xs)), xs))[0]

    cell = eqx.nn.LSTMCell(INPUTS, STATES, key=jr.key(0))
    assert not layer_remark(one_state(loop), cell, *SEQUENCE)


def stopped(cell, state, x):
    return cell(x, jax.lax.stop_gradient(state))


def stopped_at_some_steps(cell, state, x):
    stopped = jax.tree.map(jax.lax.stop_gradient, state)
    return cell(x, by_where(x[0] > 1, stopped, state))


def with_noise_in_weights(cell, state, x):
    weights = cell.weight_hh * (1 + x[0])
    return eqx.tree_at(lambda cell: cell.weight_hh, cell, weights)(x, state)


@pytest.mark.parametrize("cell", [eqx.nn.GRUCell, eqx.nn.LSTMCell])
@pytest.mark.parametrize("step", [stopped, stopped_at_some_steps, with_noise_in_weights])
def test_a_step_with_another_derivative_or_other_weights(step, cell):
    """A layer has the same values, but the derivative goes through all steps; and it has the
    same weights at all steps."""

    def loop(cell, xs, _):
        return jax.lax.scan(lambda h, x: (step(cell, h, x), None), zero_state(cell), xs)[0]

    cell = cell(INPUTS, STATES, key=jr.key(0))
    assert not layer_remark(one_state(loop), cell, *SEQUENCE)


def swapped(cell, state, x):
    return cell(x, state)[::-1]


def without_cell_state(cell, state, x):
    return cell(x, (state[0], jnp.ones(STATES)))[0], state[1]


def one_for_both(cell, state, x):
    return cell(x, (state[0], state[0]))


def two_masks(cell, state, x):
    h, c = cell(x, state)
    return jnp.where(x[0] > 0, h, state[0]), jnp.where(x[0] > 1, c, state[1])


def opposite_masks(cell, state, x):
    h, c = cell(x, state)
    return jnp.where(x[0] > 0, h, state[0]), jnp.where(x[0] > 0, state[1], c)


def one_mask_twice(cell, state, x):
    new = cell(x, state)
    return jax.tree.map(lambda a, b: jnp.where(x[0] > 0, a, b), new, state)


def renamed(cell, state, x):
    """The layer does the same, with its states in another order."""
    return cell(x, state[::-1])[::-1]


OF_NO_LAYER = [swapped, without_cell_state, one_for_both, two_masks, opposite_masks]


@pytest.mark.parametrize("step", [*OF_NO_LAYER, one_mask_twice, renamed])
def test_the_two_states_of_an_lstm(step):
    def loop(cell, xs, _):
        return jax.lax.scan(lambda s, x: (step(cell, s, x), None), zero_state(cell), xs)[0]

    cell = eqx.nn.LSTMCell(INPUTS, STATES, key=jr.key(0))
    is_layer = step not in OF_NO_LAYER
    assert bool(layer_remark(one_state(loop), cell, *SEQUENCE)) == is_layer


@pytest.mark.parametrize("halts", [False, True])
def test_a_loop_whose_output_is_an_input_of_the_next_step(halts):
    """A decoder, and a loop that stops by its state: no layer has these inputs or lengths."""

    def loss(model, xs):
        def step(carry, x):
            h, y, is_done = carry
            new = model.cell(x if halts else x + y, h)
            h = jnp.where(is_done, h, new) if halts else new
            y = model.readout(h)[0]
            return (h, y, is_done | (y > 0.3)), y

        init = jnp.zeros(STATES), jnp.zeros(()), jnp.zeros((), bool)
        return jnp.sum(jax.lax.scan(step, init, xs)[1] ** 2)

    assert not layer_remark(loss, network(), SEQUENCE[0])


def test_the_direction_and_the_first_state_of_the_layer():
    def loop(cell, xs, first):
        step = lambda h, x: (cell(x, h),) * 2
        return jax.lax.scan(step, first, xs, reverse=True)[1]

    cell, xs = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0)), SEQUENCE[0]
    first = 0.1 * jnp.ones(STATES)
    remark = layer_remark(one_state(loop), cell, xs, first)
    assert 'from_cell(cell, keep="states", reverse=True)(xs, state)' in remark
    assert "`state` is the first state of the loop" in remark
    layer = eqg.nn.GRU.from_cell(cell, keep="states", reverse=True)
    assert jnp.allclose(layer(xs, first)[0], loop(cell, xs, first), atol=1e-5)


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_python_number_in_the_carry(is_batch):
    """The advice under `vmap` reads the shapes of the carry."""
    loop = lambda *args: with_counter(by_where, *args)
    batched, args = (states_of_batch, SEQUENCES) if is_batch else (one_state, SEQUENCE)
    cell = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0))
    report = eqg.explain_memory(batched(loop), cell, *args, compiled=False)
    assert [a for a in report.advice if a.kind == "loop"]


def test_several_loops_have_one_remark():
    """Those of one type of cell, by each line that runs them."""

    class Both(eqx.Module):
        forward: eqx.nn.GRUCell
        backward: eqx.nn.GRUCell
        other: eqx.nn.LSTMCell

    def loss(model, xs, length):
        times = jnp.arange(len(xs))

        def run(cell, xs, reverse):
            def step(h, inputs):
                t, x = inputs
                h = by_where(t < length, cell(x, h), h)
                return h, jax.tree.leaves(h)[0]

            return jax.lax.scan(step, zero_state(cell), (times, xs), reverse=reverse)[1]

        ys = run(model.forward, xs, False), run(model.backward, xs, True)
        return jnp.sum(run(model.other, jnp.concatenate(ys, -1), False) ** 2)

    keys = jr.split(jr.key(0), 3)
    cells = [eqx.nn.GRUCell(INPUTS, STATES, key=key) for key in keys[:2]]
    model = Both(*cells, eqx.nn.LSTMCell(2 * STATES, STATES, key=keys[2]))
    remarks = eqg.explain_memory(loss, model, *SEQUENCE, compiled=False).remarks
    of_gru, of_lstm = (remark for remark in remarks if "from_cell" in remark)
    call = 'eqg.nn.GRU.from_cell({}, keep="states"{})(xs, lengths=lengths)'
    assert call.format("forward", "") in of_gru
    assert call.format("backward", ", reverse=True") in of_gru
    assert "run an `eqx.nn.GRUCell` each" in of_gru
    assert "`num_layers` or `bidirectional`" in of_gru
    assert "runs an `eqx.nn.LSTMCell`: `eqg.nn.LSTM.from_cell(other" in of_lstm


def test_a_fori_loop_of_a_cell():
    def loop(cell, xs, _):
        step = lambda i, h: cell(xs[i], h)
        return jax.lax.fori_loop(0, len(xs), step, jnp.zeros(STATES))

    cell = eqx.nn.GRUCell(INPUTS, STATES, key=jr.key(0))
    for batched, args in ((one_state, SEQUENCE), (states_of_batch, SEQUENCES)):
        assert 'from_cell(cell, keep="states")(xs)' in layer_remark(batched(loop), cell, *args)
