"""The diagnoses: causes that are several hops, or several paths, away from what they spoil.

Each program is run twice: with arguments that have the cause, where the fields of the records
are known, and with arguments that do not, where nothing is reported.
"""

from pathlib import Path

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def arrays(**leaves):
    return {k: jnp.asarray(v, "float32") for k, v in leaves.items()}


def scan(step, init, xs):
    return jax.lax.scan(step, init, xs)


# ---------------------------------------------------------------- explain_zero

relu, total = jax.nn.relu, jnp.sum
SOURCE = Path(__file__).read_text()


def carry_of(m, reverse):
    step = lambda c, x: (x[1] * c + x[0], None)
    last, _ = jax.lax.scan(step, m["first"], (m["a"], m["keep"]), reverse=reverse)
    return last + total(m["keep"])


@eqg.custom_vjp
def zero_rule(x):
    return x * 2.0


zero_rule.def_fwd(lambda x: (zero_rule(x), None))
zero_rule.def_bwd(lambda _, ct: (0.0 * ct,))
_of_each = lambda of: lambda a, b: jnp.where(a > 1.0, b, 2 * b) + of(a, lambda x: 0.0)
AB = arrays(a=[1.2, 2.3], b=[1.0, 3.0])
KEEP = {"a": [3, 2, 1], "first": 1}
# By the leaf, the kind, the operation and the step of each record: a loss of a model, one with
# the cause, and one without it. If these are the same, the loss has it: `of` applies a function
# to a value, or returns the value.
ZEROS = {
    "a multiplied by zero: mul, model['live']; a dead units: relu": (lambda m, of: total(relu(
        relu(m["a"]) - 1.0)) + m["live"] * total(m["a"]), arrays(a=[-1, -2], live=0),
        arrays(a=[-1, -2], live=1)),
    # In the steps of the second example, the factor is not zero.
    "a multiplied by zero: mul, model['i'] at [0]": (lambda m, of: total(jax.vmap(lambda n, x:
        jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[0] * x), (m["i"], x))[
        1])(np.float32([1, 3]), jnp.append(m["a"], 9.0))), arrays(a=[1], i=0), arrays(a=[1],
        i=0.5)),
    "a dead units: relu; b dead units: relu": (lambda m, of: total(relu(relu(m["a"]) +
        m["b"])), arrays(a=[3, 2], b=[-4, -3]), arrays(a=[3, 2], b=[-2, -3])),
    "a stop_gradient: stop_gradient, by structure": (lambda m, of: total(scan(lambda c, x: (c +
        x, m["b"][0] * jnp.sin(of(c, jax.lax.stop_gradient))), 0.0, m["a"])[1]), AB, AB),
    "a comparison: gt, by structure": (lambda m, of: total(jax.jit(jax.vmap(_of_each(of)))(
        m["a"], m["b"])), AB, AB),
    "a argmax: argmax, by structure; a rounding: round, by structure": (lambda m, of: m["b"][
        jnp.argmax(m["a"])] * total(of(m["a"] * 3.0, jnp.round)), AB, AB),
    # An operation after the first cut need not be corrected first: `sign` has no record.
    "a rounding: floor, by structure": (lambda m, of: (lambda a, b: b * of(a, lambda x:
        jnp.sign(jnp.floor(x))))(*scan(lambda c, x: ((c[0] + x["a"], c[1] + x["b"]), None),
        (0.0, 0.0), m)[0]), AB, AB),
    "a never used: , by structure; b rounding: round, by structure": (lambda m, of: total(of(
        m["b"] * np.ones(2, "float32"), jnp.round)) + total(of(m["a"], lambda x: 0.0)), AB, AB),
    "a multiplied by zero: mul, convert_element_type; b comparison: gt, by structure": (lambda
        m, of: total(of(1 + m["b"], lambda x: (x > 9).astype("float32")) * m["a"]), AB, AB),
    "a branch not taken: cond": (lambda m, of: jax.lax.cond(m["b"] > 0, lambda a: total(
        jnp.sin(a)), lambda a: 3.0, m["a"]) * m["b"], arrays(a=[1, 2], b=-1), arrays(a=[1, 2],
        b=1)),
    # The derivative of all steps ends at the product of the second and last one.
    "a multiplied by zero: mul, model['w'] at [1]": (lambda m, of: scan(lambda c, a: (m["w"] *
        (c + a), None), m["w"], m["a"])[0] + m["w"], arrays(a=[1, 2], w=0), arrays(a=[1, 2],
        w=0.5)),
    "a multiplied by zero: mul, model['w'] at [2]": (lambda m, of: total(scan(lambda c, a: (c,
        m["w"] * a), None, m["a"])[1]), arrays(a=[1, 2, 3], w=0), arrays(a=[1, 2, 3], w=0.5)),
    "first multiplied by zero: mul, model['keep'] at [2]": (lambda m, of: carry_of(m, False),
        arrays(keep=[1, 1, 0], **KEEP), arrays(keep=[1, 1, 1], **KEEP)),
    "first multiplied by zero: mul, model['keep'] at [0]": (lambda m, of: carry_of(m, True),
        arrays(keep=[0, 1, 1], **KEEP), arrays(keep=[1, 1, 1], **KEEP)),
    "a saturated: tanh": (lambda m, of: total(jnp.tanh(jnp.sin(0.0) + m["a"])),
        arrays(a=[200, 300]), arrays(a=[1, 2])),
    "a canceled: sub": (lambda m, of: of(2.0, lambda x: 1.0) * total(m["a"]) - total(m["a"]) +
        total(m["b"]), AB, AB),
    "a masked: select_n": (lambda m, of: total(jnp.where(m["b"] > 3.5, m["a"] * 2.0, m["b"])),
        arrays(a=[1, 2], b=[3, 3]), arrays(a=[1, 2], b=[4, 3])),
    "a dead units: select_n": (lambda m, of: total(jnp.where(m["a"] > 0, m["a"] * 2.0, 0.0)),
        arrays(a=[-1, -2]), arrays(a=[1, -2])),
    # A rounding with a straight-through derivative has no remark.
    "a underflow: mul": (lambda m, of: total(m["a"] * m["s"] * m["s"]) + m["s"] +
        jax.lax.stop_gradient(jnp.round(m["s"]) - m["s"]),
        arrays(a=[1, 1], s=1e-30), arrays(a=[1, 1], s=1)),
    "b underflow: mul": (lambda m, of: total((m["b"].astype("float16") *
        jnp.float16(1e-5)).astype("float32")) * m["s"], arrays(b=[1, 2],
        s=1e-4), arrays(b=[1, 2], s=1)),
    "a rule without a derivative: zero_rule, by structure": (lambda m, of: total(of(
        m["a"], zero_rule) * m["b"]), AB, AB),
}  # fmt: skip


def text_of(record):
    parts = f"{record.leaf[2:-2]} {record.kind}: {record.primitive}"
    if record.kind == "multiplied by zero":
        parts += f", {record.detail.split('`')[1]}"
    parts += ", by structure" * record.by_structure
    return parts + (f" at {list(record.step)}" if record.step else "")


@pytest.mark.parametrize("name", ZEROS)
def test_explain_zero(name):
    loss, bad, good = ZEROS[name]
    report = eqg.explain_zero(lambda m: loss(m, lambda x, fn: fn(x)), bad)
    assert "; ".join(map(text_of, report.found)) == name
    assert report.n_leaves == len(bad)
    for record in report.found:
        assert record.code in SOURCE
        assert bool(record.code) == bool(record.primitive)
        assert not record.code or f".py:{record.line}" in str(report)
    assert not eqg.explain_zero(lambda m: loss(m, lambda x, fn: x), good)


# By the kinds and details of the symptoms: a loss, and a model.
SYMPTOMS = {
    "": (lambda m: total(m["a"].astype("float32") * 6e4), {"a": np.float16([99, 99]), "b": 3}),
    "not finite: true singularity": (lambda m: total(jnp.sqrt(m["a"])), arrays(a=[0, 1])),
    "zero: rounding": (lambda m: total(jnp.round(m["a"]) ** 2), arrays(a=[0.7, 1])),
    "exploding: ": (lambda m: total(scan(lambda h, _: (m["w"] @ h, None), m["a"], np.zeros(30))[
        0]), arrays(w=3 * np.eye(2), a=[1, 1])),
    "vanishing: ": (lambda m: total(m["a"]) * 1e-9 + total(m["b"] ** 2), AB),
    "no array: the Python number 0.5": (lambda m: total(m["b"] * m["a"]), AB | {"b": 0.5}),
    "kink: along a random direction": (lambda m: total(jnp.abs(m["a"] - 1) + m["a"]),
        arrays(a=[1, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", SYMPTOMS)
def test_explain_gradient(name):
    report = eqg.explain_gradient(*SYMPTOMS[name])
    text = "; ".join(dict.fromkeys(f"{s.kind}: {s.detail}" for s in report.found))
    assert text.partition(", the slope")[0] == name
    assert bool(report) == bool(name)


def test_dead_units_of_a_leaf_with_a_gradient():
    """A unit is dead if it is so for all examples: the third one, and not the first."""
    loss = lambda m, xs: jnp.sum(jax.vmap(lambda x: relu(m["w"] @ x + m["b"]))(xs))
    w = np.array([[1, 0], [0, 1], [0, 1], [1, 1]])
    m = arrays(w=w, b=[0, 0, -9, 1])
    xs = jnp.array([[-1.0, 2.0], [1.0, 0.5], [1.0, 1.0]])
    report = eqg.explain_zero(loss, m, xs)
    assert not report
    assert "['b'] is zero for 1 of 4 units (2)" in report.remarks[0]
    assert not eqg.explain_zero(loss, {**m, "b": jnp.zeros(4)}, xs).remarks


@pytest.mark.parametrize(("slope", "is_rounding"), [(0.0, True), (1e-4, False)])
def test_gradients_that_are_rounding_errors(slope, is_rounding):
    """The probabilities have the sum one: only the slope is a derivative."""
    m = arrays(a=[0.5, 1.7, -0.3, 0.9], b=[1, 2])
    fn = lambda m: jnp.sum(0.3 * jax.nn.softmax(m["a"]) + slope * m["a"]) + jnp.sum(m["b"])
    gradient = np.abs(jax.grad(fn)(m)["a"])
    assert np.any(gradient > 0)
    assert np.all(gradient < 1e-6) == is_rounding
    report = eqg.explain_zero(fn, m)
    assert not report
    assert any("['a'] is not exactly zero" in text for text in report.remarks) == is_rounding


# ---------------------------------------------------------------- gradient_flow


class Scale(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight * x


class Chain(eqx.Module):
    step: Scale
    last: Scale

    def __call__(self, x, n):
        h, _ = scan(lambda h, _: (self.step(h), None), x, jnp.zeros(n))
        return self.last(h)


def test_gradient_flow_has_the_norms_of_numpy():
    w, v = np.array([2.0, 0.5, -1.5]), np.array([1.0, -3.0, 0.25])
    chain = Chain(Scale(jnp.array(w, "float32")), Scale(jnp.array(v, "float32")))
    xs = np.array([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]], "float32")
    loss = lambda m, xs: jnp.sum(
        jax.vmap(lambda x: m(x, 5))(xs)[:, :] * jnp.array([[1.0], [3.0]])
    )
    flow = eqg.gradient_flow(loss, chain, xs)
    # The gradient of the output of step t is v * w ** (4 - t), and three times that.
    norms = [np.sqrt(10) * np.linalg.norm(v * w ** (4 - t)) for t in range(5)]
    np.testing.assert_allclose(flow["step"], norms, rtol=1e-6)
    np.testing.assert_allclose(flow["last"], [np.sqrt(3 * 10)], rtol=1e-6)
    assert list(eqg.gradient_flow(loss, chain, xs, where=lambda m: m.last)) == ["last"]


def test_gradient_flow_of_a_gradient_that_is_not_finite():
    chain = Chain(Scale(jnp.ones(2)), Scale(jnp.ones(2)))
    loss = lambda m, x: jnp.sum(jnp.sqrt(m(x, 2)))
    flow = eqg.gradient_flow(loss, chain, jnp.array([0.0, 1.0]))
    assert np.isnan(flow["step"]).all()


# ---------------------------------------------------------------- explain_memory


def _memory(loss, *args, **options):
    return eqg.explain_memory(loss, *args, compiled=False, **options)


def test_the_bytes_of_residuals_are_those_of_the_pullback():
    n, m = 12, 5

    def loss(a, xs):
        y = jnp.sin(a)
        return jnp.sum(jnp.tanh(jax.vmap(lambda x: x * y)(xs)) ** 2)

    a, xs = jnp.ones(n), jnp.ones((m, n))
    report = _memory(loss, a, xs)
    pull = jax.eval_shape(lambda a, xs: jax.vjp(lambda a: loss(a, xs), a)[1], a, xs)
    kept = [x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)]
    assert sorted(r.bytes for r in [*report.found, *report.inputs]) == sorted(kept)
    assert report.total == sum(kept) - 4 * n * m
    assert [(r.primitive, r.shape, r.kind) for r in report.inputs] == [("xs", (m, n), "input")]
    assert {(r.primitive, r.bytes) for r in report.found} == {
        ("tanh", 4 * n * m), ("integer_pow", 4 * n * m), ("sin", 4 * n)
    }  # fmt: skip
    lines = report.by_line()
    assert sum(lines.values()) == report.total == sum(report.by_path().values())
    assert list(lines.values()) == sorted(lines.values(), reverse=True)


def _loop(w, xs, n_tanh=1, n_carry=1, run=scan):
    def step(hs, x):
        h = w @ hs[-1] + x
        for _ in range(n_tanh):
            h = jnp.tanh(h) * 2.0
        return [h, *hs[:-1]], None

    return jnp.sum(run(step, [jnp.zeros(8)] * n_carry, xs)[0][0])


W8 = jnp.asarray(np.eye(8))


def _kept(steps, n_tanh, n_carry, every):
    """The bytes that are kept with a checkpoint every so many steps of such a loop."""
    carry, of_step = 32 * n_carry, 32 * (1 + 2 * n_tanh)
    return steps // every * carry + every * of_step


@pytest.mark.parametrize(
    ("steps", "n_tanh", "n_carry", "checkpoint"),
    [(3, 2, 1, None), (4, 2, 1, 1), (16, 2, 1, 2), (64, 1, 1, 4), (64, 1, 4, 8), (64, 4, 1, 2),
     (256, 1, 3, 16), (256, 2, 1, 8)],
)  # fmt: skip
def test_advice_on_loops(steps, n_tanh, n_carry, checkpoint):
    report = _memory(_loop, W8, jnp.ones((steps, 8)), n_tanh, n_carry)
    assert len(report.advice) == (checkpoint is not None)
    in_loop = [r for r in report.found if r.n_steps > 1]
    assert {(r.n_steps, r.bytes, r.bytes_per_step) for r in in_loop} == {
        (steps, steps * 32, 32)
    }
    assert [r.kind for r in in_loop].count("carry") == 1
    assert len(in_loop) == 1 + 2 * n_tanh
    of_step = 32 * len(in_loop)
    for advice in report.advice:
        assert f"checkpoint={checkpoint!r})" in advice.cure
        kept = lambda k: _kept(steps, n_tanh, n_carry, k)
        assert advice.saves == sum(r.bytes for r in in_loop) - kept(checkpoint)
        # No number of steps keeps less.
        divisors = [k for k in range(1, steps + 1) if steps % k == 0]
        assert min(map(kept, divisors)) == steps * of_step - advice.saves


def test_memory_is_measured():
    report = eqg.explain_memory(_loop, W8, jnp.ones((64, 8)))
    assert 0.7 * report.total < report.compiled < 1.3 * report.total
    (advice,) = report.advice
    checkpointed = lambda *args: eqg.filter_scan(*args, checkpoint=4)
    followed = eqg.explain_memory(
        lambda *args: _loop(*args, run=checkpointed), W8, jnp.ones((64, 8))
    )
    assert followed.compiled < 0.5 * report.compiled
    assert 0.8 * advice.saves < report.compiled - followed.compiled < 1.2 * advice.saves
