"""The values that a loss keeps, against JAX's residuals, closed forms, and compiled
programs."""

import functools as ft
import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._diagnosis._memory import explain_memory as explain_memory_module
from eqx_grads._diagnosis._memory.checkpoints import candidates, undoes_checkpoints
from eqx_grads._diagnosis._memory.maps import seeing_maps
from eqx_grads._diagnosis._memory.residuals import Gradient
from eqx_grads._diagnosis.origins import NumberedLoss
from eqx_grads._diagnosis.traced_loss import trace_loss
from eqx_grads._jaxprs.evaluate import evaluate
from jax.extend.core import Literal
from jax.interpreters import partial_eval as pe

from .helpers import assert_close, assert_linear_in_size


KEY = jr.key(0)
SIZE = jnp.zeros(()).dtype.itemsize  # of a float
THIS_FILE = __file__


def line_of(text: str) -> int:
    """The line of this file that has this text first."""
    with open(THIS_FILE) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


# ---------------------------------------------------------------- models


class Recurrent(eqx.Module):
    cell: eqx.Module
    readout: eqx.nn.Linear
    checkpoint: int | str | None = eqx.field(static=True, default=None)

    def __call__(self, xs):
        step = lambda h, x: (self.cell(x, h), None)
        h, _ = eqg.filter_scan(  # the loop of `Recurrent`
            step, jnp.zeros(self.cell.hidden_size), xs, checkpoint=self.checkpoint
        )
        return self.readout(h)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


class Sequential(eqx.Module):
    blocks: list

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def gru(checkpoint=None, steps=96):
    model = Recurrent(eqx.nn.GRUCell(4, 24, key=KEY), eqx.nn.Linear(24, 1, key=KEY), checkpoint)
    return mean_square, model, (jnp.ones((8, steps, 4)),)


def mlp():
    model = eqx.nn.MLP(32, 32, 32, 6, activation=jnp.tanh, key=KEY)
    return mean_square, model, (jnp.ones((64, 32)),)


def transformer():
    blocks = [
        Block(
            eqx.nn.MultiheadAttention(2, 16, key=key),
            eqx.nn.LayerNorm(16),
            eqx.nn.MLP(16, 16, 64, 1, activation=jax.nn.gelu, key=key),
        )
        for key in jr.split(KEY, 2)
    ]
    return mean_square, Sequential(blocks), (jnp.ones((8, 32, 16)),)


def nested():
    cell = eqx.nn.GRUCell(2, 32, key=KEY)

    def loss(cell, xs):
        def outer(h, xs):
            h, _ = jax.lax.scan(lambda h, x: (jax.vmap(cell)(x, h), None), h, xs)  # inner loop
            return jnp.tanh(h), None

        h, _ = jax.lax.scan(outer, jnp.zeros((16, 32)), xs)  # outer loop
        return jnp.sum(h**2)

    return loss, cell, (jnp.ones((12, 20, 16, 2)),)


def scanned_layers():
    make = lambda key: eqx.nn.MLP(32, 32, 64, 2, activation=jnp.tanh, key=key)
    model = eqx.filter_vmap(make)(jr.split(KEY, 24))

    def loss(model, x):
        arrays, static = eqx.partition(model, eqx.is_array)
        step = lambda x, layer: (x + jax.vmap(eqx.combine(layer, static))(x), None)
        return jnp.sum(jax.lax.scan(step, x, arrays)[0] ** 2)

    return loss, model, (jnp.ones((512, 32)),)


MODELS = [mlp, gru, transformer, nested, scanned_layers]
IN_LOOPS = [gru, nested, scanned_layers]


@ft.cache
def report_of(case):
    """With the compiled gradient. Each takes a second or so: made once."""
    loss, model, args = case()
    return eqg.explain_memory(loss, model, *args)


def used_by_pullback(loss, model, *args) -> int:
    """The bytes of the leaves of the pullback that the backward pass uses, without inputs."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    trees = []

    def forward(arrays, args):
        _, pullback = jax.vjp(lambda arrays: loss(eqx.combine(arrays, static), *args), arrays)
        leaves, treedef = jax.tree.flatten(pullback)
        trees[:] = [treedef]
        return leaves

    program = jax.make_jaxpr(forward)(arrays, args).jaxpr
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.outvars]
    one = jnp.ones(())
    backward = jax.make_jaxpr(lambda leaves: jax.tree.unflatten(*trees, leaves)(one))(types)
    _, used = pe.dce_jaxpr(backward.jaxpr, [True] * len(backward.out_avals))
    pairs = zip(program.outvars, used, strict=True)
    kept = {v for v, u in pairs if u and not isinstance(v, Literal)} - {*program.invars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


# ---------------------------------------------------------------- what is kept


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_total_is_what_jax_says(model):
    report = report_of(model)
    loss, model, args = model()
    computed = used_by_pullback(loss, model, *args)
    assert report.total == sum(r.bytes for r in report.found) == computed
    assert sum(report.by_path().values()) == sum(report.by_line().values()) == computed
    assert [r.bytes for r in report.found] == sorted(r.bytes for r in report.found)[::-1]


def test_a_layer_with_its_own_backward_pass():
    """With wrapped cells, it ran a plain scan: the sizes and the advice belonged to the plain
    scan."""
    layer, xs = eqg.nn.GRU(2, 8, key=KEY), jnp.ones((16, 300, 2))
    loss = lambda layer, xs: jnp.sum(jax.vmap(lambda x: layer(x)[0])(xs) ** 2)
    report = eqg.explain_memory(loss, layer, xs, compiled=False)
    assert report.total == used_by_pullback(loss, layer, xs)
    assert {r.path for r in report.found} <= {"GRU", ""}
    assert not [a for a in report.advice if a.kind == "loop"]


def test_lines_and_layers():
    def loss(model, x):
        h = jax.vmap(model.layers[0])(x)
        h = jnp.tanh(h)  # here is tanh
        return jnp.sum(jnp.sin(jax.vmap(model.layers[1])(h)))  # here is sin

    model = eqx.nn.MLP(3, 3, 8, 1, key=KEY)
    report = eqg.explain_memory(loss, model, jnp.ones((5, 3)), compiled=False)
    by_name = {r.primitive: r for r in report.found}
    assert by_name["tanh"].line == line_of("# here is tanh")
    assert by_name["tanh"].code.startswith("h = jnp.tanh(h)")
    assert by_name["sin"].line == line_of("# here is sin")
    assert by_name["tanh"].file == THIS_FILE
    assert by_name["tanh"].shape == (5, 8)
    assert by_name["tanh"].bytes == 5 * 8 * SIZE
    kept = {r.primitive for r in report.inputs}
    assert kept == {"model.layers[1].weight", "x"}
    assert {r.path for r in report.found} == {""}  # computed outside of the layers


@pytest.mark.parametrize("checkpoint", ["sqrt", 8, "replay"])
def test_checkpoints_of_filter_scan(checkpoint):
    """The carries before each chunk, and the inputs. A replay keeps all carries."""
    report = eqg.explain_memory(*flat(gru(checkpoint)), compiled=False)
    chunks = {"sqrt": (8, 12), 8: (12,), "replay": (96,)}[checkpoint]
    stacks = [r for r in report.found if r.n_steps > 1 and r.dtype.startswith("float")]
    assert sum(r.bytes for r in stacks) in [n * 8 * 24 * SIZE for n in chunks]
    assert {r.line for r in stacks} <= {line_of("# the loop of"), line_of("step = lambda h, x")}
    # Beside these, there are the transposed data.
    assert report.total < sum(r.bytes for r in stacks) + 2 * args_bytes(gru()[2]) + 2000


def flat(case):
    loss, model, args = case
    return loss, model, *args


def args_bytes(args):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args))


@pytest.mark.parametrize("wrap", [eqg.filter_checkpoint, eqx.filter_checkpoint])
def test_checkpoint_keeps_inputs_only(wrap):
    def loss(model, x):
        x = x * jnp.sum(model.layers[0].bias)
        return jnp.sum(wrap(model)(x))

    model = eqx.nn.MLP(8, 8, 64, 3, activation=jnp.tanh, key=KEY)
    report = eqg.explain_memory(loss, model, jnp.ones(8), compiled=False)
    assert [(r.primitive, r.bytes) for r in report.found] == [("mul", 8 * SIZE)]


def test_control_flow():
    def loss(w, x):
        y = jax.jit(lambda w: jnp.sin(w * x))(w)  # jit
        y = jax.lax.cond(x[0] > 0, jnp.cos, lambda y: y * y, y)  # cond
        y = jax.lax.fori_loop(0, 6, lambda i, y: jnp.tanh(y), y)  # fori
        y = jax.lax.scan(lambda c, a: (c, jnp.exp(a)), 0.0, y, reverse=True)[1]  # map
        n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
        return jnp.sum(y) * n.astype(y.dtype)

    report = eqg.explain_memory(loss, jnp.ones(5), jnp.ones(5), compiled=False)
    assert report.total == used_by_pullback(loss, jnp.ones(5), jnp.ones(5))
    lines = {r.line for r in report.found}
    assert {line_of(f"# {name}") for name in ("jit", "cond", "fori", "map")} <= lines
    assert {r.n_steps for r in report.found if r.line == line_of("# fori")} == {6}


@eqg.custom_vjp
def ours(x):
    return jnp.sin(x)


ours.def_fwd(lambda x: (jnp.sin(x), jnp.outer(x, x) @ jnp.outer(x, x)))
ours.def_bwd(lambda residuals, ct: (ct * residuals[0],))
MASK = jnp.arange(9.0) > 3
KINDS = {
    "rule": (ours, {("ours", "rule", 81 * SIZE)}),
    "constant": (
        lambda w: jnp.where(MASK, 2 * w, 0.0),
        {("constant", "constant", 9)},
    ),
    "loop": (
        lambda w: jax.lax.scan(lambda h, x: (jnp.sin(h * x), None), w[0], w)[0],
        {("sin", "carry", 9 * SIZE), ("sin", "computed", 9 * SIZE)},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name):
    fn, expected = KINDS[name]
    report = eqg.explain_memory(lambda w: jnp.sum(fn(w)), jnp.ones(9), compiled=False)
    assert {(r.primitive, r.kind, r.bytes) for r in report.found} == expected


def test_implicit_solve():
    optx = pytest.importorskip("optimistix")

    def loss(w):
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        fn = lambda y, w: y - 0.5 * jnp.tanh(w * y) - 1
        return jnp.sum(optx.root_find(fn, solver, jnp.ones(3), args=w).value ** 2)

    report = eqg.explain_memory(loss, jnp.ones(3), compiled=False)
    assert report.found
    assert all(r.n_steps == 1 for r in report.found)  # no step of the solver is kept


def test_a_large_program_is_compiled_on_demand(monkeypatch):
    monkeypatch.setattr(explain_memory_module, "_MOST_COMPILED", 5)
    report = eqg.explain_memory(lambda w: jnp.sum(jnp.sin(jnp.exp(jnp.cos(w)))), jnp.ones(64))
    assert report.compiled is None
    assert re.search(r"has \d+ equations, and was not compiled", str(report))
    assert report.verify().compiled is not None
    assert "not compiled" not in str(report.verify())


# ---------------------------------------------------------------- advice


@pytest.mark.slow
@pytest.mark.parametrize("model", [*IN_LOOPS, transformer])
def test_what_advice_saves_is_measured(model):
    report = report_of(model)
    verified = report.verify()
    assert sorted(a.cure for a in verified.advice) == sorted(a.cure for a in report.advice)
    measured = [a.measured for a in verified.advice]
    assert measured == sorted(measured)
    assert verified.found == report.found
    for advice in verified.advice:
        assert advice.is_undone == (model is transformer and undoes_checkpoints())
        if not advice.is_undone and advice.kind != "map":
            assert advice.saves == pytest.approx(report.compiled - advice.measured, rel=0.2)
    text = " ".join(str(verified).split())
    assert sum(f"advice: {a.cure}" in text for a in verified.advice) == 1  # one thing to do


@pytest.mark.slow
@pytest.mark.parametrize("model", [gru, nested, transformer])
def test_advice_changes_no_result(model):
    loss, model, args = model()
    args = jax.tree.map(lambda x: jr.normal(KEY, x.shape, x.dtype), args)
    traced, again = retraced(loss, model, args)
    numbered = NumberedLoss(traced)
    gradient = Gradient(numbered, traced, numbered.origin_of)
    n, values = len(traced.leaves), traced.values
    of = lambda fn: jax.jit(jax.value_and_grad(lambda arrays: fn(*arrays, *values[n:])))(
        values[:n]
    )
    expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, *args)
    found = list(candidates(numbered, gradient.sources, (), again))
    assert {c.advice.kind for c in found} >= {"layer"}
    for candidate in found:
        got = of(candidate.apply())
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), eps=2000)


def retraced(loss, model, args):
    trace = lambda **options: trace_loss(
        "test", loss, model, args, {}, steps_are_visible=False, **options
    )
    again = lambda **options: lambda *values: evaluate(trace(**options).program, values)[0]
    return trace(), again


def test_advice_names_the_loop_or_the_layer():
    report = eqg.explain_memory(*flat(gru()), compiled=False)
    assert report.compiled is None
    do = " ".join(advice.cure for advice in report.advice)
    assert f"the loop at test_explain_memory.py:{line_of('# the loop of')}" in do
    assert "Wrap `cell` in `eqg.filter_checkpoint`" in do
    of_steps = [r for r in report.found if r.n_steps == 96]
    assert all(r.cure == report.advice[0].cure for r in of_steps)
    assert "each call of `blocks[*]` in" in report_of(transformer).advice[0].cure


@pytest.mark.slow
def test_advice_can_be_followed():
    """A model with `checkpoint=k` needs the memory that the advice predicts."""
    report = eqg.explain_memory(*flat(gru()), compiled=False)
    advice = next(a for a in report.advice if "filter_scan" in a.cure)
    checkpoint = re.search(r"checkpoint=(.*)\)", advice.cure)[1].strip("'")
    followed = eqg.explain_memory(*flat(gru(int(checkpoint))))
    plain = report_of(gru).compiled
    assert plain - followed.compiled == pytest.approx(advice.saves, rel=0.2)
    assert not [a for a in followed.advice if "filter_scan" in a.cure]


def test_no_advice_where_nothing_is_saved():
    report = eqg.explain_memory(lambda w: jnp.sum(jnp.sin(w @ w) ** 2), jnp.ones((64, 64)))
    assert not report.advice
    assert "No checkpoint saves a tenth of it." in str(report)


# ---------------------------------------------------------------- a large vmap


def wide(key=KEY):
    return eqx.nn.MLP(3, "scalar", 64, 2, activation=jnp.tanh, key=key)


def by_vmap(model, xs):
    return jnp.mean(jax.vmap(model)(xs) ** 2)  # the vmap


def by_other_axes(model, xs):
    def f(scale, x, params):  # `scale` and `params` are the same for all
        return params["w"] * model(x) * scale, params["w"]

    axes, model = {"w": None}, model
    out, w = jax.vmap(f, in_axes=(None, 1, axes), out_axes=(0, None))(
        2.0, xs.T, {"w": xs[0, 0]}
    )
    return jnp.mean(out**2) + w


def by_filter_vmap(model, xs):
    return jnp.mean(eqx.filter_vmap(model)(xs) ** 2)


@pytest.mark.parametrize("loss", [by_vmap, by_other_axes, by_filter_vmap])
def test_a_large_vmap_in_chunks(loss):
    """It saves what a loss written so saves (jax#26263), and changes no result."""
    xs = jr.normal(KEY, (1024, 3))
    report = eqg.explain_memory(loss, wide(), xs).verify()
    best = report.advice[0]
    assert (best.kind, best.primitive) == ("map", "vmap")
    assert "jax.vmap(" in best.code or "filter_vmap(" in best.code
    assert best.measured < 0.15 * report.compiled
    chunk = int(re.search(r"`eqg.filter_map\(f, xs, chunk=(\d+)\)`", best.cure)[1])
    if loss is by_vmap:
        assert best.line == line_of("# the vmap")
        followed = lambda model, xs: jnp.mean(eqg.filter_map(model, xs, chunk=chunk) ** 2)
        assert eqg.explain_memory(followed, wide(), xs).compiled == best.measured
        assert not eqg.explain_memory(followed, wide(), xs).advice


def test_the_loss_in_chunks_is_the_same_loss():
    model, xs = wide(), jr.normal(KEY, (64, 3))
    for loss in (by_vmap, by_other_axes, by_filter_vmap):
        with seeing_maps() as seen:
            expected = eqx.filter_value_and_grad(loss)(model, xs)
        with seeing_maps(seen.calls[0], 16) as seen:
            got = eqx.filter_value_and_grad(loss)(model, xs)
        assert [call.length for call in seen.calls] == [64]
        assert_close(jax.tree.leaves(got), jax.tree.leaves(expected), eps=2000)
    assert "maps.py" not in jax.vmap.__code__.co_filename


def test_a_named_axis_is_left_alone():
    """A sum over it needs all examples at once."""

    def loss(model, xs):
        normalized = lambda x: jnp.tanh(model(x) - jax.lax.pmean(model(x), "batch"))
        return jnp.mean(jax.vmap(normalized, axis_name="batch")(xs))

    report = eqg.explain_memory(loss, wide(), jnp.ones((1024, 3)), compiled=False)
    assert not [a for a in report.advice if a.kind == "map"]


# ---------------------------------------------------------------- the report


# ---------------------------------------------------------------- bad and large input


def explain_many_products(n):
    def loss(w, x):
        for _ in range(n):
            x = jnp.sin(w @ x + x) * 0.5 + x * w[0, 0]
        return jnp.sum(x)

    w = jnp.ones((8, 8))
    assert len(jax.make_jaxpr(loss)(w, w[0]).eqns) > 6 * n
    assert len(eqg.explain_memory(loss, w, w[0], compiled=False).found) > n


@pytest.mark.slow
def test_work_is_linear_in_the_number_of_equations():
    assert_linear_in_size(explain_many_products, 10)


def test_no_reverse_mode():
    loss = lambda w: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * w), (0, w)
    )
    with pytest.raises(eqg.RuleError, match="`while_loop` has no reverse mode") as error:
        eqg.explain_memory(lambda w: loss(w)[1], jnp.array(4.0))
    assert "no derivative in reverse mode" in str(error.value)

    def with_host(w):
        n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
        return n * jax.pure_callback(lambda x: x, w, w)

    with pytest.raises(eqg.RuleError, match="do not support JVP") as error:
        eqg.explain_memory(with_host, jnp.array(4.0))
    assert "while_loop" not in str(error.value)
