"""The options and reports of the checkers: each once with what passes, once with what fails."""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..reports import record
from .test_checkers import jvp_rule, vjp_rule, x_of


X = x_of("float32")
Y = X + 2


check = lambda fn, *args, **options: eqgt.check_rule(fn, *args, raises=False, **options)


cube = lambda x: x**3


def wrong_cube(factor=1.1):
    """The derivative of `x**3` with a factor."""
    return jvp_rule(cube, lambda p, t: factor * 3 * p[0] ** 2 * t[0])


def product(of_x=1.0, of_y=1.0):
    """`x * y`, with factors in the derivatives by its arguments."""
    return jvp_rule(lambda x, y: x * y, lambda p, t: of_x * p[1] * t[0] + of_y * p[0] * t[1])


clipped = lambda bound=0.5: vjp_rule(lambda x: x, lambda xs, ct: (jnp.clip(ct, -bound, bound),))


F, R = "forward", "reverse"
both = lambda fn, *args, **options: check(fn, *args, checks=(F, R), **options)
half = lambda x: x.astype("float16")
times = lambda k: lambda x: np.asarray(k, x.dtype) * x
# What runs the check with an option, the option with which it passes, the one with which checks
# fail, and their names.
OPTIONS = {
    "reference": (lambda k: both(jvp_rule(lambda x: half(jnp.round(x)), lambda p, t:
        half(t[0])), X, reference=times(k)), 1.0, 1.01, {F, R}),
    "reference with a rule": (lambda k: both(clipped(), X, nonlinear=True,
        reference=clipped(k)), 0.5, 0.6, {R}),
    "nonlinear": (lambda k: check(clipped(), X, checks=("adjoint", "linear"), nonlinear=k),
        True, False, {"adjoint", "linear"}),
    "nondifferentiable": (lambda name: both(product(of_y=2.0), X, Y,
        nondifferentiable=(name,)), "y", "x", {F, R}),
    "a part of an argument": (lambda name: both(lambda p: product(of_y=2.0)(p["a"], p["b"]),
        {"a": X, "b": Y}, nondifferentiable=(name,)), "p['b']", "p['a']", {F, R}),
    "seeds": (lambda n: check(vjp_rule(lambda x: 2 * x, lambda xs, ct: (jnp.where(ct > 1.8,
        0.0, 2.0).astype(ct.dtype) * ct,)), X, checks=(R,), seed=[2, 1][:n]), 1, 2, {R}),
    "tolerance": (lambda k: both(wrong_cube(k), X, tolerance=1e-2), 1.005, 1.02, {F, R}),
    "complex": (lambda f: both(vjp_rule(lambda z, r: z**2, lambda zs, ct: (2 * f(zs[0]) * ct,
        0 * zs[1])), x_of("complex64"), X), lambda z: z, jnp.conj, {R}),
    "an error": (lambda bad: check(vjp_rule(cube, lambda xs, ct: 1 / 0 if bad else (3 * xs[0]
        ** 2 * ct,)), X, checks=(R,)), False, True, {R}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_check_rule(name):
    run, right, wrong, checks = OPTIONS[name]
    assert run(right).passed
    assert {f.check for f in run(wrong).failures} == checks


# Options of checkers that make no sense.
BAD = {
    "check_rule": {"raises": 1, "nonlinear": 1, "fn": 3},
    "check_gradients": {"raises": 1, "tolerance": -1.0, "order": 3},
    "assert_trees_close": {"entrywise": 1, "tolerance": -1.0, "scale": -1.0},
    "numerical_jacobian": {"fn": 3},
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_make_no_sense(name):
    for option, value in BAD[name].items():
        first, options = (value, {}) if option == "fn" else (jnp.sum, {option: value})
        with pytest.raises(eqg.RuleError, match=f"`{option}` of `{name}`"):
            getattr(eqgt, name)(first, X, **options)


# ---------------------------------------------------------------- check_gradients


wrong_sin = lambda x: jvp_rule(lambda x: jnp.sin(x), lambda p, t: 1.2 * jnp.cos(p[0]) * t[0])(x)


# What `skip` names, and the leaves that are wrong then.
SKIPPED = {
    (): ["[0]['b']", "[0]['w']"], "[0]['w']": ["[0]['b']"], ("[0]['b']",): ["[0]['w']"], "[0]":
    [], "[*]['w']": ["[0]['b']"],
}  # fmt: skip


@pytest.mark.parametrize("skip", SKIPPED)
def test_leaves_that_are_skipped(skip):
    loss = lambda m: jnp.sum(wrong_sin(m[0]["w"]) + wrong_sin(m[0]["b"]) + jnp.sin(m[1]["w"]))
    report = eqgt.check_gradients(loss, [{"w": X, "b": Y}, {"w": X}], skip=skip, raises=False)
    assert [f.leaf for f in report.found] == SKIPPED[skip]
    skipped = [x.leaf for x in report.leaves if x.verdict == "skipped"]
    n_skipped = len(SKIPPED[()]) - len(SKIPPED[skip]) + ("*" in skip)
    assert len(skipped) == n_skipped
    assert report["[1]['w']"].verdict == ("skipped" if "*" in skip else "right")


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
in_place = lambda act: lambda w: jnp.sum(jnp.real(act(w)))
FIRST, TWICE = np.array([1.1, 1.0, 1.0]), jnp.array([0, 0, 2])
Z = jnp.array([0.3 + 0.2j, -1.0 + 0.7j, 0.5 - 1.1j])
# A loss that is right, one that is wrong, the model, options, and of the fault its kind, its
# leaf and its function.
FAULTS = {
    "order": (in_place(second(1.0)), in_place(second(1.1)), X, {"order": 2}, ("wrong", "",
        "<lambda>")),
    # Along a direction, the slope is a sum over all entries.
    "order of the first": (in_place(second(1.0)), in_place(second(FIRST)), Z, {"order": 2},
        ("wrong", "", "<lambda>")),
    "order of the last": (in_place(second(1.0)), in_place(second(FIRST[::-1])), X, {"order": 2},
        ("wrong", "", "<lambda>")),
    "an index": (lambda w: jnp.sum(jnp.sin(w[TWICE])), lambda w: jnp.sum(wrong_sin(w[TWICE])),
        X, {}, ("wrong", "", "<lambda>")),
    "forward only": (lambda w: while_sum(w, jnp.sin), lambda w: while_sum(w, wrong_sin), X, {},
        ("wrong", "", "")),
    "not finite": (lambda w: while_sum(w, jnp.sin), lambda w: while_sum(w, jnp.sqrt), Y, {},
        ("not finite", "", "")),
    "beside a NaN": (lambda m: jnp.sum(jnp.sin(m["a"])), lambda m: jnp.sum(wrong_sin(m["a"]) +
        jnp.sqrt(m["b"])), {"a": X, "b": 0 * Y}, {"skip": "['b']"}, ("wrong", "['a']",
        "<lambda>")),
    "reverse only": (in_place(jnp.sin), in_place(raw_sin), X, {}, ("wrong", "", "raw_sin")),
    "complex": (in_place(cube), in_place(vjp_rule(cube, lambda ws, ct: (3 * ws[0].conj() ** 2 *
        ct,))), Z, {}, ("wrong", "", "<lambda>")),
    "in a scan": (lambda w: jax.lax.scan(lambda c, x: (jnp.sin(c + x), None), 0.0, w)[0],
        lambda w: jax.lax.scan(lambda c, x: (wrong_sin(c + x), None), 0.0, w)[0], X, {},
        ("wrong", "", "<lambda>")),
    "cut": (lambda m: jnp.sum(jax.lax.stop_gradient(m["a"]) * m["b"]), lambda m: jnp.sum(
        product(of_x=0.0)(m["a"], m["b"])), {"a": X, "b": Y}, {}, ("cut", "['a']", "<lambda>")),
    "too large": (lambda w: jnp.sum(jnp.exp(w + 80)), lambda w: jnp.sum(jnp.exp(w + 90)), X,
        {}, ("not finite", "", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_gradients(name):
    right, wrong, model, options, (kind, leaf, function) = FAULTS[name]
    assert eqgt.check_gradients(right, model, **options).passed
    report = eqgt.check_gradients(wrong, model, raises=False, **options)
    (fault,) = report.found
    assert fault.kind == kind
    assert leaf in fault.leaf
    assert function in fault.primitive


def test_a_report_of_many_leaves():
    """Each verdict has a list, and the details are of the first six kinds."""
    verdicts = ["WRONG"] * 8 + ["zero"] * 9 + ["flat", "kink", "stopped", "not measured"]
    leaves = [
        eqgt.LeafVerdict(f"w[{i}]", v, 1.5, i, 0.7, left=-i, right=i)
        for i, v in enumerate(verdicts)
    ]
    fault = lambda leaf: eqgt.GradientFault(kind="wrong", leaf=leaf, detail=f"It is {leaf}")
    faults = [fault(leaf.leaf) for leaf in leaves[:8]]
    record(str(eqgt.GradientReport("loss", leaves, faults, {"seed": 3})))
