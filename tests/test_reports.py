"""All reports have one shape: the same fields, columns and notes, and the same errors."""

import dataclasses
import pathlib
import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from eqx_grads._diagnosis._nan.causes import Kind
from eqx_grads._diagnosis._zero.advice import CURES
from eqx_grads._diagnosis.report import AbstractRecord, AbstractReport, COLUMNS, Table


ROOT = pathlib.Path(__file__).parents[1]
RECORDS = (
    eqg.NonFinite,
    eqg.ZeroGradient,
    eqg.Residual,
    eqg.MemoryAdvice,
    eqgt.GradientFault,
)
TOOLS = {
    "explain_nan": eqg.explain_nan,
    "explain_zero": eqg.explain_zero,
    "explain_memory": eqg.explain_memory,
    "check_gradients": eqgt.check_gradients,
    "gradient_flow": eqg.gradient_flow,
}


class Layer(eqx.Module):
    weight: jax.Array
    act: str = eqx.field(static=True)

    def __call__(self, x):
        x = self.weight * x
        if self.act == "sqrt":
            return jnp.where(x > 0, jnp.sqrt(x), 0.0)  # SQRT
        if self.act == "round":
            return jnp.round(x)  # ROUND
        return wrong(x)  # WRONG


@eqg.custom_vjp
def wrong(x):
    return x**2


wrong.def_fwd(lambda x: (wrong(x), x))
wrong.def_bwd(lambda x, ct: (x * ct,))


def model_of(act, n=2):
    return [Layer(jnp.array([1.0, 0.5]), "wrong"), *[Layer(jnp.ones(2), act)] * (n - 1)]


def loss_of(layers, x):
    for layer in layers:
        x = layer(x)
    return jnp.sum(x**2)


X = jnp.array([1.3, 0.0])


def line_of(mark):
    lines = pathlib.Path(__file__).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


def report_of(tool):
    if tool == "explain_nan":
        return eqg.explain_nan(loss_of, model_of("sqrt"), X)
    if tool == "explain_zero":
        return eqg.explain_zero(loss_of, model_of("round"), X)
    if tool == "explain_memory":
        return eqg.explain_memory(loss_of, model_of("sqrt"), X)
    return eqgt.check_gradients(loss_of, model_of("wrong"), X + 1, raises=False)


REPORTS = ("explain_nan", "explain_zero", "explain_memory", "check_gradients")


@pytest.mark.parametrize("tool", REPORTS)
def test_shape(tool):
    report = report_of(tool)
    assert isinstance(report, AbstractReport)
    assert report
    for record in report.found:
        assert isinstance(record, AbstractRecord)
        assert record.kind
        assert record.file == __file__
        place = f"{pathlib.Path(__file__).name}:{record.line}"
        assert place in str(report)
        assert (
            record.code
            == pathlib.Path(__file__).read_text().splitlines()[record.line - 1].strip()
        )
    for table in report.tables():
        assert tuple(table.columns[: len(COLUMNS)]) == COLUMNS
        assert all(len(row) == len(table.columns) for row in table.rows)
    text = str(report)
    assert text == repr(report)
    assert text.startswith(report.headline)
    assert "eqx_grads." not in text
    for subject, note in report.notes():
        assert note.endswith((".", "?")), note
        assert subject in text
    assert all(isinstance(remark, str) for remark in report.remarks)


@pytest.mark.parametrize(
    ("tool", "mark", "path"),
    [
        ("explain_nan", "SQRT", "[1]"),
        ("explain_zero", "ROUND", "[1]"),
        ("check_gradients", "WRONG", "[0]"),
    ],
)
def test_the_fields_mean_the_same(tool, mark, path):
    record = report_of(tool).found[0]
    assert (record.line, record.path) == (line_of(mark), path)
    assert record.code.endswith(f"# {mark}")
    if tool != "explain_nan":
        assert record.leaf == "[0].weight"
    assert record.primitive == {"SQRT": "sqrt", "ROUND": "round", "WRONG": "wrong"}[mark]


# One line each: what is shown is the part with the operation.
LONG = {
    "sqrt": lambda x: jnp.sum(jnp.where(x > 0.0, 1.0 + jax.numpy.sqrt(x), jnp.zeros_like(x))),
    "div": lambda x: jnp.sum(jnp.where(x > 0.0, jnp.ones_like(x) / (x * 1.0), jnp.zeros(2))),
    "log": lambda x: jnp.sum(jnp.where(x > 0.0, "é" and 1.0 + jax.lax.log(x), 0.0 * x)),
}
SHOWN = {
    "sqrt": "jax.numpy.sqrt(x)",
    "div": "jnp.ones_like(x) / ",
    "log": "jax.lax.log(x)",
}


@pytest.mark.parametrize("name", LONG)
def test_the_part_of_a_long_line_with_the_operation_is_shown(name):
    report = eqg.explain_nan(LONG[name], X)
    (record,) = report.found
    column = record.code.index({"sqrt": "jax.numpy", "div": "jnp.ones", "log": "jax.lax"}[name])
    assert (record.primitive, record.column) == (name, column)
    assert SHOWN[name] in str(report)


def test_an_operation_on_several_lines():
    loss = lambda x: (
        jnp.sum(jnp.where(x > 0.0, jnp.sqrt(x), 0.0) + jnp.zeros_like(x))
        + jnp.sum(jnp.where(x > 0.0, 1.0 + 1.0 + jnp.log1p(
            x - 1.0), 0.0))
    )  # fmt: skip
    report = eqg.explain_nan(loss, X)
    assert {r.primitive for r in report.found} == {"sqrt", "log1p"}
    assert all(r.code[r.column :].startswith("jnp." + r.primitive) for r in report.found)


def test_inputs_name_their_leaf():
    report = eqg.explain_nan(loss_of, model_of("wrong")[:1], jnp.array([jnp.nan, 1.0]))
    assert [(r.leaf, r.primitive) for r in report.found] == [("", "x")]
    bad = [Layer(jnp.array([jnp.nan, 1.0]), "wrong")]
    report = eqg.explain_nan(loss_of, bad, X)
    assert [r.leaf for r in report.found] == ["[0].weight"]
    report = eqg.explain_memory(lambda w, x: jnp.sum(w * w * x), X, X)
    inputs = {(r.leaf, r.primitive) for r in report.inputs}
    assert inputs == {("model", "model"), ("", "x")}


@pytest.mark.parametrize("cls", RECORDS)
def test_records(cls):
    assert issubclass(cls, AbstractRecord)
    shared = {field.name for field in dataclasses.fields(AbstractRecord)}
    # Each shared field is in the table of the documentation.
    page = (ROOT / "docs" / "api" / "diagnosis.md").read_text()
    table = page.split("| field | column |")[1].split("\n\n")[0]
    first_cells = "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == shared
    assert f"[`eqx_grads.{'testing.' * (cls is eqgt.GradientFault)}{cls.__name__}`][]" in page


def test_all_kinds_are_documented():
    page = (ROOT / "docs" / "api" / "diagnosis.md").read_text()
    of_nan, rest = page.split("## Zero\n")
    of_zero, of_memory = rest.split("## Too big for memory")
    kinds = lambda text: set(re.findall(r"^\| ([^|`]+?) \| [^|]* \|$", text, re.MULTILINE))
    names = set(map(str, Kind))
    assert kinds(of_nan) >= names
    assert kinds(of_zero) - {"kind"} == set(CURES)
    kept = {"computed", "carry", "rule", "constant", "input", "loop", "layer", "map"}
    assert kinds(of_memory) >= kept


# ---------------------------------------------------------------- the table


# ---------------------------------------------------------------- other tools, other input


def test_each_points_to_the_right_one():
    def both(w):
        return jnp.sum(jnp.round(w["a"])) + jnp.sum(jnp.where(X > 0, jnp.sqrt(w["b"] * X), 0))

    nan = eqg.explain_zero(both, {"a": X, "b": jnp.ones(2)})
    assert {r.leaf for r in nan.found} == {"['a']"}
    assert "The gradient of ['b'] is not finite: see `eqg.explain_nan`." in str(nan)


@pytest.mark.parametrize("tool", TOOLS)
def test_auxiliary_output(tool):
    """Keyword arguments go to the loss, so that `has_aux=True` does not exist."""

    def with_aux(model, x):
        return jnp.sum(jax.vmap(model)(x)), {"n": 3}

    model, x = eqx.nn.Linear(2, 3, key=jr.key(0)), jnp.ones((4, 2))
    with pytest.raises(eqg.RuleError, match="did not return a real scalar") as error:
        TOOLS[tool](with_aux, model, x)
    do = "pass `lambda *a, **k: with_aux(*a, **k)[0]`"
    assert do in str(error.value)
    TOOLS[tool](lambda *a, **k: with_aux(*a, **k)[0], model, x)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_wide_tables_are_wrapped(n):
    """First words, in the header as well, and then the code is cut."""
    words, code = "words of which there are many " * 3, "value = first * second + third/2"
    columns = (*(f"a column {i}" for i in range(n)), "code", "bad elements", "operands")
    row = (*[words] * n, code, "1 of 2: [0], ...", "3.58e+03, 59.8")
    text = Table(columns, [row] * 30, source="partly").text()
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("words") == 12 * 3 * n
    assert text.count(code[:16]) == 12
    assert (code in text) == (n < 6)
    assert text.endswith("... and 18 more: see `partly`.")
