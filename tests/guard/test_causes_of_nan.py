"""The causes of a NaN: which formula, layout, step and element `explain_nan` names.

A row has a loss, and the point at which it is not finite. The fields of the records are those
that one reads off the loss by hand.
"""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn


Z2, M2 = np.zeros(2, "float32"), np.zeros((2, 2), "float32")
ONES2, EMPTY = np.ones((2, 2), "float32"), np.full(2, -np.inf, "float32")
BIG = np.array([9e3, 0.0], "float32")
INF, IN_DATA = np.float32([np.inf, 1.0]), np.float32([1.0, np.nan, 1.0])
ONE, X_OR_0 = np.float32(1), np.array([1.0, 0.0], np.float32)
DEAD, SINGULAR, DOMAIN = "dead branch", "true singularity", "outside of the domain"
ZERO_BY_INF = "zero times infinity"
sqrt, log, exp, total = jnp.sqrt, jnp.log, jnp.exp, jnp.sum
norm, mean = jnp.linalg.norm, jnp.mean


def rms(x, axis=None):
    return sqrt(mean(x**2, axis))


def over(x, y):
    return exp(x) / total(exp(y))


def clamped(x):
    return sqrt(jnp.maximum(x, 0.0))


# ---------------------------------------------------------------- formulas

# By the function that a cure names: losses, and the points at which they are not finite.
CURES = {
    "safe.log_softmax(x)": [(lambda x: log(nn.softmax(x))[1], BIG), (lambda x: log(over(x,
        x))[0], -BIG), (lambda x: nn.log_softmax(x - jnp.inf)[0], Z2)],
    "safe.entropy(p)": [(lambda x: (lambda p: -total(p * log(p)))(nn.softmax(x)), BIG)],
    "nn.softplus": [(lambda x: total(jnp.log1p(exp(x))), BIG), (lambda x: total(log(1 +
        exp(x))), BIG)],
    "nn.logsumexp(x)`": [(lambda x: log(total(exp(x))), BIG)],
    "jnp.logaddexp": [(lambda x: log(exp(x[0]) + exp(x[1])), BIG)],
    "nn.softmax(x)`": [(lambda x: over(x, x)[0], BIG), (lambda x: (exp(x) @ jnp.arange(2.0)) /
        total(exp(x)), BIG)],
    "nn.sigmoid(x)": [(lambda x: total(1 / (1 + exp(-x))), -BIG), (lambda x: total(exp(x) / (1
        + exp(x))), BIG)],
    "nn.sigmoid(-x)": [(lambda x: total(1 / (1 + exp(x))), BIG)],
    "log_sigmoid(x)": [(lambda x: log(nn.sigmoid(x[0])), -BIG)],
    "log_sigmoid(-x)": [(lambda x: log(1 - nn.sigmoid(x[0])), BIG)],
    "safe.norm(x)": [(norm, Z2), (lambda x: sqrt(total(x * x)), Z2), (lambda x: sqrt(x @ x),
        Z2), (lambda w: total(jax.grad(lambda x: norm(w * x))(Z2) ** 2), ONE)],
    "safe.hypot(x, y)": [(lambda x: sqrt(x[0] ** 2 + x[1] ** 2), Z2)],
    "safe.sqrt(jnp.mean(x**2))": [(rms, Z2)],
    "safe.std(x)": [(jnp.std, Z2), (lambda x: total(rms(x - mean(x, 1)[:, None], 1)), M2)],
    "jnp.sign": [(lambda x: total(x / jnp.abs(x)), Z2)],
    "safe.normalize(x)": [(lambda x: (x / norm(x))[0], Z2), (lambda x: (2 * x / norm(x))[0],
        Z2), (lambda x: total(x / norm(x, axis=1, keepdims=True)), M2)],
    "safe.log_cosh(x)": [(lambda x: total(log(jnp.cosh(x))), BIG)],
    "safe.log_expm1(x)": [(lambda x: total(log(jnp.expm1(x))), BIG)],
    "safe.expm1_ratio(x)": [(lambda x: total(jnp.expm1(x) / x), Z2), (lambda x: total((exp(x) -
        1) / x), Z2)],
    "safe.log1p_ratio(x)": [(lambda x: total(jnp.log1p(x) / x), Z2)],
    "safe.sinhc(x)": [(lambda x: total(jnp.sinh(x) / x), Z2)],
    "safe.softmax(x)": [(lambda x: nn.softmax(x - jnp.inf)[0], Z2)],
    "safe.logsumexp(x)": [(lambda x: nn.logsumexp(x - jnp.inf), Z2)],
    "nn.logsumexp(x, b=weights)": [(lambda w: log(exp(np.float32([-1e4, -2e4])) @ w), Z2 +
        1)],
    "nn.logsumexp(jax.nn.log_softmax(x), b=weights)": [(lambda x:
        log(total(nn.softmax(x)[:2])), np.float32([-2e3, -2e3, 1.0]))],
    "logarithms of its factors": [(lambda x: log(exp(-(x[0] ** 2)) * 3), BIG), (lambda x:
        total(log(exp(x) / 3)), -BIG)],
    "safe.divide(x, y)": [(lambda w: total(jax.grad(lambda x: w / x)(0 * ONE)), ONE)],
}  # fmt: skip
# By a function: losses that look as if it was a part of them.
LOOK_ALIKES = {
    "safe.std": [(lambda x: total(rms(x - mean(x, 0)[None], 1)), ONES2), (lambda x: total(rms(x
        - mean(x, 1)[None], 1)), ONES2), (lambda x: rms(x - total(x) / 4), Z2)],
    "safe.norm": [(lambda x: sqrt(total(x * x.T)), M2), (lambda x: sqrt(total(x[:, None] *
        x[None])), Z2), (lambda x: total(sqrt(x @ x)), M2)],
    "safe.normalize": [(lambda x: total(x / norm(x, axis=1)[None]), M2), (lambda x:
        total(jnp.sin(x) / norm(x)), Z2)],
    "safe.hypot": [(lambda x: sqrt(x[0] ** 2 + x[1]), Z2)],
    "jnp.sign": [(lambda x: total(x.T / jnp.abs(x)), M2)],
    "softmax": [(lambda x: total(exp(x) / total(x)), BIG), (lambda x: total(over(x, x / 2)),
        BIG), (lambda x: total(log(over(x, 2 * x))), -BIG), (lambda x: total(exp(x - jnp.max(x))
        / 2), EMPTY)],
    "nn.sigmoid": [(lambda x: total(exp(x / 2) / (1 + exp(x))), BIG), (lambda x: total(5 / (2 +
        exp(x)) * 0 + exp(x)), BIG)],
    "expm1_ratio": [(lambda x: total(jnp.expm1(x) / (x + x)), Z2)],
    "log_cosh": [(lambda x: total(log(jnp.cosh(x) + 1)), BIG)],
    "safe.entropy(p)` in place": [(lambda x: -total(nn.softmax(x) * log(nn.softmax(2 * x))),
        BIG)],
}  # fmt: skip


@pytest.mark.parametrize("name", [*CURES, *LOOK_ALIKES])
def test_the_function_that_a_cure_names(name):
    for loss, x in CURES.get(name, ()):
        assert name in " ".join(r.cure for r in eqg.explain_nan(loss, jnp.asarray(x)).found)
    for loss, x in LOOK_ALIKES.get(name, ()):
        found = eqg.explain_nan(loss, jnp.asarray(x)).found
        assert found
        assert name not in " ".join(r.cure for r in found)


# ---------------------------------------------------------------- kinds

# By the kind, the operation, the index and the operands: a loss, and the point.
KINDS = {
    "inf - inf: sub[] of -inf, -inf": (lambda x: log(x[0]) - log(x[1]), Z2),
    "inf / inf: div[0] of inf, inf": (lambda x: x[0] + total(INF / (INF + x)), Z2),
    "outside of the domain: sin[0] of inf": (lambda x: total(jnp.sin(INF + x)), Z2),
    "true singularity: div[0] of 1, 0": (lambda x: total(1 / x), X_OR_0[::-1]),
    "overflow: div[0] of 1e+30, 1e-30": (lambda x: total(x / 1e-30), np.float32([1e30, 1.0])),
    "outside of the domain: log[1] of -1; true singularity: log[0] of 0": (lambda x:
        total(log(x)), np.float32([0.0, -1.0])),
    "NaN in the input: mul[1] of 1, nan": (lambda x: total(x * IN_DATA), np.ones(3,
        "float32")),
    "dead branch: sqrt[1] of 0": (lambda x: total(sqrt(jnp.maximum(jnp.maximum(x, x - 1),
        0))[None]), np.float32([4.0, -1.0])),
    "zero mask: sqrt[] of 0": (lambda x: clamped(x) * jnp.where(x > 0, 2 * x, 0.0), -ONE),
    "zero times infinity: sqrt[] of 0": (lambda x: sqrt(x) * jnp.sin(x), 0 * ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_cause(name):
    loss, x = KINDS[name]
    found = eqg.explain_nan(loss, jnp.asarray(x)).found
    shown = lambda r: ", ".join(f"{x:.3g}" for x in r.operands)
    texts = sorted(f"{r.kind}: {r.primitive}{list(r.index)} of {shown(r)}" for r in found)
    assert "; ".join(texts) == name


# ---------------------------------------------------------------- layouts

# What may be between a root and the mask that drops an element of it.
X23 = np.arange(6, dtype="float32").reshape(2, 3) + 1
LAYOUTS = [
    lambda x: -x, lambda x: x.T, lambda x: x[:, ::-1], lambda x: jnp.roll(x, 1, 1),
    lambda x: lax.slice(x, (0, 0), (2, 3), (1, 2)), lambda x: x.reshape(3, 2),
    lambda x: x[:, None].squeeze(1), lambda x: jnp.broadcast_to(x[:, None], (2, 4, 3)),
    lambda x: jnp.broadcast_to(x[:, :, None], (2, 3, 2)),
    lambda x: jnp.concatenate([x * 0.5, x[:, :2]], 1), lambda x: jnp.split(x, [1], 1)[1],
    lambda x: jnp.pad(x, ((1, 0), (0, 2))), lambda x: x.sum(0), lambda x: x.sum(1),
    lambda x: (-x).max(1), lambda x: x.prod(0), lambda x: x @ jnp.ones((3, 4)),
    lambda x: jnp.einsum("bi,bij->bj", x, jnp.ones((2, 3, 2))),
    lambda x: jnp.einsum("ib,kbi->bk", x, jnp.ones((4, 3, 2))),
    lambda x: x[jnp.array([1, 0, 1])], lambda x: jnp.zeros((4, 3)).at[jnp.array([3, 1])].add(x),
    lambda x: lax.dynamic_slice(x, (jnp.int32(1), 0), (1, 3)),
    lambda x: jax.vmap(lambda x: jnp.convolve(x, jnp.ones(2)))(x),
    lambda x: x.astype("float16") * 2,
]  # fmt: skip


def image(fn, index):
    """The elements that one of the operand reaches, by finite values."""
    x = X23.copy()
    x[index] = 0.01
    return np.asarray(fn(jnp.array(x)) != fn(jnp.array(X23)))


@pytest.mark.parametrize("first", range(8))
def test_elements_are_followed_through_layouts(first):
    """A mask drops all that one element reaches, and keeps the rest of another one."""
    bad, other = (0, 1), (1, 2)
    fns = LAYOUTS[first::8]
    reached = [(fn, image(fn, bad), image(fn, other)) for fn in fns]
    value = lambda y: total(y).astype("float32") * 1.5
    # A value that is NaN is that of the one element, in each layout that has it.
    loss = lambda xs: sum(value(fn(log(x))) for fn, x in zip(fns, xs, strict=True))
    found = eqg.explain_nan(loss, [jnp.array(X23).at[bad].set(-1.0)] * len(fns)).found
    got = [(r.index, r.n_bad, r.shape) for r in found if r.kind == DOMAIN and r.is_forward]
    assert got == [(bad, 1, (2, 3))] * sum(kept.any() for _, kept, _ in reached)

    def masked(xs):
        terms = ((fn(sqrt(x)), ~drop) for x, (fn, drop, _) in zip(xs, reached, strict=True))
        return sum(value(jnp.where(keep, y, 0.0)) for y, keep in terms)

    both = jnp.array(X23).at[bad].set(0.0).at[other].set(0.0)
    found = eqg.explain_nan(masked, [both] * len(fns)).found
    want = [(SINGULAR if (kept & ~drop).any() else DEAD, other) for _, drop, kept in reached]
    assert sorted((r.kind, r.index) for r in found) == sorted(want + [(DEAD, bad)] * len(fns))


# ---------------------------------------------------------------- boundaries of a mask


# A loss, the point, whether it is on the boundary of the mask, and the function with the limit.
BOUNDARIES = {
    "equal": (lambda x: jnp.where(x == 0, 1.0, jnp.sinh(x) / x), 0.0, True, "safe.sinhc"),
    "nearly": (lambda x: jnp.where(x > 0.9e-3, x / x, 1.0), 0.0, True, ""),
    "not nearly": (lambda x: jnp.where(x > 1.2e-3, x / x, 1.0), 0.0, False, ""),
    "too far": (lambda x: jnp.where(x > 1001.2, (x - 1000) / (x - 1000), 1.0), 1e3, False,
        ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDARIES)
def test_the_boundary_of_a_mask(name):
    loss, x, is_on, function = BOUNDARIES[name]
    (record,) = eqg.explain_nan(loss, jnp.float32(x)).found
    assert (record.kind, record.primitive, record.mask) == (DEAD, "div", "where")
    assert ("check_gradients" in record.cure) == is_on
    assert ("has the limit" in record.cure) == bool(function)
    assert function in record.cure


# ---------------------------------------------------------------- what does not select


def _ones(x):
    return x * np.arange(3, dtype="float32")


POSITIVE = np.array([False, True, True])
# A loss of the logarithms of 0, 1 and 2, what drops the first, and what the cure says.
SELECTIONS = {
    "slice": (lambda y: y[1:], "(`f(x[i])`)"),
    "index": (lambda y: y[np.array([1, 2])], "(`f(x[i])`)"),
    "maximum": (lambda y: jnp.maximum(y, -5.0), "inside of the `maximum`"),
    "minimum": (lambda y: jnp.minimum(-y, 5.0), "inside of the `minimum`"),
    "max": (jnp.max, "inside of the `max`"),
    "min": (lambda y: jnp.min(-y), "inside of the `min`"),
    "clip": (lambda y: jnp.clip(y, -5.0, 5.0), "inside of the `clip`"),
    "where": (lambda y: jnp.where(POSITIVE, y, -5.0),
        "in place of `jnp.where(ok, f(x), other)`"),
}  # fmt: skip


@pytest.mark.parametrize("mask", SELECTIONS)
def test_what_does_not_select_an_element(mask):
    select, cure = SELECTIONS[mask]
    (record,) = eqg.explain_nan(lambda x: total(select(log(_ones(x)))), ONE).found
    assert (record.kind, record.mask, record.index) == (DEAD, mask, (0,))
    assert cure in record.cure


# ---------------------------------------------------------------- several sources

FIRST, LAST = np.array([1.0, 0.0, 1.0], "float32"), np.array([1.0, 1.0, 0.0], "float32")
KEEP = FIRST * LAST > 0
X3 = np.array([1.0, 2.0, 3.0], "float32")


def quotients(w, a, b):
    return total(jnp.where(KEEP, exp(w * (X3 * a / a) + w * b / b), 0.0))


def in_scan(w, a, b):
    c, _ = lax.scan(lambda c, _: (c + w * (X3 * a / a) + w * b / b, None), 0 * X3, None, 4)
    return total(jnp.where(KEEP, exp(c), 0.0))


def inputs_of_one(w, a, b):
    """Both are operands of one product."""
    return total(jnp.where(KEEP, exp(w * (X3 / a) * (X3 / b)), 0.0))


@pytest.mark.parametrize("loss", [quotients, jax.checkpoint(quotients), in_scan, inputs_of_one])
def test_each_source_has_its_own_elements(loss):
    found = eqg.explain_nan(loss, jnp.float32(0.5), jnp.array(FIRST), jnp.array(LAST)).found
    got = sorted((r.kind, r.primitive, r.index, r.n_bad, r.shape) for r in found)
    assert got == [(DEAD, "div", (1,), 1, (3,)), (DEAD, "div", (2,), 1, (3,))]


@pytest.mark.parametrize("is_nan", [True, False])
def test_an_infinity_that_does_no_harm(is_nan):
    """`log(0)` is a weight of zero in `logsumexp`, whatever else is not finite."""

    def loss(x):
        weights = log(np.array([0.0, 1.0], "float32") * x[1])
        return nn.logsumexp(weights + sqrt(x[0]))

    report = eqg.explain_nan(loss, jnp.array([-1.0 if is_nan else 1.0, 2.0]))
    assert [r.primitive for r in report.found if r.is_forward] == ["sqrt"] * is_nan
    assert any("does no harm to the loss" in text for text in report.remarks) == is_nan


# ---------------------------------------------------------------- steps


def roots(x, xs, live, weights):
    def step(c, at):
        x_t, is_live, weight = at
        return c + weight * jnp.where(is_live, sqrt(x_t - x), 0.0), None

    return lax.scan(step, 0.0, (xs, live, weights))[0]


def _steps(n, zeros=(), dead=(), masked=()):
    """The data of so many steps: where `sqrt` is at zero, is dropped, has the weight zero."""
    at = lambda steps: np.isin(np.arange(n), steps)
    dead, masked = at(dead), at(masked)
    return 2.0 - np.float32(at(zeros) | dead | masked), ~dead, np.float32(~masked)


# Of n steps those that are bad, and of each record the kind, the step, the number of steps and
# whether there are more. Many are sampled: sixteen, from the first to the last.
STEPS = {
    "many": (100, {"dead": range(99)}, {(DEAD, (98,), 99, False)}),
    "three kinds": (9, {"zeros": [0, 5], "dead": [8], "masked": [3]}, {(DEAD, (8,), 1, False),
        (SINGULAR, (5,), 2, False), ("zero mask", (3,), 1, False)}),
    "sampled": (80, {"dead": range(79), "masked": [79]}, {("zero mask", (79,), 1, True), (DEAD,
        (74,), 15, True)}),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_steps_of_a_loop(name):
    n, bad, expected = STEPS[name]
    report = eqg.explain_nan(roots, ONE, *_steps(n, **bad))
    assert {(r.kind, r.step, r.count, r.are_more_steps) for r in report.found} == expected
    for r in report.found:
        least = f" and {'at least ' * r.are_more_steps}{r.count - 1} more" * (r.count > 1)
        assert f"{r.step[0]}{least}" in str(report)


@pytest.mark.parametrize("n", [3, 70])
def test_values_of_steps(n):
    xs = jnp.ones(n).at[1:].set(-1.0)
    each = lambda w, xs: total(lax.scan(lambda c, x: (c, log(w * x)), 0.0, xs)[1])
    (record,) = eqg.explain_nan(each, ONE, xs).found
    assert (record.step, record.operands, record.is_forward) == ((1,), (-1.0,), True)
    assert (record.count, record.are_more_steps) == ((2, False) if n == 3 else (3, True))


def test_the_largest_product_of_complex_numbers():
    """The cotangent of a sum over the threshold is the real part in its largest product."""
    matrix = np.complex64([[0.0, 5.0], [1.0, 3.0]])
    loss = lambda x: (np.complex64([1.0, 200j]) @ (matrix @ x)).real
    (record,) = eqg.explain_nan(loss, jnp.ones(2, "complex64"), threshold=550.0).found
    assert (record.kind, record.index) == ("exceeds the threshold", (1,))
    assert (record.operands, abs(record.cotangent)) == ((3.0,), 0.0)
