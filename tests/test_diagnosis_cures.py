"""The cures of the diagnosis: they are code that runs, and cure what they are for."""

import ast
import functools as ft
import inspect
import re

import diffrax
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import optax
import optimistix
import pytest
from eqx_grads._diagnosis._nan import cures as nan_cures
from eqx_grads._diagnosis._zero import advice as zero_cures

from .guard.test_causes_of_nan import CURES
from .nan_causes import PLANTED


# ---------------------------------------------------------------- the texts


def texts():
    """The cures of `explain_nan` and `explain_zero`."""
    nan = [
        text
        for name, table in vars(nan_cures).items()
        if name.startswith("_OF_")
        for text in (table.values() if isinstance(table, dict) else [table])
    ]
    nan += [f"`eqg.safe.{call}`" for call in nan_cures._SAFE.values()]
    return [*nan, *zero_cures.CURES.values(), *zero_cures.SPECIAL.values()]


FILLED = {
    **dict.fromkeys(("safe", "use", "how", "domain", "a", "what", "whose"), ""),
    "op": "sqrt",
    "mask": "maximum",
    "name": "round",
    "holder": "x",
    "x": "x",
}
SNIPPETS = sorted(
    {code for text in texts() for code in re.findall("`([^`]*)`", text.format(**FILLED))}
)
PACKAGES = {
    "eqg": eqg,
    "jax": jax,
    "jnp": jnp,
    "optax": optax,
    "optimistix": optimistix,
    "diffrax": diffrax,
    "eqx": __import__("equinox"),
}


def resolve(node):
    """The object that `package.name` is, or `None` for a name of the user's."""
    if isinstance(node, ast.Name):
        return PACKAGES.get(node.id)
    owner = resolve(node.value) if isinstance(node, ast.Attribute) else None
    return None if owner is None else getattr(owner, node.attr)


@pytest.mark.parametrize("code", SNIPPETS)
def test_code_in_a_cure_can_be_pasted(code):
    """Names exist, and each call has the arguments that the function needs."""
    if code in ("def_fwd", "while_loop"):
        return
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            resolve(node)  # raises `AttributeError`
        if not isinstance(node, ast.Call) or (fn := resolve(node.func)) is None:
            continue
        signature = inspect.signature(fn)
        keywords = {keyword.arg: None for keyword in node.keywords}
        if any(isinstance(x, ast.Constant) and x.value is ... for x in node.args):
            signature.bind_partial(**keywords)
        else:
            signature.bind(*node.args, **keywords)


# ---------------------------------------------------------------- zero_safe, for other's code


def cured_by_zero_safe():
    for name, losses in CURES.items():
        for i, (loss, x) in enumerate(losses):
            yield pytest.param(lambda loss=loss, x=x: (loss, jnp.array(x)), id=f"{name} {i}")
    for planted in PLANTED:
        if planted.kind in ("0/0", "true singularity", "zero times infinity"):
            yield pytest.param(planted.make, id=planted.name)


PLAIN = "`eqg.zero_safe(loss)`"
BY_ZERO = '`eqg.zero_safe(loss, policy="zero")`'


def named_zero_safe(report):
    """The call of `zero_safe` that makes the gradient finite, or `None`."""
    named = {call for call in (PLAIN, BY_ZERO) for r in report.found if f"se {call}" in r.cure}
    assert len(named) <= 1
    said = {call for call in (PLAIN, BY_ZERO) if f"{call} makes" in str(report.remarks)}
    assert said <= named
    return next(iter(named), None)


def policy_of(call):
    return "selected" if call == PLAIN else "zero"


@pytest.mark.slow
@pytest.mark.parametrize("make", list(cured_by_zero_safe()))
def test_zero_safe_cures_what_names_it(make):
    loss, *args = make()
    named = named_zero_safe(eqg.explain_nan(loss, *args))
    if named:
        safe = eqg.zero_safe(loss, policy=policy_of(named))
        assert not eqg.explain_nan(safe, *args).bad_leaves


def of_length(x):
    return jnp.sum(x / jnp.maximum(jnp.linalg.norm(x), 1e-6))


def clamped_and_of_length(x):
    return jnp.sum(jnp.sqrt(jnp.maximum(x, 0.0))) + of_length(x + 1)


NAMED = {
    "norm": (jnp.linalg.norm, jnp.zeros(3), BY_ZERO),
    "deviation": (jnp.std, jnp.ones(3), BY_ZERO),
    "square of a root": (lambda x: jnp.sum(jnp.sqrt(x) ** 2), jnp.zeros(2), BY_ZERO),
    "norm and maximum": (lambda x: jnp.linalg.norm(x) + of_length(x), jnp.zeros(2), BY_ZERO),
    # Nothing but what a maximum does not select depends on the argument of the root.
    "maximum": (lambda x: jnp.sum(jnp.sqrt(jnp.maximum(x, 0.0))), -jnp.ones(2), PLAIN),
    "two causes": (clamped_and_of_length, -jnp.ones(2), PLAIN),
    # These are infinite, or not made of a factor that is zero.
    "root": (lambda x: jnp.sum(jnp.sqrt(x)), jnp.zeros(2), None),
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
    report = eqg.explain_nan(loss, x)
    assert named_zero_safe(report) == named
    assert is_finite("selected") == (named == PLAIN)
    assert is_finite("zero") == (named is not None)


def test_what_a_maximum_does_not_select_is_a_dead_branch_also_where_zeros_arrive():
    """The cotangent of the maximum is `-sum(x) / eps**2`, which is zero at zero. It was
    reported as 0/0, with the weaker `policy="zero"`."""
    x = jnp.zeros(3)
    (record,) = eqg.explain_nan(of_length, x).found
    assert (record.kind, record.mask) == ("dead branch", "maximum")
    assert PLAIN in record.cure
    # Near zero the function is `sum(x) / eps`.
    gradient = jax.grad(eqg.zero_safe(of_length))(x)
    assert jnp.allclose(gradient, 1e6, rtol=1e-5)
    assert jnp.any(jax.grad(eqg.zero_safe(of_length, policy="zero"))(x))


def test_what_zero_safe_does_not_fix_is_not_advised(monkeypatch):
    loss = lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))
    report = eqg.explain_nan(loss, jnp.zeros(2))
    assert "Use `eqg.zero_safe(loss)`" in report.found[0].cure
    assert not report.remarks
    for name, works in (("zero", True), ("neither", False)):
        monkeypatch.setattr(
            "eqx_grads._diagnosis._nan.explain_nan._is_finite_with",
            lambda policy, *_, name=name: policy == name,
        )
        report = eqg.explain_nan(loss, jnp.zeros(2))
        assert ('`eqg.zero_safe(loss, policy="zero")`' in report.found[0].cure) == works
        assert ("was tried, and does not make this gradient" in str(report.remarks)) != works
        assert ("zero_safe" in report.found[0].cure) == works


def _masked(root, y):
    """A product with a mask, some operations after the root."""
    h = jnp.tanh(root(y))
    return jnp.sum((2 * h + 1) * jnp.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("root", "cured", "named"),
    [
        (
            jnp.sqrt,
            lambda y: eqg.safe.where(jnp.array([True, False]), jnp.sqrt, y, 0.0),
            "with this operation in `f`, and the mask as `ok`",
        ),
        (jnp.sqrt, eqg.safe.sqrt, "Or use `eqg.safe.sqrt(x)`"),
    ],
)
def test_the_cure_of_a_zero_mask_is_at_the_operation(root, cured, named):
    y = jnp.array([4.0, 0.0])
    (record,) = eqg.explain_nan(ft.partial(_masked, root), y).found
    assert record.kind == "zero mask"
    assert named in record.cure
    gradient = jax.grad(ft.partial(_masked, cured))(y)
    assert gradient[0] == jax.grad(ft.partial(_masked, root))(y)[0]
    assert gradient[1] == 0


def test_a_divisor_whose_square_underflows():
    """The derivative is in range, `y**-2` is not."""
    x, y = jnp.array(1.74e-31, "float32"), jnp.array(6.85e-30, "float32")
    slope = lambda divide: jax.grad(lambda y: divide(x, y) * jnp.float32(-2e-3))
    (record,) = eqg.explain_nan(lambda y: x / y * jnp.float32(-2e-3), y).found
    assert record.kind == "overflow"
    assert "`eqg.safe.divide(x, y)`" in record.cure
    exact = -float(x) / float(y) ** 2 * -2e-3
    assert not jnp.isfinite(slope(jnp.divide)(y))
    assert abs(slope(eqg.safe.divide)(y) / exact - 1) < 1e-5
    # And so it is in a branch that is not taken.
    masked = lambda divide: lambda y: jnp.where(y > 1, divide(jnp.zeros_like(y), y), 0.0)
    (record,) = eqg.explain_nan(masked(jnp.divide), y).found
    assert record.kind == "dead branch"
    assert jax.grad(masked(eqg.safe.divide))(y) == 0


# ---------------------------------------------------------------- masks


MASK = jnp.array([True, False, True])
X = jnp.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: jnp.sum(jnp.where(MASK, x, -jnp.inf)),
        lambda x: jnp.sum(x + jnp.where(MASK, 0.0, -jnp.inf)),
        lambda x: -jnp.mean(jax.nn.log_softmax(jnp.where(MASK, x, -jnp.inf))),
        lambda x: jnp.sum(jnp.where(MASK, x, jnp.full(3, -jnp.inf))),
        lambda x: jnp.sum(jnp.where(MASK, x, -jnp.full(3, jnp.inf))),
    ],
    ids=["sum", "added", "log_softmax", "array", "negative"],
)
def test_infinity_of_a_mask_is_no_overflow(loss):
    (record,) = eqg.explain_nan(loss, X).found
    assert (record.kind, record.primitive) == ("constant infinity", "select_n")
    assert record.index == (1,)
    assert "selects a constant infinity" in record.cure


@pytest.mark.parametrize(
    ("operation", "outside", "cured"),
    [
        (jnp.arccos, 1 + 1e-6, lambda x: eqg.safe.arccos(jnp.clip(x, -1, 1))),
        (jnp.sqrt, -1e-6, lambda x: eqg.safe.sqrt(jnp.maximum(x, 0))),
        (jnp.log, -1e-6, lambda x: jnp.log(jnp.maximum(x, 1e-6))),
    ],
    ids=["arccos", "sqrt", "log"],
)
def test_an_argument_that_rounds_to_the_outside_of_a_domain(operation, outside, cured):
    """Clipped alone, it is at an end of the domain, at which the derivative is infinite."""
    x = jnp.array(outside)
    (record,) = eqg.explain_nan(operation, x).found
    assert record.kind == "outside of the domain"
    assert "jnp.clip(x, -1, 1)" in record.cure or "jnp.maximum(x, " in record.cure
    assert not eqg.explain_nan(cured, x)
    inside = x - 0.1 * jnp.sign(x) if abs(outside) > 1 else -x + 0.5
    assert jnp.allclose(jax.grad(cured)(inside), jax.grad(operation)(inside))


# ---------------------------------------------------------------- functions of JAX


def test_argmin_is_chosen_with_the_opposite_sign():
    """For an `argmin`, `one_hot_argmax` of the same numbers would choose the largest."""
    distances = jnp.array([2.0, 0.5, 3.0])
    values = jnp.array([1.0, 2.0, 4.0])
    (record,) = eqg.explain_zero(lambda d: values[jnp.argmin(d)], distances).found
    assert (record.kind, record.primitive) == ("argmax", "argmin")
    chosen = re.search(r"`(eqg\.ste\.one_hot_argmax\(.*?\))`", record.cure)[1]
    cured = lambda x: jnp.sum(eval(chosen, {"eqg": eqg, "x": x}) * values)
    assert cured(distances) == values[jnp.argmin(distances)]
    assert jnp.any(jax.grad(cured)(distances))
    (record,) = eqg.explain_zero(lambda x: values[jnp.argmax(x)], distances).found
    assert "one_hot_argmax(logits)" in record.cure
