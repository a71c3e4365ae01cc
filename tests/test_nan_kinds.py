"""`explain_nan`: the kind of cause and the cure, for the usual formulas."""

import inspect

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest


X = jnp.array([1.0, 0.0])


CANCELS = "terms cancel, or underflow"
UNSELECTED = {
    "cancels": lambda x: (lambda y: jnp.sum(y - y))(jnp.sqrt(x)),
    "underflows": lambda x: jnp.sum(jnp.sqrt(x) * TINY * TINY),
    "product": lambda x: jnp.sum(jnp.sqrt(x) @ jnp.array([[1.0, -1.0], [1.0, -1.0]])),
}
TINY = jnp.finfo(X.dtype).tiny


@pytest.mark.parametrize("name", UNSELECTED)
def test_a_zero_that_no_selection_makes(name):
    loss = UNSELECTED[name]
    (record,) = eqg.explain_nan(loss, X).found
    assert (record.kind, record.primitive, record.mask) == (
        "zero times infinity",
        "sqrt",
        CANCELS,
    )
    assert record.index == (1,)
    assert "meets a cotangent that is zero" in record.cure
    # What the cure says: this is not what `zero_safe` drops, but by its other policy.
    assert jnp.isnan(jax.grad(eqg.zero_safe(loss))(X)[1])
    assert jnp.isfinite(jax.grad(eqg.zero_safe(loss, policy="zero"))(X)[1])


def test_inputs():
    bad = jnp.array([1.0, jnp.inf])
    loss = lambda model, data: jnp.sum(model["w"] * data["x"])
    for value, name in ((jnp.nan, "NaN"), (jnp.inf, "inf")):
        bad = jnp.array([1.0, value])
        (record,) = eqg.explain_nan(loss, {"w": bad}, {"x": X}).found
        assert (record.kind, record.leaf) == (f"{name} in the input", "['w']")
        assert record.cure.startswith("The parameter `['w']` holds the")
        (record,) = eqg.explain_nan(loss, {"w": X + 1}, {"x": bad}).found
        assert (record.kind, record.primitive) == (f"{name} in the input", "data['x']")
        assert (record.index, record.leaf) == ((1,), "")
        assert record.cure.startswith("`data['x']` holds the")
        (record,) = eqg.explain_nan(lambda w, bad=bad: jnp.sum(w * bad), X + 1).found
        assert (record.kind, record.primitive) == (f"{name} in the input", "mul")
        assert record.cure.startswith("A constant of the loss holds the")


def _root_in_zero_safe(x):
    y = jnp.sqrt(x)  # INSIDE
    return jnp.sum(y)


def _scan_in_zero_safe(x):
    step = lambda h, t: (jnp.sqrt(h * t), h)  # INSIDE
    return jnp.sum(jax.lax.scan(step, x, jnp.array([1.0, 0.0, 1.0]))[0])


@pytest.mark.parametrize("fn", [_root_in_zero_safe, _scan_in_zero_safe])
@pytest.mark.parametrize(
    "around",
    [
        lambda fn: lambda x: 2 * eqg.zero_safe(fn)(x),
        lambda fn: jax.jit(eqg.zero_safe(fn)),
        lambda fn: eqg.zero_safe(lambda x: eqg.zero_safe(fn)(x) + 1),
    ],
    ids=["in the loss", "jit", "nested"],
)
def test_lines_inside_of_zero_safe(fn, around):
    """What `zero_safe` evaluates keeps its lines."""
    source, first = inspect.getsourcelines(fn)
    (line,) = [first + i for i, text in enumerate(source) if "# INSIDE" in text]
    (record,) = eqg.explain_nan(around(fn), X).found
    assert (record.file, record.line, record.primitive) == (__file__, line, "sqrt")


# ---------------------------------------------------------------- a gradient in the loss


# ---------------------------------------------------------------- elements of other kinds


def test_elements_that_were_not_finite_before_have_no_cause_of_their_own():
    loss = lambda x: jnp.sum(jnp.log(x * jnp.log(x)))
    report = eqg.explain_nan(loss, jnp.array([-1.0, 1.0, 3.0]))
    kinds = {(record.kind, record.index) for record in report.found}
    assert kinds == {("outside of the domain", (0,)), ("true singularity", (1,))}


@pytest.mark.parametrize(
    ("fn", "matrix", "cure"),
    [
        (jnp.linalg.inv, jnp.ones((2, 2)), "The matrix of `custom_linear_solve` is singular"),
        (jnp.linalg.cholesky, -jnp.eye(2), "The matrix is not positive definite"),
    ],
)
def test_matrices(fn, matrix, cure):
    report = eqg.explain_nan(lambda a: jnp.sum(fn(a)), matrix)
    assert report.found[0].cure.startswith(cure)
    assert "a + eps * jnp.eye(n)" in report.found[0].cure


def test_what_is_given_a_nan_is_no_cause():
    def logsumexp(z):
        top = jnp.max(z)
        return top + jnp.log(jnp.sum(jnp.exp(z - top)))

    def loss(w, x):
        return logsumexp(w * ((x - jnp.mean(x)) / jnp.std(x)))

    (record,) = eqg.explain_nan(loss, jnp.ones(3), jnp.ones(3)).found
    assert (record.primitive, record.is_forward) == ("div", True)


def test_what_is_within_a_derivative_does_not_cross_the_threshold():
    """The derivative of `tanh` has two factors, and the first may be larger."""
    loss = lambda x: 61.9 * jnp.tanh(x)
    report = eqg.explain_nan(loss, jnp.array(-1.01), threshold=100.0)
    assert not report
    (record,) = eqg.explain_nan(loss, jnp.array(0.1), threshold=50.0).found
    assert record.primitive == "mul"


# ---------------------------------------------------------------- steps of a loop


# ---------------------------------------------------------------- selections of a constant


def _clamped(x):
    return jnp.sqrt(jnp.maximum(x, 0.0))


BOUNDS = {
    "maximum": (_clamped, "maximum"),
    "clip": (lambda x: jnp.sqrt(jnp.clip(x, 0.0, 4.0)), "clip"),
    "clamp": (lambda x: jnp.sqrt(jax.lax.clamp(jnp.zeros(()), x, jnp.full((), 4.0))), "clip"),
    "of two": (lambda x: jnp.sqrt(jnp.maximum(jnp.maximum(x, x - 1), 0.0)), "maximum"),
    "reshaped": (lambda x: jnp.sqrt(jnp.maximum(x, 0.0)[None, None])[0, 0], "maximum"),
    "of a tie": (lambda x: _clamped(x + 1), None),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_root_of_a_bound(name):
    """It does not depend on the model, and JAX multiplies infinity by zero."""
    loss, mask = BOUNDS[name]
    x = jnp.array(-1.0)
    report = eqg.explain_nan(lambda x: loss(x) + 0.0, x)
    if not report.bad_leaves:  # the derivative of `clamp` is a selection and no product
        assert name == "clamp"
        return
    (record,) = report.found
    if mask is None:
        assert record.kind == "true singularity"
        return
    assert (record.kind, record.mask, record.primitive) == ("dead branch", mask, "sqrt")
    # What is advised, against the slope of the constant.
    assert jax.grad(eqg.zero_safe(loss))(x) == 0.0 == loss(x - 0.1) - loss(x)
    assert record.cure.startswith("Use `eqg.zero_safe(loss)`, or")


# ---------------------------------------------------------------- what does not select

W = jnp.array(1.0)


def _xs(w):
    return w * jnp.arange(3, dtype=w.dtype)


TARGETS = jnp.array([1.0, jnp.nan, 2.0])
IS_MEASURED = ~jnp.isnan(TARGETS)
OF_NAN = {
    "square": lambda w, t: jnp.sum(jnp.where(IS_MEASURED, (_xs(w) - t) ** 2, 0.0)),
    "product": lambda w, t: jnp.sum(jnp.where(IS_MEASURED, jnp.exp(_xs(w)) * t, 0.0)),
    "nanmean": lambda w, t: jnp.nanmean((_xs(w) - t) ** 2),
    "index": lambda w, t: jnp.sum(((_xs(w) - t) ** 2)[jnp.array([0, 2])]),
}


@pytest.mark.parametrize("name", OF_NAN)
def test_a_nan_of_the_data_that_is_not_selected_has_one_cure(name):
    loss = OF_NAN[name]
    (record,) = eqg.explain_nan(loss, W, TARGETS).found
    assert record.kind == "dead branch"
    assert "`t` holds the NaN" in record.cure
    assert "`jnp.where(ok, t, 0.0)`" in record.cure
    assert "with this operation in" not in record.cure
    if name != "nanmean":  # which looks at the NaN
        mended = lambda w: loss(w, jnp.where(IS_MEASURED, TARGETS, 0.0))
        assert jnp.isfinite(jax.grad(mended)(W))


# ---------------------------------------------------------------- values in loops


def test_an_infinite_value_whose_cotangent_is_zero():
    """An infinite bound, as of censored data: `sub` was said to have an infinite derivative."""
    bound = jnp.array([jnp.inf, 1.0])
    rate = jnp.array(2.0)
    loss = lambda rate, bound: jnp.sum(jnp.tanh((bound - 1.3) * rate))
    closed = lambda rate: loss(rate, bound)
    for report in (eqg.explain_nan(loss, rate, bound), eqg.explain_nan(closed, rate)):
        (record,) = report.found
        assert record.kind == "zero times infinity"
        assert "`eqg.safe.where(ok, f, x, other)`" in record.cure
        assert "derivative of" not in record.cure
    is_finite = jnp.isfinite(bound)
    inner = lambda rate: lambda bound: jnp.tanh((bound - 1.3) * rate)
    cured = lambda rate: jnp.sum(eqg.safe.where(is_finite, inner(rate), bound, 1.0))
    assert not eqg.explain_nan(cured, rate)
    assert cured(rate) == loss(rate, bound)
    assert jax.grad(cured)(rate) == jax.grad(loss)(rate, bound[1:])


def test_a_dead_branch_of_a_product_of_a_row():
    """Not elementwise, and no formula: what is not used is replaced before it."""
    ok = jnp.array([True, False])
    rows = jnp.array([[1.0, 2.0], [1e30, 1e30]])
    product = lambda w, rows: jnp.linalg.cholesky(jnp.einsum("ni,nj->nij", w * rows, w * rows))
    loss = lambda w: jnp.sum(jnp.where(ok, product(w, rows)[:, 0, 0], 0.0))
    report = eqg.explain_nan(loss, jnp.array(1.0))
    assert report
    assert not any("safe.where" in record.cure for record in report.found)


# ---------------------------------------------------------------- what a NaN meets

FIRST, XS = jnp.array([1.0, 0.0, 1.0]), jnp.array([1.0, 2.0, 3.0])
NAN = jnp.array([1.0, jnp.nan, 1.0])
SELECTIONS = {
    "max": jnp.max,
    "sort": jnp.sort,
    "cummax": jax.lax.cummax,
    "pooling": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "VALID"),
    "segment_max": lambda x: jax.ops.segment_max(x, jnp.array([0, 1, 1]), 2),
    "shift by hand": lambda x: jnp.exp(x - x.max()),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_of_a_nan_is_no_cause(name):
    """A maximum that is NaN is equal to none of its operands."""
    loss = lambda w: jnp.sum(SELECTIONS[name](w * (XS * FIRST / FIRST)))
    (record,) = eqg.explain_nan(loss, W).found
    assert (record.kind, record.primitive, record.index) == ("0/0", "div", (1,))
    masked = lambda w: jnp.where(w > 9, loss(w), w)
    (record,) = eqg.explain_nan(masked, W).found
    assert (record.kind, record.primitive, record.index) == ("dead branch", "div", (1,))


def test_a_maximum_of_a_constant_nan():
    (record,) = eqg.explain_nan(lambda w: jnp.max(w * NAN), XS).found
    assert (record.kind, record.primitive) == ("NaN in the input", "mul")


@pytest.mark.thorough
@pytest.mark.parametrize("reverse", [False, True])
def test_a_long_loop_runs_compiled_up_to_the_first_bad_step(reverse):
    """Its carry counts the steps, so that the first bad step depends on it."""

    def loss(w, xs):
        def step(c, x):
            for _ in range(4):
                x = jnp.tanh(x + 0.1)
            return c + w, x + jnp.log(100.5 - c)

        c, ys = jax.lax.scan(step, 0.0, xs, reverse=reverse)
        return c + jnp.sum(ys)

    (record,) = eqg.explain_nan(loss, W, jnp.ones(250)).found
    assert (record.kind, record.primitive) == ("outside of the domain", "log")
    assert (record.step, record.count) == ((148 if reverse else 101,), 149)
