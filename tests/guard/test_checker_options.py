"""The options and reports of the checkers: each once with what passes, and once with what fails."""

import functools as ft
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .test_checkers import jvp_rule, vjp_rule, x_of


X = x_of("float32")
Y = X + 2


def check(fn, *args, **options):
    return eqgt.check_rule(fn, *args, raises=False, **options)


def cube(x):
    return x**3


def wrong_cube(factor=1.1):
    """The derivative of `x**3` with a factor."""
    return jvp_rule(cube, lambda p, t: factor * 3 * p[0] ** 2 * t[0])


def product(of_x=1.0, of_y=1.0):
    """`x * y`, with factors in the derivatives by its arguments."""
    return jvp_rule(lambda x, y: x * y, lambda p, t: of_x * p[1] * t[0] + of_y * p[0] * t[1])


def clipped(bound=0.5):
    return vjp_rule(lambda x: x, lambda xs, ct: (jnp.clip(ct, -bound, bound),))


class Layer(eqx.Module):
    weight: jax.Array
    frozen: jax.Array
    factor: float = eqx.field(static=True, default=1.0)

    @eqg.custom_jvp
    def __call__(self, x):
        return self.weight * self.frozen * x

    @__call__.def_jvp
    def _call_jvp(primals, tangents):
        (self, x), (t, t_x) = primals, tangents
        out = self.frozen * (t.weight * x + self.weight * t_x)
        return self(x), out + self.factor * t.frozen * self.weight * x


class Option(NamedTuple):
    """`run(option)` passes for `right`. For `wrong`, checks fail: their names, and what is in
    the place or text of a failure."""

    run: Callable[[Any], Any]
    right: Any
    wrong: Any
    checks: set[str]
    match: str = ""


F, R = "forward", "reverse"
both = lambda fn, *args, **options: check(fn, *args, checks=(F, R), **options)
added = lambda terms: ft.reduce(operator.add, terms)
times = lambda k: lambda x: np.asarray(k, x.dtype) * x
OPTIONS = {
    "reference": Option(lambda k: both(jvp_rule(lambda x: jnp.round(x), lambda p, t: t[0]), X,
        reference=times(k)), 1.0, 1.01, {F, R}),
    "expected_tangent": Option(lambda k: check(wrong_cube(2.0), X, checks=(F,),
        expected_tangent=lambda p, t: np.asarray(k, t[0].dtype) * p[0] ** 2 * t[0]), 6.0, 6.1,
        {F}),
    "expected_cotangent": Option(lambda k: check(clipped(), X, checks=(R,), nonlinear=True,
        expected_cotangent=lambda p, ct: (jnp.clip(ct, -k, k),)), 0.5, 0.6, {R}),
    "nonlinear": Option(lambda k: check(clipped(), X, checks=("adjoint", "linear"),
        nonlinear=k), True, False, {"adjoint", "linear"}),
    "nondifferentiable": Option(lambda name: both(product(of_y=2.0), X, Y,
        nondifferentiable=(name,)), "y", "x", {F, R}),
    "a part of an argument": Option(lambda name: both(lambda p: product(of_y=2.0)(p["a"],
        p["b"]), {"a": X, "b": Y}, nondifferentiable=(name,)), "p['b']", "p['a']", {F, R},
        "p['b']"),
    "a leaf of a layer": Option(lambda name: both(Layer(X, Y, 2.0), X,
        nondifferentiable=(name,)), "self.frozen", "self.weight", {F, R}, "self.frozen"),
    "skip": Option(lambda skip: check(wrong_cube(), X, checks=(F, "finite"), skip=skip), F, (),
        {F}),
    "cotangents": Option(lambda w: check(vjp_rule(lambda x: 2 * x, lambda xs, ct:
        (jnp.where(jnp.max(jnp.abs(ct)) > 50, 0.0, 2.0).astype(ct.dtype) * ct,)), X,
        checks=(R,), cotangents=w), X, 100 + X, {R}, "given"),
    "seeds": Option(lambda n: check(vjp_rule(lambda x: 2 * x, lambda xs, ct: (jnp.where(ct >
        1.8, 0.0, 2.0).astype(ct.dtype) * ct,)), X, checks=(R,), seed=range(n)), 2, 3, {R}),
    "tolerance": Option(lambda k: both(wrong_cube(k), X, tolerance=1e-2), 1.005, 1.02, {F,
        R}),
    "five arguments": Option(lambda k: check(jvp_rule(lambda *xs: added([x**2 for x in xs]),
        lambda p, t: added([np.float32(2 * (k if None in t else 1)).astype(y.dtype) * x * y for
        x, y in zip(p, t, strict=True) if y is not None]), symbolic_zeros=True), *[X + i for i
        in range(5)], checks=("zeros",)), 1.0, 1.1, {"zeros"}, "perturbed"),
    "complex": Option(lambda f: both(vjp_rule(lambda z: z**2, lambda zs, ct: (2 * f(zs[0]) *
        ct,)), x_of("complex64")), lambda z: z, jnp.conj, {R}),
    "an error": Option(lambda bad: check(vjp_rule(cube, lambda xs, ct: 1 / 0 if bad else (3 *
        xs[0] ** 2 * ct,)), X, checks=(R,)), False, True, {R}, "division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_check_rule(name):
    one = OPTIONS[name]
    right = one.run(one.right)
    assert right.passed, str(right)
    assert any(f.verdict == "passed" for f in right.findings)
    wrong = one.run(one.wrong)
    assert {f.check for f in wrong.failures} == one.checks, str(wrong)
    if one.checks:
        texts = "\n".join(f"{f.where}\n{f.text}" for f in wrong.failures).replace("`", "")
        assert one.match in texts


def test_the_report_of_a_rule():
    report = check(product(of_y=1.5), X, Y, checks=(F, "finite"), seed=3)
    assert report.numbers == {"seed": 3, "leaves": ["`x`", "`y`"], "not_finite": []}
    (failure,) = report.failures
    # Along `y`, the derivative is off by a half; the norm is that of both.
    assert failure.error > 1000 * failure.tolerance
    np.testing.assert_allclose(failure.tolerance, 1e-5)
    assert {f.verdict for f in report["finite"]} == {"passed"}
    head, _, columns, *rows = str(report).splitlines()
    assert head == "The rule of `<lambda>`: FAILED (seed 3)"
    assert columns.split() == ["check", "status", "worst", "error", "where"]
    assert [row.split()[:2] for row in rows[:2]] == [[F, "FAILED"], ["finite", "passed"]]
    assert any("1.5 times" in row for row in rows)
    with pytest.raises(KeyError, match="reverse"):
        report["reverse"]
    with pytest.raises(eqgt.RuleCheckError, match="FAILED"):
        report.raise_if_failed()
    infinite = check(lambda x: 2 * x, jnp.array([1.0, jnp.inf]), checks=(F,))
    assert infinite.numbers["not_finite"] == ["`x`"]
    assert "Entries of `x` are not finite" in str(infinite)
    assert "without a reference" not in str(infinite)


SINGLE = (F, "reverse", "adjoint", "linear", "transforms", "leaks", "residuals")


@pytest.mark.parametrize("name", SINGLE)
def test_single_checks(name):
    report = getattr(eqgt, f"check_{name}")(cube, X)
    assert {f.check for f in report.findings} == {name}


# ---------------------------------------------------------------- check_gradients


class Net(eqx.Module):
    layers: list[Any]
    scale: jax.Array

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jnp.sum(x * self.scale)


class Dense(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    act: Any = eqx.field(static=True, default=jnp.sin)

    def __call__(self, x):
        return self.act(self.weight @ x) + self.bias


M = jnp.array([[0.3, -1.2, 0.5], [1.1, 0.4, -0.7], [0.2, 0.9, 0.6]])


def net(first=jnp.sin, second=jnp.sin):
    return Net([Dense(M, X, first), Dense(M.T, Y, second)], Y)


def wrong_sin(factor=1.2):
    return vjp_rule(lambda x: jnp.sin(x), lambda xs, ct: (np.asarray(factor, ct.dtype)
                                                          * jnp.cos(xs[0]) * ct,))  # fmt: skip


loss = lambda m, x: m(x) ** 2
NAMES = ["layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias", "scale"]
# What `skip` names, and the leaves that are wrong then, if the rules of both layers are.
SKIPPED = {
    "none": ((), ["layers[0].weight", "layers[0].bias", "layers[1].weight"]),
    "a leaf": ("layers[0].weight", ["layers[0].bias", "layers[1].weight"]),
    "two": (("layers[0].weight", "layers[0].bias"), ["layers[1].weight"]),
    "a layer": ("layers[0]", ["layers[1].weight"]),
    "a list": ("layers", []),
    "a pattern": ("layers[*].weight", ["layers[0].bias"]),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_leaves_that_are_skipped(name):
    skip, expected = SKIPPED[name]
    report = eqgt.check_gradients(
        loss, net(wrong_sin(), wrong_sin()), X, skip=skip, raises=False
    )
    assert [f.leaf for f in report.found] == expected
    assert [x.leaf for x in report.leaves] == NAMES
    assert {report["scale"].verdict, report["layers[1].bias"].verdict} <= {"right", "skipped"}
    n_skipped = {"none": 0, "a leaf": 1, "two": 2, "a layer": 2, "a list": 4, "a pattern": 2}[
        name
    ]
    assert [x.verdict for x in report.leaves].count("skipped") == n_skipped


@eqg.custom_jvp
def forward_only(x):
    return jnp.sin(x)


forward_only.def_jvp(lambda p, t: (forward_only(*p), 1.2 * jnp.cos(p[0]) * t[0]))


def while_sum(w, act):
    body = lambda c: (c[0] + 1, c[1] + act(w * c[0].astype(w.dtype)))
    return jnp.sum(jax.lax.while_loop(lambda c: c[0] < 3, body, (0, 0 * w))[1])


@jax.custom_vjp
def raw_sin(x):
    return jnp.sin(x)


raw_sin.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct * 1.2,))
second = lambda k: jvp_rule(lambda x: jnp.sin(x), lambda p, t: t[0] * jvp_rule(
    lambda x: jnp.cos(x), lambda p, t: -jnp.sin(p[0]) * t[0] * np.asarray(k, t[0].dtype)
)(p[0]))  # fmt: skip
in_place = lambda act: lambda w: jnp.sum(act(w))
Z = jnp.array([0.3 + 0.2j, -1.0 + 0.7j])
# A loss that is right, one that is wrong, the model, options, and of the fault its kind, its
# leaf, its function and words of its text.
FAULTS = {
    "order": (in_place(second(1.0)), in_place(second(1.1)), X, {"order": 2}, ("wrong", "", "",
        "")),
    "forward only": (lambda w: while_sum(w, jnp.sin), lambda w: while_sum(w, forward_only), X,
        {}, ("wrong", "", "", "")),
    "reverse only": (in_place(jnp.sin), in_place(raw_sin), X, {}, ("wrong", "", "raw_sin",
        "1.2 times")),
    "complex": (lambda w: jnp.sum(jnp.real(w**3)), lambda w: jnp.sum(jnp.real(vjp_rule(lambda
        w: w**3, lambda ws, ct: (3 * ws[0].conj() ** 2 * ct,))(w))), Z, {}, ("wrong", "",
        "<lambda>", "")),
    "in a scan": (lambda w: jax.lax.scan(lambda c, x: (jnp.sin(c + x), None), 0.0, w)[0],
        lambda w: jax.lax.scan(lambda c, x: (wrong_sin()(c + x), None), 0.0, w)[0], X, {},
        ("wrong", "", "<lambda>", "")),
    "cut": (lambda m: jnp.sum(m["a"] * m["b"]), lambda m: jnp.sum(jax.lax.stop_gradient(m["a"])
        * m["b"]), {"a": X, "b": Y}, {}, ("cut", "['a']", "stop_gradient", "")),
    "no number": (in_place(jnp.sin), lambda w: jnp.sum(jnp.log(w - 9)), X, {}, ("not finite",
        "", "", "The loss itself is nan")),
    "too large": (lambda w: jnp.sum(jnp.exp(w + 80)), lambda w: jnp.sum(jnp.exp(w + 90)), X,
        {}, ("not finite", "", "", "")),
    "python": (in_place(jnp.sin), lambda w: jnp.sum(w) * np.random.uniform(1, 2), X, {},
        ("random", "", "", "Two calls return different values")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_gradients(name):
    right, wrong, model, options, (kind, leaf, function, words) = FAULTS[name]
    assert eqgt.check_gradients(right, model, **options).passed
    report = eqgt.check_gradients(wrong, model, raises=False, **options)
    (fault,) = report.found
    assert fault.kind == kind
    assert leaf in fault.leaf
    assert function in fault.primitive
    assert words in fault.detail
    if function:
        assert fault.line > 0
    remarks = " ".join(report.remarks)
    assert ("no reverse mode" in remarks) == (name == "forward only")
    assert ("no forward mode" in remarks) == (name == "reverse only")
    assert f"FAILED (seed 0), {len(report.leaves)} lea" in report.headline


def test_verdicts_on_leaves():
    model = {"used": X, "unused": Y, "none": jnp.zeros((0,)), "tiny": jnp.float32(1e-30)}
    loss = lambda m: jnp.sum(jnp.sin(m["used"])) + m["tiny"] ** 2 + jnp.sum(m["none"])
    report = eqgt.check_gradients(loss, model)
    assert report["['unused']"].verdict == "zero"
    assert report["['used']"].verdict == report["['none']"].verdict == "right"
    assert report["['tiny']"].verdict == "not measured"
