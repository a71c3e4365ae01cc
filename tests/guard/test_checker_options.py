"""The options and reports of the checkers: each once with what passes, and once with what fails."""

import re
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
    return jvp_rule(
        lambda x, y: x * y, lambda p, t: of_x * p[1] * t[0] + of_y * p[0] * t[1]
    )


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
LIN = lambda k: lambda p, t: (k * t[0],)
double = lambda x: jnp.float32(2.0) * x
times = lambda k: lambda x: np.asarray(k, x.dtype) * x
OPTIONS = {
    "reference": Option(lambda k: both(vjp_rule(jnp.round, lambda xs, ct: (ct,)), X,
                                       reference=times(k)), 1.0, 1.01, {F, R}),
    "reference's value": Option(lambda k: check(jvp_rule(cube, lambda p, t: 2 * t[0]), X,
                                reference=lambda x: 2 * x + k, checks=("primal", F)), 0.0, 5.0,
                                set()),
    "expected_tangent": Option(lambda k: check(wrong_cube(2.0), X, checks=(F,),
        expected_tangent=lambda p, t: np.asarray(k, t[0].dtype) * p[0] ** 2 * t[0]), 6.0, 6.1,
        {F}),
    "expected_cotangent": Option(lambda k: check(clipped(), X, checks=(R,), nonlinear=True,
        expected_cotangent=lambda p, ct: (jnp.clip(ct, -k, k),)), 0.5, 0.6, {R}),
    "nonlinear": Option(lambda k: check(clipped(), X, checks=("adjoint", "linear"), nonlinear=k),
                        True, False, {"adjoint", "linear"}),
    "nondifferentiable": Option(lambda name: both(product(of_y=2.0), X, Y,
                                                  nondifferentiable=(name,)), "y", "x", {F, R}),
    "a part of an argument": Option(lambda name: both(lambda p: product(of_y=2.0)(p["a"], p["b"]),
        {"a": X, "b": Y}, nondifferentiable=(name,)), "p['b']", "p['a']", {F, R}, "p['b']"),
    "a leaf of a layer": Option(lambda name: both(Layer(X, Y, 2.0), X, nondifferentiable=(name,)),
                                "self.frozen", "self.weight", {F, R}, "self.frozen"),
    "a method": Option(lambda k: both(Layer(X, Y, k), X), 1.0, 1.1, {F, R}, "self.frozen"),
    "skip": Option(lambda skip: check(wrong_cube(), X, checks=(F, "finite"), skip=skip), F, (),
                   {F}),
    "tangents": Option(lambda t: check(jvp_rule(lambda x: 2 * x, lambda p, t: jnp.where(
        jnp.max(jnp.abs(t[0])) > 50, 0.0, 2.0).astype(p[0].dtype) * t[0]), X, checks=(F,),
        tangents=t), (X,), (100 + X,), {F}, "given"),
    "cotangents": Option(lambda w: check(vjp_rule(lambda x: 2 * x, lambda xs, ct: (jnp.where(
        jnp.max(jnp.abs(ct)) > 50, 0.0, 2.0).astype(ct.dtype) * ct,)), X, checks=(R,),
        cotangents=w), X, 100 + X, {R}, "given"),
    "seeds": Option(lambda n: check(jvp_rule(lambda x: 2 * x, lambda p, t: jnp.where(
        t[0] > 1.0, 0.0, 2.0).astype(p[0].dtype) * t[0]), jnp.float32(1.0), checks=(F,),
        seed=range(n)), 1, 40, {F}),
    "tolerance": Option(lambda k: both(wrong_cube(k), X, tolerance=1e-2), 1.005, 1.02, {F, R}),
    "points": Option(lambda x: check(jnp.log, X[:1], checks=("finite",), at=[(X[:1] + 9,),
                     (np.float32([x]),)]), 0.5, 0.0, {"finite"}, "at[1]"),
    "bytes of a call": Option(lambda n: check(jnp.sin, X, checks=("residuals",),
                              max_residual_bytes=n), 12, 11, {"residuals"}, "12 bytes"),
    "five arguments": Option(lambda k: check(jvp_rule(lambda *xs: sum(x**2 for x in xs),
        lambda p, t: sum(2 * x * y for x, y in zip(p, t, strict=True)) if None not in t else
        sum(2 * k * x * y for x, y in zip(p, t, strict=True) if y is not None),
        symbolic_zeros=True), *[X + i for i in range(5)], checks=("zeros",)),
        np.float32(1), np.float32(1.1), {"zeros"}, "perturbed"),
    "complex": Option(lambda f: both(vjp_rule(lambda z: z**2, lambda zs, ct: (2 * f(zs[0]) * ct,)),
                                     x_of("complex64")), lambda z: z, jnp.conj, {R, F}),
    "half precision": Option(lambda k: both(wrong_cube(np.float16(k)), x_of("float16")), 1.0, 1.2,
                             {F, R}),
    "keyword": Option(lambda k: both(lambda x, *, k: wrong_cube(k)(x), X, k=k), 1.0, 1.1, {F, R}),
    "an error": Option(lambda bad: check(vjp_rule(cube, lambda xs, ct: 1 / 0 if bad else
        (3 * xs[0] ** 2 * ct,)), X, checks=(R,)), False, True, {R}, "division by zero"),
    "jit": Option(lambda bad: check(vjp_rule(cube, lambda xs, ct: (3 * xs[0] ** 2 * ct * (float(
        ct[0]) * 0 + 1 if bad else 1),)), X, checks=("transforms",)), False, True,
        {"transforms"}, "jit"),
    "a shape": Option(lambda shape: check(jax_rule(lambda x: jnp.sum(x), lambda x, ct:
        jnp.broadcast_to(ct, shape)), X, checks=(R,)), (3,), (1,), {R}),
    "third order": Option(lambda k: check(jvp_rule(cube, lambda p, t: jvp_rule(lambda x: 3 * x**2,
        lambda p, t: jnp.float32(k) * 6 * p[0] * t[0])(p[0]) * t[0]), X, checks=("order",)),
        1.0, 1.1, {"order"}, "order 2"),
    "a value that is static": Option(lambda n: check(vjp_rule(lambda x: (x**2, 3), lambda xs, ct:
        (2 * xs[0] * ct[0],), value=lambda x: (x**2, n)), X, checks=("primal",)), 3, 4,
        {"primal"}),
}  # fmt: skip


def jax_rule(fn, backward):
    f = jax.custom_vjp(fn)
    f.defvjp(lambda x: (fn(x), x), lambda x, ct: (backward(x, ct),))
    return f


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
        assert wrong.numbers["leaves"] == right.numbers["leaves"] or "differ" in name
