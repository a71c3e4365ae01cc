"""The causes of a NaN: which formula, layout, step and element `explain_nan` names.

A row has a loss, and the point at which it is not finite. The fields of the records are those
that one reads off the loss by hand.
"""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest
from eqx_grads._diagnosis._nan import births
from jax import lax, nn
from jax.scipy import special
from jax.scipy.linalg import solve_triangular
from jax.sharding import AxisType, PartitionSpec as P


KEYS = jax.random.split(jax.random.key(0), 3)
Z2, M2 = np.zeros(2, "float32"), np.zeros((2, 2), "float32")
BIG = np.array([9e3, 0.0], "float32")
INF, IN_DATA = np.float32([np.inf, 1.0]), np.float32([1.0, np.nan, 1.0])
ONE, X_OR_0 = np.float32(1), np.array([1.0, 0.0], np.float32)
DEAD, SINGULAR, DOMAIN = "dead branch", "true singularity", "outside of the domain"
sqrt, log, exp, total = jnp.sqrt, jnp.log, jnp.exp, jnp.sum
norm, mean = jnp.linalg.norm, jnp.mean


def rms(x, axis=None):
    return sqrt(mean(x**2, axis))


def over(x, y):
    return exp(x) / total(exp(y))


jvp_rule = jax.custom_jvp(sqrt)
jvp_rule.defjvps(lambda t, y, x: t / (2 * y))

# ---------------------------------------------------------------- cures

# By the function that a cure names: losses, and the points at which they are not finite.
CURES = {
    "nn.softmax": [(lambda x: over(x, x)[0], BIG), (lambda x: log(total(exp(x))), BIG)],
    "log_sigmoid": [(lambda x: log(nn.sigmoid(x[0])), -BIG)],
    "safe.norm(x)": [(norm, Z2), (lambda x: (x / norm(x))[0], Z2)],
    "safe.sqrt(x)": [(lambda x: sqrt(x @ x), Z2), (rms, Z2)], "safe.std(x)": [(jnp.std, Z2)],
    "safe.softmax(x)": [(lambda x: nn.softmax(x - jnp.inf)[0], Z2)],
    "safe.log_softmax(x)": [(lambda x: nn.log_softmax(x - jnp.inf)[0], Z2)],
    "safe.power(x, y)": [(lambda x: total(x**0.5), Z2)],
    "safe.arctan2(y, x)": [(lambda x: jnp.arctan2(x[0], x[1]), Z2)],
    "safe.arccos(x)": [(lambda x: total(jnp.arccos(x + 1)), Z2)],
    "safe.arcsin(x)": [(lambda x: total(jnp.arcsin(x - 1)), Z2)],
    "safe.logaddexp(x, y)": [(lambda x: exp(jnp.logaddexp(*(x - jnp.inf))), Z2)],
    "safe.xlogy(x, y)": [(lambda x: special.xlogy(x[0], x[1]), Z2)],
    "safe.xlog1py(x, y)": [(lambda x: special.xlog1py(x[0], x[1] - 1), Z2)],
    "safe.eigh(a)": [(lambda x: total(jnp.linalg.eigh(jnp.diag(x + 1))[1]), Z2),
        (lambda x: total(jnp.linalg.eigh(jnp.diag(jnp.append(x + 1, 4.0)))[1][:, 2]), Z2)],
    "smooth there, compute it without": [(lambda x: jnp.cos(norm(x)), Z2)],
    "safe.svd(a)": [(lambda x: total(jnp.linalg.svd(jnp.diag(x + 1))[0]), Z2)],
    "jnp.maximum(n, 1)": [(lambda x: total(jnp.sinh(x) / x), Z2)],
    "`jnp.where(ok, x, other)` on the operand of": [(lambda x: jnp.where(x[0] > 0, total(
        jnp.linalg.inv(jnp.diag(x))), 0.0), Z2)],
    "compute it in the rule": [(lambda x: 0.0 * jvp_rule(x[0]), Z2)],
    "jnp.eye": [(lambda x: exp(-solve_triangular(jnp.diag(x[:1]), jnp.ones(1))[0]), Z2)],
    "bound the state": [(lambda x: total((1e33 * x) * x), BIG)],
    'zero_safe(f, policy="zero")': [(lambda w: total(jax.grad(lambda x: norm(w * x))(Z2) ** 2),
        ONE)],
    # Losses that look as if this function was a part of them.
    "not safe.std": [(lambda x: rms(x - total(x) / 4), Z2)],
    "not safe.norm": [(lambda x: total(sqrt(x @ x)), M2)],
    "not safe.normalize": [(lambda x: total(jnp.sin(x) / norm(x)), Z2)],
    "not softmax": [(lambda x: total(x * 3e38 * x), BIG)],
    "not in a derivative": [(lambda x: jax.grad(lambda x: exp(x) * x)(x[0]), BIG)],
    "clip_gradient_norm(x, max_norm)": [(lambda x: 1e3 * jnp.sin(1e12 * exp(x[0])), 60 + Z2)],
    "not in the rule": [(lambda x: jnp.where(x[0] > 0, jvp_rule(x[0]), 0.0), Z2)],
}  # fmt: skip


@pytest.mark.parametrize("name", CURES)
def test_the_function_that_a_cure_names(name):
    for loss, x in CURES[name]:
        cures = " ".join(r.cure for r in eqg.explain_nan(loss, jnp.asarray(x)).found)
        assert cures
        assert (name.removeprefix("not ") in cures) == (not name.startswith("not "))


# ---------------------------------------------------------------- kinds


def arrays(**leaves):
    return {k: jnp.asarray(v, "float32") for k, v in leaves.items()}


def ln(x):
    return jnp.log(x)


def twice_root(x):
    return 2.0 * jnp.sqrt(x)


@eqg.custom_vjp
def root_rule(x):
    return jnp.sqrt(x)


root_rule.def_fwd(lambda x: (root_rule(x), root_rule(x)))
root_rule.def_bwd(lambda y, ct: (ct / (2 * y),))


MESH = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))


def last_of(step, init, xs):
    return lax.scan(lambda c, x: (step(c, x), None), init, xs)[0]


def two_hops_later(m):
    """An index does not take the element either. The record names the mask that drops it by its
    value."""
    scaled = jnp.transpose(jnp.reshape(twice_root(m["x"]) * 3.0, (1, 2)))
    kept = total(jnp.where(m["x"][:, None] > 0, scaled, 0.0))
    return kept + total(scaled[:1]) + total(m["y"])


def in_three_steps(m):
    body = lambda c: (c[0] + 1, c[1] + sqrt(m["x"])[0])
    return lax.while_loop(lambda c: c[0] < 3, body, (0, jnp.zeros(())))[1]


# By the kind, the operation, the index, the step and the number of steps of each record, and by
# the leaves with a bad gradient: a loss, a point where it is not finite, and one where it is.
KINDS = {
    "inf - inf: sub[0] forward": (lambda x: total((lax.complex(x, INF + x) - lax.complex(x,
        INF)).imag), Z2),
    "inf - inf: reduce_sum[] forward; outside of the domain: log[2] forward": (lambda x: total(
        log(x) + np.float32([np.inf, -np.inf, 0])), np.float32([1, 1, -1])),
    "inf / inf: div[0] forward": (lambda x: x[0] + total(INF / (INF + x)), Z2),
    "outside of the domain: sin[0] forward": (lambda x: total(jnp.sin(jnp.bfloat16(
        INF + x))), Z2),
    "true singularity: div[0] forward": (lambda x: total(1 / x), X_OR_0[::-1]),
    "overflow: div[0] forward": (lambda x: total(x / 1e-30), np.float32([1e30, 1.0])),
    # Infinity minus infinity is no cause of its own.
    "overflow: exp[1] forward": (lambda x: total((lambda y: y - 2 * y)(exp(x))),
        np.float32([60, 100]), np.float32([60, 80])),
    "0/0: div[0] forward": (lambda x: total(jnp.sin(x) / x), X_OR_0[::-1], X_OR_0 + 1),
    "outside of the domain: log[1] forward; true singularity: log[0] forward": (lambda x:
        total(log(x)), np.float32([0.0, -1.0])),
    "NaN in the input: mul[1] forward": (lambda x: total(x * IN_DATA), np.ones(3,
        "float32")),
    "NaN in the input: model['x'][1] forward | x y": (lambda m: total(jnp.sin(m["x"])) * total(
        m["y"]), arrays(x=[1, np.nan], y=[1, 2]), arrays(x=[1, 2], y=[1, 2])),
    "inf in the input: model['x'][1] forward | y": (lambda m: total(m["x"] * m["y"]),
        arrays(x=[1, np.inf], y=[1, 2]), arrays(x=[1, 2], y=[1, 2])),
    "dead branch: sqrt[1] by maximum": (lambda x: total(sqrt(jnp.maximum(jnp.maximum(x, x - 1),
        0))[None]), np.float32([4.0, -1.0]), X_OR_0 + 1),
    "dead branch: sqrt[0] by where; zero mask: sqrt[1] by mul": (lambda x: (lambda y: jnp.where(
        x[0] > 0, y[0], 0.0) + 0.0 * y[1])(sqrt(x)), Z2),
    # A NaN is the last one.
    "dead branch: log[0] by slice | y": (lambda m: log(m["y"])[jnp.argsort(sqrt(m["x"]))[0]],
        arrays(x=[-1, 4], y=[0, 1]), arrays(x=[1, 4], y=[1, 1])),
    # The second element is `inf - inf`, and not used.
    "true singularity: div[0] forward | x": (lambda m: (1 / m["x"] - 1 / lax.stop_gradient(
        m["y"]))[0], arrays(x=[0, 0], y=[1, 0]), arrays(x=[1, 1], y=[1, 1])),
    "outside of the domain: sqrt[0] forward": (lambda x: total(log(1 - sqrt(x))), np.float32([
        -1, 0.25])),
    "zero mask: sqrt[] by mul": (lambda x: 0.0 * sqrt(x), 0 * ONE, ONE),
    "zero times infinity: sqrt[0] by mul": (lambda x: total(sqrt(x) * lax.map(lambda t:
        lax.cond(t > 0, jnp.sin, jnp.zeros_like, t), x)), X_OR_0[::-1]),
    "zero times infinity: sqrt[] by mul": (lambda x: sqrt(x) * jnp.sin(x), 0 * ONE),
    "true singularity: sqrt[1] at [3] x3 | a": (lambda m: total(last_of(lambda c, x: c +
        twice_root(x), jnp.zeros(2), m["a"]) * m["b"]) + total(m["b"]), arrays(a=[[1, 2], [0,
        1], [3, 0], [1, 0]], b=[1, 2]), arrays(a=np.ones((4, 2)), b=[1, 2])),
    "true singularity: log[1] forward; true singularity: sqrt[1] | a b": (lambda m: total(sqrt(
        m["a"])) * 2 + exp(total(ln(m["b"]))) + total(ln(m["b"])), arrays(a=[1, 0, 4], b=[2,
        0, 1, 0]), arrays(a=[1, 2, 4], b=[2, 1, 1, 1])),
    "dead branch: div[1] by where; dead branch: log[0] by where | x y": (lambda m: total(
        jnp.where(m["x"] > 0, 1 / m["x"], log(m["y"]))), arrays(x=[1, 0, 2], y=[0, 1, 0]),
        arrays(x=[1, 3, 2], y=[1, 1, 2])),
    "dead branch: sqrt[1] by where | x": (two_hops_later, arrays(x=[1, 0], y=[1, 0]),
        arrays(x=[1, 0.5], y=[1, 2])),
    "outside of the domain: sqrt[0] forward | x": (lambda m: total(jax.jit(jax.vmap(lambda x:
        lax.cond(total(x) < 10.0, sqrt, lambda x: x, x)))(m["x"])), arrays(x=[-1, 4]),
        arrays(x=[1, 4])),
    "outside of the domain: log[0, 0, 1, 2] forward": (lambda m: total(jax.shard_map(lambda x:
        jnp.swapaxes(log(x) - lax.psum(x, "i"), 0, 1), mesh=MESH, in_specs=P(None, "i"),
        out_specs=P("i"))(m["x"][None])), arrays(x=[[1, 2, 3], [1, 2, -1], [1, 2, 3], [1, 2,
        4]]), arrays(x=np.ones((4, 3)))),
    "true singularity: root_rule[0] | x": (lambda m: total(root_rule(m["x"])) * m["y"],
        arrays(x=[0, 1], y=2), arrays(x=[0.5, 1], y=2)),
    "inf - inf: sub[] at [1] forward; true singularity: log[] at [1] forward | w x": (lambda m:
        last_of(lambda c, x: c * m["w"] + (lambda y: y - y)(log(x)), jnp.zeros(()), m["x"]),
        arrays(x=[2, 0, 1], w=1), arrays(x=[2, 3, 1], w=1)),
    "true singularity: sqrt[0] | y": (lambda m: total(sqrt(jnp.where(m["x"] > 0, m["x"], 0.0)))
        + total(sqrt(m["y"])), arrays(x=[-1, 4], y=[0, 2]), arrays(x=[-1, 4], y=[1, 2])),
    "true singularity: sqrt[0]; true singularity: sqrt[1] | x y": (lambda m: 3.0 * total(sqrt(
        m["x"])) + 5.0 * total(sqrt(m["y"])), arrays(x=[0, 4], y=[1, 0]), arrays(x=[1, 4], y=[1,
        2])),
    "true singularity: sqrt[1] forward | x": (lambda m: total(jax.grad(lambda x: total(
        sqrt(x)))(m["x"])), arrays(x=[1, 0]), arrays(x=[1, 2])),
    "true singularity: log[] at [1] forward | w x": (lambda m: last_of(lambda c, x: c *
        m["w"][0] + x, m["w"][1], lax.scan(lambda c, x: (c, log(x)), None, m["x"])[1]),
        arrays(x=[0.5, 0, 0.1], w=[1, 2]), arrays(x=[0.5, 0.2, 0.1], w=[1, 2])),
    # The cotangent of the last carry, which nothing uses, is zero.
    "dead branch: sqrt[] at [2] by mul | w x": (lambda m: total(lax.scan(lambda c, x: (sqrt(c) *
        x, c), m["w"], m["x"])[1]), arrays(x=[1, 0, 1], w=1), arrays(x=[1, 2, 1], w=1)),
    # The root in the first step meets what is zero because of the root in the second one.
    "dead branch: log[] by where; dead branch: sqrt[] at [1] x2 by where | x y": (lambda m:
        jnp.where(m["y"] > 0, log(m["y"]), 0.0) + (lambda h: jnp.where(h > 0, h, 0.0))(last_of(
        lambda h, _: sqrt(h), m["x"], jnp.zeros(2))), arrays(x=0, y=0), arrays(x=1, y=1)),
    "outside of the domain: log[] at [0] forward": (lambda x: total(lax.scan(lambda c, y: (c,
        log(x * y) + y), 0.0, 1 - 2 * X_OR_0)[1]), ONE),
    # With so many steps, those before the bad one are compiled. It is the last but one to run.
    "true singularity: log[] at [1] forward": (lambda x: total(lax.scan(lambda c, y: (c + 1,
        log((c - 498 * y) ** 2)), 0.0, jnp.full(500, x), reverse=True)[1]), ONE),
    "true singularity: sqrt[0] at [0] x3 | x": (in_three_steps, arrays(x=[0, 1]),
        arrays(x=[0.5, 1])),
    # The first of two is done after two steps, at the third its root would be bad.
    "outside of the domain: sqrt[0, 1] at [1] forward | x": (lambda m: total(jax.vmap(lambda n,
        x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + sqrt(x - c[0])), (0,
        jnp.zeros(2)))[1])(np.array([2, 3]), m["x"])), arrays(x=[[3, 0.5], [5, 6]]),
        arrays(x=[[1.5, 3], [5, 6]])),
    "true singularity: sqrt[] at [2] x3 | x": (lambda m: lax.scan(lambda c, k: (c + sqrt(
        m["x"]) * jax.random.uniform(k), k), 0.0, KEYS)[0] + total(log(lax.scan(lambda c, x: (c,
        x), 0.0, jnp.zeros(0))[1])), arrays(x=0), arrays(x=1)),
}  # fmt: skip


def text_of(record):
    parts = f"{record.kind}: {record.primitive}{list(record.index)}"
    parts += f" at {list(record.step)}" if record.step else ""
    parts += f" x{record.count}" if record.count > 1 else ""
    return parts + " forward" * record.is_forward + f" by {record.mask}" * bool(record.mask)


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_cause(name):
    loss, bad, *good = KINDS[name]
    report = eqg.explain_nan(loss, jnp.asarray(bad) if eqx.is_array_like(bad) else bad)
    leaves = [leaf[2:-2] for leaf in report.bad_leaves if leaf != "model"]
    texts = "; ".join(sorted(map(text_of, report.found)))
    assert f"{texts} | {' '.join(leaves)}".removesuffix(" | ") == name
    for model in good:
        assert not eqg.explain_nan(loss, model).bad_leaves


def test_where_a_cause_is():
    """The line, and the line of the caller where two calls of a function are causes."""

    def loss(x):
        of_x = 3 * total(twice_root(x))
        return of_x + total(twice_root(x.ravel()[:1]))

    in_jax = lambda x: total(jnp.piecewise(x, [x > 1], [jnp.square, loss]))
    for fn in (loss, lambda x: jax.jit(loss)(x), in_jax):
        found = eqg.explain_nan(fn, jnp.asarray(Z2)).found
        assert {r.code for r in found} == {"return 2.0 * jnp.sqrt(x)"}
        assert [r.caller for r in found if "in `loss`" in r.caller]
    for x in Z2, np.float32([0, -1]):  # a cause in the loss is not one of another call
        found = eqg.explain_nan(loss, jnp.asarray(x)).found
        assert len({r.caller for r in found}) == 2
    # In a library that calls a function of yours, it is a line of this function.
    solver = optx.Newton(1e-5, 1e-5)
    loss = lambda x: optx.root_find(lambda y, x: y - 3 * sqrt(x), solver, x, args=x).value
    (record,) = eqg.explain_nan(loss, 0 * ONE).found
    assert (record.primitive, "3 * sqrt(x)" in record.code) == ("sqrt", True)
    assert record.library.startswith("optimistix/_root_find")
    (record,) = eqg.explain_nan(lambda x: jax.grad(sqrt)(x[0]), jnp.asarray(Z2)).found
    assert record.primitive == "sqrt"


@pytest.mark.parametrize(
    ("threshold", "step"), [(7.9, 3), (8.0, 2), (15.9, 2), (16.0, 1), (63.9, 0), (64.0, None)]
)
def test_the_threshold(threshold, step):
    """The cotangent is twice as large after each step, and 64 after six of them. What is too
    large is replaced by zero, so that what comes next is found as well."""
    loss = lambda h: last_of(lambda h, _: 2.0 * h, h, jnp.zeros(6)) @ np.float32([0.01, 1])
    found = eqg.explain_nan(loss, jnp.ones(2), threshold=threshold).found
    expected = f"exceeds the threshold: mul[1] at [{step}]"
    assert list(map(text_of, found)) == [expected] * (step is not None)


def test_one_cause_that_zero_safe_drops_beside_another():
    """It is named, as it makes this gradient finite, which is all that it can do."""
    loss = lambda x: total(jnp.where(x > 0, sqrt(x), 100 * x))
    eqg.explain_nan(loss, jnp.asarray(X_OR_0), threshold=10.0)


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
    got = [r.index for r in found if r.kind == DOMAIN and r.is_forward]
    assert got == [bad] * sum(kept.any() for _, kept, _ in reached)

    def masked(xs):
        terms = ((fn(sqrt(x)), ~drop) for x, (fn, drop, _) in zip(xs, reached, strict=True))
        return sum(value(jnp.where(keep, y, 0.0)) for y, keep in terms)

    both = jnp.array(X23).at[bad].set(0.0).at[other].set(0.0)
    found = eqg.explain_nan(masked, [both] * len(fns)).found
    want = [(SINGULAR if (kept & ~drop).any() else DEAD, other) for _, drop, kept in reached]
    assert sorted((r.kind, r.index) for r in found) == sorted(want + [(DEAD, bad)] * len(fns))


# ---------------------------------------------------------------- what does not select


def _ones(x):
    return x * np.arange(3, dtype="float32")


POSITIVE = np.array([False, True, True])
# What drops the first of the logarithms of 0, 1 and 2.
SELECTIONS = {
    "slice": lambda y: y[1:], "index": lambda y: y[np.array([1, 2])],
    "maximum": lambda y: jnp.maximum(y, -5.0), "minimum": lambda y: jnp.minimum(-y, 5.0),
    "max": jnp.max, "min": lambda y: jnp.min(-y), "clip": lambda y: jnp.clip(y, -5.0, 5.0),
    "where": lambda y: jnp.where(POSITIVE, y, -5.0),
}  # fmt: skip


@pytest.mark.parametrize("mask", SELECTIONS)
def test_what_does_not_select_an_element(mask):
    (record,) = eqg.explain_nan(lambda x: total(SELECTIONS[mask](log(_ones(x)))), ONE).found
    mask = "maximum" if mask == "clip" else mask  # JAX takes it to be one
    assert (record.kind, record.mask, record.index) == (DEAD, mask, (0,))


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


def infinities_of_one(w, a, b):
    return total(jnp.where(KEEP, w * (X3 / a + X3 / b), 0.0))


@pytest.mark.parametrize(
    "loss",
    [quotients, jax.checkpoint(quotients), in_scan, inputs_of_one, infinities_of_one],
)
def test_each_source_has_its_own_elements(loss):
    found = eqg.explain_nan(loss, jnp.float32(0.5), jnp.array(FIRST), jnp.array(LAST)).found
    got = sorted((r.kind, r.primitive, r.index) for r in found)
    assert got == [(DEAD, "div", (1,)), (DEAD, "div", (2,))]


@pytest.mark.parametrize("is_nan", [True, False])
def test_an_infinity_that_does_no_harm(is_nan):
    """`log(0)` is a weight of zero in `logsumexp`, whatever else is not finite."""

    def loss(x):
        weights = log(np.array([0.0, 1.0], "float32") * x[1])
        return nn.logsumexp(weights + sqrt(x[0]))

    report = eqg.explain_nan(loss, jnp.array([-1.0 if is_nan else 1.0, 2.0]))
    assert [r.primitive for r in report.found if r.is_forward] == ["sqrt"] * is_nan


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


# Of n steps those that are bad, and of each record the kind, the step and the number of steps.
STEPS = {
    "many": (100, {"dead": range(99)}, {(DEAD, (98,), 99)}),
    "three kinds": (9, {"zeros": [0, 5], "dead": [8], "masked": [3]}, {(DEAD, (8,), 1),
        (SINGULAR, (5,), 2), ("zero mask", (3,), 1)}),
    "one of many": (80, {"dead": range(79), "masked": [79]}, {("zero mask", (79,), 1), (DEAD,
        (78,), 79)}),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_steps_of_a_loop(name):
    n, bad, expected = STEPS[name]
    report = eqg.explain_nan(roots, ONE, *_steps(n, **bad))
    assert {(r.kind, r.step, r.count) for r in report.found} == expected


def test_a_loop_that_runs_compiled_first(monkeypatch):
    """As it does if it is long, and finite. The report is the same."""
    monkeypatch.setattr(births, "_MOST_IN_DETAIL", 0)
    for name in KINDS:
        if " at " in name or "[0] by mul" in name:
            test_the_kind_of_a_cause(name)
    test_the_steps_of_a_loop("three kinds")
    test_the_threshold(7.9, 3)


@pytest.mark.parametrize("n", [3, 70])
def test_values_of_steps(n):
    xs = jnp.ones(n).at[1:].set(-1.0)
    each = lambda w, xs: total(lax.scan(lambda c, x: (c, log(w * x)), 0.0, xs)[1])
    (record,) = eqg.explain_nan(each, ONE, xs).found
    assert (record.step, record.is_forward, record.count) == ((1,), True, n - 1)


def test_the_threshold_of_complex_numbers():
    matrix = np.complex64([[0.0, 5.0], [1.0, 3.0]])
    loss = lambda x: (np.complex64([1.0, 200j]) @ (matrix @ x)).real
    (record,) = eqg.explain_nan(loss, jnp.ones(2, "complex64"), threshold=550.0).found
    assert (record.kind, record.index) == ("exceeds the threshold", (1,))


def test_a_derivative_that_is_nan_where_the_value_is_fine():
    loss = lambda a: jax.scipy.special.gammainc(a, jnp.inf)
    report = eqg.explain_nan(loss, 2 * ONE)
    (record,) = report.found
    assert (report.loss, record.kind, record.primitive) == (1.0, DOMAIN, "igamma")


def test_the_budget():
    """Without time, the report has the cure that was tried."""
    report = eqg.explain_nan(lambda x: total(jnp.where(x > 0, sqrt(x), 0.0)), jnp.asarray(Z2),
        seconds=0.0)  # fmt: skip
    assert (list(report.found), list(report.bad_leaves)) == ([], ["model"])
    with pytest.raises(eqg.RuleError, match="positive"):
        eqg.explain_nan(total, ONE, threshold=0.0)


@pytest.mark.parametrize(("checkpoint", "b"), [(None, 1.0), (None, 0.0), ("replay", 1.0)])
def test_the_cure_is_tried_on_the_loss_as_it_runs(checkpoint, b):
    """In the rule of a replayed scan, `zero_safe` may not reach what is not finite; and it has
    to help all leaves."""
    step = lambda w: lambda c, x: (c + jnp.where(x > 0, sqrt(w * x), 0.0), None)
    scan = lambda w, xs: eqg.filter_scan(step(w), 0.0, xs, checkpoint=checkpoint)[0]
    loss, m = lambda m, xs: scan(m["a"], xs) + sqrt(m["b"]), arrays(a=1.0, b=b)
    xs = np.array([1.0, 0.0, 2.0], "float32")
    helps = np.isfinite(jax.tree.leaves(jax.grad(eqg.zero_safe(loss))(m, xs))).all()
    found = eqg.explain_nan(loss, m, xs).found
    assert len(found) == 1 + (b == 0)
    assert any("`eqg.zero_safe(loss)`" in record.cure for record in found) == helps
