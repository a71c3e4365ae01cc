"""`check_gradients` finds every planted fault of a model, and accuses no right model."""

import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads._diagnosis._programs.in_float64 import evaluate_in_float64
from eqx_grads._diagnosis._programs.lowest_precision import lowest_precisions
from eqx_grads.testing._gradient_faults import _cure, NO_REASONS
from eqx_grads.testing._judge_leaf import Judge
from eqx_grads.testing._loss_program import trace
from eqx_grads.testing._slope import (
    central_slope,
    confirmed_slope,
    is_settled,
    Samples,
    Slope,
    with_sides,
)

from .helpers import assert_linear_in_size
from .model_faults import between, DATA, dense_stack, FAULTS, with_rule
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


def names(cases):
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in cases]


@pytest.mark.slow
@pytest.mark.parametrize("name", names(FAULTS))
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
    assert {found.leaf for found in report.found} == set(fault.wrong), str(report)
    for found in report.found:
        assert found.kind == fault.kind, str(report)
        assert found.path == fault.layer, str(report)
        assert found.primitive == fault.function, str(report)
        if found.primitive:
            assert found.file.endswith("model_faults.py"), str(report)
            assert found.line > 0


@pytest.mark.parametrize("name", names(RIGHT))
def test_right_model_is_not_accused(name):
    fn, model, *args = RIGHT[name]()
    report = eqgt.check_gradients(fn, model, *args)
    assert not report
    # A check that measures nothing accuses nobody.
    unmeasured = [leaf for leaf in report.leaves if leaf.verdict == "not measured"]
    assert len(unmeasured) <= (name in UNMEASURABLE), str(report)


def test_there_are_enough_of_them():
    assert len(FAULTS) >= 25
    assert len(RIGHT) >= 25


# ---------------------------------------------------------------- verdicts


def test_a_kink_is_told_from_an_error():
    fn, model, *args = RIGHT["lasso_at_zero"]()
    assert eqgt.check_gradients(fn, model, *args)["model"].verdict == "kink"

    @jax.custom_vjp
    def size(x):
        return jnp.abs(x)

    size.defvjp(lambda x: (size(x), x), lambda x, ct: (2 * ct * jnp.sign(x),))
    wrong = lambda m, x: jnp.mean((x @ m - 1.0) ** 2) + jnp.sum(size(m))
    report = eqgt.check_gradients(wrong, model + 0.1, *args, raises=False)
    assert report["model"].verdict == "WRONG"


def test_why_a_leaf_is_not_measured():
    fn, model, *args = RIGHT["chaotic_map_of_60_steps"]()
    report = eqgt.check_gradients(fn, model, *args)
    assert report["model"].verdict == "not measured"
    assert "have no slope that the gradient could be compared with" in str(report)
    assert "down to 1e-13 of an entry: model. The loss is chaotic" in str(report)


def test_a_single_parameter_is_moved():
    """Whatever the seed: its component along the gradient does not add up to zero with the
    random one."""
    program = trace(lambda m: m**2, jnp.array(0.7), (), {})
    judge = Judge(program, 1e-6, ["reverse"], seed=0)
    moves = [abs(judge.direction("model", [0]).tangents[0]) for _ in range(1000)]
    assert min(moves) > 0.1


def test_a_small_error_is_said_to_be_small():
    square = jax.custom_vjp(lambda x: x**2)
    square.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * (1 + 1e-5) * ct * x,))
    model = jnp.array([1.0, 2.0, -3.0])
    report = eqgt.check_gradients(lambda m: jnp.sum(square(m)), model, raises=False)
    (found,) = report.found
    assert "It is off by 1e-05 of its size, " in found.detail
    assert "times the error of the differences" in found.detail
    assert "every entry is 1 + 1e-05 times the expected one" in found.detail
    cure = _cure("wrong", [], NO_REASONS, is_small=True)
    assert "a solver that iterates to a tolerance" in cure


def test_leaves_without_influence_are_listed():
    fn, model, *args = RIGHT["rounded_then_unused"]()
    report = eqgt.check_gradients(fn, model, *args)
    assert report["layers[0].weight"].verdict == "flat"
    assert "The loss is flat here, and changes over longer steps" in str(report)


def test_what_is_not_inexact_is_ignored():
    model = {"w": jnp.ones(3), "n": jnp.arange(3), "none": None, "p": 0.5, "key": jr.key(0)}
    fn = lambda m: jnp.sum(jnp.sin(m["w"]) * m["p"]) + jr.uniform(m["key"], ()) * 0
    report = eqgt.check_gradients(fn, model)
    assert [leaf.leaf for leaf in report.leaves] == ["['w']"]


def straight_through():
    return between(lambda x: eqg.ste.round(3 * x) / 3)


@pytest.mark.slow
def test_a_gradient_that_is_no_derivative_on_purpose():
    fn, model, data = straight_through()
    report = eqgt.check_gradients(fn, model, data, raises=False)
    assert {found.leaf for found in report.found} == {"layers[0].weight", "layers[0].bias"}
    assert {found.kind for found in report.found} == {"not a derivative"}
    # They have an influence, which is not that of a small step.
    assert "The loss does not change with `" in str(report)
    assert "no influence" not in str(report)
    assert "on purpose" in str(report)
    report = eqgt.check_gradients(fn, model, data, skip="layers[0]")
    assert report["layers[0].bias"].verdict == "skipped"
    assert report["layers[2].bias"].verdict == "right"
    assert not eqgt.check_gradients(fn, model, data, skip="*[0].*")


def test_skip_of_what_there_is_not():
    fn, model, data = dense_stack(None)
    with pytest.raises(eqg.RuleError, match="does not have: `layer`"):
        eqgt.check_gradients(fn, model, data, skip="layer")
    with pytest.raises(eqg.RuleError, match="skip all leaves"):
        eqgt.check_gradients(fn, model, data, skip="layers")


def test_tolerance():
    fn, model, data = FAULTS["second_leaf_wrong_by_one_in_a_thousand"].make()
    assert not eqgt.check_gradients(fn, model, data, tolerance=1e-2)


# ---------------------------------------------------------------- the value


def test_a_random_loss_is_named():
    rng = np.random.default_rng(0)
    noisy = lambda m, x: jnp.sum(m * x) * rng.normal()
    report = eqgt.check_gradients(noisy, jnp.ones(3), jnp.ones(3), raises=False)
    assert [found.kind for found in report.found] == ["random"]
    assert "Two calls return different values" in str(report)
    assert report["model"].verdict == "right"


def test_a_random_callback_is_named():
    rng = np.random.default_rng(0)
    host = lambda: np.float32(rng.normal())
    draw = lambda: jax.pure_callback(host, jax.ShapeDtypeStruct((), np.float32))
    noisy = lambda m: jnp.sum(m) + jax.lax.stop_gradient(draw()).astype(m.dtype)
    report = eqgt.check_gradients(noisy, jnp.ones(3), raises=False)
    (found,) = report.found
    assert (found.kind, found.primitive) == ("random", "pure_callback")
    assert found.file == __file__
    assert report["model"].verdict == "not measured"


def test_a_loss_that_raises_an_error_close_by():
    def loss(x):
        x = eqx.error_if(x, jnp.any(x < 0), "negative")
        return jnp.sum(jnp.log(x))

    # A step that is short for the second entry leads far below zero in the first one.
    x = jnp.array([1e-4, 1e3])
    assert eqgt.check_gradients(loss, x)["model"].verdict == "right"
    wrong = lambda x: loss(eqg.scale_gradient(x, 1.1))
    assert eqgt.check_gradients(wrong, x, raises=False)["model"].verdict == "WRONG"
    with pytest.raises(RuntimeError, match="negative"):
        eqgt.check_gradients(loss, -x)


def test_a_rule_for_one_precision_only():
    @jax.custom_jvp
    def host(x):
        return jax.pure_callback(np.square, jax.ShapeDtypeStruct((), jnp.float32), x)

    host.defjvp(lambda primals, tangents: (host(*primals), 2 * primals[0] * tangents[0]))
    loss = lambda x: host(jnp.sum(x))
    report = eqgt.check_gradients(loss, jnp.array([1.0, 2.0], jnp.float32))
    assert report["model"].verdict == "right"
    assert report.numbers["precision"] == "float32"


def test_a_constant_in_float32_says_nothing_of_the_loss():
    data = jnp.array([[0.3, -0.7], [1.1, 0.2]], jnp.float32)
    fn = lambda w: jnp.sum(jnp.tanh(jnp.asarray(data, w.dtype) @ w))
    w = jnp.array([0.4, 0.9], jnp.float32)
    report = eqgt.check_gradients(fn, w)
    assert report.numbers["precision"] == "float64"
    rounded = lambda w: fn(w.astype(jnp.float32)).astype(w.dtype)
    assert eqgt.check_gradients(rounded, w).numbers["tolerance"] == 1e-6


@pytest.mark.slow
def test_a_loop_without_reverse_mode_behind_a_stop():
    """Without the `stop_gradient`, there is no gradient to compare with."""

    def root(w):  # of y = cos(w y)
        step = lambda y: jnp.cos(w * y)
        return jax.lax.while_loop(lambda y: jnp.abs(step(y) - y) > 1e-12, step, w)

    w = jnp.array([0.3, 0.6])
    constant = lambda w: jnp.sum(w**2 * jax.lax.stop_gradient(jax.vmap(root)(w)))
    assert eqgt.check_gradients(constant, w)["model"].verdict == "stopped"

    @eqg.custom_jvp
    def double(w):
        return 2 * w

    double.def_jvp(lambda primals, tangents: (double(*primals), 3 * tangents[0]))
    solved = eqg.implicit(lambda y, w: y - jnp.cos(w * y))(root)
    loss = lambda w: jnp.sum(double(w) * jax.vmap(solved)(w))
    [fault] = eqgt.check_gradients(loss, w, raises=False).found
    assert fault.primitive == "double"


def test_a_loss_that_is_not_finite():
    report = eqgt.check_gradients(lambda m: jnp.log(m), jnp.array(-1.0), raises=False)
    assert [found.kind for found in report.found] == ["not finite"]
    assert "explain_nan" in report.found[0].cure


@pytest.mark.parametrize("is_chaotic", [False, True])
def test_a_gradient_that_is_not_finite_in_the_user_s_precision(is_chaotic):
    """Where the differences are those of float64, or none at all."""

    def loss(model):
        w = model["w"]
        softplus = jnp.where(w > 20, w, jnp.log1p(jnp.exp(w)))
        chaos = jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(9 * y), w / 100)
        return jnp.sum(softplus) + float(is_chaotic) * jnp.sum(chaos) + model["b"] ** 2

    model = {"w": jnp.array([1.0, 100.0], jnp.float32), "b": jnp.array(2.0, jnp.float32)}
    assert np.isnan(jax.grad(loss)(model)["w"]).any()
    report = eqgt.check_gradients(loss, model, raises=False)
    assert [(f.kind, f.leaf) for f in report.found] == [("not finite", "['w']")]
    assert "In float32, entries of the gradient are NaN" in report.found[0].detail
    assert report["['b']"].verdict == "right"
    model["w"] = jnp.ones(2, jnp.float32)
    assert not eqgt.check_gradients(loss, model, raises=False).found


@pytest.mark.slow
def test_the_determinant_of_a_matrix():
    """JAX computes its diagonal by a branch for each platform, also in float64."""
    w = jr.normal(jr.key(2), (3, 3), jnp.float32)
    pinned = lambda w: w.astype(jnp.float32)
    loss = lambda w: pinned(w)[0, 0] * jnp.linalg.slogdet(pinned(w))[1]
    for seed in range(4):
        assert eqgt.check_gradients(loss, w, seed=seed)["model"].verdict == "right"
    wide = np.asarray(w, np.float64)
    program = jax.make_jaxpr(loss)(w)
    with jax.enable_x64(True):
        (value,) = evaluate_in_float64(program, [wide])
    expected = wide[0, 0] * np.linalg.slogdet(wide)[1]
    np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("fn", "model", "match"),
    [
        (lambda m: m, jnp.ones(3), "did not return a real scalar"),
        (lambda m: 1.0, {"n": 3}, "without inexact arrays"),
        (lambda m: float(m), jnp.ones(()), "can't trace the loss"),
    ],
)
def test_bad_input(fn, model, match):
    with pytest.raises(eqg.RuleError, match=match):
        eqgt.check_gradients(fn, model)


# ---------------------------------------------------------------- the report


def test_it_raises_with_the_report():
    fn, model, data = FAULTS["missing_factor"].make()
    with pytest.raises(
        eqgt.GradientCheckError, match="The gradient of `loss`: FAILED"
    ) as error:
        eqgt.check_gradients(fn, model, data)
    for part in ("layers[0].weight", "square model_faults.py:", "half the expected one"):
        assert part in re.sub(r"\s+", " ", str(error.value))
    assert isinstance(error.value, AssertionError)


def test_report():
    fn, model, data = FAULTS["missing_factor"].make()
    report = eqgt.check_gradients(fn, model, data, raises=False, seed=3)
    assert report
    assert not report.passed
    assert report.numbers["seed"] == 3
    assert report.numbers["precision"] == "float64"
    assert report["layers[2].weight"].verdict == "right"
    assert report["layers[0].weight"].relative_error > 0.01
    with pytest.raises(KeyError, match="no leaf 'layers'"):
        report["layers"]


@pytest.mark.slow
def test_the_numbers_are_those_of_autodiff():
    """An outside witness for the columns of the report."""
    fn, model, *data = RIGHT["recurrent_stack"]()
    gradient = jax.grad(fn)(model, *data)
    report = eqgt.check_gradients(fn, model, *data)
    for leaf in report.leaves:
        assert leaf.reverse == pytest.approx(leaf.forward, rel=1e-9)
        assert leaf.reverse == pytest.approx(leaf.differences, rel=1e-7)
    assert len(report.leaves) == len(jax.tree.leaves(gradient))


# ---------------------------------------------------------------- size


@pytest.mark.slow
def test_a_hundred_thousand_parameters_take_few_evaluations():
    model = eqx.nn.MLP(100, 10, 256, 2, key=jr.key(0))
    assert sum(x.size for x in jax.tree.leaves(model) if eqx.is_array(x)) > 90_000
    xs = jr.normal(jr.key(1), (32, 100))
    evaluations = []

    def loss(m, x):
        jax.debug.callback(lambda: evaluations.append(1))
        return jnp.mean(jax.vmap(m)(x) ** 2)

    report = eqgt.check_gradients(loss, model, xs)
    jax.effects_barrier()
    assert [leaf.verdict for leaf in report.leaves] == ["right"] * 6
    # 552 at the time of writing.
    assert 0 < len(evaluations) < 1000


@pytest.mark.slow
def test_a_wrong_bias_among_a_hundred_thousand_parameters():
    affine = lambda w, b, x: w @ x + b
    bwd = lambda res, ct: (jnp.outer(ct, res[1]), 1.001 * ct, res[0].T @ ct)
    rule = with_rule(affine, lambda w, b, x: (affine(w, b, x), (w, x)), bwd)
    key = jr.key(0)
    model = {
        "w": [jr.normal(k, (300, 300)) / 17 for k in jr.split(key)],
        "b": [jnp.full(300, 1e-4)] * 2,
    }

    def fn(m, x):
        x = jnp.tanh(affine(m["w"][0], m["b"][0], x))
        return jnp.sum(rule(m["w"][1], m["b"][1], x) ** 2)

    report = eqgt.check_gradients(fn, model, jr.normal(key, (300,)), raises=False)
    assert [found.leaf for found in report.found] == ["['b'][1]"]


def check_many_layers(n):
    def fn(m, x):
        for _ in range(n):
            x = x + 1e-3 * jnp.tanh(m @ x)
        return jnp.sum(x)

    report = eqgt.check_gradients(fn, jnp.eye(3), jnp.asarray(DATA[0]))
    assert report["model"].verdict == "right"


@pytest.mark.slow
def test_ten_thousand_equations():
    check_many_layers(2500)


@pytest.mark.slow
def test_work_is_linear_in_the_number_of_equations():
    assert_linear_in_size(check_many_layers, 5)


@pytest.mark.slow
def test_other_solvers():
    optx = pytest.importorskip("optimistix")

    def fn(m, x):
        solver = optx.Newton(rtol=1e-10, atol=1e-10)
        root = optx.root_find(lambda y, p: y + p * jnp.tanh(y) - x, solver, x, args=m)
        return jnp.sum(root.value**2)

    model, x = jnp.array([0.3, 0.5]), jnp.array([1.0, -2.0])
    report = eqgt.check_gradients(fn, model, x, tolerance=1e-5)
    assert report["model"].verdict == "right", str(report)


# ---------------------------------------------------------------- the pieces


def sampled(fn):
    return Samples(lambda steps: [fn(h) for h in steps])


@pytest.mark.parametrize(
    ("fn", "slope"),
    [
        (lambda h: np.exp(3 * h), 3.0),
        (lambda h: np.sin(1e5 * h) * 1e-5, 1.0),
        (lambda h: 1e6 + np.tanh(1e3 * h), 1e3),
        (lambda h: 0.0 * h + 5, 0.0),
        (lambda h: np.round(0.2 + h), 0.0),
        (lambda h: np.maximum(h - 1e-7, 0.0) + 2 * h, 2.0),
        (lambda h: np.sqrt(h + 1e-4), 50.0),
    ],
)
def test_slope(fn, slope):
    samples = sampled(fn)
    found = confirmed_slope(samples, central_slope(samples, abs(slope)))
    assert is_settled(samples, found, 2 * slope + 1)
    assert abs(found.value - slope) <= 10 * found.error + 1e-12
    assert found.error <= 1e-4 * max(abs(slope), 1)
    assert not with_sides(samples, found).is_kink


def test_many_small_kinks_have_the_slope_of_short_steps():
    kinks = np.linspace(-1, 1, 10_001)
    samples = sampled(lambda h: np.mean(np.abs(0.30003 + h - kinks)))
    slope = np.mean(np.sign(0.30003 - kinks))
    average = Slope(samples.richardson(2.0**-10), 1e-8, 2.0**-10)
    assert abs(average.value - slope) > 1e-6
    found = confirmed_slope(samples, average)
    assert abs(found.value - slope) <= 10 * found.error < 1e-6


@pytest.mark.parametrize("noise", [1e-9, 1e-3])
def test_a_slope_that_is_no_evidence(noise):
    """Noise of a function without slope contradicts any slope that is not within the changes
    from one step to the next."""
    samples = sampled(lambda h: 1 + noise * np.sin(1e17 * h))
    found = confirmed_slope(samples, central_slope(samples, 1.0))
    assert is_settled(samples, found, 1e10 * noise)
    assert not is_settled(samples, found, 1e16 * noise)


def test_slopes_of_both_sides():
    samples = sampled(lambda h: np.where(h > 0, 3 * h, -h) + np.sin(h))
    slope = with_sides(samples, central_slope(samples, 1.0))
    assert slope.is_kink
    assert slope.left == pytest.approx(0.0, abs=1e-6)
    assert slope.right == pytest.approx(4.0, abs=1e-6)
    assert slope.admits(1.0)
    assert not slope.admits(5.0)


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
    with jax.enable_x64(True):
        (got,) = jax.jit(lambda x: evaluate_in_float64(program, [x]))(jnp.asarray(x))
        assert got.dtype == jnp.float64
    h = 0.0
    for y in np.sin(x):
        h = 0.5 * h + y
    while h < 4:
        h *= 2
    assert float(got) == pytest.approx(np.exp(h), rel=1e-12)


class _Around(eqx.Module):
    """Its rule returns a cotangent of a layer that is one of its fields."""

    linear: eqx.nn.Linear

    @eqg.custom_vjp
    def __call__(self, x):
        return jnp.sin(self.linear(x))

    @__call__.def_fwd
    def _call_fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _call_bwd(residuals, ct):
        self, x = residuals
        ct = ct * jnp.cos(self.linear(x))
        linear = eqg.tangents.of(self.linear, weight=jnp.outer(ct, x), bias=ct)
        return eqg.tangents.of(self, linear=linear), self.linear.weight.T @ ct


@pytest.mark.thorough
def test_a_rule_of_a_module_that_has_layers():
    model = _Around(eqx.nn.Linear(3, 2, key=jr.key(0)))
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    x = jnp.arange(3.0)
    assert eqgt.check_gradients(loss, model, x).passed
    assert not eqg.explain_nan(loss, model, x)
    assert not eqg.explain_zero(loss, model, x)


def test_a_loss_that_raises_without_a_message():
    def loss(x):
        assert x.dtype == jnp.float32
        return jnp.sum(jnp.sin(x))

    report = eqgt.check_gradients(loss, jnp.array([0.5, 0.3], "float32"))
    assert report["model"].verdict == "right"


def test_a_loss_that_captures_numpy_arrays():
    rows = np.array([1, 0, 1])
    loss = lambda x: jnp.sum(jnp.zeros_like(x).at[rows].add(jnp.sin(x[rows])))
    report = eqgt.check_gradients(loss, jnp.array([0.5, 0.3], "float32"))
    assert report["model"].verdict == "right"


@pytest.mark.filterwarnings("error")
def test_an_infinite_gradient():
    """Of autodiff, and of a rule where the gradient is finite."""

    @jax.custom_vjp
    def exp_sum(x):
        return jnp.sum(jnp.exp(x))

    infinite = lambda x, ct: (ct * jnp.array([jnp.inf, -jnp.inf], x.dtype),)
    exp_sum.defvjp(lambda x: (exp_sum(x), x), infinite)
    for loss, leaf in (
        (lambda p: jnp.sum(jnp.sqrt(p["a"])), 0.0),
        (lambda p: exp_sum(p["a"]), 1.0),
    ):
        model = {"a": jnp.full(2, leaf), "b": jnp.ones(2)}
        whole = lambda p, loss=loss: loss(p) + jnp.sum(p["b"] ** 2)
        report = eqgt.check_gradients(whole, model, raises=False)
        (fault,) = report.found
        assert (fault.kind, fault.leaf) == ("not finite", "['a']")
        assert "are infinite" in fault.detail
        assert eqgt.check_gradients(whole, model, skip="['a']").passed


def _entropy(w):
    p = jax.nn.softmax(w)
    return jnp.sum(p * jnp.log(p))


def test_a_loss_that_is_nan_in_the_precision_of_the_model_only():
    """It was said to be finite, as it is in float64."""
    w = jnp.array([0.0, 2.0, -120.0], jnp.float32)
    report = eqgt.check_gradients(_entropy, w, raises=False)
    (fault,) = report.found
    assert fault.kind == "not finite"
    assert fault.detail == "In float32, entries of the gradient are NaN, and the loss is nan."


def test_slopes_out_of_the_range_of_the_model_are_no_evidence():
    """A right gradient was "wrong" by a difference of 1e-49."""
    w = jnp.array([0.0, 120.0, -120.0], jnp.float32)
    report = eqgt.check_gradients(lambda w: -eqg.safe.entropy(jax.nn.softmax(w)), w)
    assert report["model"].verdict == "not measured"
    (fault,) = eqgt.check_gradients(_entropy, w, raises=False).found
    assert (fault.kind, fault.detail[-12:]) == ("not finite", "loss is nan.")


class TestOrder2:
    def test_a_rule_that_is_right_to_first_order_only(self):
        @eqg.custom_vjp
        def cube(x):
            return x**3

        cube.def_fwd(lambda x: (cube(x), x))
        cube.def_bwd(lambda x, ct: (3 * jax.lax.stop_gradient(x) ** 2 * ct,))
        loss = lambda model: jnp.sum(cube(model["x"]) * model["y"])
        model = {"x": jnp.array([0.5, -1.2]), "y": jnp.array([0.7, 0.4])}
        assert not eqgt.check_gradients(loss, model)
        report = eqgt.check_gradients(loss, model, order=2, raises=False)
        assert [fault.leaf for fault in report.found] == ["['x']"]
        assert report["['y']"].verdict == "right"
        right = lambda model: jnp.sum(model["x"] ** 3 * model["y"])
        assert not eqgt.check_gradients(right, model, order=2)

    def test_a_kernel_at_coincident_points(self):
        """The Hessian of a Matern kernel by its two points is 3 and -3 there, not NaN."""

        def kernel(points):
            d = jnp.sqrt(3.0) * eqg.safe.norm(points[0] - points[1])
            return (1 + d) * jnp.exp(-d)

        points = jnp.array([[0.5, 0.25], [0.5, 0.25]])
        assert not eqgt.check_gradients(kernel, points)
        report = eqgt.check_gradients(kernel, points, order=2, raises=False)
        assert {fault.kind for fault in report.found} == {"not finite"}

    def test_another_order(self):
        with pytest.raises(eqg.RuleError, match="`order` of `check_gradients`"):
            eqgt.check_gradients(lambda x: x, jnp.array(1.0), order=3)

    @pytest.mark.parametrize(
        ("loss", "model"), [(lambda x: 2 * x, jnp.ones(2)), (lambda n: 2.0, jnp.array(3))]
    )
    def test_what_is_not_a_loss(self, loss, model):
        """The errors are those of the first order."""
        with pytest.raises(eqg.RuleError, match="check_gradients") as first:
            eqgt.check_gradients(loss, model)
        with pytest.raises(eqg.RuleError, match="check_gradients") as second:
            eqgt.check_gradients(loss, model, order=2)
        assert str(first.value) == str(second.value)


# ---------------------------------------------------------------- no derivative here


def test_a_loss_that_rounds_to_zero():
    """Of a confident classifier: the gradient is 3e-20."""
    loss = lambda logits: jax.nn.logsumexp(logits) - logits[0]
    for logits in ([45.0, 0.0], [60.0, -3.0, 1.0]):
        assert eqgt.check_gradients(loss, jnp.array(logits))["model"].verdict == "not measured"
    wrong = lambda logits: loss(0.9 * logits + 0.1 * eqg.scale_gradient(logits, 2.0))
    assert eqgt.check_gradients(wrong, jnp.array([3.0, 1.0]), raises=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_kink_with_one_flat_side(seed):
    report = eqgt.check_gradients(lambda x: jnp.where(x < 1, x, 1.0), jnp.array(1.0), seed=seed)
    assert report["model"].verdict == "kink"
    assert "(the slopes of its sides are 1 and 0)" in " ".join(str(report).split())


def _with_slope(fn, slope):
    rule = eqg.custom_jvp(fn)
    rule.def_jvp(lambda p, t: (rule(*p), slope(p[0]) * t[0]))
    return rule


@pytest.mark.parametrize("n", [1, 5])
def test_the_gradient_at_a_kink_is_between_its_slopes(n):
    """They are -1 and -2, beside kinks with a right gradient."""
    fn = lambda x: jnp.where(x < 0, -x, -2 * x)
    at = lambda k: lambda x: jnp.where(x < 0, -1.0, jnp.where(x > 0, -2.0, k))
    loss = lambda k: lambda x: _with_slope(fn, at(k))(x[0]) + jnp.sum(jnp.abs(x[1:]))
    for slope in (-1.0, -1.4, -2.0):
        verdict = eqgt.check_gradients(loss(slope), jnp.zeros(n))["model"].verdict
        assert verdict == "kink"
    for slope in (0.0, -0.9, -2.2):
        assert eqgt.check_gradients(loss(slope), jnp.zeros(n), raises=False)


def test_several_kinks_do_not_hide_a_wrong_gradient():
    """The kinks cancel along some directions."""
    kinks = lambda x: jnp.sum(jnp.abs(x[:3])) - jnp.sum(jnp.abs(x[1:4]))
    loss = lambda k: (
        lambda x: kinks(x) + jnp.sum(_with_slope(lambda x: x**2, lambda x: k * x)(x[4:]))
    )
    x = jnp.array([0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.5])
    assert eqgt.check_gradients(loss(2.0), x)["model"].verdict == "kink"
    assert eqgt.check_gradients(loss(2.2), x, raises=False)


def test_a_staircase_is_flat_here():
    report = eqgt.check_gradients(lambda t: jnp.floor(100 * t) / 100, jnp.array(0.123))
    assert report["model"].verdict == "flat"
    assert "changes over longer steps" in str(report)
    constant = eqgt.check_gradients(lambda t: 0 * jnp.floor(t), jnp.array(0.123))
    assert constant["model"].verdict == "zero"


def test_a_tie_is_right_at_points_nearby():
    """JAX's second derivative of a function that is smooth there."""
    loss = lambda m: jnp.minimum(m["a"], m["b"]) ** 2 + jnp.maximum(m["a"], m["b"]) ** 2
    tie = {"a": jnp.array(1.5), "b": jnp.array(1.5)}
    assert not eqgt.check_gradients(loss, tie)
    report = eqgt.check_gradients(loss, tie, order=2, raises=False)
    text = " ".join(str(report).split())
    assert "Right at points nearby, and not at this one: a tie of `min` at test_check" in text
    assert not eqgt.check_gradients(loss, tie | {"a": jnp.array(1.4)}, order=2)


STOPS = {
    "target network": lambda m, x: jnp.mean(
        (jnp.tanh(m["w"] @ x) - jax.lax.stop_gradient(jnp.tanh(m["target"] @ x))) ** 2
    ),
    "vector quantization": lambda m, x: (
        jnp.sum((jax.lax.stop_gradient(m["w"] @ x) - m["target"][0, 0]) ** 2)
        + jnp.sum((m["w"] @ x - jax.lax.stop_gradient(m["target"][0, 0])) ** 2)
    ),
    "straight-through": lambda m, x: jnp.sum(
        m["w"] + jax.lax.stop_gradient(jnp.round(m["w"]) - m["w"])
    ),
    "in a scan": lambda m, x: jax.lax.scan(
        lambda c, x: (jnp.sin(m["w"][0] * jax.lax.stop_gradient(c) + x), None), m["w"][1], x
    )[0].sum(),
}


@pytest.mark.parametrize("name", STOPS)
def test_values_that_are_stopped_are_held(name):
    model = {"w": jnp.full((2, 3), 0.3), "target": jnp.full((2, 3), 0.2)}
    x = jnp.array([0.1, 1.0, 2.0])
    report = eqgt.check_gradients(STOPS[name], model, x)
    assert "stopped" in {leaf.verdict for leaf in report.leaves}
    assert "`stop_gradient` is called at test_check_gradients.py:" in str(report)
    wrong = lambda m, x: (
        STOPS[name](m, x) + jnp.sum(_with_slope(jnp.sin, lambda x: 1.1 * jnp.cos(x))(m["w"]))
    )
    report = eqgt.check_gradients(wrong, model, x, raises=False)
    assert [fault.leaf for fault in report.found] == ["['w']"]


def test_a_gradient_that_is_zero_in_half_precision_only():
    loss = lambda scale: lambda w: jnp.sum(w * 1e-5) * scale
    w = jnp.ones(3, "float16")
    (fault,) = eqgt.check_gradients(loss(1e-4), w, raises=False).found
    assert fault.kind == "cut"
    assert "In float16, the gradient is zero" in fault.detail
    assert not eqgt.check_gradients(loss(1.0), w)


@pytest.mark.parametrize("grow", [jnp.exp, lambda y: jnp.prod(y) ** 12], ids=["exp", "power"])
def test_a_loss_that_is_huge_far_away_hides_nothing(grow):
    # Its rounding there is larger than the gradient here.
    square = eqg.custom_vjp(lambda x: x**2)
    square.def_fwd(lambda x: (square(x), x))
    square.def_bwd(lambda x, ct: (2.04 * x * ct,))
    loss = lambda model: jnp.sum(grow(square(model["w"])))
    report = eqgt.check_gradients(loss, {"w": jnp.array([0.3, 1.2])}, raises=False)
    assert report["['w']"].verdict == "WRONG"


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
    assert seen
    assert max(seen) < 2000
