"""`check_gradients` finds every planted fault of a model, and accuses no right model."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads._diagnosis.in_float64 import evaluate_in_float64
from eqx_grads.testing._oracle import lowest_precisions

from .helpers import quick_only
from .model_faults import DATA, dense_stack, FAULTS, with_rule
from .right_models import RIGHT


# One of each kind for every change; all of them are slow tests.
QUICK = {
    "missing_factor",
    "missing_cotangent_of_a_bias",
    "wrong_rule_deep_in_a_scan",
    "stop_gradient_left_in",
    "relu_at_its_kink",
    "float32_only",
    "chaotic_map",
    "chaotic_map_of_60_steps",
    "a_hundred_thousand_kinks",
}
# A bias that the norm removes, and a loss that turns within any step.
UNMEASURABLE = {"batch_norm_with_state", "chaotic_map_of_60_steps"}


@pytest.mark.parametrize("name", quick_only(FAULTS, QUICK, pytest.mark.slow))
def test_fault_is_found(name):
    fault = FAULTS[name]
    fn, model, *args = fault.make()
    report = eqgt.check_gradients(fn, model, *args, raises=False)
    if fault.kind == "stopped":  # on purpose, or not
        assert not report
        stopped = {leaf.leaf for leaf in report.leaves if leaf.verdict == "stopped"}
        assert stopped == set(fault.wrong), str(report)
        assert "`stop_gradient` is called at model_faults.py:" in str(report)
        return
    text = " ".join(str(report).split())
    assert {found.leaf for found in report.found} == set(fault.wrong), str(report)
    for found in report.found:
        layer = fault.layer or found.leaf.rpartition(".")[0]
        fields = found.kind, found.path, found.primitive
        assert fields == (fault.kind, layer, fault.function), str(report)
        if found.primitive:
            assert found.file.endswith("model_faults.py"), str(report)
            assert f"model_faults.py:{found.line}" in text


@pytest.mark.parametrize("name", quick_only(RIGHT, QUICK, pytest.mark.slow))
def test_right_model_is_not_accused(name):
    fn, model, *args = RIGHT[name]()
    report = eqgt.check_gradients(fn, model, *args)
    assert not report
    # A check that measures nothing accuses nobody.
    unmeasured = [leaf for leaf in report.leaves if leaf.verdict == "not measured"]
    assert len(unmeasured) <= (name in UNMEASURABLE), str(report)


# ---------------------------------------------------------------- verdicts


def with_slope(fn, slope):
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(lambda p, t: (rule(*p), slope(p[0]) * t[0]))
    return rule


def wrong_square(factor):
    return with_rule(lambda x: x**2, lambda x: (x**2, x), lambda x, ct: (factor * ct * x,))


def confident(logits):
    """Rounds to zero, with a gradient of 3e-20."""
    return jax.nn.logsumexp(logits) - logits[0]


def determinant(w):
    """JAX computes its diagonal by a branch for each platform, even in float64."""
    w = w.astype("float32")
    return w[0, 0] * jnp.linalg.slogdet(w)[1]


def entropy(w):
    p = jax.nn.softmax(w)
    return jnp.sum(p * jnp.log(p))


def raises_close_by(x):
    return jnp.sum(jnp.log(eqx.error_if(x, jnp.any(x < 0), "negative")))


@jax.custom_jvp
def square_on_host(x):
    return jax.pure_callback(np.square, jax.ShapeDtypeStruct((), jnp.float32), x)


square_on_host.defjvp(lambda p, t: (square_on_host(*p), 2 * p[0] * t[0]))


def stopped_in_a_scan(w):
    step = lambda c, x: (jnp.sin(w[0] * jax.lax.stop_gradient(c) + x), None)
    return jax.lax.scan(step, w[1], jnp.array([0.1, 1.0]))[0]


def kinks_beside(k):
    """The kinks cancel along some directions."""
    curve = with_slope(lambda x: x**2, lambda x: k * x)
    return lambda x: jnp.sum(jnp.abs(x[:3])) - jnp.sum(jnp.abs(x[1:4])) + jnp.sum(curve(x[4:]))


def one_sided_kink(k, factor=1.0):
    """Its slopes are -1 and -2."""
    slope = lambda x: jnp.where(x == 0, k, factor * jnp.where(x < 0, -1.0, -2.0))
    fn = with_slope(lambda x: jnp.where(x < 0, -x, -2 * x), slope)
    return lambda x: fn(x[0]) + jnp.sum(jnp.abs(x[1:]))


in_half = lambda fn: lambda x: fn(x.astype("bfloat16")).astype(x.dtype)
newton = lambda f, y: jax.lax.fori_loop(0, 9, lambda _, y: y - f(y) / (2 * y), y)
largest = lambda x: jnp.max(x)
all_of_maximum = with_rule(largest, lambda x: (largest(x), x == largest(x)), lambda is_max, ct:
    (jnp.where(is_max, ct, 0.0),))  # fmt: skip
bump = with_slope(
    lambda x: jnp.maximum(x, 0.0) * (1 - x), lambda x: jnp.where(x < 0, 0.0, 1 - 2 * x)
)
stable = jnp.array([1.0, 2.0], "float32")
DIRECTION = jnp.array([-1.152883, -1.229587, -0.7161828, 1.6050261], "float32")
KINKS = jnp.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.5])
# A loss, its model, the verdict, and the kind of the fault, if there is one.
VERDICTS = {
    "kinks": (one_sided_kink(-1.4), jnp.zeros(5), "kink"),
    "the slopes of an entry": (lambda x: jnp.sum(jnp.abs(x)) ** 4 + x[1],
        jnp.array([1.0, 0.0]), "kink"),
    "zero but for rounding": (lambda x: with_slope(jnp.sqrt, lambda d: 1e12)(
        3 * jnp.sum(x * x) - jnp.sum(x * x) - 2 * jnp.sum(x * x)), DIRECTION, "zero"),
    # In float32, a difference of nearly equal numbers has few digits.
    "rounding": (lambda x: jnp.sum(jnp.sin(x) * ((x + 2.0**18 * jnp.cos(0 * x)) - 2.0**18)),
        jnp.array([0.3, 0.7], "float32"), "right"),
    # The slope of each falls from 100 to 99.8 within the step to a point nearby.
    "kinks of two signs": (lambda x: 100 * (bump(x[0] - 1) - bump(x[1] - 1)), jnp.ones(2),
        "kink"),
    "below float32": (lambda x: 1e-20 * jnp.sum(wrong_square(1.0)(1e-10 * x)), stable,
        "not measured"),
    "a slope outside": (one_sided_kink(-0.9), jnp.zeros(5), "WRONG", "wrong"),
    "a slope of zero": (one_sided_kink(0.0), jnp.zeros(1), "WRONG", "cut"),
    "wrong beside a kink": (one_sided_kink(-1.4, 1.1), jnp.zeros(5), "WRONG", "wrong"),
    "a rule in half": (lambda x: jnp.sum(with_slope(jnp.sin, in_half(jnp.cos))(x)), stable,
        "WRONG", "wrong"),
    "beside a branch": (lambda w: determinant(wrong_square(1.0)(w)), jnp.eye(3) + 0.5, "WRONG",
        "wrong"),
    "a solver": (lambda w: jax.lax.custom_root(lambda y: y**2 - w, w, newton, lambda g, y: 2 * y
        / g(jnp.ones_like(y))), jnp.array(3.0), "WRONG", "wrong"),
    "kinks hide nothing": (kinks_beside(2.2), KINKS, "WRONG", "wrong"),
    "rounds to zero": (confident, jnp.array([45.0, 0.0]), "not measured"),
    "does not": (lambda x: confident(0.9 * x + 0.1 * eqg.scale_gradient(x, 2.0)),
                 jnp.array([3.0, 1.0]), "WRONG", "wrong"),
    "out of range": (lambda w: -eqg.safe.entropy(jax.nn.softmax(w)),
                     jnp.array([0.0, 120.0, -120.0], "float32"), "not measured"),
    "NaN in float32": (entropy, jnp.array([0.0, 2.0, -120.0], "float32"), "WRONG",
                       "not finite"),
    "stopped in a scan": (stopped_in_a_scan, jnp.array([0.3, 0.2]), "stopped"),
    "loss is NaN": (jnp.log, jnp.array(-1.0), "not measured", "not finite"),
    "zero in half": (lambda w: jnp.sum(w * 1e-5) * 1e-4, jnp.ones(3, "float16"), "WRONG",
                     "cut"),
    # Its derivative has the number 2 / sqrt(pi), with three digits.
    "numbers in half": (lambda w: jnp.sum(jax.lax.erf(w)), jnp.array([0.3, -1.1], "bfloat16"),
                        "right"),
    "huge far away": (lambda x: jnp.sum(jnp.exp(wrong_square(2.04)(x))), jnp.array([0.3, 1.2]),
                      "WRONG", "wrong"),
    # A step that is short for the second entry leads far below zero in the first one.
    "raises, wrong": (lambda x: raises_close_by(eqg.scale_gradient(x, 1.1)),
                      jnp.array([1e-4, 1e3]), "WRONG", "wrong"),
    "on the host": (lambda x: square_on_host(jnp.sum(x)), stable, "right"),
    "an index in half": (lambda w: jnp.sum(jnp.sin(w[np.array([0, 2, 0, 0, 1])])),
        jnp.array([0.1, 0.2, 0.3, 0.4], "bfloat16"), "right"),
    "determinant": (determinant, jr.normal(jr.key(2), (3, 3), "float32"), "right"),
    "stationary": (lambda x: jnp.cos(jnp.sum(x)), jnp.zeros(2), "right"),
    "the edge of a domain": (lambda x: eqg.safe.sqrt(x) ** 2, jnp.array(0.0), "WRONG", "cut"),
    "all of a maximum": (lambda z: all_of_maximum(z.real + z.imag),
        jnp.array([0.75 + 0.25j, 0.25 + 0.75j, 0.3]), "WRONG", "wrong"),
    **{f"a stair of {k}": (lambda x, k=k: 1 + k * jnp.sum(jnp.floor(3 * x)), KINKS[4:] + 0.1,
        verdict) for k, verdict in ((1.5e-9, "flat"), (1e-10, "zero"))},
    "the guess of a solver": (lambda g: eqg.implicit(lambda y, g: y**2 - 2, tolerance=None)(
        lambda g: (g + 2 / g) / 2)(g), jnp.array(2.0), "WRONG", "cut"),
    "a tie of `eq`": (lambda x: jnp.where(x == 0, x, jnp.sin(2 * x)), jnp.array(0.0), "WRONG",
        "wrong"),
    "a tie of `floor`": (lambda x: jnp.floor(x) + (x - jnp.floor(x)) * (jnp.ceil(x) -
        jnp.floor(x)), jnp.array(2.0), "WRONG", "cut"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name):
    loss, model, verdict, *kinds = VERDICTS[name]
    for seed in range(3 if verdict == "kink" else 1):
        report = eqgt.check_gradients(loss, model, seed=seed, raises=False)
        assert report["model"].verdict == verdict
        assert [fault.kind for fault in report.found] == kinds


@pytest.mark.parametrize("is_chaotic", [False, True])
def test_only_the_leaf_that_is_not_finite(is_chaotic):
    """Where the differences are in float64, or missing."""

    def loss(model):
        w = model["w"]
        chaos = jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(9 * y), w / 100)
        softplus = jnp.where(w > 20, w, jnp.log1p(jnp.exp(w)))
        return jnp.sum(softplus) + float(is_chaotic) * jnp.sum(chaos) + model["b"] ** 2

    model = {"w": jnp.array([1.0, 100.0], "float32"), "b": jnp.array(2.0, "float32")}
    report = eqgt.check_gradients(loss, model, raises=False)
    assert [(f.kind, f.leaf) for f in report.found] == [("not finite", "['w']")]
    assert report["['b']"].verdict == "right"
    assert eqgt.check_gradients(loss, model, skip="['w']").passed


def test_a_tie_is_right_at_points_nearby():
    """JAX's second derivative of a function that is smooth there."""
    loss = lambda m: jnp.minimum(m["a"], m["b"]) ** 2 + jnp.maximum(m["a"], m["b"]) ** 2
    tie = {"a": jnp.array(1.5), "b": jnp.array(1.5)}
    assert not eqgt.check_gradients(loss, tie)
    assert str(eqgt.check_gradients(loss, tie, order=2, raises=False))
    assert not eqgt.check_gradients(loss, tie | {"a": jnp.array(1.4)}, order=2)


# ---------------------------------------------------------------- errors


def test_errors():
    stack = dense_stack(None)
    for match, args, options in (
        ("did not return a real scalar", (lambda m: m, jnp.ones(3)), {}),
        ("without inexact arrays", (lambda m: 1.0, {"n": 3}), {}),
        ("can't trace the loss", (float, jnp.ones(())), {}),
        ("have: `layer`", stack, {"skip": "layer"}),
        ("skip all leaves", stack, {"skip": "layers[*]*"}),
    ):
        for order in (1, 2):
            with pytest.raises(eqg.RuleError, match=match):
                eqgt.check_gradients(*args, **{"order": order, **options})
    with pytest.raises(RuntimeError, match="negative"):
        eqgt.check_gradients(raises_close_by, -jnp.ones(2))


# ---------------------------------------------------------------- values that are stopped


@pytest.mark.slow
def test_a_loop_without_reverse_mode_behind_a_stop():
    """Without the `stop_gradient`, the loss has no gradient to compare with."""

    def root(w):  # of y = cos(w y)
        step = lambda y: jnp.cos(w * y)
        return jax.lax.while_loop(lambda y: jnp.abs(step(y) - y) > 1e-12, step, w)

    w = jnp.array([0.3, 0.6])
    constant = lambda w: jnp.sum(w**2 * jax.lax.stop_gradient(jax.vmap(root)(w)))
    assert eqgt.check_gradients(constant, w)["model"].verdict == "stopped"
    double = with_slope(lambda w: 2 * w, lambda w: 3.0)
    solved = eqg.implicit(lambda y, w: y - jnp.cos(w * y))(root)
    loss = lambda w: jnp.sum(double(w) * jax.vmap(solved)(w))
    [fault] = eqgt.check_gradients(loss, w, raises=False).found
    assert fault.primitive == "<lambda>"


def test_a_loop_that_would_not_end_far_away():
    # Where `x` is negative, the loop runs as long as it may, and returns a huge number.
    def loop(x):
        step = lambda state: (1.5 * state[0], state[1] + 1)
        goes_on = lambda state: (state[0] < 1) & (state[1] < 2000)
        y, n = jax.lax.while_loop(goes_on, step, (x, 0))
        return jnp.where(n < 2000, y, jnp.nan), n

    seen = []
    host = lambda n: seen.append(int(n)) or np.float32(0)
    like = jax.ShapeDtypeStruct((), np.float32)

    def loss(model):
        y, n = jax.lax.stop_gradient(loop(model["w"][0]))
        called = jax.pure_callback(host, like, n)
        return jnp.sum(model["w"] * (y + called))

    report = eqgt.check_gradients(loss, {"w": jnp.array([0.3, 0.2])})
    assert report["['w']"].verdict == "stopped"
    assert 0 < max(seen) < 2000


# ---------------------------------------------------------------- the second order


def test_a_kernel_at_coincident_points():
    """The Hessian of a Matern kernel by its two points is 3 and -3 there, not NaN."""

    def kernel(points):
        d = jnp.sqrt(3.0) * eqg.safe.norm(points[0] - points[1])
        return (1 + d) * jnp.exp(-d)

    points = jnp.array([[0.5, 0.25], [0.5, 0.25]])
    assert not eqgt.check_gradients(kernel, points)
    report = eqgt.check_gradients(kernel, points, order=2, raises=False)
    assert {fault.kind for fault in report.found} == {"not finite"}


# ---------------------------------------------------------------- size


@pytest.mark.slow
def test_ten_thousand_equations():
    def fn(m, x):
        for _ in range(2500):
            x = x + 1e-3 * jnp.tanh(m @ x)
        return jnp.sum(x)

    report = eqgt.check_gradients(fn, jnp.eye(3), jnp.asarray(DATA[0]))
    assert report["model"].verdict == "right"


# ---------------------------------------------------------------- the pieces


def test_a_program_in_float64():
    def fn(x):
        y = jnp.sin(x.astype(jnp.bfloat16)).astype(jnp.float32)
        step = lambda h, x: ((h * jnp.float32(0.5) + x).astype(jnp.float32), None)
        h, _ = jax.lax.scan(jax.checkpoint(step), jnp.zeros((), jnp.float32), y)
        h = jax.lax.while_loop(lambda h: h < 4, lambda h: h * 2, h)
        return jax.lax.cond(h > 0, jnp.exp, jnp.cos, jax.nn.relu(h))

    x = np.array([0.3, 0.7, 1.1])
    program = jax.make_jaxpr(fn)(jnp.asarray(x, jnp.float32))
    assert lowest_precisions(program) == [jnp.bfloat16]
    w = np.asarray(VERDICTS["determinant"][1])
    of_w = jax.make_jaxpr(determinant)(w)
    with jax.enable_x64(True):
        (got,) = jax.jit(lambda x: evaluate_in_float64(program, [x]))(jnp.asarray(x))
        (value,) = evaluate_in_float64(of_w, [w.astype(float)])
        assert got.dtype == jnp.float64
    h = 0.0
    for y in np.sin(x):
        h = 0.5 * h + y
    while h < 4:
        h *= 2
    assert float(got) == pytest.approx(np.exp(h), rel=1e-12)
    expected = w[0, 0] * np.linalg.slogdet(w.astype(float))[1]
    np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_an_algorithm_for_bfloat16_is_not_used_in_float64():
    """`jax.nn.dot_product_attention` asks for one."""
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    dot = lambda x: jax.lax.dot(x, x, precision=algorithm, preferred_element_type=jnp.float32)
    program = jax.make_jaxpr(dot)(jnp.ones(2, "bfloat16"))
    with jax.enable_x64(True):
        (got,) = evaluate_in_float64(program, [jnp.array([1 / 3, 1 / 7])])
    np.testing.assert_allclose(got, 1 / 9 + 1 / 49, rtol=1e-14)


@pytest.mark.parametrize("wrap", [eqg.zero_safe, lambda f: f])
def test_what_zero_safe_drops_is_said(wrap):
    """Where the gradient is wrong, as on the boundary of a mask."""
    loss = wrap(lambda x: jnp.sum(jnp.where(x == 0, 0.0, 3 * x)))
    report = eqgt.check_gradients(loss, jnp.array([0.0, 1.0]), raises=False)
    assert not report.passed
    assert any("`zero_safe` drops" in x for x in report.remarks) == (wrap is eqg.zero_safe)
