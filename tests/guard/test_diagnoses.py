"""The diagnoses: causes that are several hops, or several paths, away from what they spoil.

Each program is run twice: with arguments that have the cause, where the fields of the records
are known, and with arguments that do not, where nothing is reported.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def arrays(**leaves):
    return {k: jnp.asarray(v, "float32") for k, v in leaves.items()}


def _fields(record, expected):
    """The expected fields of a record. If a text is part of a field, the text."""
    found = {}
    for key, want in expected.items():
        have = getattr(record, key)
        found[key] = want if isinstance(want, str) and want and want in have else have
    return found


def assert_found(records, expected):
    assert len(records) == len(expected), [
        (r.kind, r.leaf, r.primitive, r.code) for r in records
    ]
    for record, want in zip(records, expected, strict=True):
        assert _fields(record, want) == want


# ---------------------------------------------------------------- explain_nan


class Nan(NamedTuple):
    """A loss, a model for which it or its gradient is not finite, and one for which both are.

    - `found`: fields of each record. `leaves`: the leaves with a bad gradient.
    """

    loss: Callable[..., Any]
    bad: Any
    good: Any
    found: list[dict[str, Any]]
    leaves: list[str]


NANS: dict[str, Nan] = {}


def nan(bad, good, found, leaves):
    def enter(loss):
        NANS[loss.__name__] = Nan(loss, bad, good, found, [f"['{x}']" for x in leaves])
        return loss

    return enter


def root(x):
    return jnp.sqrt(x)


def log(x):
    return jnp.log(x)


def twice_root(x):
    return 2.0 * root(x)


def scan(step, init, xs):
    return jax.lax.scan(step, init, xs)


SINGULAR = "true singularity"
DEAD = "dead branch"


@nan(
    arrays(a=[[1, 2], [0, 1], [3, 0], [1, 0]], b=[1, 2]), arrays(a=np.ones((4, 2)), b=[1, 2]),
    [{"kind": SINGULAR, "primitive": "sqrt", "code": "return jnp.sqrt(x)", "step": (3,),
      "index": (1,), "count": 3, "is_forward": False, "caller": ""}],
    ["a"],
)  # fmt: skip
def two_functions_and_a_scan(m):
    total, _ = scan(lambda c, x: (c + twice_root(x), None), jnp.zeros(2), m["a"])
    return jnp.sum(total * m["b"]) + jnp.sum(m["b"])


@nan(
    arrays(a=[1, 0, 4], b=[2, 0, 1, 0]), arrays(a=[1, 2, 4], b=[2, 1, 1, 1]),
    [{"kind": SINGULAR, "primitive": "log", "code": "return jnp.log(x)", "is_forward": True,
      "index": (1,), "n_bad": 2},
     {"kind": SINGULAR, "primitive": "sqrt", "code": "return jnp.sqrt(x)", "is_forward": False,
      "index": (1,), "n_bad": 1}],
    ["a", "b"],
)  # fmt: skip
def two_causes_that_merge(m):
    return jnp.sum(root(m["a"])) * 2 + jnp.exp(jnp.sum(log(m["b"]))) + jnp.sum(log(m["b"]))


@nan(
    arrays(x=[1, 0, 2], y=[0, 1, 0]), arrays(x=[1, 3, 2], y=[1, 1, 2]),
    [{"kind": DEAD, "primitive": "log", "mask": "where", "code": "return jnp.log(x)",
      "index": (0,), "n_bad": 2},
     {"kind": DEAD, "primitive": "div", "mask": "where", "code": "return 1 / x", "index": (1,),
      "n_bad": 1}],
    ["x", "y"],
)  # fmt: skip
def where_of_two_inputs(m):
    def inverse(x):
        return 1 / x

    return jnp.sum(jnp.where(m["x"] > 0, inverse(m["x"]), log(m["y"])))


@nan(
    arrays(x=[4, 0]), arrays(x=[4, 1]),
    [{"kind": "zero mask", "primitive": "sqrt", "code": "return jnp.sqrt(x)", "index": (1,),
      "is_forward": False}],
    ["x"],
)  # fmt: skip
def mask_of_a_derivative(m):
    return jnp.sum((m["x"] > 0).astype("float32") * root(m["x"]))


@nan(
    arrays(x=[1, 0], y=[1, 0]), arrays(x=[1, 0.5], y=[1, 2]),
    [{"kind": DEAD, "primitive": "sqrt", "mask": "where", "index": (1,)}],
    ["x"],
)  # fmt: skip
def a_mask_two_hops_later(m):
    """An index does not take the element either. The record names the mask that drops it by its
    value."""
    x, y = m["x"], m["y"]
    scaled = jnp.transpose(jnp.reshape(twice_root(x) * 3.0, (1, 2)))
    kept = jnp.sum(jnp.where(x[:, None] > 0, scaled, 0.0))
    return kept + jnp.sum(scaled[:1]) + jnp.sum(y)


@nan(
    arrays(x=[-1, 4]), arrays(x=[1, 4]),
    [{"kind": "outside of the domain", "primitive": "sqrt", "is_forward": True, "index": (0,)}],
    ["x"],
)  # fmt: skip
def in_jit_vmap_and_cond(m):
    inner = lambda x: jax.lax.cond(jnp.sum(x) < 10.0, root, lambda x: x, x)
    return jnp.sum(jax.jit(jax.vmap(inner))(m["x"]))


@nan(
    arrays(x=[0.0, 1.0], y=2.0), arrays(x=[0.5, 1.0], y=2.0),
    [{"kind": SINGULAR, "primitive": "root_rule", "code": "root_rule(m", "index": (0,)}],
    ["x"],
)  # fmt: skip
def in_a_rule(m):
    return jnp.sum(root_rule(m["x"])) * m["y"]


@eqg.custom_vjp
def root_rule(x):
    return jnp.sqrt(x)


root_rule.def_fwd(lambda x: (root_rule(x), root_rule(x)))
root_rule.def_bwd(lambda y, ct: (ct / (2 * y),))


@nan(
    arrays(x=[2.0, 0.0, 1.0], w=1.0), arrays(x=[2.0, 3.0, 1.0], w=1.0),
    [{"kind": "inf - inf", "primitive": "sub", "is_forward": True, "step": (1,)},
     {"kind": SINGULAR, "primitive": "log", "is_forward": True, "step": (1,)}],
    ["w", "x"],
)  # fmt: skip
def carry_that_becomes_nan(m):
    def step(c, x):
        y = log(x)
        return c * m["w"] + (y - y), None

    return scan(step, jnp.zeros(()), m["x"])[0]


@nan(
    arrays(x=[0.0, 3.0]), arrays(x=[1.0, 3.0]),
    [{"kind": "0/0", "primitive": "div", "is_forward": True, "index": (0,)}],
    ["x"],
)  # fmt: skip
def quotient_of_zeros(m):
    return jnp.sum(jnp.sin(m["x"]) / m["x"])


@nan(
    arrays(x=[60.0, 100.0]), arrays(x=[60.0, 80.0]),
    [{"kind": "overflow", "primitive": "exp", "is_forward": True, "index": (1,)}],
    ["x"],
)  # fmt: skip
def overflow(m):
    return jnp.sum(jnp.exp(m["x"]))


@nan(
    arrays(x=[1.0, np.nan], y=[1.0, 2.0]), arrays(x=[1.0, 2.0], y=[1.0, 2.0]),
    [{"kind": "NaN in the input", "primitive": "model['x']", "index": (1,)}],
    ["x", "y"],
)  # fmt: skip
def nan_in_the_input(m):
    return jnp.sum(jnp.sin(m["x"])) * jnp.sum(m["y"])


@nan(
    arrays(x=[1.0, np.inf], y=[1.0, 2.0]), arrays(x=[1.0, 2.0], y=[1.0, 2.0]),
    [{"kind": "inf in the input", "primitive": "model['x']", "index": (1,)}],
    ["y"],
)  # fmt: skip
def infinity_in_the_input(m):
    return jnp.sum(m["x"] * m["y"])


@nan(
    arrays(x=[-1.0, 4.0], y=[0.0, 2.0]), arrays(x=[-1.0, 4.0], y=[1.0, 2.0]),
    [{"kind": SINGULAR, "primitive": "sqrt", "index": (0,), "caller": "in `dropped_on_the_way`",
      "is_forward": False}],
    ["y"],
)  # fmt: skip
def dropped_on_the_way(m):
    """The slope at the masked element of `x` is infinite as well, and `where` drops it."""
    x = jnp.where(m["x"] > 0, m["x"], 0.0)
    of_x = jnp.sum(root(x))
    return of_x + jnp.sum(root(m["y"]))


@nan(
    arrays(x=[0.0, 4.0], y=[1.0, 0.0]), arrays(x=[1.0, 4.0], y=[1.0, 2.0]),
    [{"kind": SINGULAR, "primitive": "sqrt", "index": (1,)},
     {"kind": SINGULAR, "primitive": "sqrt", "index": (0,)}],
    ["x", "y"],
)  # fmt: skip
def two_calls_of_a_function(m):
    of_x = 3.0 * jnp.sum(root(m["x"]))
    return of_x + 5.0 * jnp.sum(root(m["y"]))


@nan(
    arrays(x=[1.0, 0.0]), arrays(x=[1.0, 2.0]),
    [{"kind": SINGULAR, "derivative_of": "sqrt", "is_forward": True, "index": (1,)}],
    ["x"],
)  # fmt: skip
def a_derivative_in_the_loss(m):
    return jnp.sum(jax.grad(lambda x: jnp.sum(root(x)))(m["x"]))


@nan(
    arrays(x=[0.5, 0.0, 0.1], w=[1.0, 2.0]), arrays(x=[0.5, 0.2, 0.1], w=[1.0, 2.0]),
    [{"kind": SINGULAR, "primitive": "log", "is_forward": True, "step": (1,), "count": 1,
      "index": ()}],
    ["w", "x"],
)  # fmt: skip
def through_two_loops(m):
    logs = scan(lambda c, x: (c, log(x)), None, m["x"])[1]
    return scan(lambda c, x: (c * m["w"][0] + x, None), m["w"][1], logs)[0]


@nan(
    arrays(x=[0.0, 1.0]), arrays(x=[0.5, 1.0]),
    [{"kind": SINGULAR, "primitive": "sqrt", "index": (0,), "step": (0,), "count": 3}],
    ["x"],
)  # fmt: skip
def in_a_while_loop(m):
    def body(c):
        return c[0] + 1, c[1] + root(m["x"])[0]

    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.zeros(())))[1]


@pytest.mark.parametrize("name", NANS)
def test_explain_nan(name):
    one = NANS[name]
    report = eqg.explain_nan(one.loss, one.bad)
    assert_found(report.found, one.found)
    assert list(report.bad_leaves) == one.leaves
    assert bool(report)
    report = eqg.explain_nan(one.loss, one.good)
    assert not report
    assert not report.bad_leaves


@pytest.mark.parametrize(
    ("threshold", "step"), [(7.9, 3), (8.0, 2), (15.9, 2), (16.0, 1), (63.9, 0), (64.0, None)]
)
def test_the_threshold_of_explain_nan(threshold, step):
    """The cotangent is twice as large after each step, and 64 after six of them."""
    loss = lambda h: scan(lambda h, _: (2.0 * h, None), h, jnp.zeros(6))[0]
    report = eqg.explain_nan(loss, jnp.float32(1.0), threshold=threshold)
    assert bool(report) == (step is not None)
    if step is not None:
        kind = "exceeds the threshold"
        assert_found(report.found, [{"kind": kind, "primitive": "mul", "step": (step,)}])
        # What is too large is replaced by zero, so that what comes next is found as well.
        assert [r.count for r in report.found] == [1]


@pytest.mark.parametrize("is_bad", [True, False])
def test_what_zero_safe_drops(is_bad):
    x = jnp.array([4.0, 0.0 if is_bad else 1.0])
    loss = lambda x: jnp.sum(jnp.where(x > 0, twice_root(x), 0.0))
    report = eqg.explain_nan(eqg.zero_safe(loss), x)
    assert not report
    expected = [{"kind": DEAD, "primitive": "sqrt", "mask": "where", "index": (1,)}]
    assert_found(report.dropped, expected if is_bad else [])


# ---------------------------------------------------------------- explain_zero


class Zero(NamedTuple):
    """As above, for a loss of a model and of whether it is the one with the cause."""

    loss: Callable[..., Any]
    bad: Any
    good: Any
    found: list[dict[str, Any]]


ZEROS: dict[str, Zero] = {}


def zero(bad, good, *found):
    def enter(loss):
        records = [
            {"leaf": f"['{leaf}']", "kind": kind, **fields} for leaf, kind, fields in found
        ]
        ZEROS[loss.__name__] = Zero(loss, bad, good, records)
        return loss

    return enter


def relu(x):
    return jax.nn.relu(x)


@zero(
    arrays(a=[-1, -2], live=0), arrays(a=[-1, -2], live=1),
    ("a", "dead units", {"primitive": "relu", "code": "jax.nn.relu(x)"}),
    ("a", "multiplied by zero", {"primitive": "mul", "detail": "`model['live']`"}),
)  # fmt: skip
def two_dead_relus_and_a_path(m, bad):
    return jnp.sum(relu(relu(m["a"]) - 1.0)) + m["live"] * jnp.sum(m["a"])


@zero(
    arrays(a=[3, 2], b=[-4, -3]), arrays(a=[3, 2], b=[-2, -3]),
    ("a", "dead units", {"primitive": "relu"}),
    ("b", "dead units", {"primitive": "relu"}),
)  # fmt: skip
def the_second_relu_is_dead(m, bad):
    return jnp.sum(relu(relu(m["a"]) + m["b"]))


def _cut(leaf, kind, **fields):
    return leaf, kind, {"by_structure": True, **fields}


AB = arrays(a=[1.2, 2.3], b=[1.0, 3.0])


@zero(AB, AB, _cut("a", "cast to an integer", primitive="convert_element_type"))
def integer_cast(m, bad):
    a = 2.0 * m["a"]
    return jnp.sum(m["b"]) * jnp.sum(a.astype("int32").astype("float32") if bad else a)


@zero(AB, AB, _cut("a", "stop_gradient", primitive="stop_gradient"))
def stop_gradient_in_a_scan(m, bad):
    step = lambda c, x: (
        c + m["b"][0] * jnp.sin(jax.lax.stop_gradient(x) if bad else x),
        None,
    )
    return scan(step, jnp.zeros(()), m["a"])[0]


@zero(AB, AB, _cut("a", "comparison", primitive="gt"))
def comparison_in_jit_and_vmap(m, bad):
    def one(a, b):
        return jnp.where(a > 1.0, b, 2 * b) + (0.0 if bad else a)

    return jnp.sum(jax.jit(jax.vmap(one))(m["a"], m["b"]))


@zero(AB, AB, _cut("a", "argmax"), _cut("a", "rounding", primitive="round"))
def two_cuts_on_two_paths(m, bad):
    chosen = m["b"][jnp.argmax(m["a"])]
    return chosen * jnp.sum(jnp.round(m["a"] * 3.0) if bad else m["a"] * 3.0)


@zero(AB, AB, _cut("a", "rounding", primitive="floor"))
def live_after_the_cut_of_the_other_path(m, bad):
    """An operation after the first cut need not be corrected first: `sign` has no record."""
    return jnp.sum(m["b"] * (jnp.sign(jnp.floor(m["a"])) if bad else m["a"]))


@zero(AB, AB, _cut("a", "never used"))
def never_used(m, bad):
    return jnp.sum(m["b"]) + (0.0 if bad else jnp.sum(m["a"]))


@zero(
    arrays(a=[1, 2], b=-1), arrays(a=[1, 2], b=1),
    ("a", "branch not taken", {"primitive": "cond", "by_structure": False}),
)  # fmt: skip
def in_cond(m, bad):
    sin = lambda a: jnp.sum(jnp.sin(a))
    return jax.lax.cond(m["b"] > 0, sin, lambda a: 3.0, m["a"]) * m["b"]


@zero(
    arrays(a=[1, 2], w=0), arrays(a=[1, 2], w=0.5),
    ("a", "multiplied by zero", {"primitive": "mul", "detail": "`model['w']`", "step": (1,)}),
)  # fmt: skip
def multiplied_in_a_scan(m, bad):
    """The derivative of all steps ends at the product of the second and last one."""
    step = lambda c, a: (m["w"] * (c + a), None)
    return scan(step, m["w"], m["a"])[0] + m["w"]


@zero(
    arrays(a=[1, 2, 3], w=0), arrays(a=[1, 2, 3], w=0.5),
    ("a", "multiplied by zero", {"primitive": "mul", "detail": "`model['w']`", "step": (2,)}),
)  # fmt: skip
def multiplied_in_each_step(m, bad):
    """Of several steps, it is the last one."""
    return jnp.sum(scan(lambda c, a: (c, m["w"] * a), None, m["a"])[1])


def _carry(m, reverse):
    step = lambda c, x: (x[1] * c + x[0], None)
    last, _ = jax.lax.scan(step, m["first"], (m["a"], m["keep"]), reverse=reverse)
    return last + jnp.sum(m["keep"])


@zero(
    arrays(a=[3, 2, 1], first=1, keep=[1, 1, 0]), arrays(a=[3, 2, 1], first=1, keep=[1, 1, 1]),
    ("first", "multiplied by zero", {"primitive": "mul", "step": (2,)}),
)  # fmt: skip
def a_carry_that_is_lost(m, bad):
    """The derivative is zero in the two steps before the last one, too."""
    return _carry(m, reverse=False)


@zero(
    arrays(a=[3, 2, 1], first=1, keep=[0, 1, 1]), arrays(a=[3, 2, 1], first=1, keep=[1, 1, 1]),
    ("first", "multiplied by zero", {"primitive": "mul", "step": (0,)}),
)  # fmt: skip
def a_carry_that_is_lost_backwards(m, bad):
    return _carry(m, reverse=True)


@zero(
    arrays(a=[200, 300]), arrays(a=[1, 2]),
    ("a", "saturated", {"primitive": "tanh", "by_structure": False}),
)  # fmt: skip
def saturated(m, bad):
    return jnp.sum(jnp.tanh(jnp.sin(0.0) + m["a"]))


@zero(
    arrays(a=[1, 2], b=[3, 4]), arrays(a=[1, 2], b=[3, 4]),
    ("a", "canceled", {"by_structure": False}),
)  # fmt: skip
def canceled(m, bad):
    total = jnp.sum(m["a"]) * (1.0 if bad else 2.0)
    return total - jnp.sum(m["a"]) + jnp.sum(m["b"])


@zero(
    arrays(a=[1, 2], b=[3, 3]), arrays(a=[1, 2], b=[4, 3]),
    ("a", "masked", {"primitive": "select_n"}),
)  # fmt: skip
def masked_by_another(m, bad):
    return jnp.sum(jnp.where(m["b"] > 3.5, m["a"] * 2.0, m["b"]))


@zero(
    arrays(a=[-1, -2]), arrays(a=[1, -2]), ("a", "dead units", {"primitive": "select_n"})
)  # fmt: skip
def masked_by_itself(m, bad):
    return jnp.sum(jnp.where(m["a"] > 0, m["a"] * 2.0, 0.0))


@zero(
    arrays(a=[1, 1], s=1e-30), arrays(a=[1, 1], s=1), ("a", "underflow", {"primitive": "mul"})
)  # fmt: skip
def underflow(m, bad):
    return jnp.sum(m["a"] * m["s"] * m["s"]) + m["s"]


@zero(
    arrays(a=[1, 2], s=1e-4), arrays(a=[1, 2], s=1),
    ("a", "underflow", {"primitive": "mul", "code": "jnp.float16(1e-5)"}),
)  # fmt: skip
def underflow_in_reverse_mode(m, bad):
    small = m["a"].astype("float16") * jnp.float16(1e-5)
    return jnp.sum(small.astype("float32")) * m["s"]


@eqg.custom_vjp
def zero_rule(x):
    return x * 2.0


zero_rule.def_fwd(lambda x: (zero_rule(x), None))
zero_rule.def_bwd(lambda _, ct: (0.0 * ct,))


@zero(
    AB,
    AB,
    ("a", "rule without a derivative", {"primitive": "zero_rule", "code": "zero_rule(m["}),
)
def a_rule(m, bad):
    return jnp.sum((zero_rule(m["a"]) if bad else m["a"]) * m["b"])


@pytest.mark.parametrize("name", ZEROS)
def test_explain_zero(name):
    one = ZEROS[name]
    report = eqg.explain_zero(one.loss, one.bad, True)
    assert_found(report.found, one.found)
    assert report.n_leaves == len(one.bad)
    assert not eqg.explain_zero(one.loss, one.good, False)


def test_dead_units_of_a_leaf_with_a_gradient():
    """A unit is dead if it is so for all examples: the third one, and not the first."""
    loss = lambda m, xs: jnp.sum(jax.vmap(lambda x: relu(m["w"] @ x + m["b"]))(xs))
    w = np.array([[1, 0], [0, 1], [0, 1], [1, 1]])
    m = arrays(w=w, b=[0, 0, -9, 1])
    xs = jnp.array([[-1.0, 2.0], [1.0, 0.5], [1.0, 1.0]])
    report = eqg.explain_zero(loss, m, xs)
    assert not report
    said = "The gradient of ['b'] is zero for 1 of 4 units (2)."
    assert said in " ".join(report.remarks)
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


# ---------------------------------------------------------------- gradient_flow and probe


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
    loss = lambda m, x: jnp.sum(root(m(x, 2)))
    flow = eqg.gradient_flow(loss, chain, jnp.array([0.0, 1.0]))
    assert np.isnan(flow["step"]).all()
    flow = eqg.gradient_flow(loss, chain, jnp.array([4.0, 1.0]))
    np.testing.assert_allclose(flow["step"], np.hypot(0.25, 0.5) * np.ones(2), rtol=1e-6)


def test_the_statistics_of_a_gradient():
    ct = np.array([3.0, -4.0, np.nan, np.inf, 0.5], "float32")
    loss = lambda slot, x: jnp.sum(eqg.probe(x, slot) * ct)
    found = jax.grad(loss)(eqg.GradientStatistics(), jnp.ones(5))
    kept = ct[np.isfinite(ct)]
    np.testing.assert_allclose(found.norm, np.linalg.norm(kept), rtol=1e-6)
    assert (found.max, found.nonfinite, found.steps) == (4.0, 2.0, 1.0)

    def looped(slot, x):
        return scan(lambda h, _: (eqg.probe(2 * h, slot), None), x, jnp.zeros(3))[0].sum()

    found = jax.grad(looped)(eqg.GradientStatistics(), jnp.ones(4))
    assert (found.norm, found.max, found.steps) == (2.0 * (1 + 2 + 4), 7.0, 3.0)
    np.testing.assert_allclose(found.mean_norm, 14 / 3, rtol=1e-6)
    np.testing.assert_allclose(found.mean_max, 7 / 3, rtol=1e-6)


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


def _loop(w, xs, n_tanh=1, other=None):
    def step(h, x):
        h = w @ h + x
        for _ in range(n_tanh):
            h = jnp.tanh(h) * 2.0
        return h, None

    total = jnp.sum(scan(step, jnp.zeros(8), xs)[0])
    if other is None:
        return total
    y = jnp.sin(w[0, 0] * other)
    return total + jnp.sum(y @ y)


W8 = jnp.eye(8)


def _kept(steps, n_tanh, every):
    """The bytes that are kept with a checkpoint every so many steps of such a loop."""
    carry, of_step = 32, 32 * (1 + 2 * n_tanh)
    return steps // every * carry + every * of_step


@pytest.mark.parametrize(
    ("steps", "n_tanh", "checkpoint"),
    [(3, 2, None), (4, 2, 1), (16, 1, 2), (16, 2, 2), (64, 1, 4), (64, 2, 4), (64, 4, 2),
     (256, 1, 8), (256, 2, 8)],
)  # fmt: skip
def test_advice_on_loops(steps, n_tanh, checkpoint):
    report = _memory(_loop, W8, jnp.ones((steps, 8)), n_tanh)
    assert len(report.advice) == (checkpoint is not None)
    in_loop = [r for r in report.found if r.n_steps > 1]
    assert {(r.n_steps, r.bytes, r.bytes_per_step) for r in in_loop} == {
        (steps, steps * 32, 32)
    }
    assert [r.kind for r in in_loop].count("carry") == 1
    assert len(in_loop) == 1 + 2 * n_tanh
    of_step = 32 * len(in_loop)
    for advice in report.advice:
        assert (advice.kind, advice.primitive) == ("loop", "scan")
        assert f"checkpoint={checkpoint!r})" in advice.cure
        assert "scan(step" in advice.code
        assert advice.saves == sum(r.bytes for r in in_loop) - _kept(steps, n_tanh, checkpoint)
        # No number of steps keeps less.
        divisors = [k for k in range(1, steps + 1) if steps % k == 0]
        assert min(_kept(steps, n_tanh, k) for k in divisors) == steps * of_step - advice.saves


@pytest.mark.parametrize(("n", "is_worth_it"), [(76, True), (77, False)])
def test_advice_that_saves_little(n, is_worth_it):
    """Beside the loop, the loss keeps a sine and a cosine, which can't be saved."""
    report = _memory(_loop, W8, jnp.ones((64, 8)), 1, jnp.ones((n, n)))
    saved = 64 * 96 - _kept(64, 1, 4)
    assert (saved > 0.1 * report.total) == is_worth_it
    assert [a.kind for a in report.advice] == ["loop"] * is_worth_it


class Sines(eqx.Module):
    weight: jax.Array
    n: int = eqx.field(static=True)

    def __call__(self, x):
        for _ in range(self.n):
            x = jnp.sin(self.weight @ x)
        return x


@pytest.mark.parametrize("is_group", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_advice_on_layers(n, is_group):
    """Of one layer alone, a checkpoint has to compute all again at the peak."""
    layers = [Sines(jnp.eye(16), n) for _ in range(3)]
    names = range(3) if is_group else "abc"
    model = layers if is_group else dict(zip(names, layers, strict=True))
    loss = lambda m, x: jnp.sum(m[names[2]](m[names[1]](m[names[0]](x))))
    report = _memory(loss, model, jnp.ones((16, 40)))
    # The cosines of each layer, and its results that go into products.
    sizes = [2560 * 2 * n, 2560 * 2 * n, 2560 * (2 * n - 1)]
    assert report.by_path() == {f"[{x!r}]": size for x, size in zip(names, sizes, strict=True)}
    assert [(a.kind, a.path) for a in report.advice] == [("layer", "[*]")] * is_group


def test_memory_is_measured():
    report = eqg.explain_memory(_loop, W8, jnp.ones((64, 8)))
    assert 0.7 * report.total < report.compiled < 1.3 * report.total
    assert [a.measured for a in report.advice] == [None]
    (advice,) = report.verify().advice
    assert advice.measured < 0.5 * report.compiled
    assert 0.8 * advice.saves < report.compiled - advice.measured < 1.2 * advice.saves


# ---------------------------------------------------------------- what zero_safe keeps


class Safe(NamedTuple):
    """A loss whose gradient is NaN at `x`, and the same with its operations kept in range: its
    gradient by plain autodiff is the one to be had."""

    loss: Callable[[Any], Any]
    mended: Callable[[Any], Any]
    x: Any


def _in_range(x, ok):
    return jnp.where(ok, x, 1.0)


X0 = np.array([4.0, 0.0, 1.0, -2.0], "float32")
POSITIVE = lambda x: x > 0
W = np.array([[1.0, -2.0, 0.5, 3.0], [0.3, 1.0, -1.0, 2.0]], "float32")


def _log_in_scan(fn):
    """A carry in which a dead element comes back in the next step, selected by another."""

    def loss(x):
        def step(c, w):
            return c * 0.5 + jnp.where(POSITIVE(x), fn(x) * w, jnp.roll(c, 1)), c[0]

        c, ys = scan(step, jnp.ones(4), jnp.array(W))
        return jnp.sum(c) + jnp.sum(ys)

    return loss


def _pair(of):
    """A loss with `log`, and one with the logarithm of what is in range."""
    return of(jnp.log), of(lambda x: jnp.log(_in_range(x, POSITIVE(x))))


SAFE: dict[str, Safe] = {
    name: Safe(*_pair(of), X0)
    for name, of in {
        "where": lambda log: lambda x: jnp.sum(jnp.where(POSITIVE(x), log(x), x)),
        "where of two": lambda log: (
            lambda x: jnp.sum(jnp.where(POSITIVE(x), log(x) * x[::-1], x**2))
        ),
        "two hops": lambda log: (
            lambda x: jnp.sum(jnp.where(POSITIVE(x), jnp.exp(log(x) * 2.0) + x, x))
        ),
        "nested where": lambda log: (
            lambda x: jnp.sum(jnp.where(x < 3, jnp.where(POSITIVE(x), log(x), 3 * x), x * x))
        ),
        "index": lambda log: lambda x: log(x)[0] * x[1] + log(x)[2],
        "slice and pad": lambda log: lambda x: jnp.sum(jnp.pad(log(x), (2, 0))[2:3] * x[1]),
        "concatenate": lambda log: (
            lambda x: jnp.sum(jnp.concatenate([log(x), x])[4:]) + log(x)[0]
        ),
        "dynamic slice": lambda log: (
            lambda x: jnp.sum(
                jax.lax.dynamic_slice(log(x), (x[2].astype("int32") - 1,), (1,)) * x
            )
        ),
        "overwritten": lambda log: lambda x: jnp.sum(log(x).at[1].set(x[1]).at[3].set(2.0) * x),
        "maximum": lambda log: (
            lambda x: jnp.sum(jnp.maximum(jnp.where(POSITIVE(x), log(x), -1.0), 0.5) * x)
        ),
        # A row that is dead is a factor of what the other rows are products with.
        "product": lambda log: (
            lambda x: jnp.sum(
                jnp.where(POSITIVE(x)[:, None], log(x)[:, None] * W[:1, :2] @ (W * x[2]), 0.0)
            )
        ),
        "broadcast": lambda log: (
            lambda x: jnp.sum(
                jnp.where(POSITIVE(x)[:, None], log(x)[:, None] * jnp.array(W).T, 1.0)
            )
        ),
        "jit and vmap": lambda log: (
            lambda x: jnp.sum(jax.jit(jax.vmap(lambda y: jnp.where(POSITIVE(y), log(y), y)))(x))
        ),
        "scan": _log_in_scan,
    }.items()
}


@pytest.mark.parametrize("name", SAFE)
def test_zero_safe(name):
    loss, mended, x = SAFE[name]
    want, gradient = jax.value_and_grad(mended)(x)
    assert np.all(np.isfinite(gradient))
    assert not np.all(np.isfinite(jax.grad(loss)(x)))
    value, got = jax.value_and_grad(eqg.zero_safe(loss))(x)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(got, gradient, rtol=1e-6, atol=1e-7)
    # Forward mode, and the second derivative, along a direction.
    t = np.array([0.3, -1.0, 2.0, 0.7], "float32")
    along = lambda fn: jax.jvp(jax.grad(fn), (x,), (t,))
    _, of_got = along(eqg.zero_safe(loss))
    _, of_want = along(mended)
    np.testing.assert_allclose(of_got, of_want, rtol=1e-5, atol=1e-6)
    _, slope = jax.jvp(eqg.zero_safe(loss), (x,), (t,))
    np.testing.assert_allclose(slope, np.dot(gradient, t), rtol=1e-5)


@pytest.mark.parametrize("name", SAFE)
def test_zero_safe_keeps_what_is_finite(name):
    x = np.array([4.0, 0.5, 1.5, 2.0], "float32")
    loss = SAFE[name].loss
    gradient = jax.grad(loss)(x)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_array_equal(jax.grad(jax.jit(eqg.zero_safe(loss)))(x),
                                  jax.grad(jax.jit(loss))(x))  # fmt: skip


def test_zero_safe_keeps_a_singularity_that_is_taken():
    """An infinity that a path leads from belongs to the function."""
    both = lambda x: jnp.sum(jnp.where(x >= 0, jnp.sqrt(x), 0.0)) + jnp.sqrt(x[1])
    gradient = jax.grad(eqg.zero_safe(both))(X0)
    np.testing.assert_array_equal(np.isinf(gradient), [False, True, False, False])
    assert gradient[3] == 0
    # Of a constant, the tangent is zero, and no term of an infinite slope is left.
    padded = eqg.zero_safe(lambda x: jnp.sum(jnp.sqrt(jnp.concatenate([x, jnp.zeros(1)]))))
    assert jax.jvp(padded, (jnp.array([4.0]),), (jnp.ones(1),))[1] == 0.25
    squared = lambda x: jnp.sum(jnp.sqrt(x) ** 2)
    assert np.isnan(jax.grad(eqg.zero_safe(squared))(jnp.zeros(1))).all()
    zero_wins = jax.grad(eqg.zero_safe(squared, policy="zero"))(jnp.array([0.0, 4.0]))
    np.testing.assert_allclose(zero_wins, [0.0, 1.0])
