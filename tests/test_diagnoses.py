"""All diagnoses: the shape of a report, names and lines, wrong input, progress."""

import copy
import io
import pathlib
import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .cases import CASES
from .helpers import assert_linear_in_size
from .test_explain_nan import lines_of, PLANTED
from .test_explain_zero import CUTS, VALUES


pytestmark = pytest.mark.versions


PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "api" / "diagnosis.md").read_text()
KEY, X, NAN = jax.random.key(0), jnp.array([1.3, 0.0]), jnp.nan
Y = jnp.array([0.5, 2.0])
TOOLS = {
    "explain_gradient": eqg.explain_gradient,
    "explain_nan": eqg.explain_nan,
    "explain_zero": eqg.explain_zero,
    "explain_memory": eqg.explain_memory,
    "check_gradients": eqgt.check_gradients,
    "gradient_flow": eqg.gradient_flow,
}
FOUR = pytest.mark.parametrize("tool", list(TOOLS)[1:5])


def gradient(loss, model):
    return eqx.filter_grad(eqg.zero_safe(loss))(model)


# ---------------------------------------------------------------- reports


@eqg.custom_vjp
def wrong(x):
    return x**2


wrong.def_fwd(lambda x: (wrong(x), x))
wrong.def_bwd(lambda x, ct: (x * ct,))


class Layer(eqx.Module):
    weight: jax.Array
    act: str = eqx.field(static=True)

    def __call__(self, x):
        x = self.weight * x
        if self.act == "explain_nan":
            return jnp.where(x > 0, jnp.sqrt(x), 0.0)  # explain_nan
        if self.act == "explain_zero":
            return jnp.round(x)  # explain_zero
        return wrong(x)  # check_gradients


def loss_of(layers, x):
    for layer in layers:
        x = layer(x)
    return jnp.sum(x**2)


MADE_OF = {"explain_nan": "sqrt", "explain_zero": "round", "check_gradients": "wrong"}


@FOUR
def test_the_fields_of_all_reports_mean_the_same(tool):
    model = [Layer(jnp.array([1.0, 0.5]), "wrong"), Layer(jnp.ones(2), tool)]
    options = {"raises": False} if tool == "check_gradients" else {}
    report = TOOLS[tool](loss_of, model, X + float(tool == "check_gradients"), **options)
    assert report
    source = pathlib.Path(__file__).read_text().splitlines()
    for record in report.found:
        assert record.kind
        assert record.file == __file__
        assert f"test_diagnoses.py:{record.line}" in str(report)
        assert record.code == source[record.line - 1].strip()
    text = str(report)
    assert text == repr(report)
    assert text.startswith(report.headline)
    assert not re.search(r"eqx_grads\.|more: see", text)
    for table, shown in zip(report.tables(), text.split("\n\n")[1:], strict=False):
        columns = zip(table.columns, *table.rows, strict=True)
        assert all(name in shown.split("--")[0] for name, *cells in columns if any(cells))
    assert max(map(len, text.splitlines())) <= 100
    if tool in MADE_OF:
        record = report.found[0]
        assert [record.line] == lines_of(Layer, tool)
        assert record.path == ("[0]" if tool == "check_gradients" else "[1]")
        assert record.primitive == MADE_OF[tool]
        assert tool == "explain_nan" or record.leaf == "[0].weight"


# One line each: what is shown is the part with the operation.
LONG = {
    "sqrt": (lambda x: jnp.sum(jnp.where(x > 0.0, 1.0 + jax.numpy.sqrt(x), jnp.zeros_like(x))),
        "jax.numpy.sqrt(x)"),
    "log": (lambda x: jnp.sum(jnp.where(x > 0.0, "é" and 1.0 + jax.lax.log(x), 0.0 * x)),
        "jax.lax.log(x)"),
    "log1p": (lambda x: jnp.sum(jnp.where(x > 0.0, 1.0 + 1.0 + jnp.log1p(
        x - 1.0), 0.0)), "jnp.log1p("),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_the_part_of_a_long_line_with_the_operation_is_shown(name):
    loss, shown = LONG[name]
    (record,) = eqg.explain_nan(loss, X).found
    assert (record.primitive, record.column) == (name, record.code.index(shown))


def test_wide_tables_are_wrapped_and_long_ones_are_cut():
    model = {f"{'name_' * 6}{i}": NAN * X for i in range(15)}
    report = eqg.explain_nan(
        lambda model: sum(jnp.sum(jnp.sin(x)) for x in model.values()), model
    )
    assert max(map(len, str(report).splitlines())) <= 100


def test_the_kinds_and_records_are_documented():
    kinds = {kind for kind, *_ in PLANTED.values()} | {kind for _, kind in CUTS.values()}
    kinds |= {name.partition(":")[0] for name in VALUES}
    kinds |= {"computed", "carry", "rule", "constant", "input", "loop", "layer", "map"}
    assert kinds <= set(re.findall(r"^\| ([^|`]+?) \| [^|]* \|$", PAGE, re.MULTILINE))
    for record in ("NonFinite", "ZeroGradient", "Residual", "MemoryAdvice"):
        assert f"[`eqx_grads.{record}`][]" in PAGE


# ---------------------------------------------------------------- names

W, BAD = jnp.ones(2), {"a": jnp.array([1.0, NAN])}
looped = lambda w: jax.lax.while_loop(lambda c: c < 3, lambda c: c + w[0], 0.0)
# A loss, its arguments and keyword arguments, and the name of the input that holds the NaN.
NAMES = [
    (lambda model, xs: jnp.sum(model["w"] * xs["a"]), [{"w": W}, BAD], {}, "xs['a']"),
    (lambda model, *, target: jnp.sum(model) * target, [W], {"target": NAN + W[0]}, "target"),
    (lambda w, *rest: sum(rest, looped(w)), [W, W[0], NAN * W[0]], {}, "rest[1]"),
    (lambda params, model: jnp.sum(params) * model, [W, NAN * W[0]], {}, "args[0]"),
    (lambda params, xs: jnp.sum(params["w"]) * xs, [{"w": NAN * W}, W[0]], {}, "model['w']"),
    (lambda w: jnp.sum(w * BAD["a"]), [W], {}, "mul"),  # a constant
]


@pytest.mark.parametrize(("loss", "args", "kwargs", "name"), NAMES)
def test_names_of_inputs(loss, args, kwargs, name):
    (record,) = eqg.explain_nan(loss, *args, **kwargs).found
    assert record.primitive == name


class Tagged(eqx.Module):
    weight: jax.Array
    tag: str

    def __call__(self, x):
        return self.weight * x


def test_a_loss_that_looks_at_its_layers():
    def by_type(model, x):
        assert type(model) is Tagged
        return jnp.sum(jnp.sqrt(model(x)))

    def by_attribute(model, x):
        assert isinstance(model, Tagged)
        assert model.tag == "a"
        return jnp.sum(jnp.sqrt(model(x) + eqx.tree_at(lambda m: m.weight, model, X)(x)))

    for loss in (by_type, by_attribute):
        report = eqg.explain_nan(loss, Tagged(Y, "a"), 0 * X)
        assert list(report.bad_leaves) == ["weight"]
    flow = eqg.gradient_flow(lambda m: jnp.sum(copy.copy(m)(X)), Tagged(Y, "a"))
    assert list(flow) == ["Tagged"]


class Stack(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", [eqg.filter_checkpoint, eqg.zero_safe])
def test_a_wrapped_layer_has_the_path_that_users_know(wrap):
    wrapped = Stack([wrap(eqx.nn.Linear(2, 2, key=KEY)) for _ in range(2)])
    loss = lambda model, x, *, fn: jnp.sum(fn(model(x)))
    paths = ["layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias"]
    zeros = eqg.explain_zero(loss, wrapped, X, fn=jnp.round)
    assert [r.leaf for r in zeros.found] == paths
    flow = eqg.gradient_flow(lambda m: loss(m, X, fn=jnp.square), wrapped)
    assert list(flow) == ["layers[0]", "layers[1]"]
    broken = eqx.tree_at(lambda s: jax.tree.leaves(s)[1], wrapped, jnp.full(2, NAN))
    (found,) = eqg.explain_nan(loss, broken, X, fn=jnp.square).found
    assert found.leaf == "layers[0].bias"
    memory = eqg.explain_memory(loss, wrapped, X, fn=jnp.square, compiled=False)
    assert "_fn" not in str(memory)
    checked = eqgt.check_gradients(loss, wrapped, X, fn=jnp.square, skip=["layers[1]"])
    assert [leaf.leaf for leaf in checked.leaves] == paths


# ---------------------------------------------------------------- wrong input

unknown = Primitive("mystery")
unknown.def_impl(lambda x: 2 * x)
unknown.def_abstract_eval(lambda x: x)
mlir.register_lowering(unknown, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))


def on_the_host(x):
    return jax.pure_callback(np.sin, jax.typeof(x), x, vmap_method="expand_dims")


def host(x):
    return jnp.sum(on_the_host(x))


with_a_rule = jax.custom_jvp(on_the_host)
with_a_rule.defjvps(lambda t, y, x: t * jnp.cos(x))


def mystery(x):
    return jnp.sum(unknown.bind(with_a_rule(x)))


def decides(x):
    return jnp.sum(x) if x[0] > 0 else 0.0


def numpy(x):
    return jnp.sum(np.sin(x))


TEXTS = {
    "real scalar": [(lambda x: x, Y), (lambda x: (jnp.sum(x), x), Y), (lambda x: "loss", Y),
        (lambda x: jax.lax.complex(*x), Y)],
    "can't trace the loss": [(decides, Y), (numpy, Y)], "is not a function": [(3, Y)],
    "without inexact arrays": [(jnp.sum, jnp.arange(3)), (lambda m: m["a"] ** 2, {"a": 0.5}),
        (lambda m: 1.0, None)],
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tool", list(TOOLS)[:5])
def test_errors(tool, text):
    for loss, model in TEXTS[text]:
        with pytest.raises(eqg.RuleError, match=text):
            TOOLS[tool](loss, model)


def test_errors_of_the_loss_and_of_where_it_is_called():
    with pytest.raises(eqg.RuleError, match="inside a transformed function"):
        jax.jit(lambda x: eqg.explain_nan(jnp.sum, x))(Y)

    def raises(w):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        eqg.explain_nan(raises, Y)
    # Keyword arguments go to the loss, and `has_aux` is one.
    assert not eqg.explain_nan(lambda x, has_aux: jnp.sum(x), Y, has_aux=True)


@pytest.mark.parametrize("tool", list(TOOLS)[:5])
@pytest.mark.parametrize("loss", [host, mystery])
def test_an_operation_without_a_derivative(tool, loss):
    with pytest.raises(eqg.RuleError, match="has no derivative"):
        TOOLS[tool](loss, Y)


@pytest.mark.parametrize("op", [on_the_host, unknown.bind])
def test_opaque_operations_without_a_tangent(op):
    """They have no part in the gradient: their value is held, as the loss asks for."""
    loss = lambda x: jnp.sum(x * op(jax.lax.stop_gradient(x)))
    assert not eqg.explain_nan(loss, Y)
    assert not eqg.explain_zero(loss, Y)
    assert sum(record.bytes for record in eqg.explain_memory(loss, Y).found) > 0
    assert eqgt.check_gradients(loss, Y)["model"].verdict == "stopped"
    assert jnp.array_equal(gradient(loss, Y), jax.grad(loss)(Y))


def test_check_gradients_of_a_rule_around_an_operation_without_a_derivative():
    sin = jax.custom_jvp(on_the_host)

    def loss(x, factor):
        sin.defjvp(lambda xs, ts: (sin(*xs), factor * jnp.cos(*xs) * ts[0]))
        return jnp.sum(sin(x))

    assert not eqgt.check_gradients(loss, Y, 1.0)
    assert eqgt.check_gradients(loss, Y, 2.0, raises=False)


@pytest.mark.parametrize("tool", ["explain_nan", "explain_zero", "explain_memory"])
def test_side_effects_do_not_multiply(tool):
    seen = []

    def loss(x):
        jax.debug.callback(lambda x: seen.append(x), x)
        return jnp.sum(x**2)

    TOOLS[tool](loss, Y)
    jax.effects_barrier()
    assert len(seen) <= 1


def test_a_reference_is_not_followed():
    """`explain_nan` raised "Out of bound indexer", and `explain_zero` said "never used"."""
    outside = jax.new_ref(jnp.zeros(2))

    def _writes_inside(x):
        ref = jax.new_ref(jnp.zeros(2))
        ref[...] = jnp.sqrt(x)
        return jnp.sum(ref[...])

    def _writes_outside(x):
        outside[...] = x
        return jnp.sum(jnp.sqrt(x))

    for explain in (eqg.explain_nan, eqg.explain_zero):
        for loss in (_writes_inside, jax.jit(_writes_inside), _writes_outside):
            with pytest.raises(eqg.RuleError, match=r"can't follow(?s:.)*new_ref(?s:.)*in `_w"):
                explain(loss, Y)


# ---------------------------------------------------------------- size and time


def many_sines(n):
    def loss(w, x):
        for _ in range(n):
            x = jnp.sin(w @ x + x) * 0.5 + x * w[0, 0]
        y = jnp.where(x > 5, jnp.sqrt(x - x), 0.0)
        for _ in range(n // 10):
            y = y * w[0, 0]
        return jnp.sum(x + y)

    return loss, jnp.ones((8, 8)), jnp.ones(8)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compiled": False}])
def test_work_is_linear_in_the_number_of_equations(options):
    explain = eqg.explain_memory if options else eqg.explain_nan
    assert len(explain(*many_sines(10), **options).found) >= (10 if options else 1)
    assert_linear_in_size(lambda n: explain(*many_sines(n), **options), 10)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
@FOUR
def test_progress_on_a_terminal(tool, is_terminal, monkeypatch):
    stderr = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    TOOLS[tool](lambda w: jnp.sum(w**2), jnp.ones(3))
    text = stderr.getvalue()
    assert (f"{tool}: tracing" in text) == is_terminal
    assert text.endswith("\r\x1b[K") == is_terminal  # it is taken back


# ---------------------------------------------------------------- all ops


@pytest.mark.conformance
@pytest.mark.parametrize("name", [name for name in CASES if name != "nondifferentiable"])
def test_no_op_is_accused_or_changed(name):
    """Of no public op, `explain_nan` finds a fault, and `zero_safe` changes a number."""

    def total(fn_and_args):
        fn, args = fn_and_args
        leaves = [x for x in jax.tree.leaves(fn(*args)) if eqx.is_inexact_array(x)]
        return sum((jnp.sum(x.real.astype(jnp.float32)) for x in leaves), jnp.zeros(()))

    model = CASES[name].make()
    report = eqg.explain_nan(total, model)
    assert not report, str(report)
    expected = eqx.filter_jit(eqx.filter_value_and_grad(total))(model)
    got = eqx.filter_jit(eqx.filter_value_and_grad(eqg.zero_safe(total)))(model)
    # Up to the order of sums, which XLA chooses.
    assert eqx.tree_equal(got, expected, rtol=1e-6)
    jax.clear_caches()
