"""`explain_memory`: the values that a loss keeps, against JAX's pullback, closed forms, and
compiled programs; and advice that can be followed."""

import re

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.extend.core import Literal
from jax.interpreters import partial_eval as pe

from .helpers import quick_only
from .test_explain_nan import lines_of


KEY = jr.key(0)
SIZE = jnp.zeros(()).dtype.itemsize  # of a float


def explain(loss, *args):
    return eqg.explain_memory(loss, *args, compiled=False)


class Recurrent(eqx.Module):
    cell: eqx.Module
    readout: eqx.nn.Linear
    checkpoint: int | str | None = eqx.field(static=True, default=None)

    def __call__(self, xs):
        step = lambda h, x: (self.cell(x, h), None)  # LOOP
        zeros = jnp.zeros(self.cell.hidden_size)
        h, _ = eqg.filter_scan(step, zeros, xs, checkpoint=self.checkpoint)  # LOOP
        return self.readout(h)


def mean_square(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def gru(checkpoint=None):
    model = Recurrent(eqx.nn.GRUCell(4, 24, key=KEY), eqx.nn.Linear(24, 1, key=KEY), checkpoint)
    return mean_square, model, jnp.ones((8, 96, 4))


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


def test_a_layer_with_its_own_backward_pass():
    """With wrapped cells, it ran a plain scan: the sizes and the advice belonged to the plain
    scan."""
    layer, xs = eqg.nn.GRU(2, 8, key=KEY), jnp.ones((16, 300, 2))
    loss = lambda layer, xs: jnp.sum(jax.vmap(lambda x: layer(x)[0])(xs) ** 2)
    report = explain(loss, layer, xs)
    assert report.total == used_by_pullback(loss, layer, xs)
    assert {r.path for r in report.found} <= {"GRU", ""}
    assert not [a for a in report.advice if a.kind == "loop"]


def test_lines_and_control_flow():
    def loss(w, x):
        y = jax.jit(lambda w: jnp.sin(w * x))(w)  # LINE
        y = jax.lax.cond(x[0] > 0, jnp.cos, lambda y: y * y, y)  # LINE
        y = jax.lax.fori_loop(0, 6, lambda i, y: jnp.tanh(y), y)  # LINE FORI
        y = jax.lax.scan(lambda c, a: (c, jnp.exp(a)), 0.0, y, reverse=True)[1]  # LINE
        n = jax.lax.while_loop(lambda n: n < 3, lambda n: n + 1, 0)
        return jnp.sum(y) * n.astype(y.dtype)

    report = explain(loss, jnp.ones(5), jnp.ones(5))
    assert report.total == used_by_pullback(loss, jnp.ones(5), jnp.ones(5))
    assert {*lines_of(loss, "LINE")} <= {r.line for r in report.found}
    in_loop = [r for r in report.found if [r.line] == lines_of(loss, "LINE FORI")]
    assert {r.n_steps for r in in_loop} == {6}
    assert {r.file for r in report.found} == {__file__}
    model = eqx.nn.MLP(3, 3, 8, 1, key=KEY)
    inputs = explain(
        lambda m, x: jnp.sum(jnp.sin(jax.vmap(m)(x))), model, jnp.ones((5, 3))
    ).inputs
    assert {r.primitive for r in inputs} == {"model.layers[1].weight", "x"}


@pytest.mark.parametrize("checkpoint", ["sqrt", 8, "replay"])
def test_checkpoints_of_filter_scan(checkpoint):
    """The carries before each chunk, and the inputs. A replay keeps all carries."""
    report = explain(*gru(checkpoint))
    chunks = {"sqrt": (8, 12), 8: (12,), "replay": (96,)}[checkpoint]
    stacks = [r for r in report.found if r.n_steps > 1 and r.dtype.startswith("float")]
    assert sum(r.bytes for r in stacks) in [n * 8 * 24 * SIZE for n in chunks]
    assert {r.line for r in stacks} <= {*lines_of(Recurrent, "LOOP")}
    # Beside these, there are the transposed data.
    assert report.total < sum(r.bytes for r in stacks) + 2 * gru()[2].nbytes + 2000


def test_the_lines_of_steps_that_are_replayed():
    """The weights are frozen. All was said to be kept at the call of `filter_scan`."""

    def loss(h, w, xs):
        step = lambda h, x: (jnp.tanh(jnp.sin(w @ h) + x), None)  # STEP
        return jnp.sum(eqg.filter_scan(step, h, xs, checkpoint="replay")[0])

    found = explain(loss, jnp.ones(8), jnp.eye(8), jnp.ones((99, 8))).found
    in_loop = [(r.line, r.primitive) for r in found if r.n_steps > 1]
    assert in_loop
    assert {line for line, _ in in_loop} == {*lines_of(loss, "STEP")}
    assert "replayed_scan" not in dict(in_loop).values()


@eqg.custom_vjp
def ours(x):
    return jnp.sin(x)


ours.def_fwd(lambda x: (jnp.sin(x), jnp.outer(x, x) @ jnp.outer(x, x)))
ours.def_bwd(lambda residuals, ct: (ct * residuals[0],))
same = eqg.custom_vjp(lambda x, y: jnp.sum(y))
same.def_fwd(lambda x, y: (jnp.sum(y), None))
same.def_bwd(lambda _, ct: (jnp.full(9, ct), jnp.zeros(9)))
MASK = jnp.arange(9) > 4
KINDS = {
    "rule": (lambda w: jnp.sum(ours(w)), {("ours", "rule", 81 * SIZE)}),
    "constant": (lambda w: jnp.sum(jnp.where(MASK, 2 * w, 0.0)), {("constant", "constant", 9)}),
    "unused": (lambda w: same(jnp.exp(w), 2 * w), {("exp", "computed", 9 * SIZE)}),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name):
    fn, expected = KINDS[name]
    report = explain(fn, jnp.ones(9))
    assert {(r.primitive, r.kind, r.bytes) for r in report.found} == expected


@pytest.mark.parametrize("wrap", [eqg.filter_checkpoint, eqx.filter_checkpoint])
def test_checkpoint_keeps_inputs_only(wrap):
    loss = lambda model, x: jnp.sum(wrap(model)(x * jnp.sum(model.layers[0].bias)))
    model = eqx.nn.MLP(8, 8, 64, 3, activation=jnp.tanh, key=KEY)
    report = explain(loss, model, jnp.ones(8))
    assert [(r.primitive, r.bytes) for r in report.found] == [("mul", 8 * SIZE)]


def test_no_step_of_a_solver_is_kept():
    optx = pytest.importorskip("optimistix")

    def loss(w):
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        fn = lambda y, w: y - 0.5 * jnp.tanh(w * y) - 1
        return jnp.sum(optx.root_find(fn, solver, jnp.ones(3), args=w).value ** 2)

    assert {r.n_steps for r in explain(loss, jnp.ones(3)).found} == {1}


def test_no_reverse_mode():
    power = lambda w: jax.lax.while_loop(lambda c: c < 3, lambda c: c * w, w)
    with pytest.raises(eqg.RuleError, match="`while_loop` has no reverse mode"):
        explain(power, jnp.array(1.5))


# ---------------------------------------------------------------- advice


@pytest.mark.slow
def test_advice_can_be_followed():
    """A model with `checkpoint=k` needs the memory that the advice predicts."""
    report = explain(*gru())
    assert report.compiled is None
    advice = next(a for a in report.advice if "filter_scan" in a.cure)
    assert f"the loop at test_explain_memory.py:{lines_of(Recurrent, 'LOOP')[1]}" in advice.cure
    checkpoint = re.search(r"checkpoint=(.*)\)", advice.cure)[1].strip("'")
    followed = eqg.explain_memory(*gru(int(checkpoint)))
    saved = eqg.explain_memory(*gru()).compiled - followed.compiled
    assert saved == pytest.approx(advice.saves, rel=0.2)
    assert not [a for a in followed.advice if "filter_scan" in a.cure]


def test_no_advice_where_nothing_is_saved():
    report = eqg.explain_memory(lambda w: jnp.sum(jnp.sin(w @ w) ** 2), jnp.ones((64, 64)))
    assert not report.advice


WIDE = lambda: eqx.nn.MLP(3, "scalar", 64, 2, activation=jnp.tanh, key=KEY)


def by_vmap(model, xs):
    return jnp.mean(jax.vmap(model)(xs) ** 2)  # VMAP


def by_other_axes(model, xs):
    f = lambda scale, x, params: params["w"] * model(x) * scale
    mapped = jax.vmap(f, in_axes=(None, 1, {"w": None}))  # `scale` and `params` are one for all
    return jnp.mean(mapped(2.0, xs.T, {"w": xs[0, 0]}) ** 2)


LOSSES = [by_vmap, by_other_axes]


@pytest.mark.parametrize("loss", quick_only(LOSSES, [by_vmap], pytest.mark.thorough))
def test_jax_26263(loss):
    """A large `vmap` in chunks saves what a loss written so saves."""
    xs, vmap = jr.normal(KEY, (1024, 3)), jax.vmap
    report = eqg.explain_memory(loss, WIDE(), xs)
    assert jax.vmap is vmap
    best = report.advice[0]
    assert (best.kind, best.primitive) == ("map", "vmap")
    assert re.search(r"jax\.vmap\(|mapped\(", best.code)
    assert report.total - best.saves < 0.1 * report.total
    chunk = int(re.search(r"`eqg.filter_map\(f, xs, chunk=(\d+)\)`", best.cure)[1])
    if loss is by_vmap:
        assert [best.line] == lines_of(loss, "VMAP")
        followed = lambda model, xs: jnp.mean(eqg.filter_map(model, xs, chunk=chunk) ** 2)
        followed = eqg.explain_memory(followed, WIDE(), xs)
        assert followed.compiled < 0.15 * report.compiled
        assert not followed.advice
        # What the advice leaves is what that keeps, and the chunk that is computed again.
        left = followed.total + report.total * chunk / len(xs)
        assert report.total - best.saves == pytest.approx(left, rel=0.1)


# ---------------------------------------------------------------- advice on loops

STATES = 32


def scanned(cell, xs, checkpoint):
    step = lambda h, x: (cell(x, h),) * 2
    return eqg.filter_scan(step, jnp.zeros(STATES, xs.dtype), xs, checkpoint=checkpoint)[1]


def test_a_line_that_runs_a_loop_twice_has_one_advice():
    """One edit of this line changes both loops."""
    cells = [eqx.nn.GRUCell(n, STATES, key=KEY) for n in (3, STATES)]
    stacked = lambda m, xs, k: jnp.sum(scanned(m[1], scanned(m[0], xs, k), k) ** 2)
    report = explain(stacked, cells, jnp.ones((400, 3)), None)
    (advice,) = [a for a in report.advice if a.kind == "loop"]
    assert len({str(a) for a in report.advice}) == len(report.advice)
    (checkpoint,) = re.findall(r", called 2 times, by .*checkpoint=(\d+)", advice.cure)
    left = explain(stacked, cells, jnp.ones((400, 3)), int(checkpoint)).total
    # A few steps of one loop are computed again at one time.
    assert 0 < report.total - left - advice.saves < 0.1 * report.total
    assert advice.saves > 0.7 * report.total


def test_a_python_number_in_the_carry():
    """The advice reads the shapes of the carry."""

    def loss(w, xs):
        step = lambda c, x: ((c[0] + 1, jnp.tanh(w * c[1] + x)), None)
        return jnp.sum(jax.vmap(lambda xs: jax.lax.scan(step, (0, 0.0), xs)[0][1])(xs))

    report = explain(loss, jnp.array(0.5), jnp.ones((8, 400)))
    assert [a for a in report.advice if a.kind == "loop"]


def test_the_bytes_of_all_inputs_are_added():
    """Both factors of a product are kept, 1 KiB and 2 KiB."""
    loss = lambda ab, _: jnp.sum(jnp.sum(ab[0] * ab[1], axis=1) ** 2)
    report = str(eqg.explain_memory(loss, (jnp.ones((1, 2, 128)), jnp.ones((4, 1, 128))), 0))
    assert "besides 3 KiB of inputs" in report
