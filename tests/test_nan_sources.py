"""`explain_nan`: several causes at one operation, of which each has its own elements."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest


X = jnp.array([1.0, 2.0, 3.0])
W = jnp.array(0.5)
FIRST, LAST = jnp.array([1.0, 0.0, 1.0]), jnp.array([1.0, 1.0, 0.0])  # where each has a zero


@pytest.fixture(autouse=True)
def _mixed_promotion():
    """The losses are what users write."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def places(report):
    """The operation, the first bad element and the number of these of each record."""
    return [(r.primitive, r.index, r.n_bad, r.shape) for r in report.found]


def check_gradient(loss, *args):
    """Against finite differences, in double precision."""
    with jax.enable_x64(True):
        w, step = jnp.array(0.5, jnp.float64), 1e-5
        difference = (loss(w + step, *args) - loss(w - step, *args)) / (2 * step)
        assert jnp.allclose(jax.grad(loss)(w, *args), difference, rtol=1e-6)


def quotients(w, a, b):
    h = w * (X * a / a)
    l = h + w * b / b
    return jnp.sum(jnp.where((FIRST > 0) & (LAST > 0), jnp.exp(l), 0.0))


def quotients_in_scan(w, a, b):
    step = lambda c, _: (c + w * (X * a / a) + w * b / b, None)
    c, _ = jax.lax.scan(step, jnp.zeros(3), jnp.arange(4))
    return jnp.sum(jnp.where((FIRST > 0) & (LAST > 0), jnp.exp(c), 0.0))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("loss", [quotients, quotients_in_scan])
def test_each_cause_has_its_own_elements(loss, around):
    report = eqg.explain_nan(around(loss), W, FIRST, LAST)
    assert sorted(places(report)) == [("div", (1,), 1, (3,)), ("div", (2,), 1, (3,))]
    assert {r.kind for r in report.found} == {"dead branch"}
    ones = jnp.ones(3)
    assert jnp.isnan(jax.grad(loss)(W, ones, LAST))  # each is to be mended
    assert jnp.isnan(jax.grad(loss)(W, FIRST, ones))
    check_gradient(loss, ones, ones)


def masked_rows(w, n, mask):
    h = w * ((X * n) / n)
    logits = jnp.where(mask, jnp.stack([h, -h], 1), -jnp.inf)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    rows = jax.nn.logsumexp(log_p + h[:, None], axis=-1)
    return jnp.sum(jnp.where((FIRST > 0) & (LAST > 0), rows, 0.0))


@pytest.mark.slow
def test_a_cause_that_shows_only_where_another_one_does_as_well():
    """The NaN of the division is in each place that the one of the softmax reaches."""
    mask = jnp.array([[True, True], [True, True], [False, False]])
    report = eqg.explain_nan(masked_rows, W, FIRST, mask)
    assert places(report) == [("div", (1,), 1, (3,)), ("sub", (2, 0), 2, (3, 2))]
    assert "safe.log_softmax" in report.found[1].cure
    assert jnp.isnan(jax.grad(masked_rows)(W, jnp.ones(3), mask))
    check_gradient(masked_rows, jnp.ones(3), jnp.ones_like(mask))


def test_a_nan_in_the_data_and_a_division():
    data = jnp.array([1.0, 1.0, jnp.nan])

    def loss(w, data):
        return jnp.sum(jnp.where(FIRST * LAST > 0, jnp.exp(w * (X / FIRST) + w * data), 0.0))

    expected = [("div", (1,), 1, (3,)), ("exp", (2,), 1, (3,))]
    assert sorted(places(eqg.explain_nan(loss, W, data))) == expected
    expected = [("div", (1,), 1, (3,)), ("mul", (2,), 1, (3,))]  # a constant
    assert sorted(places(eqg.explain_nan(lambda w: loss(w, data), W))) == expected


def test_a_cause_is_found_in_one_of_many_elements():
    n = 10_000
    a, b = jnp.ones(n).at[77].set(0.0), jnp.ones(n).at[n - 1].set(0.0)
    loss = lambda w: jnp.sum(jnp.where(a * b > 0, jnp.exp(w / a + w / b), 0.0))
    expected = [("div", (77,), 1, (n,)), ("div", (n - 1,), 1, (n,))]
    assert sorted(places(eqg.explain_nan(loss, W))) == expected


NAN = jnp.array([1.0, jnp.nan, 1.0])
SELECTIONS = {
    "max": jnp.max,
    "min": jnp.min,
    "sort": jnp.sort,
    "cummax": jax.lax.cummax,
    "cummin": jax.lax.cummin,
    "pooling": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "VALID"),
    "segment_max": lambda x: jax.ops.segment_max(x, jnp.array([0, 1, 1]), 2),
    "shift by hand": lambda x: jnp.exp(x - x.max()),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_of_a_nan_is_no_cause(name):
    """A maximum that is NaN is equal to none of its operands."""
    loss = lambda w: jnp.sum(SELECTIONS[name](w * (X * FIRST / FIRST)))
    (record,) = eqg.explain_nan(loss, W).found
    assert (record.kind, record.primitive, record.index) == ("0/0", "div", (1,))
    masked = lambda w: jnp.where(w > 9, loss(w), w)
    (record,) = eqg.explain_nan(masked, W).found
    assert (record.kind, record.primitive, record.index) == ("dead branch", "div", (1,))


def test_a_maximum_of_a_constant_nan():
    (record,) = eqg.explain_nan(lambda w: jnp.max(w * NAN), X).found
    assert (record.kind, record.primitive) == ("NaN in the input", "mul")


@pytest.mark.slow
def test_a_where_is_named_and_not_the_index_before_it():
    """The index takes an element of the row, and the `where` drops the row."""
    x, n, labels = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([2.0, 0.0]), jnp.array([0, 1])

    def loss(w):
        logits = w * x * n[:, None] / n[:, None]
        log_p = jax.nn.log_softmax(logits)
        terms = -jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0]
        return jnp.sum(jnp.where(n > 0, terms, 0.0))

    report = eqg.explain_nan(loss, W)
    (record,) = report.found
    assert (record.kind, record.primitive, record.mask) == ("dead branch", "div", "where")
    assert (record.index, record.n_bad, record.shape) == ((1, 0), 2, (2, 2))
    first = jnp.array([0])
    report = eqg.explain_nan(lambda w: jnp.sum(jnp.log(w * n)[first]), W)
    assert report.found[0].mask == "index"
    assert "dead branch of an `index`" in str(report)
