"""The diagnoses: causes that are several hops, or several paths, away from what they spoil.

Each program is run twice: with arguments that have the cause, where the fields of the records
are known, and with arguments that do not, where nothing is reported.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .test_core import sharded


def arrays(**leaves):
    return {k: jnp.asarray(v, "float32") for k, v in leaves.items()}


def scan(step, init, xs):
    return jax.lax.scan(step, init, xs)


# ---------------------------------------------------------------- explain_zero

relu, total = jax.nn.relu, jnp.sum


def carry_of(m, reverse):
    step = lambda c, x: (x[1] * c + x[0], None)
    last, _ = jax.lax.scan(step, m["first"], (m["a"], m["keep"]), reverse=reverse)
    return last + total(m["keep"])


@eqg.custom_vjp
def zero_rule(x):
    return x * 2.0


zero_rule.def_fwd(lambda x: (zero_rule(x), None))
zero_rule.def_bwd(lambda _, ct: (0.0 * ct,))


@eqg.custom_vjp
def search(a, b):
    rounded = jax.lax.cond(True, jnp.floor, jnp.sign, b)
    return jax.lax.while_loop(lambda a: total(a) < 9, lambda a: 2 * a, a), rounded


search.def_fwd(lambda a, b: (search(a, b), None))
search.def_bwd(lambda _, cts: (cts[0], jnp.zeros(2)))


@eqg.implicit(lambda y, a: y**3 + y - a)
def root(a, *, guess):
    step = lambda y: y - (y**3 + y - a) / (3 * y**2 + 1)
    return jax.lax.while_loop(lambda y: jnp.max(jnp.abs(y**3 + y - a)) > 1e-4, step, guess)


def windows(m, of):
    step = lambda h, x: (m["b"] * h + x, None)
    last, _ = eqg.filter_scan(step, of(m["a"], lambda a: 2 * a), m["x"], truncate=2)
    return total(last)


_of_each = lambda of: lambda a, b: jnp.where(a > 1.0, b, 2 * b) + of(a, lambda x: 0.0)
XS = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
AB = arrays(a=[1.2, 2.3], b=[1.0, 3.0])
KEEP = {"a": [3, 2, 1], "first": 1}
# By the leaf, the kind, the operation and the step of each record: a loss of a model, one with
# the cause, and one without it. If these are the same, the loss has it: `of` applies a function
# to a value, or returns the value.
ZEROS = {
    "a multiplied by zero: mul, model['live']; a dead units: relu": (lambda m, of: total(relu(
        relu(m["a"]) - 1.0)) + m["live"] * total(m["a"]), arrays(a=[-1, -2], live=0),
        arrays(a=[-1, -2], live=1)),
    # In the steps of the second example, the factor is not zero. The first one is done before.
    "a multiplied by zero: mul, model['i'] at [0]": (lambda m, of: total(jax.vmap(lambda n, x:
        jax.lax.while_loop(lambda c: (c[0] != n) & (c[0] < 9), lambda c: (c[0] + 1, c[0] * x), (
        m["i"], x))[1])(np.float32([1, 3]), jnp.stack([m["a"], XS[0, :2]]))), arrays(a=[1, 2],
        i=0), arrays(a=[1, 2], i=0.5)),
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
    "a closed over: , by structure": (lambda m, of: total(of(m, lambda m: AB)["a"] * m["b"]),
        AB, AB),
    # A remark says that the gradient of `b` is not finite.
    "a sign: sign, by structure": (lambda m, of: total(of(m["a"], jnp.sign)) + total(jnp.where(
        m["b"] > 0, jnp.sqrt(m["b"]), 0.0)), arrays(a=[1, 2], b=[0, 4]), AB),
    "a multiplied by zero: mul, convert_element_type; b comparison: gt, by structure": (lambda
        m, of: total(of(1 + m["b"], lambda x: (x > 9).astype("float32")) * m["a"]), AB, AB),
    "a branch not taken: cond": (lambda m, of: jax.lax.cond(m["b"] > 0, lambda a: total(
        jnp.sin(a)), lambda a: 3.0, m["a"]) * m["b"], arrays(a=[1, 2], b=-1), arrays(a=[1, 2],
        b=1)),
    # The comparison decides on the branch, the factor is what the branch returns.
    "a comparison: gt, by structure; b dead units: relu; c multiplied by zero: mul, cond": (
        lambda m, of: jax.lax.cond(m["a"][0] > 0, lambda b: total(relu(b)), total, m["b"]) *
        total(m["c"]) + of(total(m["a"]), lambda a: 1.0), arrays(a=[1, 2], b=[-1, -2],
        c=[2, 3]), arrays(a=[1, 2], b=[1, 2], c=[2, 3])),
    # The derivative of all steps ends at the product of the second and last one.
    "a multiplied by zero: mul, model['w'] at [1]": (lambda m, of: scan(lambda c, a: (m["w"] *
        (c + a), None), m["w"], m["a"])[0] + m["w"], arrays(a=[1, 2], w=0), arrays(a=[1, 2],
        w=0.5)),
    "a multiplied by zero: mul, model['w'] at [2, 1]": (lambda m, of: total(scan(lambda c, r: (
        c, scan(lambda c, a: (c, m["w"] * a), None, r)[1]), None, m["a"])[1]),
        arrays(a=np.ones((3, 2)), w=0), arrays(a=np.ones((3, 2)), w=0.5)),
    "first multiplied by zero: mul, model['keep'] at [2]": (lambda m, of: carry_of(m, False),
        arrays(keep=[1, 1, 0], **KEEP), arrays(keep=[1, 1, 1], **KEEP)),
    "first multiplied by zero: mul, model['keep'] at [0]": (lambda m, of: carry_of(m, True),
        arrays(keep=[0, 1, 1], **KEEP), arrays(keep=[1, 1, 1], **KEEP)),
    "a saturated: tanh": (lambda m, of: total(jnp.tanh(jnp.sin(0.0) + m["a"])),
        arrays(a=[200, 300]), arrays(a=[1, 2])),
    "a canceled: sub": (lambda m, of: total((of(2.0, lambda x: 1.0) * m["a"] - eqg.ste.round(
        m["a"])) ** 2) + total(m["b"]), AB, AB),
    "a masked: select_n": (lambda m, of: total(eqg.safe.where(m["b"] > 3.5, lambda a: a * 2.0,
        m["a"], m["b"])), arrays(a=[1, 2], b=[3, 3]), arrays(a=[1, 2], b=[4, 3])),
    "a dead units: select_n": (lambda m, of: total(jnp.where(m["a"] > 0, m["a"] * 2.0, 0.0)),
        arrays(a=[-1, -2]), arrays(a=[1, -2])),
    # A rounding with a straight-through derivative has no remark.
    "a underflow: mul": (lambda m, of: total(m["a"] * m["s"] * m["s"]) + m["s"] +
        jax.lax.stop_gradient(jnp.round(m["s"]) - m["s"]),
        arrays(a=[1, 1], s=1e-30), arrays(a=[1, 1], s=1)),
    # A maximum shares its derivative: the number of equal elements is infinite.
    "a underflow: reduce_max": (lambda m, of: jnp.max(m["a"]).astype("float32"), {"a": np.ones(
        70_000, "float16")}, {"a": np.arange(9, dtype="float16")}),
    "b underflow: mul": (lambda m, of: total((m["b"].astype("float16") *
        jnp.float16(1e-5)).astype("float32")) * m["s"], arrays(b=[1, 2],
        s=1e-4), arrays(b=[1, 2], s=1)),
    "a rule without a derivative: zero_rule, by structure": (lambda m, of: total(of(
        m["a"].astype("float16"), zero_rule).astype("float32") * m["b"]), AB, AB),
    "a rounding: round, by structure; b rounding: floor, by structure; b sign: sign, by "
    "structure": (lambda m, of: of(total(m["b"]), lambda b: 1.0) + (lambda a, b: total(b) +
        total(of(500 * a, jnp.round)))(*search(m["a"], m["b"])), AB, AB),
    "a rounding: round, by structure; a rounding: floor, by structure; a sign: sign, by "
    "structure": (lambda m, of: total(sharded(lambda a, b: jax.lax.psum(b * jax.lax.cond(
        jnp.round(a[0]) > 3, lambda a: of(a, jnp.floor), lambda a: of(a, jnp.sign), a), "i"))(
        m["a"], m["b"])), AB, AB),
    "b initial guess: stop_gradient, by structure": (lambda m, of: total(root(m["a"],
        guess=m["b"])) + of(total(m["b"]), lambda b: 1.0), AB, AB),
    "a truncated: stop_gradient, by structure": (lambda m, of: windows(m, of) + of(total(
        m["a"]), lambda a: 1.0), *[arrays(a=[1, 2], b=[0.5, 3], x=np.ones((5, 2)))] * 2),
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
    assert all(f".py:{r.line}" in str(report) for r in report.found if r.code)
    assert not eqg.explain_zero(lambda m: loss(m, lambda x, fn: x), good)


def rounded(m):
    """The first lines have roundings of the user's, which have no derivative."""
    is_large, nearest = m["a"][0] > 9, lambda b: jax.lax.round(b)
    own = jax.lax.cond(is_large, nearest, lambda b: jnp.trunc(b), m["b"])
    own = jax.vmap(jnp.floor)(own + m["a"]) + jax.jit(jnp.sign)(m["a"])
    of_jax = jax.scipy.ndimage.map_coordinates(jnp.arange(9.0), [m["a"]], 1) + m["a"] % 0.7
    straight = m["a"] + jax.lax.stop_gradient(jnp.ceil(m["a"]) - m["a"])
    return total((own + of_jax + straight + eqg.ste.round(m["b"])) * m["b"])


# By the kinds and details of the symptoms, and a remark in parentheses: a loss, and a model.
SYMPTOMS = {
    " (roundings)": (rounded, AB),
    " (zero_safe)": (eqg.zero_safe(lambda m: total(jnp.where(m["a"] > 0, jnp.sqrt(m["a"]), 0.0)
        + m["b"])), arrays(a=[0, 4], b=[1, 1])),
    "no reverse mode: ; zero: multiplied by zero": (lambda m: jax.lax.while_loop(lambda s: s <
        9, lambda s: s * m["a"] + jnp.abs(m["z"]) + 0 * m["b"].astype("float32"), 1.0),
        arrays(a=2) | {"b": np.float16(3), "z": np.complex64(3 + 2j)}),
    "": (lambda m: total(m["a"].astype("float32") * 6e4), {"a": np.float16([99, 99]), "b": 3}),
    "not finite: true singularity": (lambda m: total(jnp.sqrt(m["a"])), arrays(a=[0, 1])),
    "zero: rounding": (lambda m: total(jnp.round(m["a"]) ** 2), arrays(a=[0.7, 1])),
    "exploding: ": (lambda m: total(scan(lambda h, _: (m["w"] @ h, None), m["a"], np.zeros(30))[
        0]), arrays(w=3 * np.eye(2), a=[1, 1])),
    "vanishing: ": (lambda m: total(m["a"]) * 1e-3 + total(m["b"] ** 2) * 1e3, AB),
    "exploding:  (the square overflows)": (lambda m: total(m["a"] * np.float32([3e25, 4e25])),
        arrays(a=[1, 1])),
    "no array: the Python number 0.5": (lambda m: total(m["b"] * m["a"]), AB | {"b": 0.5,
        "c": True}),
    "no array: the Python number 0.5 (Equinox)": (lambda m: total(m(jnp.ones(3))), eqx.tree_at(
        lambda m: m.bias, eqx.nn.Linear(3, 2, key=jax.random.key(0)), 0.5)),
    # Of two features, a normalization leaves the signs.
    "rounding noise: ": (lambda m: total((jax.nn.standardize(XS @ m["w"], epsilon=0.0) - 0.3)
        ** 2), arrays(w=[[0.3, -1.2], [2, 0.7], [-0.4, 0.9]])),
    "kink: along a random direction": (lambda m: total(jnp.abs(m["a"] - 1) + m["a"]) / 99,
        arrays(a=[1, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", SYMPTOMS)
def test_explain_gradient(name):
    report = eqg.explain_gradient(*SYMPTOMS[name])
    text = "; ".join(dict.fromkeys(f"{s.kind}: {s.detail}" for s in report.found))
    assert text.partition(", the slope")[0] == name.partition(" (")[0]
    assert bool(report) == bool(text)
    assert {s.file for s in report.found} <= {"", __file__}


def test_dead_units_of_a_leaf_with_a_gradient():
    """A unit is dead if it is so for all examples: the third one, and not the first."""
    loss = lambda m, xs: jnp.sum(jax.vmap(lambda x: relu(m["w"] @ x + m["b"]))(xs))
    w = np.array([[1, 0], [0, 1], [0, 1], [1, 1]])
    m = arrays(w=w, b=[0, 0, -9, 1])
    xs = jnp.array([[-1.0, 2.0], [1.0, 0.5], [1.0, 1.0]])
    assert "for 1 of 4 units (2)." in eqg.explain_zero(loss, m, xs).remarks[0]
    assert not eqg.explain_zero(loss, {**m, "b": jnp.zeros(4)}, xs).remarks


@pytest.mark.parametrize(
    ("dtype", "slope"), [("float32", 0.0), ("float32", 1e-4), ("bfloat16", 0.0)]
)
def test_gradients_that_are_rounding_errors(dtype, slope):
    """The probabilities have the sum one: only the slope is a derivative."""
    m = {"a": jnp.array([0.5, 1.7, -0.3, 0.9], dtype), "b": jnp.zeros(2, dtype)}
    fn = lambda m, s: jnp.sum(0.3 * jax.nn.softmax(m["a"]) + s * m["a"]) + jnp.sum(m["b"])
    args = m, jnp.asarray(slope, dtype)
    gradient = np.abs(jax.grad(fn)(*args)["a"])
    assert np.any(gradient > 0)
    assert np.all(gradient < jnp.finfo(dtype).eps) == (slope == 0)
    report = eqg.explain_zero(fn, *args)
    assert not report
    assert list(report.noise) == ["['a']"] * (slope == 0)


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
    inputs = [(r.primitive, r.shape, r.dtype, r.kind) for r in report.inputs]
    assert inputs == [("xs", (m, n), "float32", "input")]
    assert [r.bytes for r in report.found] == [4 * n * m] * 3 + [4 * n]
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
