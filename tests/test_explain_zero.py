"""`explain_zero`: which leaves have a zero gradient, why, and on which line. The witness is
`jax.grad`."""

import functools as ft
import inspect
import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import compilations, skip_without_checkpointed_loops
from .test_explain_nan import assert_can_be_pasted, lines_of


KEY, ONE = jax.random.key(0), jnp.array(1.0)
X = jnp.array([0.3, -1.2, 2.0])


def zero_leaves(loss, model, *args) -> set[str]:
    grads = eqx.filter_grad(loss)(model, *args)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    name = lambda path: jax.tree_util.keystr(path).removeprefix(".") or "model"
    return {name(path) for path, g in leaves if not np.any(np.asarray(g))}


def check(loss, model, *args):
    """The report, which has the leaves that the witness finds."""
    report = eqg.explain_zero(loss, model, *args)
    assert {record.leaf for record in report.found} == zero_leaves(loss, model, *args)
    assert_can_be_pasted(report)
    return report


def only(*args):
    (record,) = check(*args).found
    return record


# ---------------------------------------------------------------- operations without derivative

BINS = jnp.linspace(0.0, 1.0, 11)


@jax.custom_vjp
def raw_rule(w):
    return jnp.sin(w)


raw_rule.defvjp(lambda w: (jnp.sin(w), None), lambda _, ct: (jnp.zeros_like(ct),))
raw_forward_rule = jax.custom_jvp(jnp.cos)
raw_forward_rule.defjvp(lambda p, t: (jnp.cos(*p), jnp.zeros_like(*t)))
our_rule = eqg.custom_vjp(lambda w: 2 * w)
our_rule.def_fwd(lambda w: (2 * w, None))
our_rule.def_bwd(lambda residuals, ct: (None,), symbolic_zeros=True)


def bisection(w):
    def body(bounds):
        low, high = bounds
        middle = (low + high) / 2
        is_low = middle**3 + middle < w  # HERE
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    start = jnp.full_like(w, -10.0), jnp.full_like(w, 10.0)
    return jax.lax.while_loop(lambda b: jnp.max(b[1] - b[0]) > 1e-3, body, start)[0]


def counted(w):
    is_on = lambda n: jnp.max(n - w) < 3  # HERE
    return jax.lax.while_loop(is_on, lambda n: n + 1, jnp.zeros((), w.dtype))


RULE, LOOP = "rule without a derivative", "comparison in a while_loop"
CUTS = {
    "argsort": (lambda w: X.astype(w.dtype)[jnp.argsort(w, axis=-1)], "order"),
    "round": (lambda w: jnp.round(3 * w), "rounding"),
    "sign": (lambda w: jnp.sign(w), "sign"),
    "where": (lambda w: jnp.where(w > 0, 2.0, 1.0).astype(w.dtype), "comparison"),
    "searchsorted": (lambda w: jnp.searchsorted(BINS, w).astype(w.dtype), "number of a bin"),
    "index": (lambda w: X.astype(w.dtype)[jnp.abs(w).astype("int32")], "cast to an integer"),
    "categorical": (lambda w: jax.random.categorical(KEY, w).astype(w.dtype),
        "argmax"),
    "bernoulli": (lambda w: jax.random.bernoulli(KEY, jax.nn.sigmoid(w)).astype(w.dtype),
        "comparison"),
    "raw_rule": (lambda w: raw_rule(w), RULE),
    "raw_forward_rule": (lambda w: raw_forward_rule(w), RULE),
    "our_rule": (lambda w: our_rule(w), RULE),
    # What is compared is used, if few other results change the comparison.
    "large": (lambda w: jnp.where(jnp.round(w) > 1e3, 0, 1).astype(w.dtype), "rounding"),
    "small": (lambda w: jnp.where(abs(jnp.round(w)) < 0.5, 0, 1).astype(w.dtype), "rounding"),
    "odd": (lambda w: jnp.where(jnp.round(w[0]) % 2 == 1, 0, 1).astype(w.dtype), "rounding"),
    "equal": (lambda w: jnp.where(jnp.round(w) == jnp.round(X), 0, 1).astype(w.dtype),
        "rounding"),
    "bisection": (bisection, LOOP),
    "counted": (counted, LOOP),
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
IN_ALL = ("our_rule", "counted")


@pytest.mark.parametrize(
    ("name", "context"), [(n, c) for n in CUTS for c in CONTEXTS if c == "plain" or n in IN_ALL]
)
def test_cut(name, context):
    fn, kind = CUTS[name]
    record = only(lambda w: jnp.sum(CONTEXTS[context](fn, w)), X)
    assert (record.leaf, record.kind, record.by_structure) == ("model", kind, True)
    lines, first = inspect.getsourcelines(fn)
    assert record.file == __file__
    assert record.line in (lines_of(fn, "HERE") or range(first, first + len(lines)))


def test_surrogates_are_not_reported_and_the_cure_mends_it():
    for fn in (eqg.ste.round, eqg.ste.sign, eqg.ste.floor, eqg.ste.one_hot_argmax):
        assert not check(lambda w, fn=fn: jnp.sum(fn(w) * X), X)
    code = re.search("`(.*?)`", only(lambda w: jnp.sum(jnp.round(w) * X), X).cure)[1]
    assert not check(lambda w: jnp.sum(eval(code, {"eqg": eqg, "x": w}) * X), X)


def test_argmin_is_chosen_with_the_opposite_sign():
    """For an `argmin`, `one_hot_argmax` of the same numbers would choose the largest."""
    values = jnp.array([1.0, 2.0, 4.0])
    record = only(lambda d: values[jnp.argmin(d)], X)
    chosen = re.search(r"`(eqg\.ste\.one_hot_argmax\(-.*?\))`", record.cure)[1]
    cured = lambda x: jnp.sum(eval(chosen, {"eqg": eqg, "x": x}) * values)
    assert cured(X) == values[jnp.argmin(X)]
    assert jnp.any(jax.grad(cured)(X))


# ---------------------------------------------------------------- threads


@pytest.mark.slow
def test_optimistix_54():
    optx = pytest.importorskip("optimistix")

    def loss(w):
        solver = optx.Newton(rtol=1e-5, atol=1e-5)
        cubic = lambda y, a: y**3 + y - a
        return optx.root_find(cubic, solver, w["guess"], w["a"]).value  # HERE

    record = only(loss, {"guess": ONE, "a": 2 * ONE})
    assert (record.leaf, record.kind) == ("['guess']", "initial guess")
    assert [record.line] == lines_of(loss, "HERE")


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

    record = only(loss, {"drag": jnp.array(0.1)})
    assert (record.kind, [record.line]) == (LOOP, lines_of(loss, "HERE"))
    assert "eqg.event_time" in record.cure
    assert "diffrax.Event" in record.cure


def test_equinox_189():
    """A Python number is named with the line that makes it an array. One in a library, such as
    a rate, is not meant."""

    class Base(eqx.Module):
        count: int = 2
        shift: jax.Array | None = None

    class Part(Base):
        pass

    class WithNumbers(eqx.Module):
        scale: float
        part: Part
        dropout: eqx.nn.Dropout
        weight: jax.Array

        def __init__(self):
            self.scale = 0.5  # NUMBER
            self.part, self.dropout, self.weight = Part(), eqx.nn.Dropout(0.1), X

    loss, model = lambda m: jnp.sum(m.weight**2) * m.scale, WithNumbers()
    assert eqx.filter_grad(loss)(model).scale is None
    (remark,) = eqg.explain_zero(loss, model).remarks
    (line,) = lines_of(WithNumbers, "NUMBER")
    assert f"`scale` (the Python number 0.5 at test_explain_zero.py:{line})" in remark
    code = remark.rpartition(" = ")[2].partition("`")[0]
    fixed = eqx.tree_at(lambda m: m.scale, model, eval(code, {"jnp": jnp}))
    assert "scale" not in eqg.explain_zero(loss, fixed).remarks[0]
    assert eqx.filter_grad(loss)(fixed).scale == jnp.sum(X**2)


def test_jax_gcm_843():
    """A straight-through index has no gradient either."""
    table = jnp.arange(20.0) ** 2
    record = only(lambda t: table[jnp.round(t).astype(int)], X[2])
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
def test_jax_8684(image, order, text):
    """Inside a function of a library, the cure is what to pass."""

    def shifted(pixels, order):
        at, sample = jnp.arange(5.0), jax.scipy.ndimage.map_coordinates
        return lambda s: jnp.sum(sample(pixels, [at + s, at + s], order) * 1.0)

    pixels = jnp.arange(100).reshape(10, 10).astype(image)
    with jax.numpy_dtype_promotion("standard"):
        assert text in only(shifted(pixels, order), jnp.array(0.3)).cure
    assert jax.grad(shifted(pixels.astype(float), 1))(jnp.array(0.3)) == 55  # as it says


def test_a_shift_of_each_row_of_logits():
    """Those are rounding errors. That of the last row is zero, without units that are dead."""
    logits = jnp.zeros((5, 2)).at[:4].set(jax.random.normal(KEY, (4, 2)) * 3)
    shifts = lambda b: jnp.sum(jax.nn.softmax(logits + b[:, None])[:, 0])
    report = eqg.explain_zero(shifts, jnp.ones(5))
    assert set(report.noise) == {"model"}


def test_gpjax_508():
    """The clamp behind a zero second derivative: of a kernel, which is clamped."""

    def loss(m, x):
        kernel = lambda x: m**2 * jnp.sqrt(jnp.maximum(x**2, 1.0))  # HERE
        return jnp.sum(jax.vmap(jax.grad(kernel))(x))

    record = only(loss, jnp.array(0.5), jnp.array([0.3, 0.6]))
    (line,) = lines_of(loss, "HERE")
    assert (record.line, record.kind) == (line, "multiplied by zero")
    assert not check(loss, jnp.array(0.5), jnp.array([1.3, 0.6]))


# ---------------------------------------------------------------- zero by values

VALUES = {
    "zero derivative": lambda w, x: jnp.sum(jnp.cos(jnp.float16(w - X)) * jnp.float16(x)),
    "zero derivative: product": lambda w, x: jnp.sum((w - X) * (w - X)),
    "not selected": lambda w, x: jnp.concatenate([x, w])[1],
    "not selected: half": lambda w, x: jnp.append(jnp.round(jnp.float16(w)), jnp.float16(x))[4],
    "not selected: set at some": lambda w, x: jnp.sum((w * x).at[jnp.arange(3)].set(x) ** 2),
    "not selected: no steps": lambda w, x: jax.lax.scan(
        lambda c, _: (c + w[0], None), 0.0, None, 0
    )[0],
    "canceled: product": lambda w, x: jnp.sum(jnp.array([[1.0], [-1.0]]) @ w[None]),
    "canceled: softmax": lambda w, x: jax.nn.softmax(1e3 * w)[1],
    "canceled: cross-entropy": lambda w, x: jax.nn.logsumexp(1e3 * w) - 1e3 * w[2],
    "canceled: mean": lambda w, x: 1e20 * jnp.sum(w - jnp.mean(w)),
    "dead units: clip": lambda w, x: jnp.sum(jnp.clip(w, 50.0, 60.0) * x),
    "dead units: hinge": lambda w, x: jnp.sum(jnp.maximum(0.0, 1.0 - 99 * w**2)),
    "saturated: silu": lambda w, x: jnp.sum(jax.nn.silu(jnp.bfloat16(w) - 2000)),
    "saturated: log_sigmoid": lambda w, x: jnp.sum(jax.nn.log_sigmoid(w + 2000)),
}


@pytest.mark.parametrize("name", VALUES)
def test_zero_by_values(name):
    record = only(VALUES[name], X, X)
    assert (record.kind, record.by_structure) == (name.partition(":")[0], False)
    lines, first = inspect.getsourcelines(VALUES[name])
    assert record.line in range(first, first + len(lines))


@pytest.mark.parametrize("factor", [jnp.array(0.0), jnp.array(False)])
def test_multiplied_by_zero_names_an_input_of_another_type(factor):
    """A weak type counts: JAX converts it. The factor is not a leaf, and is not to be
    trained."""
    cast = lambda x: x if x.weak_type else x.astype(jnp.float32)
    loss = lambda w, factor: jnp.sum(jnp.tanh(w) * cast(factor))
    assert eqg.explain_zero(loss, X, jnp.asarray(factor)).found[0].detail == "`factor`"


def test_a_gradient_that_vanishes_over_the_steps():
    def loss(h, xs):
        step = lambda h, x: (jnp.tanh((0.1 * jnp.eye(3) + 0.01) @ h + x), None)  # HERE
        return jnp.sum(jax.lax.scan(step, h, xs)[0])

    record = only(loss, X, jnp.zeros((400, 3)))
    assert (record.kind, [record.line]) == ("underflow", lines_of(loss, "HERE"))
    assert 0 < record.step[0] < 380
    with jax.enable_x64(True):  # as they differ, it is no tie
        assert only(lambda x: jnp.maximum(x, 1 + 1e-12), jnp.array(1.0)).kind == "dead units"


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, 2])
def test_truncated(checkpoint):
    def loss(model, xs):
        step = lambda h, x: (jnp.tanh(model["w"] * h + x), None)
        scan = eqg.filter_scan(step, model["h"], xs, truncate=3, checkpoint=checkpoint)  # HERE
        return scan[0]

    record = only(loss, {"w": 0.5 * ONE, "h": 0.1 * ONE}, 0.1 * jnp.arange(7.0))
    assert (record.leaf, record.kind) == ("['h']", "truncated")
    assert [record.line] == lines_of(loss, "HERE")


def test_surrogates_and_safe_functions_where_their_derivative_is_zero():
    spike = lambda w, s: jnp.sum(eqg.surrogates.spike(w * X - 9.0, s))
    assert "`eqg.surrogates.atan()`" in only(spike, ONE, eqg.surrogates.triangle()).cure
    assert not check(spike, ONE, eqg.surrogates.atan())  # as it says
    assert only(eqg.safe.norm, jnp.zeros(2)).primitive == "safe.norm"
    # The report names the function that the user calls, and not a rule inside.
    force = lambda w: jnp.sum(jax.grad(lambda x: w * eqg.safe.norm(x))(jnp.zeros(2)))
    assert "The derivative of `safe.norm` is zero here" in str(check(force, jnp.array(2.0)))


def test_a_cond_under_vmap():
    step = lambda w, x: jax.lax.cond(w * x > 100, lambda: (w * x) ** 2, lambda: 1.0)
    cure = only(lambda w: jnp.sum(jax.vmap(step, (None, 0))(w, X)), ONE).cure
    assert "A `cond` under a `vmap`" in cure


def test_kinks_and_staircases():
    remarks = lambda loss, x: eqg.explain_zero(loss, jnp.array(x)).remarks
    (remark,) = remarks(lambda w: jnp.where(w < 1, w, 1.0), 1.0)
    assert remark.endswith("the other side has a slope: 0 above and 1 below.")
    assert "is flat here" in remarks(lambda t: jnp.floor(100 * t), 0.1234)[0]
    report = eqg.explain_zero(lambda w: jnp.floor(sum(w)), [jnp.bfloat16(0.03)] * 7)
    assert report.remarks[4:] == ["And so for [4], [5], [6]."]
    for smooth in (lambda x: x**2, lambda x: 1 + x**3, jnp.cos, lambda x: 0.0 * x):
        assert not remarks(smooth, 0.0)


# ---------------------------------------------------------------- zero_safe


def test_a_gradient_that_zero_safe_makes_finite():
    loss = lambda m: jnp.where(m["x"] > 0, jnp.sqrt(m["x"]), 0.0) * m["w"] + m["t"] * 0.0
    model = {"w": 2 * ONE, "t": 0.5 * ONE, "x": 0 * ONE}
    for fn in (loss, eqg.zero_safe(loss)):
        assert eqg.explain_zero(fn, model).not_finite == ["['x']"]


@pytest.mark.thorough
def test_a_derivative_that_zero_safe_drops():
    """At `lam = 0`, the derivative of the transformation of Box and Cox is `log(x)**2 / 2`, and
    the derivative of the branch is zero. All diagnoses say so."""
    x, lam = jnp.array([0.5, 2.0, 5.0]), jnp.array(0.0)

    def loss(lam):
        return jnp.sum(jnp.where(lam == 0, jnp.log(x), (x**lam - 1) / lam))

    safe = eqg.zero_safe(loss)
    assert jax.grad(safe)(lam) == 0
    (record,) = eqg.explain_nan(loss, lam).found
    assert record.kind == "dead branch"
    assert not eqg.explain_nan(safe, lam)
    zero = eqg.explain_zero(safe, lam)
    assert zero.remarks[0] == "The gradient of model is not finite: see `eqg.explain_nan`."
    report = eqgt.check_gradients(safe, lam, raises=False)
    assert not report.passed
    assert any("`zero_safe` drops" in remark for remark in report.remarks)
    # As the cure says.
    mended = lambda lam: jnp.sum(jnp.log(x) * eqg.safe.expm1_ratio(lam * jnp.log(x)))
    assert jnp.allclose(mended(lam), loss(lam))
    report = eqgt.check_gradients(mended, lam)
    assert report.passed
    assert not any("zero_safe" in remark for remark in report.remarks)


# ---------------------------------------------------------------- models


def test_an_error_of_the_gradient_is_quoted():
    broken = eqg.custom_vjp(lambda w: w)

    def bwd(residuals, ct):
        raise ValueError("it is broken.\nsee")

    broken.def_fwd(lambda w: (w, None))
    broken.def_bwd(bwd)
    report = eqg.explain_zero(lambda w: broken(w) * jnp.zeros(()), jnp.array(2.0))
    assert "raises ValueError: it is broken. Directional" in report.remarks[0]


def test_leaves_that_are_complex_or_can_have_no_gradient():
    loss = lambda w: jnp.sum(jnp.real(w["a"]) ** 2) + jnp.sum(jnp.round(jnp.imag(w["b"])))
    found = eqg.explain_zero(loss, dict.fromkeys("ab", jax.lax.complex(X, X))).found
    assert [r.leaf for r in found] == ["['b']"]
    model = {"w": jnp.ones(2), "table": jnp.arange(3), "key": jax.random.key(0), "b": None}
    for tool in (eqg.explain_zero, eqg.explain_gradient):
        text = " ".join(str(tool(lambda m, i: m["w"][m["table"][i]], model, 1)).split())
        assert "`['table']` (an array of int" in text
        assert "`['b']` (`None`)" in text
        assert "No arrays" not in str(tool(lambda w, i: w[i], X, 1))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_equal_operations_are_compiled_once(wrap):
    """A long program of few operations takes no more compilations than a short one."""

    def count(n):
        loss = lambda x: jnp.sum(jnp.round(ft.reduce(lambda x, _: jnp.sin(x), range(n), x)))
        with compilations() as found:
            assert eqg.explain_zero(wrap(loss), jnp.ones(3))
        return len(found)

    count(120)
    assert count(320) == count(120)
