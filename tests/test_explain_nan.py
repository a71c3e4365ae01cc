"""`explain_nan` finds planted causes at the right line, step and kind, and none elsewhere."""

import inspect

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from . import nan_causes
from .helpers import assert_linear_in_size, skip_without_checkpointed_loops
from .nan_causes import HEALTHY, PLANTED, Planted, scanned, SCANS


def _explain(make, threshold=None):
    loss, model, *args = make()
    return eqg.explain_nan(loss, model, *args, threshold=threshold)


def _lines(fn, mark):
    source, first = inspect.getsourcelines(fn)
    return [first + i for i, text in enumerate(source) if f"# {mark}" in text]


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_planted(case: Planted):
    report = _explain(case.make, case.threshold)
    expected = case.lines("HERE")
    found = [r for r in report.found if not expected or r.line in expected]
    assert found, str(report)
    assert {r.line for r in found} >= set(expected), str(report)
    assert case.others or len(found) == len(report.found), str(report)
    record = found[0]
    assert record.kind == case.kind, str(report)
    assert record.step == case.step, str(report)
    assert case.primitive in (None, record.primitive), str(report)
    assert case.index in (None, record.index), str(report)
    assert record.path == case.path, str(report)
    assert record.cure
    if expected:
        assert record.file == nan_causes.__file__
    for line in case.lines("MASK"):
        assert (record.mask_file, record.mask_line) == (record.file, line), str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_healthy(make):
    report = _explain(make)
    assert not report, str(report)
    assert report.headline == "The loss and its gradient are finite."
    assert not report.remarks


# ---------------------------------------------------------------- loops


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "step"),
    # The last chunk of a chunked scan is a scan of its own.
    [*((name, 2) for name in SCANS), ("sqrt", 4), ("reverse sqrt", 4), ("chunks", 4)],
)
def test_step_of_a_scan(name, step):
    loss, *args = scanned(SCANS[name], step)
    (record,) = eqg.explain_nan(loss, *args).found
    assert record.line == _lines(scanned, "HERE")[0]
    assert (record.mask, record.mask_line) == ("where", _lines(scanned, "MASK")[0])
    assert (record.primitive, record.kind) == ("log", "dead branch")
    assert record.step == (step,)


def explain_many_sines(n):
    def loss(w, x):
        for _ in range(n):
            x = jnp.sin(x * w) + 0.1
        y = jnp.where(x > 5, jnp.sqrt(x - x), 0.0)
        for _ in range(n // 10):
            y = y * w
        return jnp.sum(x + y)

    (record,) = eqg.explain_nan(loss, jnp.ones(3), jnp.ones(3)).found
    assert record.kind == "dead branch"


@pytest.mark.slow
def test_work_is_linear_in_the_number_of_equations():
    assert_linear_in_size(explain_many_sines, 10)


# ---------------------------------------------------------------- what is reported


def _masked(x):
    return jnp.where(x > 5, x, 0.0)


def _by_cond(x):
    return jax.lax.cond(jnp.sum(x) > 5, lambda x: x, lambda x: 0.0 * jnp.sin(x), x)


@pytest.mark.parametrize("drop", [_masked, jax.jit(_masked), jax.vmap(_masked), _by_cond])
def test_what_does_not_reach_the_gradient_is_no_cause(drop):
    """Witness: the gradient is the same without it."""

    def loss(x, with_norm):
        norm = jnp.linalg.norm(drop(x)) if with_norm else 0.0
        return norm + jnp.sum(jnp.sqrt(x))

    x = jnp.array([0.0, 1.0])
    grads = [jax.grad(loss)(x, flag) for flag in (True, False)]
    found = eqg.explain_nan(loss, x, True).found
    if drop is _by_cond:  # which multiplies the NaN by zero: it does reach the gradient
        assert np.isnan(grads[0]).all()
        assert len(found) == 2
    else:
        np.testing.assert_array_equal(*grads)
        assert ["jnp.sqrt(x)" in r.code for r in found] == [True]
        # Alone, it makes nothing that is not finite.
        assert not eqg.explain_nan(lambda x: jnp.linalg.norm(drop(x)), x)


@pytest.mark.slow
def test_a_buffer_of_infinities():
    """Solvers keep their results so. The NaN of a step is not the NaN of a constant."""

    def loss(scale, y):
        def step(carry, i):
            y, buffer = carry
            y = y + scale * y / jnp.linalg.norm(y)
            return (y, buffer.at[i].set(y)), None

        init = y, jnp.full((3, 2), jnp.inf)
        return jnp.sum(jax.lax.scan(step, init, jnp.arange(3))[0][1] ** 2)

    (record,) = eqg.explain_nan(loss, jnp.array(1.0), jnp.zeros(2)).found
    assert (record.kind, record.primitive, record.is_forward) == ("0/0", "div", True)
    assert record.step == (0,)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_dtypes(dtype):
    loss = lambda x: jnp.sum(jnp.where(jnp.real(x) > 0, jnp.sqrt(x), 0)).real
    (record,) = eqg.explain_nan(loss, jnp.array([1, 0], dtype)).found
    assert (record.primitive, record.kind) == ("sqrt", "dead branch")


def test_rule():
    @jax.custom_jvp
    def square(x):
        return x * x

    @square.defjvp
    def square_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return square(x), 2 * x * x / x * t  # HERE

    (record,) = eqg.explain_nan(lambda x: square(x), jnp.array(0.0)).found
    assert record.rule.endswith(f":{_lines(test_rule, 'HERE')[0]}")
    # The derivative is defined there.
    assert record.kind == "0/0"
    assert record.cure.startswith("The rule of `square` is not finite there. If the derivative")


@pytest.mark.slow
def test_line_in_a_function_that_a_solver_calls():
    """Diffrax differentiates its loop by a rule, in which it calls the vector field."""
    skip_without_checkpointed_loops()
    diffrax = pytest.importorskip("diffrax")

    def drain(p):
        def field(t, level, rate):
            flow = jnp.sqrt(level)  # HERE
            return jnp.where(level > 0, -rate * flow, 0.0)  # MASK

        term, solver = diffrax.ODETerm(field), diffrax.Euler()
        return diffrax.diffeqsolve(term, solver, 0, 1, 0.25, p["level"], p["rate"]).ys[0]

    model = {"level": jnp.array(0.0), "rate": jnp.array(1.0)}
    (record,) = eqg.explain_nan(drain, model).found
    assert (record.kind, record.primitive) == ("dead branch", "sqrt")
    here, mask = (
        _lines(test_line_in_a_function_that_a_solver_calls, m) for m in ("HERE", "MASK")
    )
    assert (record.file, [record.line], [record.mask_line]) == (__file__, here, mask)
    assert record.library.startswith("diffrax")


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True])
def test_formula_in_a_function_that_a_solver_calls(is_masked):
    """The norm is in the rule of the loop, which `zero_safe` does not enter."""
    skip_without_checkpointed_loops()
    diffrax = pytest.importorskip("diffrax")

    def loss(y0):
        def field(t, y, args):
            distance = jnp.linalg.norm(y - y0)
            return jnp.where(t > 0, distance, 0.0) - y if is_masked else distance - y

        term, solver = diffrax.ODETerm(field), diffrax.Euler()
        return jnp.sum(diffrax.diffeqsolve(term, solver, 0, 1, 0.25, y0).ys)

    report = eqg.explain_nan(loss, jnp.array([1.0, 2.0]))
    (record,) = report.found
    assert record.kind == ("dead branch" if is_masked else "true singularity")
    assert "`eqg.safe.norm(x)`" in record.cure
    assert ("as the loop of Diffrax is" in " ".join(str(report).split())) == is_masked


@pytest.mark.slow
def test_a_zero_that_a_solver_makes_is_no_mask_of_the_user():
    """The last step of Diffrax's loop has a cotangent of zero. No `copy` is named."""
    skip_without_checkpointed_loops()
    diffrax = pytest.importorskip("diffrax")

    def loss(y0, power):
        field = lambda t, y, power: jnp.abs(y) ** power
        term, solver = diffrax.ODETerm(field), diffrax.Tsit5()
        return jnp.sum(diffrax.diffeqsolve(term, solver, 0, 1, 0.5, y0, power).ys ** 2)

    found = eqg.explain_nan(loss, jnp.array(0.0), jnp.array(0.5)).found
    assert found
    assert all(record.primitive == "pow" and record.mask != "copy" for record in found)
    assert all("copy" not in record.cure for record in found)
    assert all("`eqg.safe.power(x, y)`" in record.cure for record in found)


@pytest.mark.slow
def test_host_function_at_the_edge_of_its_domain():
    """Differences leave the domain."""
    fn = lambda nu, x: np.where(x > 0, nu * np.sqrt(np.abs(x)), np.nan).astype(x.dtype)
    kwargs = {"out": lambda nu, x: x, "finite_difference": "central"}
    x = jnp.array([[1.0, 2.0, 1e-6], [3.0, 1.5, 0.7]])
    for vmap_method in ("sequential", "expand_dims"):
        call = eqg.host_function(fn, **kwargs, vmap_method=vmap_method)
        rows = jax.vmap(jax.vmap(call, (None, 0)), (None, 0))
        loss = lambda x, rows=rows: jnp.sum(rows(jnp.array(0.5, x.dtype), x))
        (record,) = eqg.explain_nan(loss, x).found
        assert record.index == (0, 2)
        assert "leaves its domain" in record.cure
        (record,) = eqg.explain_nan(loss, -x).found
        assert record.is_forward


def test_gradient_that_raises():
    @jax.custom_vjp
    def checked(x):
        return 2 * x

    def bwd(_, ct):
        return (eqx.error_if(2 * ct, ~jnp.isfinite(ct), "bad cotangent"),)

    checked.defvjp(lambda x: (2 * x, None), bwd)
    report = eqg.explain_nan(lambda x: jnp.sqrt(checked(x)), jnp.array(0.0))
    assert [r.primitive for r in report.found] == ["sqrt"]
    assert "bad cotangent" in report.remarks[0]
    assert report.raises
    assert "raises an error" in report.headline


def test_the_cause_inside_of_a_shard_map():
    """It was called an overflow of the whole `shard_map`."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), "i")

    def distance(x):
        return 2 * jnp.sqrt(x)  # HERE

    of_parts = jax.shard_map(distance, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    loss = lambda x: jnp.sum(jnp.where(x > 0, of_parts(x), 0.0))
    (record,) = eqg.explain_nan(loss, jnp.array([1.0, 0.0])).found
    assert (record.kind, record.primitive, record.mask) == ("dead branch", "sqrt", "where")
    assert [record.line] == _lines(distance, "HERE")
    # And of one that exchanges values.
    total = lambda x: jax.lax.psum(jnp.sum(jnp.sqrt(x)), "i")
    of_parts = jax.shard_map(total, mesh=mesh, in_specs=P("i"), out_specs=P())
    (record,) = eqg.explain_nan(of_parts, jnp.array([1.0, 0.0])).found
    assert (record.kind, record.primitive) == ("true singularity", "sqrt")


def test_errors():
    with pytest.raises(eqg.RuleError, match="did not return a real scalar"):
        eqg.explain_nan(lambda x: x, jnp.ones(2))
    with pytest.raises(eqg.RuleError, match="without inexact arrays"):
        eqg.explain_nan(lambda x: 1.0, jnp.arange(2))
    with pytest.raises(eqg.RuleError, match="inside a transformed function"):
        jax.jit(lambda x: eqg.explain_nan(jnp.sum, x))(jnp.ones(2))


def test_what_zero_safe_drops_of_several_dead_branches():
    def loss(x):
        root = jnp.where(x > 0, jnp.sqrt(x), 0.0)  # DROPPED
        huge = 1e30 * (1e30 * x + 1e30)  # LEFT: `zero_safe` takes products to be finite
        return jnp.sum(root) + jnp.sum(jnp.where(x > 5, jnp.sin(huge), 0.0))

    x = jnp.array([0.0, 1.0], jnp.float32)
    report = eqg.explain_nan(eqg.zero_safe(loss), x)
    assert [r.line for r in report.dropped] == list(_lines(loss, "DROPPED"))
    assert [r.line for r in report.found] == list(_lines(loss, "LEFT"))
    assert {r.kind for r in (*report.found, *report.dropped)} == {"dead branch"}


@pytest.mark.parametrize("around", [lambda f: f, eqg.zero_safe])
def test_a_cause_on_the_way_of_what_a_mask_drops(around):
    """A number that is not finite in a masked row meets another operation that is not finite
    there."""

    def loss(x, with_norm=True):
        masked = jnp.where(x > 0, x, -jnp.inf)
        e = jnp.exp(masked - masked.max(-1, keepdims=True))
        p = jnp.where(x > 0, e / e.sum(-1, keepdims=True), 0.0)
        return jnp.sum(p * x) + (jnp.linalg.norm(0 * x) if with_norm else 0.0)  # HERE

    x = jnp.array([[0.3, -0.2], [-0.1, -0.5]])
    (record,) = eqg.explain_nan(around(loss), x).found
    assert [record.line] == list(_lines(loss, "HERE"))
    # As it says, the others do not reach the gradient.
    assert jnp.array_equal(jax.grad(loss)(x, False), jnp.array([[1.0, 0.0], [0.0, 0.0]]))


def test_a_nan_before_a_softmax():
    """Its maximum has an axis of size one."""
    loss = lambda x: jnp.sum(jax.nn.softmax(x / x) ** 2)
    report = eqg.explain_nan(loss, jnp.array([800.0, 0.0, 1.9, -1.0]))
    assert report.found[0].primitive == "div"
