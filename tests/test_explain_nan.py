"""`explain_nan`: planted causes are found at the right line, step and element, and none where
nothing is wrong. The cures are code that runs, and cure what they are for."""

import ast
import functools as ft
import inspect
import re

import diffrax
import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix
import pytest
from eqx_grads._diagnosis import eager
from eqx_grads._jaxprs.structure import equations
from jax.scipy.special import betaln
from jax.sharding import Mesh, PartitionSpec as P

from .guard.test_causes_of_nan import CURES
from .helpers import skip_without_checkpointed_loops


KEY, ONE = jax.random.key(0), jnp.array(1.0)
X2, X3 = jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0, 2.0])
NAN, INF = jnp.nan, jnp.inf
DEAD, POLE, ZERO = "dead branch", "true singularity", "0/0"
ZERO_BY_INF, DOMAIN = "zero times infinity", "outside of the domain"
THRESHOLD = "exceeds the threshold"
sqrt, log, exp, total, where = jnp.sqrt, jnp.log, jnp.exp, jnp.sum, jnp.where
norm, softmax = jnp.linalg.norm, jax.nn.softmax


@pytest.fixture(autouse=True)
def _mixed_promotion():
    """The losses are what users write."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def lines_of(fn, mark):
    """The lines of a function that end with this mark."""
    source, first = inspect.getsourcelines(fn)
    return [first + i for i, text in enumerate(source) if f"# {mark}" in text]


PACKAGES = {"eqg": eqg, "jax": jax, "jnp": jnp, "eqx": eqx}
PACKAGES |= {"optax": optax, "optimistix": optimistix, "diffrax": diffrax}


def _resolve(node):
    """The object that `package.name` is, or `None` for a name of the user's."""
    if isinstance(node, ast.Name):
        return PACKAGES.get(node.id)
    owner = _resolve(node.value) if isinstance(node, ast.Attribute) else None
    return None if owner is None else getattr(owner, node.attr)


def assert_can_be_pasted(report):
    """The names in the code of its cures exist, and each call has the arguments it needs."""
    codes = {c for r in report.found for c in re.findall("`([^`]*)`", r.cure) if "(" in c}
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Attribute):
            _resolve(node)  # raises `AttributeError`
        if isinstance(node, ast.Call) and (fn := _resolve(node.func)):
            is_partial = any(isinstance(x, ast.Constant) and x.value is ... for x in node.args)
            keywords = {keyword.arg: None for keyword in node.keywords}
            if is_partial:
                inspect.signature(fn).bind_partial(**keywords)
            else:
                inspect.signature(fn).bind(*node.args, **keywords)


def explain(loss, *args, **options):
    report = eqg.explain_nan(loss, *args, **options)
    assert_can_be_pasted(report)
    return report


def only(loss, *args, **options):
    (record,) = explain(loss, *args, **options).found
    return record


# ---------------------------------------------------------------- planted causes

HALF = jnp.array([[True] * 3, [False] * 3, [True] * 3])
KNOTS = jnp.array([0.0, 1.0, 1e-12, -1.0])
# The kind, other fields of the record, the arguments, a function that has the operation to be
# named, and one of its result: the loss.
PLANTED = {
    "where": (DEAD, {"primitive": "sqrt", "index": (1,)}, [X3],
        lambda x: sqrt(x),
        lambda y, x: total(where(x > 0, y, 0.0))),
    "overflow": (DEAD, {"primitive": "exp", "index": (1,)}, [jnp.array([0.0, 2.0, 0.01])],
        lambda x: exp(1000.0 * x),
        lambda big, x: total(where(x > 0.05, x, big))),
    "segment": (DEAD, {"primitive": "sqrt", "index": (1,)}, [X3],
        lambda x: sqrt(x),
        lambda y, x: total(jax.ops.segment_max(y, jnp.array([0, 0, 1]), 2))),
    "arctan2": (DEAD, {"primitive": "atan2", "index": (1,)}, [X3],
        lambda x: jnp.arctan2(x, x),
        lambda angle, x: total(where(x != 0, angle, 0.0))),
    "attention": (DEAD, {"primitive": "sub"}, [jnp.asarray(np.eye(3)), HALF],
        lambda q, mask: softmax(q @ q.T + where(mask, 0.0, -INF), axis=-1),
        lambda weights, q, mask: total(where(mask, weights, 0.0))),
    "power": ("overflow", {"primitive": "integer_pow", "index": (0,)}, [X3 * X3[::-1] + 1e-9],
        lambda x: total((1e7 * x) ** 50)),
    "branches of JAX": (POLE, {"primitive": "lgamma"}, [X2[::-1]], lambda p: betaln(*p)),
    "subnormal": (POLE, {}, [jnp.array([1e-39, 1.0], jnp.float32)], lambda x: total(log(x))),
    "matrix": (ZERO, {"primitive": "custom_linear_solve"}, [jnp.ones((2, 2))],
        lambda a: total(jnp.linalg.solve(a, jnp.ones(2)))),
    "library": (ZERO, {}, [jnp.zeros(3)],
        lambda x: total(optax.losses.cosine_distance(x, jnp.ones(3)))),
    "optimistix": (POLE, {}, [jnp.array(8.0)],
        lambda a: (lambda y: sqrt(y - y))(optimistix.root_find(
            lambda y, a: y**3 - a, optimistix.Newton(1e-4, 1e-4), ONE, a).value)),
    "knots": (THRESHOLD, {}, [KNOTS],
        lambda x: jnp.interp(jnp.array(3e-13), jnp.sort(x), jnp.arange(4.0))),
    "standardized": (ZERO, {"primitive": "div", "is_forward": True}, [jnp.ones(3), jnp.ones(3)],
        lambda w, x: (x - jnp.mean(x)) / jnp.std(x),
        lambda y, w, x: jnp.max(w * y) + log(total(exp(w * y - jnp.max(w * y))))),
    "softmax": (ZERO, {"primitive": "div"}, [jnp.array([800.0, 0.0, 1.9, -1.0])],
        lambda x: x / x,
        lambda y, x: total(softmax(y) ** 2)),
}  # fmt: skip


def planted(name):
    """The loss and its arguments."""
    _, _, args, here, *then = PLANTED[name]
    return lambda *args: then[0](here(*args), *args) if then else here(*args), *args


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name):
    kind, fields, _, here, *then = PLANTED[name]
    loss, *args = planted(name)
    report = explain(loss, *args, threshold=1e9 if kind == THRESHOLD else None)
    line = here.__code__.co_firstlineno
    found = [r for r in report.found if r.line == line]
    assert found, str(report)
    assert (found[0].kind, found[0].file) == (kind, __file__), str(report)
    assert {key: getattr(found[0], key) for key in fields} == fields
    if kind == DEAD:
        mask = then[0].__code__.co_firstlineno
        assert (found[0].mask_file, found[0].mask_line) == (__file__, mask)
        assert len(report.found) == 1


HEALTHY = {
    "logsumexp": (lambda x: jax.nn.logsumexp(x + jnp.array([0.0, -INF])), X2),
    "masked softmax": (lambda q: total(softmax(where(HALF | (q > 0), q, -INF))[0] ** 2), X3),
    "cond": (lambda x: jax.lax.cond(x > 0, sqrt, lambda x: 0 * x, x), jnp.array(0.0)),
    # JAX replaces the operands of the branch that is not taken.
    "cond under vmap": (lambda x: total(jax.vmap(HEALTHY["cond"][0])(x)), X3),
    "unused": (lambda x: total(where(log(x) > -5, x, 2 * x)), X3),
    "stopped": (lambda x: total(where(x < 5, x, jax.lax.stop_gradient(log(x)))), X3),
    "bad cotangent": (lambda x: total(sqrt(0 * jax.lax.stop_gradient(x)) + x), X3),
    "attention": (lambda m: total(m(*3 * [jnp.ones((3, 4))], mask=jnp.tri(3) > 0) ** 2),
        eqx.nn.MultiheadAttention(2, 4, key=KEY)),
    "while": (lambda x: jax.lax.while_loop(lambda y: y < 99, lambda y: y * x, x), 2 * ONE),
    "zeroed": (lambda x: total(sqrt(eqg.zero_nonfinite_gradient(x))), X3),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name):
    report = eqg.explain_nan(*HEALTHY[name])
    assert not report, str(report)


@pytest.mark.parametrize("fill", [lambda: -INF, lambda: -jnp.full(3, INF)])
@pytest.mark.parametrize("then", [total, lambda y: -jnp.mean(jax.nn.log_softmax(y))])
def test_the_infinity_of_a_mask_is_no_overflow(then, fill):
    record = only(lambda x: then(where(X3 > 0, x, fill())), 1 + X3)
    expected = "constant infinity", "select_n", (1,)
    assert (record.kind, record.primitive, record.index) == expected


def test_the_rule_of_jax_that_is_not_finite():
    @jax.custom_jvp
    def square(x):
        return x * x

    @square.defjvp
    def square_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return square(x), 2 * x * x / x * t  # HERE

    record = only(lambda x: square(x), jnp.array(0.0))
    (line,) = lines_of(test_the_rule_of_jax_that_is_not_finite, "HERE")
    assert (record.kind, record.rule.rpartition(":")[2]) == (ZERO, str(line))
    # Of two rules, it is the one that makes the infinity that meets a zero in the other.
    root, scaled = jax.custom_jvp(sqrt), jax.custom_jvp(jnp.multiply)
    root.defjvps(lambda t, y, x: t / (2 * y))  # ROOT
    scaled.defjvps(lambda t, z, x, y: y * t, lambda t, z, x, y: x * t)
    (line,) = lines_of(test_the_rule_of_jax_that_is_not_finite, "ROOT")
    assert only(lambda x: root(scaled(*x)), X2).rule.endswith(f":{line}")


# ---------------------------------------------------------------- several causes


def test_what_was_not_finite_before_has_no_cause_of_its_own():
    report = explain(lambda x: total(log(x * log(x))), jnp.array([-1.0, 1.0, 3.0]))
    assert {(r.kind, r.index) for r in report.found} == {(DOMAIN, (0,)), (POLE, (1,))}
    # But of two infinite slopes, each belongs to its operation.
    report = explain(lambda x: total(sqrt(sqrt(x))), X3)
    assert [(r.kind, r.primitive, r.index) for r in report.found] == [(POLE, "sqrt", (1,))] * 2


def _masked(x):
    return where(x > 5, x, 0.0)


@pytest.mark.parametrize("drop", [_masked, jax.jit(_masked), jax.vmap(_masked)])
def test_what_does_not_reach_the_gradient_is_no_cause(drop):
    """Witness: the gradient is the same without it."""
    loss = lambda x, with_norm: (norm(drop(x)) if with_norm else 0.0) + total(sqrt(x))
    grads = [jax.grad(loss)(X2[::-1], flag) for flag in (True, False)]
    np.testing.assert_array_equal(*grads)
    record = only(loss, X2[::-1], True)
    assert record.column == record.code.index("sqrt(x)")
    # Alone, it makes nothing that is not finite.
    assert not explain(lambda x: norm(drop(x)), X2[::-1])


@pytest.mark.parametrize("around", [lambda f: f, eqg.zero_safe])
def test_a_cause_on_the_way_of_what_a_mask_drops(around):
    """A number that is not finite in a masked row meets another operation that is not finite
    there."""

    def loss(x, with_norm=True):
        masked = where(x > 0, x, -INF)
        e = exp(masked - masked.max(-1, keepdims=True))
        p = where(x > 0, e / e.sum(-1, keepdims=True), 0.0)
        return total(p * x) + (norm(0 * x) if with_norm else 0.0)  # HERE

    x = jnp.array([[0.3, -0.2], [-0.1, -0.5]])
    assert [only(around(loss), x).line] == lines_of(loss, "HERE")
    # As it says, the others do not reach the gradient.
    assert jnp.array_equal(jax.grad(loss)(x, False), jnp.array([[1.0, 0.0], [0.0, 0.0]]))


SELECTIONS = {
    "max": jnp.max,
    "pooling": lambda x: jax.lax.reduce_window(x, -INF, jax.lax.max, (2,), (1,), "VALID"),
    "segment_max": lambda x: jax.ops.segment_max(x, jnp.array([0, 1, 1]), 2),
    "shift by hand": lambda x: exp(x - x.max()),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_of_a_nan_is_no_cause(name):
    """A maximum that is NaN is equal to none of its operands."""
    loss = lambda w: total(SELECTIONS[name](w * (1 + X3) * X3 / X3))
    record = only(loss, ONE)
    assert (record.kind, record.primitive, record.index) == (ZERO, "div", (1,))
    record = only(lambda w: where(w > 9, loss(w), w), ONE)
    assert (record.kind, record.primitive, record.index) == (DEAD, "div", (1,))


def test_a_zero_that_no_selection_makes():
    tiny = jnp.finfo(X2.dtype).tiny
    for loss in (
        lambda x: (lambda y: total(y - y))(sqrt(x)),
        lambda x: total(sqrt(x) * tiny * tiny),
        lambda x: total(sqrt(x) @ jnp.array([[1.0, -1.0], [1.0, -1.0]])),
    ):
        record = only(loss, X2)
        assert (record.kind, record.primitive, record.index) == (ZERO_BY_INF, "sqrt", (1,))
        # As the cure says: this is not what `zero_safe` drops, but by its other policy.
        assert jnp.isnan(jax.grad(eqg.zero_safe(loss))(X2)[1])
        assert jnp.isfinite(jax.grad(eqg.zero_safe(loss, policy="zero"))(X2)[1])


def test_what_is_within_a_derivative_does_not_cross_the_threshold():
    """The derivative of `tanh` has two factors, and the first may be larger."""
    loss = lambda x: 61.9 * jnp.tanh(x)
    assert not explain(loss, jnp.array(-1.01), threshold=100.0)
    assert only(loss, jnp.array(0.1), threshold=50.0).primitive == "mul"
    # But what a rule returns does, if the rule uses it too.
    rule = jax.custom_vjp(lambda x, y: x)
    rule.defvjp(lambda x, y: (x, y), lambda y, ct: (lambda c: (c, c * y))(60 * ct))
    assert only(lambda x: rule(x, x), ONE / 99, threshold=50.0)


def test_gradient_that_raises():
    @jax.custom_vjp
    def checked(x):
        return 2 * x

    bwd = lambda _, ct: (eqx.error_if(2 * ct, ~jnp.isfinite(ct), "bad cotangent"),)
    checked.defvjp(lambda x: (2 * x, None), bwd)
    assert only(lambda x: sqrt(checked(x)), jnp.array(0.0)).primitive == "sqrt"


def test_an_error_of_a_backward_rule():
    f = eqg.custom_vjp(jnp.sqrt)
    f.def_fwd(lambda x: (f(x), x))
    f.def_bwd(lambda x, ct: float("a"))
    with pytest.raises(ValueError, match="could not convert"):
        eqg.explain_nan(f, jnp.array(0.0))


# ---------------------------------------------------------------- loops

SCANS = {
    "checkpointed": lambda f, init, xs: jax.lax.scan(jax.checkpoint(f), init, xs),
    "unrolled": ft.partial(jax.lax.scan, unroll=2),
    "reverse": ft.partial(jax.lax.scan, reverse=True),
    "filter_scan": eqg.filter_scan,
    **{f"{k}": ft.partial(eqg.filter_scan, checkpoint=k) for k in ("sqrt", 3, "replay")},
    "reverse sqrt": ft.partial(eqg.filter_scan, checkpoint="sqrt", reverse=True),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("bad", [2, 4])  # the last chunk of a chunked scan is a scan of its own
def test_step_of_a_scan(name, bad):
    def loss(x, ts):
        def step(h, t):
            y = log(h * t)  # HERE
            return h * 0.9 + 0.1, where(t > 0, y, 0.0)  # MASK

        return total(SCANS[name](step, x, ts)[1])

    record = only(loss, ONE, jnp.ones(5).at[bad].set(0.0))
    assert (record.primitive, record.kind, record.step) == ("log", DEAD, (bad,))
    lines = lines_of(loss, "HERE"), lines_of(loss, "MASK")
    assert ([record.line], [record.mask_line]) == lines


def test_a_nan_in_the_data_and_a_root_at_other_steps():
    """A `where` drops both: they have the same kind and the same operation."""

    def loss(w, xs):
        ys = jax.lax.scan(lambda c, x: (c, sqrt(w + x)), 0.0, xs)[1]
        return total(where(xs > 0, ys, 0.0))

    xs = jnp.ones(10).at[2].set(NAN).at[7].set(-3.0)
    found = [(r.kind, r.step, r.count) for r in explain(loss, ONE, xs).found]
    assert found == [(DEAD, (7,), 1), (DEAD, (2,), 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_bad_step_of_a_long_loop(reverse):
    """Its carry counts the steps, so that the first bad step depends on it."""

    def loss(w, xs):
        step = lambda c, x: (c + w, jnp.tanh(x) + log(100.5 - c))
        c, ys = jax.lax.scan(step, 0.0, xs, reverse=reverse)
        return c + total(ys)

    record = only(loss, ONE, jnp.ones(250))
    assert (record.kind, record.primitive) == (DOMAIN, "log")
    assert (record.step, record.count) == ((148 if reverse else 101,), 149)


# ---------------------------------------------------------------- calls, layers and libraries


def length(x):
    return sqrt(total(x**2))  # LENGTH


HELPERS = {
    "function": length,
    "of a function": lambda x: length(x),
    "scan": lambda x: total(jax.lax.scan(lambda c, x: (c, length(x)), 0, x[None])[1]),
    "filter_jit": eqx.filter_jit(length),
}


@pytest.mark.parametrize("name", HELPERS)
def test_the_call_of_a_function_that_is_called_twice(name):
    def loss(model):
        a = HELPERS[name](model[0])  # CALL
        return a + HELPERS[name](model[1])  # CALL

    first, second = lines_of(loss, "CALL")
    for model, lines in (([X3, X3 * 0], [second]), ([X3 * 0, X3 * 0], [second, first])):
        report = explain(loss, model)
        callers = [f"test_explain_nan.py:{line}, in `loss`" for line in lines]
        assert [r.caller for r in report.found] == callers
        assert [r.line for r in report.found] == lines_of(length, "LENGTH") * len(lines)


def test_what_is_a_library():
    rms = lambda eps: eqx.nn.RMSNorm(4, eps=eps)
    loss = lambda layer: total(jax.vmap(layer)(jnp.ones((2, 4)).at[1].set(0.0)))
    record = only(loss, rms(0.0))
    assert (record.file, record.path) == (__file__, "RMSNorm")
    assert not explain(loss, rms(1e-5))
    loss = lambda x: total(optax.losses.cosine_distance(x, jnp.ones(3)))
    found = explain(loss, jnp.zeros(3)).found
    assert all(record.library.startswith("optax/") for record in found)
    # But not a layer that calls the user's function.
    layer = eqx.nn.Lambda(lambda x: total(log(x)))
    assert only(lambda model: model[0](model[1] * 0), (layer, X3)).library == ""


def _each_operation(x, n, b):
    y = x.T
    yield from (x + y, x - y, x * y, x / y, -x, abs(x), sqrt(x), jnp.square(x), jnp.isfinite(x))
    yield from (x == y, x != y, x < y, x <= y, x > y, x >= y, jnp.maximum(x, y), where(b, x, y))
    yield from (n & 5, n | 5, ~n, -n, abs(n), n * n, n[1:, ::2], n[:, 0], jnp.minimum(x, y))
    yield from (*jnp.split(x, [0, 2]), jnp.concatenate((x, y), 1), x.reshape(-1, 1), b.all())
    yield from (fn(v, 0) for fn in (total, jnp.max, jnp.min) for v in (x[:, :0], x, n))
    yield from (b.any(0), n.astype("float32"), jax.grad(lambda x: total(x * x))(x))
    pads = [(1, 2, 1), (0, 0, 3)], [(-1, 2, 0), (0, 0, 0)], [(0, 0, 1), (1, -1, 0)]
    yield from (x * 0.1, *(jax.lax.pad(n, n[0, 0], config) for config in pads))


def test_numpy_computes_as_xla():
    x = jnp.array([[1.0, -0.0, 3e-30, 3e38, -INF, NAN]] * 6, "float32")
    values = x, jnp.array([[0, 1, 7], [-5, 2**31 - 1, -(2**31)]], "int32"), x > 0
    program = jax.make_jaxpr(lambda *xs: list(_each_operation(*xs)))(*values)
    assert {e.primitive.name for e in equations(program)} >= set(eager._NUMPY)
    want = jax.jit(jax.extend.core.jaxpr_as_fun(program))(*values)
    jax.tree.map(np.testing.assert_array_equal, eager.compute_all(program, values), want)
    with jax.numpy_dtype_promotion("strict"):
        assert explain(lambda x: total(log(x)), jnp.zeros(2, "float16")).found


def test_a_long_loop_stays_compiled():
    """Its backward pass ran operation by operation, and took longer than 60 seconds."""
    xs = jnp.ones(3000).at[2990].set(-1.0)
    step = lambda h, x: (jnp.tanh(h) * sqrt(x), None)
    report = explain(lambda w, xs: total(jax.lax.scan(step, w, xs)[0]), X3, xs)
    assert [(r.kind, r.primitive, r.step) for r in report.found] == [(DOMAIN, "sqrt", (2990,))]
    assert not report.remarks


def test_the_cause_inside_of_a_shard_map():
    """It was called an overflow of the whole `shard_map`."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), "i")

    def distance(x):
        return 2 * sqrt(x)  # HERE

    of_parts = jax.shard_map(distance, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    record = only(lambda x: total(where(x > 0, of_parts(x), 0.0)), X2)
    assert (record.kind, record.primitive, record.mask) == (DEAD, "sqrt", "where")
    assert [record.line] == lines_of(distance, "HERE")
    # And of one that exchanges values.
    psum = lambda x: jax.lax.psum(total(sqrt(x)), "i")
    assert only(jax.shard_map(psum, mesh=mesh, in_specs=P("i"), out_specs=P()), X2).kind == POLE
    # And of one that splits an axis over the axes of the mesh in another order.
    mesh, spec = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("a", "b")), P(("b", "a"))
    masked = jax.shard_map(
        lambda x: where(x > 0, sqrt(x), 0.0), mesh=mesh, in_specs=spec, out_specs=spec
    )
    assert only(lambda x: total(masked(x)), jnp.tile(X2, 4)).kind == DEAD
    # Of two that are split in two orders, the second part of `x` meets the third of `y`.
    specs, y = (spec, P(("a", "b"))), np.float32([0, 0, 2, 0])
    two = jax.shard_map(lambda x, y: sqrt(x - y), mesh=mesh, in_specs=specs, out_specs=spec)
    assert only(lambda x: total(two(x, y)), jnp.arange(1.0, 5.0)).primitive == "shard_map"


def test_an_index_out_of_range():
    """jax#26328: `jnp.take` fills in NaN, and a mask drops it."""
    taken = lambda x, i: jnp.take(x, i, axis=0)
    loss = lambda x, i: total(where(i < 3, x[0] * taken(x, i) ** 2, 0.0))
    assert only(loss, X3, jnp.array([0, 7])).primitive == "gather"
    gradient = jax.grad(eqg.zero_safe(loss))(X3, jnp.array([0, 7]))
    np.testing.assert_array_equal(gradient, jax.grad(lambda x: x[0] ** 3)(X3))


@pytest.mark.slow
def test_a_function_that_a_solver_calls():
    """Diffrax differentiates its loop by a rule, in which it calls the vector field."""
    skip_without_checkpointed_loops()

    def field(t, level, rate):
        flow = sqrt(level)  # HERE
        return where(level > 0, -rate * flow, 0.0)  # MASK

    def drain(p):
        term, solver = diffrax.ODETerm(field), diffrax.Euler()
        return diffrax.diffeqsolve(term, solver, 0, 1, 0.25, p["level"], p["rate"]).ys[0]

    record = only(drain, {"level": jnp.array(0.0), "rate": ONE})
    assert (record.kind, record.primitive) == (DEAD, "sqrt")
    places = record.file, [record.line], [record.mask_line]
    assert places == (__file__, lines_of(field, "HERE"), lines_of(field, "MASK"))
    assert record.library.startswith("diffrax")


# ---------------------------------------------------------------- cures

EMPTY_ROW = jnp.array([[True, True], [False, False]])
ROWS = jnp.array([[1.0, 2.0], [3.0, 4.0]])


def masked_rows(x):
    return where(EMPTY_ROW, x, -INF)


def shifted(x):
    return masked_rows(x) - jnp.max(masked_rows(x), 1, keepdims=True)


# A loss and its argument. `reports.json` has the cures.
TEXTS = {
    "no softmax": (lambda x: total(jnp.tanh(shifted(x))), ROWS),
    "other maximum": (lambda x: total(exp(masked_rows(x) - jnp.max(masked_rows(x + 1), 1,
        keepdims=True))), ROWS),
    "shift": (lambda x: x[0] - x[1], jnp.array([3e38, -3e38], "float32")),
    "inverse": (lambda a: total(jnp.linalg.inv(a)), jnp.ones((2, 2))),
    "cholesky": (lambda a: total(jnp.linalg.cholesky(a)), -jnp.eye(2)),
    "arccos": (jnp.arccos, 1 + 1e-6 * ONE), "sqrt": (sqrt, -1e-6 * ONE),
    # The derivative is in range, `y**-2` is not.
    "divisor": (lambda y: 1.74e-31 / y * -2e-3, 6.85e-30 * ONE.astype("float32")),
    "safe": (lambda s: jnp.trace(jax.hessian(lambda x: eqg.safe.norm(s * x) ** 2)(
        jnp.zeros(2))), 2 * ONE),
    "second derivative": (lambda s: jnp.trace(jax.hessian(lambda x: norm(s * x) ** 2)(
        jnp.zeros(2))), 2 * ONE),
    "least squares": (lambda a: total(jnp.linalg.lstsq(a, X3)[0] ** 2), jnp.eye(3)[:, :2]),
    "missing data": (lambda x: jnp.nanmean(x**2), jnp.array([NAN, 1.0, 2.0])),
    # `zero_safe` takes inputs to be finite, and does not treat a square.
    "missing data without a risk": (lambda x: total(jnp.where(jnp.isnan(x), 0.0, x**2)),
        jnp.array([NAN, 1.0, 2.0])),
    # jax#40626: the derivative divides by the number of entries with the maximum.
    "clipped scatter": (lambda x: total(jnp.zeros(2).at[jnp.array([0, 5])].max(x, mode="clip")),
        jnp.array([1.0, 2.0])),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_words_of_a_cure(name):
    assert explain(*TEXTS[name])


OK = ~jnp.isnan(jnp.array([1.0, NAN, 2.0]))
OF_NAN = {
    "square": lambda w, t: total(where(OK, (w * X3 - t) ** 2, 0.0)),
    "nanmean": lambda w, t: jnp.nanmean((w * X3 - t) ** 2),
    "index": lambda w, t: total(((w * X3 - t) ** 2)[jnp.array([0, 2])]),
}


@pytest.mark.parametrize("name", OF_NAN)
def test_a_nan_of_the_data_that_is_not_selected_has_one_cure(name):
    loss, data = OF_NAN[name], jnp.array([1.0, NAN, 2.0])
    record = only(loss, ONE, data)
    assert (record.kind, "`jnp.where(ok, t, 0.0)`" in record.cure) == (DEAD, True)
    if name != "nanmean":  # which looks at the NaN
        assert jnp.isfinite(jax.grad(lambda w: loss(w, where(OK, data, 0.0)))(ONE))


def test_an_infinite_value_whose_cotangent_is_zero():
    """An infinite bound, as of censored data: `sub` was said to have an infinite derivative."""
    bound, rate = jnp.array([INF, 1.0]), jnp.array(2.0)
    loss = lambda rate, bound: total(jnp.tanh((bound - 1.3) * rate))
    for record in (only(loss, rate, bound), only(lambda rate: loss(rate, bound), rate)):
        assert record.kind == ZERO_BY_INF
    inner = lambda rate: lambda bound: jnp.tanh((bound - 1.3) * rate)
    cured = lambda rate: total(eqg.safe.where(jnp.isfinite(bound), inner(rate), bound, 1.0))
    assert not explain(cured, rate)
    assert cured(rate) == loss(rate, bound)
    assert jax.grad(cured)(rate) == jax.grad(loss)(rate, bound[1:])


def test_the_cure_of_a_zero_mask_is_at_the_operation():
    y = jnp.array([4.0, 0.0])
    loss = lambda root, y, mask=X2: total((2 * jnp.tanh(root(y)) + 1) * mask)
    record = only(ft.partial(loss, sqrt), y, X2)
    assert record.kind == "zero mask"
    cured = lambda y: eqg.safe.where(X2 > 0, sqrt, y, 0.0)
    gradient = jax.grad(ft.partial(loss, cured))(y)
    assert gradient[0] == jax.grad(ft.partial(loss, sqrt))(y)[0]
    assert gradient[1] == 0


# ---------------------------------------------------------------- zero_safe, for other's code

PLAIN = "`eqg.zero_safe(loss)`"
BY_ZERO = '`eqg.zero_safe(loss, policy="zero")`'


def named_zero_safe(report):
    """The call of `zero_safe` that makes the gradient finite, or `None`."""
    named = {call for call in (PLAIN, BY_ZERO) for r in report.found if f"se {call}" in r.cure}
    assert len(named) <= 1
    assert {
        call for call in (PLAIN, BY_ZERO) if f"{call} makes" in str(report.remarks)
    } <= named
    return next(iter(named), None)


POLES = [name for name in PLANTED if PLANTED[name][0] in (ZERO, POLE, ZERO_BY_INF)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CURES, *POLES])
def test_zero_safe_cures_what_names_it(name):
    for loss, *args in CURES.get(name) or [planted(name)]:
        args = [jax.tree.map(jnp.asarray, x) for x in args]
        if named := named_zero_safe(explain(loss, *args)):
            policy = "selected" if named == PLAIN else "zero"
            assert not eqg.explain_nan(eqg.zero_safe(loss, policy=policy), *args).bad_leaves


def of_length(x):
    return total(x / jnp.maximum(norm(x), 1e-6))


NAMED = {
    "norm": (norm, jnp.zeros(3), BY_ZERO),
    "deviation": (jnp.std, jnp.ones(3), BY_ZERO),
    "norm and maximum": (lambda x: norm(x) + of_length(x), jnp.zeros(2), BY_ZERO),
    # Nothing but what a maximum does not select depends on the argument of the root.
    "maximum": (lambda x: total(sqrt(jnp.maximum(x, 0.0))), -jnp.ones(2), PLAIN),
    "two causes": (lambda x: NAMED["maximum"][0](x) + of_length(x + 1), -jnp.ones(2), PLAIN),
    "length": (of_length, jnp.zeros(3), PLAIN),
    # These are infinite, or not made of a factor that is zero.
    "root": (lambda x: total(sqrt(x)), jnp.zeros(2), None),
    "arctan2": (lambda x: jnp.arctan2(x[0], x[1]), jnp.zeros(2), None),
}


@pytest.mark.parametrize("name", NAMED)
def test_zero_safe_is_named_where_it_helps(name):
    loss, x, named = NAMED[name]
    gradient = lambda policy: jax.jit(jax.grad(eqg.zero_safe(loss, policy=policy)))(x)
    is_finite = lambda policy: bool(jnp.all(jnp.isfinite(gradient(policy))))
    if loss is jnp.std and not is_finite("zero"):
        # Compiled, `x - mean(x)` may be a rounding error.
        assert jnp.all(jax.grad(eqg.zero_safe(loss, policy="zero"))(x) == 0)
        named = None
    assert named_zero_safe(explain(loss, x)) == named
    assert is_finite("selected") == (named == PLAIN)
    assert is_finite("zero") == (named is not None)
    if name == "length":  # near zero, the function is `sum(x) / 1e-6`
        assert (only(loss, x).kind, only(loss, x).mask) == (DEAD, "maximum")
        assert jnp.allclose(gradient("selected"), 1e6, rtol=1e-5)


def test_what_zero_safe_drops_and_does_not_drop():
    def loss(x):
        root = where(x > 0, sqrt(x), 0.0)  # DROPPED
        huge = 1e30 * (1e30 * x + 1e30)  # LEFT: `zero_safe` takes products to be finite
        return total(root) + total(where(x > 5, jnp.sin(huge), 0.0))

    x = X2.astype("float32")
    report = explain(eqg.zero_safe(loss), x)
    assert [(r.line, r.kind) for r in report.found] == [(*lines_of(loss, "LEFT"), DEAD)]
    assert {*lines_of(loss, "DROPPED")} < {r.line for r in explain(loss, x).found}
    assert named_zero_safe(explain(loss, x)) == BY_ZERO


def _root_in_zero_safe(x):
    y = sqrt(x)  # INSIDE
    return total(y)


def _scan_in_zero_safe(x):
    step = lambda h, t: (sqrt(h * t), h)  # INSIDE
    return total(jax.lax.scan(step, x, jnp.array([1.0, 0.0, 1.0]))[0])


@pytest.mark.parametrize("fn", [_root_in_zero_safe, _scan_in_zero_safe])
def test_lines_inside_of_zero_safe(fn):
    """What `zero_safe` evaluates keeps its lines."""
    for loss in (
        lambda x: 2 * eqg.zero_safe(fn)(x),
        jax.jit(eqg.zero_safe(fn)),
        eqg.zero_safe(lambda x: eqg.zero_safe(fn)(x) + 1),
    ):
        record = only(loss, X2)
        place = __file__, lines_of(fn, "INSIDE"), "sqrt"
        assert (record.file, [record.line], record.primitive) == place


# ---------------------------------------------------------------- a gradient inside of the loss

CHARGES = jnp.array([1.0, 2.0, 3.0])
POSITIONS = jnp.array([[0.0, 1.0], [2.0, 0.5], [-1.0, 3.0]])


def pair_energy(q, x, mask):
    r = sqrt(total((x[:, None] - x[None]) ** 2, -1))  # PAIR
    pair = q[:, None] * q[None] / r  # PAIR
    return total(where(mask, 0.0, pair))


def force_matching(energy):
    return lambda q, x: total(jax.grad(energy, 1)(q, x) ** 2)


def test_a_singularity_in_a_gradient_inside_of_the_loss():
    """It is not a dead branch if it is also used elsewhere, or at other elements."""
    mask = jnp.eye(3) > 0
    elsewhere = lambda q, x: pair_energy(q, x, mask) + pair_energy(q, x, mask & False)
    equal = POSITIONS.at[1].set(POSITIONS[0])
    masked = ft.partial(pair_energy, mask=mask)
    for energy, x in ((elsewhere, POSITIONS), (masked, equal)):
        assert POLE in {r.kind for r in explain(force_matching(energy), CHARGES, x).found}
    # If it is one, `zero_safe(loss)` leaves the loss NaN.
    report = explain(force_matching(masked), CHARGES, POSITIONS)
    assert {r.line for r in report.found} <= {*lines_of(pair_energy, "PAIR")}
    fixed = force_matching(eqg.zero_safe(masked, policy="zero"))
    assert jnp.all(jnp.isfinite(jax.grad(fixed)(CHARGES, POSITIONS)))


# ---------------------------------------------------------------- compiled as a whole

POLICY = 'zero_safe(loss, policy="zero")`'


def deviation(params, std=jnp.std):
    w, b = params
    return total(std(jnp.full((3, 5, 2), 0.3) @ w + b[None, None], axis=1))


def _is_finite(tree):
    return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(tree))


# XLA has to optimize: with FMA instructions, `x - mean(x)` of equal numbers is not zero.
@pytest.mark.cost
@pytest.mark.parametrize("seed", [0, 1])
def test_the_policy_is_advised_if_the_compiled_gradient_is_finite(seed):
    params = jax.random.normal(jax.random.key(seed), (2, 12)), jnp.full(12, 0.1)
    safe = eqg.zero_safe(deviation, policy="zero")
    assert _is_finite(jax.grad(safe)(params))
    is_finite = _is_finite(jax.jit(jax.grad(safe))(params))
    report = str(eqg.explain_nan(deviation, params))
    assert "eqg.safe.std(x)" in report
    assert (POLICY in report) == is_finite
    report = eqg.explain_nan(safe, params)
    assert bool(report) == (not is_finite)
    assert ("Compiled as a whole" in str(report)) == (not is_finite)
    mended = eqg.explain_nan(lambda params: deviation(params, eqg.safe.std), params)
    assert not mended
    assert not any("Compiled" in remark for remark in mended.remarks)


@pytest.mark.parametrize("bad", [np.ones(2), -1.0, np.nan, "1", True])
@pytest.mark.parametrize(("option", "hint"), [("threshold", "`None`"), ("seconds", "math.inf")])
def test_options_that_are_no_numbers(option, hint, bad):
    with pytest.raises(eqg.RuleError, match=f"(?s)`{option}` of `explain_nan`.*{hint}"):
        eqg.explain_nan(jnp.sum, jnp.ones(2), **{option: bad})
