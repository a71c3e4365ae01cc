"""`explain_zero`: which leaves have a zero gradient, why, and on which line."""

import inspect

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import skip_without_checkpointed_loops


KEY = jax.random.key(0)
X = jnp.array([0.3, -1.2, 2.0])


def line_of(fn) -> int:
    """The line of a function that is marked with `# HERE`."""
    (line,) = lines_of(fn)
    return line


def lines_of(fn) -> list[int]:
    """The line with `# HERE`, or all lines of a lambda."""
    lines, first = inspect.getsourcelines(fn)
    found = [first + i for i, line in enumerate(lines) if "# HERE" in line]
    return found or [first + i for i in range(len(lines))]


def zero_leaves(loss, model, *args) -> set[str]:
    """The witness: leaves whose `jax.grad` is zero."""
    grads = eqx.filter_grad(loss)(model, *args)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    name = lambda path: jax.tree_util.keystr(path).removeprefix(".") or "model"
    return {name(path) for path, g in leaves if not np.any(np.asarray(g))}


def check(loss, model, *args):
    """The report, which has the leaves that the witness finds."""
    report = eqg.explain_zero(loss, model, *args)
    assert {record.leaf for record in report.found} == zero_leaves(loss, model, *args)
    assert bool(report) == bool(report.found)
    for record in report.found:
        text = " ".join(str(report).split())
        assert record.kind in text
        assert record.cure in text
    return report


def only(report):
    (record,) = report.found
    return record


# ---------------------------------------------------------------- operations without derivative


BINS = jnp.linspace(0.0, 1.0, 11)


@jax.custom_vjp
def raw_rule(w):
    return jnp.sin(w)


raw_rule.defvjp(lambda w: (jnp.sin(w), None), lambda _, ct: (jnp.zeros_like(ct),))


@jax.custom_jvp
def raw_forward_rule(w):
    return jnp.sin(w)


@raw_forward_rule.defjvp
def _raw_forward_rule_jvp(primals, tangents):
    return jnp.sin(*primals), jnp.zeros_like(*tangents)


@eqg.custom_vjp
def our_rule(w):
    return jnp.sin(w)


@our_rule.def_fwd
def _our_rule_fwd(w):
    return jnp.sin(w), None


@our_rule.def_bwd(symbolic_zeros=True)
def _our_rule_bwd(residuals, ct):
    return (None,)


def bisection(w):
    def body(bounds):
        low, high = bounds
        middle = (low + high) / 2
        is_low = middle**3 + middle < w  # HERE
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    start = jnp.full_like(w, -10.0), jnp.full_like(w, 10.0)
    return jax.lax.while_loop(lambda b: jnp.max(b[1] - b[0]) > 1e-3, body, start)[0]


def counted(w):
    def is_on(n):
        return jnp.max(n - w) < 3  # HERE

    return jax.lax.while_loop(is_on, lambda n: n + 1, jnp.zeros((), w.dtype))


CUTS = {
    "argmax": (
        lambda w: jax.nn.one_hot(jnp.argmax(w, -1), w.shape[-1], dtype=w.dtype), "argmax"),
    "argmin": (lambda w: jnp.arange(3.0, dtype=w.dtype)[jnp.argmin(w, -1)], "argmax"),
    "argsort": (lambda w: X.astype(w.dtype)[jnp.argsort(w, axis=-1)], "order"),
    "round": (lambda w: jnp.round(3 * w), "rounding"),
    "floor": (lambda w: jnp.floor(w), "rounding"),
    "ceil": (lambda w: jnp.sin(jnp.ceil(w)), "rounding"),
    "sign": (lambda w: jnp.sign(w), "sign"),
    "compare": (lambda w: (w > 0).astype(w.dtype), "comparison"),
    "where": (lambda w: jnp.where(w > 0, 2.0, 1.0).astype(w.dtype), "comparison"),
    "searchsorted": (
        lambda w: jnp.searchsorted(BINS, w).astype(w.dtype), "number of a bin"),
    "digitize": (lambda w: jnp.digitize(w, BINS).astype(w.dtype), "number of a bin"),
    "integer": (lambda w: w.astype(jnp.int32).astype(w.dtype), "cast to an integer"),
    "index": (
        lambda w: X.astype(w.dtype)[jnp.abs(w).astype(jnp.int32)], "cast to an integer"),
    "stop_gradient": (lambda w: jax.lax.stop_gradient(w) * 2, "stop_gradient"),
    "categorical": (
        lambda w: jax.random.categorical(KEY, w).astype(w.dtype), "sampled category"),
    "choice": (lambda w: jax.random.choice(
        KEY, jnp.arange(w.size).astype(w.dtype), p=jax.nn.softmax(w.ravel())),
        "sampled category"),
    "bernoulli": (
        lambda w: jax.random.bernoulli(KEY, jax.nn.sigmoid(w)).astype(w.dtype), "sampled bits"),
    "raw_rule": (lambda w: raw_rule(w), "rule without a derivative"),
    "raw_forward_rule": (lambda w: raw_forward_rule(w), "rule without a derivative"),
    "our_rule": (lambda w: our_rule(w), "rule without a derivative"),
    "bisection": (bisection, "comparison in a while_loop"),
    "counted": (counted, "comparison in a while_loop"),
}  # fmt: skip


def looped(scan, fn, w, **kwargs):
    step = lambda c, _: (c + fn(w).sum(), None)
    return scan(step, jnp.zeros((), w.dtype), None, **kwargs)[0]


CONTEXTS = {
    "plain": lambda fn, w: fn(w),
    "scan": lambda fn, w: looped(jax.lax.scan, fn, w, length=3),
    "carry": lambda fn, w: jax.lax.scan(lambda c, _: (c * 0.5, fn(c)), w, None, 3)[1],
    "vmap": lambda fn, w: jax.vmap(fn)(jnp.stack([w, 2 * w])),
    "cond": lambda fn, w: jax.lax.cond(
        X[0] > 0, lambda w: fn(w).sum(), lambda w: jnp.zeros((), w.dtype), w
    ),
    "filter_scan": lambda fn, w: looped(eqg.filter_scan, fn, w, length=4, checkpoint=2),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", CUTS)
def test_cut(name, context):
    fn, kind = CUTS[name]
    record = only(check(lambda w: jnp.sum(CONTEXTS[context](fn, w)), X))
    assert (record.leaf, record.kind, record.by_structure) == ("model", kind, True)
    assert record.file == __file__
    assert record.line in lines_of(fn)


def test_straight_through_is_not_reported():
    for fn in (eqg.ste.round, eqg.ste.sign, eqg.ste.floor, eqg.ste.one_hot_argmax):
        assert not check(lambda w, fn=fn: jnp.sum(fn(w) * X), X)
    assert not check(lambda w: jnp.sum(eqg.surrogates.spike(w, eqg.surrogates.atan())), X)


def test_the_cure_mends_it():
    report = check(lambda w: jnp.sum(jnp.round(w) * X), X)
    code = only(report).cure.partition("`")[2].partition("`")[0]  # as someone pastes it
    mended = lambda w: jnp.sum(eval(code, {"eqg": eqg, "x": w}) * X)
    assert not check(mended, X)


# ---------------------------------------------------------------- threads


def test_equinox_442():
    # equinox#442: the loss of nested calls of `vmap` uses the model that it closes over.
    network = eqx.nn.Linear(3, 2, key=KEY)
    sample = jax.vmap(jax.vmap(lambda x: network(x)))
    loss = lambda model, xs: jnp.sum(sample(xs))
    report = check(loss, network, jnp.ones((2, 4, 3)))
    assert {record.kind for record in report.found} == {"closed over"}


@pytest.mark.slow
def test_optimistix_54():
    optx = pytest.importorskip("optimistix")

    def loss(w):
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        cubic = lambda y, a: y**3 + y - a
        return optx.root_find(cubic, solver, w["guess"], w["a"]).value  # HERE

    record = only(check(loss, {"guess": jnp.array(1.0), "a": jnp.array(2.0)}))
    assert (record.leaf, record.kind, record.line) == (
        "['guess']",
        "initial guess",
        line_of(loss),
    )


@pytest.mark.slow
def test_diffrax_event():
    dfx = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()

    def loss(w):
        fall = dfx.ODETerm(lambda t, y, drag: jnp.array([y[1], -9.8 - drag * y[1]]))
        event = dfx.Event(lambda t, y, args, **_: y[0] < 0.0)  # HERE
        y0 = jnp.array([10.0, 0.0])
        solution = dfx.diffeqsolve(fall, dfx.Tsit5(), 0.0, 9.0, 0.1, y0, w["drag"], event=event)
        return solution.ts[0]

    record = only(check(loss, {"drag": jnp.array(0.1)}))
    assert (record.kind, record.line) == ("comparison in a while_loop", line_of(loss))
    assert "eqg.event_time" in record.cure
    assert "diffrax.Event" in record.cure


# ---------------------------------------------------------------- zero by values


def relu_mlp(depth=1):
    return eqx.nn.MLP(3, 2, 8, depth, key=KEY)


def batch_loss(model, xs):
    return jnp.sum(jax.vmap(model)(xs) ** 2)


XS = jax.random.normal(jax.random.key(1), (64, 3))


@pytest.mark.parametrize(
    "activation",
    [jax.nn.relu, lambda x: jnp.maximum(x, 0), lambda x: jnp.where(x > 0, x, 0.0)],
    ids=["relu", "maximum", "where"],
)
def test_some_dead_units(activation):
    model = eqx.nn.MLP(3, 2, 8, 1, activation=activation, key=KEY)
    bias = jnp.full(8, 2.0).at[jnp.array([2, 5])].set(-100.0)
    model = eqx.tree_at(lambda m: m.layers[0].bias, model, bias)
    report = check(batch_loss, model, XS)
    assert not report  # they are no reason to stop a training
    assert any("layers[0].bias is zero for 2 of 8 units (2, 5)." in r for r in report.remarks)
    grads = eqx.filter_grad(batch_loss)(model, XS)
    dead = np.flatnonzero(~np.any(np.asarray(grads.layers[0].weight), 1))
    assert tuple(dead) == (2, 5)


@pytest.mark.parametrize("factor", [jnp.array(0.0), jnp.array(False), np.float16(0)])
def test_multiplied_by_zero_names_an_input_of_another_type(factor):
    """A weak type counts: JAX converts it. The factor is not a leaf, and is not to be
    trained."""
    factor = jnp.asarray(factor)
    cast = lambda x: x if x.weak_type else x.astype(jnp.float32)
    loss = lambda w, factor: jnp.sum(jnp.tanh(w) * cast(factor))
    record = only(eqg.explain_zero(loss, X, factor))
    assert (record.kind, record.detail) == ("multiplied by zero", "`factor`")
    assert "last layer" not in record.cure


VALUES = {
    "saturated": lambda w, x: jnp.sum(jax.nn.sigmoid(1e4 * w * x)),
    "zero derivative": lambda w, x: jnp.sum(jnp.cos(w - X) * x),
    "masked": lambda w, x: jnp.sum(jnp.where(x > 100, w, x)),
    "branch not taken": lambda w, x: jax.lax.cond(x[0] > 100, lambda: w[0], lambda: x[0]),
    "not selected": lambda w, x: jnp.concatenate([x, w])[1],
    "not selected: set": lambda w, x: jnp.sum((w * x).at[:].set(1.0)),
    "not selected: set at some": lambda w, x: jnp.sum((w * x).at[jnp.arange(3)].set(x) ** 2),
    "not selected: no steps": lambda w, x: jax.lax.scan(
        lambda c, _: (c + w[0], None), 0.0, None, 0
    )[0],
    "canceled": lambda w, x: jnp.sum(x * (w - w)),
    "canceled: product": lambda w, x: jnp.sum(jnp.array([[1.0], [-1.0]]) @ w[None]),
    "canceled: softmax": lambda w, x: jax.nn.softmax(1e3 * w)[1],
    "canceled: cross-entropy": lambda w, x: jax.nn.logsumexp(1e3 * w) - 1e3 * w[2],
    "dead units": lambda w, x: jnp.sum(jnp.clip(w, 50.0, 60.0) * x),
    "dead units: hinge": lambda w, x: jnp.sum(jnp.maximum(0.0, 1.0 - 99 * w**2)),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("is_batch", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_zero_by_values(name, is_batch):
    loss, kind = VALUES[name], name.partition(":")[0]
    if not is_batch:
        record = only(check(loss, X, X))
        assert (record.kind, record.by_structure) == (kind, False)
        assert record.line in lines_of(loss)
        assert "leaky_relu" not in record.cure  # they are no activations
        return
    each = jax.vmap(jax.checkpoint(jax.jit(loss)), in_axes=(None, 0))
    records = check(lambda w, xs: jnp.mean(each(w, xs)), X, jnp.stack([X, X + 1])).found
    # Under `vmap`, a `cond` becomes a `where`.
    assert {"branch not taken": "masked"}.get(kind, kind) in {r.kind for r in records}


def test_a_gradient_that_vanishes_over_the_steps():
    weight = 0.1 * jnp.eye(3) + 0.01

    def loss(h, xs):
        step = lambda h, x: (jnp.tanh(weight @ h + x), None)  # HERE
        return jnp.sum(jax.lax.scan(step, h, xs)[0])

    n = 400
    record = only(check(loss, X, jnp.zeros((n, 3))))
    assert (record.kind, record.line) == ("underflow", line_of(loss))
    assert 0 < record.step[0] < n - 20


def test_terms_of_a_rule_that_cancel():
    """With a straight-through function, the loss changes where the gradient cancels."""
    of_rule = lambda w: jnp.sum((w - eqg.ste.round(w)) ** 2)
    by_hand = lambda w: jnp.sum((w - (w + jax.lax.stop_gradient(jnp.round(w) - w))) ** 2)
    w = jnp.array([1.3, -0.6])
    for loss in (of_rule, by_hand):
        record = only(check(loss, w))
        assert record.kind == "canceled"
        assert "may change all the same" in record.cure
        assert loss(w) != loss(w + 0.1)
    mended = lambda w: jnp.sum((w - jnp.round(w)) ** 2)
    np.testing.assert_allclose(jax.grad(mended)(w), 2 * (w - jnp.round(w)), rtol=1e-6)


def test_a_zero_term_beside_another_one_is_no_cause():
    def loss(w, gates):
        step = lambda h, gate: (gate * h + 0.0 * jnp.sin(h), None)
        return jax.lax.scan(step, w, gates)[0]

    assert not check(loss, jnp.array(0.5), jnp.ones(5))
    records = check(loss, jnp.array(0.5), jnp.ones(5).at[1].set(0)).found
    assert {record.step for record in records} == {(1,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint",
    [None, *(pytest.param(c, marks=pytest.mark.slow) for c in (2, "auto"))],
)
def test_truncated(checkpoint):
    def loss(model, xs):
        step = lambda h, x: (jnp.tanh(model["w"] * h + x), None)
        scan = eqg.filter_scan(step, model["h"], xs, truncate=3, checkpoint=checkpoint)  # HERE
        return scan[0]

    model = {"w": jnp.array(0.5), "h": jnp.array(0.1)}
    record = only(check(loss, model, 0.1 * jnp.arange(7.0)))
    assert (record.leaf, record.kind, record.line) == ("['h']", "truncated", line_of(loss))


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("it is broken.\nsee"), "ValueError: it is broken"), (OSError(), "OSError")],
    ids=["text", "nothing"],
)
def test_an_error_of_the_gradient_is_quoted(error, text):
    @eqg.custom_vjp
    def broken(w):
        return w

    @broken.def_fwd
    def broken_fwd(w):
        return w, None

    @broken.def_bwd
    def broken_bwd(residuals, ct):
        raise error

    report = eqg.explain_zero(lambda w: broken(w) * jnp.zeros(()), jnp.array(2.0))
    (remark,) = report.remarks
    assert remark.startswith(f"The gradient of this loss raises {text}. Directional")
    assert only(report).kind == "multiplied by zero"


def test_while_loop_in_forward_mode():
    def loss(w):
        body = lambda s: (s[0] + 1, s[1] * w["a"] + 0.0 * w["b"])
        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.array(1.0)))[1]

    report = eqg.explain_zero(loss, {"a": jnp.array(2.0), "b": jnp.array(2.0)})
    assert only(report).leaf == "['b']"
    assert "forward mode" in str(report)


# ---------------------------------------------------------------- healthy models


class Recurrent(eqx.Module):
    cell: eqx.Module
    readout: eqx.nn.Linear

    def __call__(self, xs):
        h, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(4), xs)
        return self.readout(h)


def mlp(activation, **kwargs):
    return eqx.nn.MLP(3, 2, 8, 2, activation=activation, key=KEY, **kwargs)


SEQUENCES = jax.random.normal(jax.random.key(2), (2, 5, 4))
HEALTHY = {
    "linear": (eqx.nn.Linear(3, 2, key=KEY), XS),
    "relu": (mlp(jax.nn.relu), XS),
    "tanh": (mlp(jnp.tanh), XS),
    "gru": (Recurrent(eqx.nn.GRUCell(4, 4, key=KEY), eqx.nn.Linear(4, 1, key=KEY)), SEQUENCES),
    "quantized": (
        eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=KEY), eqx.nn.Lambda(eqg.ste.round)]),
        XS,
    ),
}


def summed(model, xs):
    out = jax.vmap(model)(xs)
    return sum(jnp.sum(x**2) + jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out))


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models(name):
    model, xs = HEALTHY[name]
    report = check(summed, model, xs)
    assert not report
    assert str(report).startswith("No leaf has a zero gradient")


# ---------------------------------------------------------------- random programs

UNARY = [
    jnp.sin,
    jnp.tanh,
    jnp.round,
    jnp.sign,
    jax.nn.relu,
    jax.lax.stop_gradient,
    eqg.ste.round,
    lambda x: (x > 0).astype(x.dtype),
    lambda x: x - x,
    lambda x: 0.0 * x,
    lambda x: jnp.where(x > 1e3, x, 1.0),
    lambda x: x[jnp.argsort(x)],
    lambda x: jnp.flip(x),
    lambda x: jax.lax.scan(lambda c, y: (jnp.cos(c) + y, c), x[0], x)[1],
    lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.floor, x),
    lambda x: jax.checkpoint(lambda x: jnp.exp(-(x**2)))(x),
    lambda x: jnp.maximum(x, 10.0),
]
BINARY = [jnp.add, jnp.multiply, lambda x, y: jnp.where(x > 0, x, y), lambda x, y: x[0] * y]


def random_program(seed):
    """A program of three leaves; each may be used in several places."""
    rng = np.random.default_rng(seed)
    # Drawn here: the loss is the same each time that it is called.
    choices = [
        (rng.integers(2), rng.integers(100), rng.integers(3 + i, size=2)) for i in range(7)
    ]
    used = rng.integers(3, 10, size=2)

    def loss(model):
        values = [model["a"], model["b"], model["c"]]
        for is_binary, op, (i, j) in choices:
            if is_binary:
                values.append(BINARY[op % len(BINARY)](values[i], values[j]))
            else:
                values.append(UNARY[op % len(UNARY)](values[i]))
        return jnp.sum(values[used[0]]) + jnp.sum(values[used[1]] ** 2)

    return loss, {name: jnp.asarray(rng.normal(size=4), X.dtype) for name in "abc"}


def check_random(seed):
    loss, model = random_program(seed)
    for record in check(loss, model).found:
        assert record.kind != "zero value"
        assert record.line or record.kind == "never used"


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    check_random(seed)


# ---------------------------------------------------------------- input, and cost


@pytest.mark.thorough
def test_shard_map():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("devices",), axis_types=auto)
    spec = jax.sharding.PartitionSpec("devices")

    def local(w):
        total = jnp.sum(jnp.round(w["a"])) + jnp.sum(w["b"])  # HERE
        return jax.lax.psum(total, "devices")

    loss = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    report = check(loss, {"a": X, "b": X})
    assert (only(report).kind, only(report).line) == ("rounding", line_of(local))
    assert not report.remarks


def test_complex_leaves():
    loss = lambda w: jnp.sum(jnp.real(w["a"]) ** 2) + jnp.sum(jnp.round(jnp.imag(w["b"])))
    model = {"a": jax.lax.complex(X, X), "b": jax.lax.complex(X, X)}
    assert only(eqg.explain_zero(loss, model)).leaf == "['b']"


def test_a_gradient_that_zero_safe_makes_finite():
    loss = lambda m: jnp.where(m["x"] > 0, jnp.sqrt(m["x"]), 0.0) * m["w"] + m["t"] * 0.0
    model = {name: jnp.array(x) for name, x in {"w": 2.0, "t": 0.5, "x": 0.0}.items()}
    assert "['x'] is not finite" in str(eqg.explain_zero(loss, model))
    report = str(eqg.explain_zero(eqg.zero_safe(loss), model))
    assert "The gradient of ['x'] is not finite without `zero_safe`" in " ".join(report.split())


@pytest.mark.parametrize(
    ("fn", "bias"),
    [
        (jax.nn.silu, -200.0),
        (jax.nn.softplus, -200.0),
        (jax.nn.log_sigmoid, 200.0),
        (jax.nn.mish, -200.0),
    ],
)
def test_saturated_functions_of_several_operations(fn, bias):
    bias = bias if jnp.zeros(()).dtype == jnp.float32 else 10 * bias
    (record,) = eqg.explain_zero(lambda b: jnp.sum(fn(X + b)), jnp.array(bias)).found
    assert record.kind == "saturated"
    assert record.primitive in (fn.__name__, "logaddexp")


def test_a_surrogate_that_is_zero_away_from_the_threshold():
    spike = lambda v, surrogate: jnp.sum(eqg.surrogates.spike(v, surrogate))
    loss = lambda w, surrogate: spike(w * X - 9.0, surrogate)
    report = eqg.explain_zero(loss, jnp.array(1.0), eqg.surrogates.triangle())
    (record,) = report.found
    assert (record.kind, record.primitive) == ("zero derivative", "spike")
    assert "stationary" not in record.cure
    assert not eqg.explain_zero(loss, jnp.array(1.0), eqg.surrogates.atan())  # as it says


def test_a_cond_under_vmap_is_no_relu():
    step = lambda w, x: jax.lax.cond(w * x > 100, lambda: (w * x) ** 2, lambda: 1.0)
    loss = lambda w: jnp.sum(jax.vmap(step, (None, 0))(w, X))
    (record,) = eqg.explain_zero(loss, jnp.array(1.0)).found
    assert "the `cond` under a `vmap`, takes the other branch" in record.cure


def test_leaves_of_integers_are_named():
    model = {"w": jnp.ones(2), "table": jnp.arange(3), "key": jax.random.key(0)}
    loss = lambda m, i: m["w"][m["table"][i]]
    assert "`['table']` (an array of int" in str(eqg.explain_zero(loss, model, jnp.array(1)))
    assert "integers" not in str(eqg.explain_zero(lambda w, i: w[i], X, jnp.array(1)))


def test_a_safe_function_whose_derivative_is_zero_in_the_loss():
    """The report names the function that the user calls, and not a rule inside."""
    force = lambda w: jnp.sum(jax.grad(lambda x: w * eqg.safe.norm(x))(jnp.zeros(2)))
    report = eqg.explain_zero(force, jnp.array(2.0))
    named = "`safe.norm` has a zero derivative where the true one does not exist"
    assert any(named in record.cure for record in report.found)
    text = str(report)
    assert "polar" not in text
    assert "inverse" not in text


def test_a_safe_function_at_its_kink():
    (record,) = eqg.explain_zero(eqg.safe.norm, jnp.zeros(2)).found
    assert record.primitive == "safe.norm"
    assert "threshold" not in record.cure


# ---------------------------------------------------------------- what else makes no gradient


class WithNumbers(eqx.Module):
    scale: float
    weight: jax.Array
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.scale = 0.5  # the number
        self.weight = X
        self.dropout = eqx.nn.Dropout(0.1)


def test_a_python_number_is_named_with_the_line_that_makes_it_an_array():
    """equinox#189. A number in a library, such as a rate, is not meant."""
    loss = lambda m: jnp.sum(m.weight**2) * m.scale
    model = WithNumbers()
    assert eqx.filter_grad(loss)(model).scale is None
    (remark,) = eqg.explain_zero(loss, model).remarks
    lines, first = inspect.getsourcelines(WithNumbers)
    line = next(first + i for i, text in enumerate(lines) if "# the number" in text)
    assert f"`scale` (the Python number 0.5 at test_explain_zero.py:{line})" in remark
    assert "dropout" not in remark
    code = remark.rpartition(" = ")[2].partition("`")[0]
    fixed = eqx.tree_at(lambda m: m.scale, model, eval(code, {"jnp": jnp}))
    assert not eqg.explain_zero(loss, fixed).remarks
    assert eqx.filter_grad(loss)(fixed).scale == jnp.sum(X**2)


def test_the_cure_of_an_index_that_is_rounded():
    """jax-gcm#843: a straight-through index has no gradient either."""
    table = jnp.arange(20.0) ** 2
    (record,) = eqg.explain_zero(lambda t: table[jnp.round(t).astype(int)], X[2]).found
    assert record.kind == "rounding"
    code = "jnp.interp(x, jnp.arange(n, dtype=x.dtype), table)"
    assert f"`{code}`" in record.cure
    cured = lambda x: eval(code, {"jnp": jnp, "table": table, "x": x, "n": 20})
    value, slope = jax.value_and_grad(cured)(jnp.array(2.3))
    np.testing.assert_allclose([value, slope], [4 + 0.3 * 5, 5.0], rtol=1e-5)


@pytest.mark.parametrize(
    ("image", "order", "text"),
    [(np.uint8, 1, "`x.astype(float)`"), (np.float32, 0, "`order=1`")],
)
def test_inside_a_function_of_a_library_the_cure_is_what_to_pass(image, order, text):
    """jax#8684."""

    def shifted(pixels, order):
        at = jnp.arange(5.0)
        sample = jax.scipy.ndimage.map_coordinates
        return lambda s: jnp.sum(sample(pixels, [at + s, at + s], order) * 1.0)

    pixels = jnp.arange(100).reshape(10, 10).astype(image)
    with jax.numpy_dtype_promotion("standard"):
        record = only(check(shifted(pixels, order), jnp.array(0.3)))
    assert text in record.cure
    assert jax.grad(shifted(pixels.astype(float), 1))(jnp.array(0.3)) == 55  # as it says


def test_rounding_noise_is_seen_anywhere_in_the_backward_pass():
    """jax#19727: of two features, a normalization leaves the signs."""

    def loss(model, x):
        h = x @ model["w"]
        h = (h - jnp.mean(h, -1, keepdims=True)) / jnp.std(h, -1, keepdims=True)
        return jnp.mean((h @ model["v"] - 1.0) ** 2)

    x = jax.random.normal(jax.random.key(1), (16, 4))
    of = lambda n: {"w": jax.random.normal(KEY, (4, n)), "v": jnp.arange(1.0, 1 + n)}
    report = eqg.explain_zero(loss, of(2), x)
    assert set(report.noise) == {"['w']"}
    assert any("a rounding error" in remark for remark in report.remarks)
    assert not eqg.explain_zero(loss, of(3), x).noise

    # A shift of all logits, which a softmax removes.
    shifted = lambda m, x: -jnp.mean(jax.nn.log_softmax(x @ m["w"] + m["b"])[:, 0])
    report = eqg.explain_zero(shifted, {"w": of(3)["w"], "b": jnp.array(0.7)}, x)
    assert set(report.noise) == {"['b']"}


def test_a_gradient_that_float64_agrees_with_is_no_noise():
    """In bfloat16, another rounding of `64 * w` changes its exponential by a half."""
    w = jnp.array([0.5, 0.75], "bfloat16")
    loss = lambda w: jnp.sum(jnp.exp(64 * w))
    exact = 64 * np.exp(64 * np.asarray(w, float))
    np.testing.assert_allclose(np.asarray(jax.grad(loss)(w), float), exact, rtol=0.02)
    assert not eqg.explain_zero(loss, w).noise


def test_the_clamp_behind_a_zero_second_derivative():
    """GPJax#508: the derivative of a kernel, which is clamped."""

    def loss(m, x):
        kernel = lambda x: m**2 * jnp.sqrt(jnp.maximum(x**2, 1.0))  # HERE
        return jnp.sum(jax.vmap(jax.grad(kernel))(x))

    record = only(check(loss, jnp.array(0.5), jnp.array([0.3, 0.6])))
    assert (record.line, record.kind) == (line_of(loss), "multiplied by zero")
    assert record.detail.endswith(f"at test_explain_zero.py:{line_of(loss)}")
    assert not check(loss, jnp.array(0.5), jnp.array([1.3, 0.6]))


def test_kinks_and_staircases():
    kinked = lambda w: jnp.where(w < 1, 2 * w, 2.0)
    (record,) = check(kinked, jnp.array(1.0)).found
    assert record.elsewhere == "It is at a kink, with slope 0 above and 2 below."
    (record,) = check(lambda t: jnp.floor(100 * t), jnp.array(0.1234)).found
    assert record.elsewhere.startswith("The loss is flat here, but changes over longer steps")
    for smooth in (lambda x: x**2, jnp.cos, lambda x: 0.0 * x):
        (record,) = check(smooth, jnp.array(0.0)).found
        assert not record.elsewhere


def test_many_leaves_are_followed_together():
    """The first two do not reach the loss, and the others end in one place or in another."""
    keys = jax.random.split(KEY, 40)
    model = {f"{i:02}": jax.random.normal(key, (3,)) for i, key in enumerate(keys)}

    def loss(model):
        values = list(model.values())[2:]
        rounded = jnp.round(sum(values[:20]))  # HERE
        return jnp.sum(rounded) + jnp.sum(jnp.sign(sum(values[20:])))

    records = check(loss, model).found
    kinds = [r.kind for r in records]
    assert kinds == 2 * ["never used"] + 20 * ["rounding"] + 18 * ["sign"]
