"""The derivative that is expected, as the user gives it to `check_rule`: `reference=`, also of
methods and Modules."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


class Affine(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    name: str = "affine"

    def plain(self, x):
        return self.weight * x + self.bias

    @eqx.filter_jit
    def compiled(self, x):
        return self.weight * x + self.bias

    def __call__(self, x):
        return _forgets_the_weight(self, x)


@eqg.custom_vjp
def _forgets_the_weight(layer, x):
    return layer.plain(x)


_forgets_the_weight.def_fwd(lambda layer, x: (layer.plain(x), (layer, x)))
_forgets_the_weight.def_bwd(
    lambda res, ct: (eqg.tangents.of(res[0], bias=ct), ct * res[0].weight)
)

AFFINE, POINT = Affine(jnp.array([2.0, -0.5]), jnp.ones(2)), jnp.array([0.5, 3.0])
FORMS = {
    "Module": lambda: (AFFINE, AFFINE),
    "method": lambda: (AFFINE.plain, AFFINE.__call__),
    "compiled method": lambda: (AFFINE.compiled, eqx.filter_jit(AFFINE.__call__)),
    "compiled Module": lambda: (eqx.filter_jit(AFFINE.plain), eqx.filter_jit(AFFINE)),
}
REFERENCES = {
    "method": lambda: AFFINE.plain,
    "compiled method": lambda: AFFINE.compiled,
    "function of the class": lambda: Affine.plain,
    "compiled": lambda: eqx.filter_jit(AFFINE.plain),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_arrays_of_a_module_are_perturbed_however_it_is_called(form):
    right, wrong = FORMS[form]()
    right = AFFINE.plain if form == "Module" else right
    eqgt.check_rule(right, POINT, checks="reverse")
    with pytest.raises(eqgt.RuleCheckError, match=r"self\.weight"):
        eqgt.check_rule(wrong, POINT, checks="reverse")


@pytest.mark.parametrize("name", REFERENCES)
def test_references_of_the_same_module(name):
    reference = REFERENCES[name]()
    eqgt.check_rule(AFFINE.plain, POINT, checks="reverse", reference=reference)
    with pytest.raises(eqgt.RuleCheckError, match=r"self\.weight"):
        eqgt.check_rule(AFFINE, POINT, checks="reverse", reference=reference)


def test_a_reference_that_does_not_have_the_arrays_of_the_module():
    with pytest.raises(eqg.RuleError, match=r"is not a function of `self\.weight`") as error:
        eqgt.check_rule(AFFINE, POINT, reference=lambda x: 2 * x)
    assert "check `lambda x: layer(x)`" in str(error.value)
    fn = lambda x: AFFINE.plain(x)
    eqgt.check_rule(fn, POINT, checks="reverse", reference=lambda x: AFFINE.weight * x)


def test_numbers_of_a_module_are_static_where_a_reference_is_given():
    options = {"checks": "reverse", "reference": lambda x: -3 * x}
    eqgt.check_rule(eqg.nn.GradientReversal(3.0), POINT, **options)


@pytest.mark.parametrize("bound", [0.5, 0.7])
def test_a_reference_with_a_rule(bound):
    def clipped(k, wrap=eqg.custom_vjp):
        rule = wrap(lambda x: x)
        define = getattr(rule, "def_fwd", None)
        backward = lambda _, ct: (jnp.clip(ct, -k, k),)
        if define is None:
            rule.defvjp(lambda x: (x, None), backward)
        else:
            define(lambda x: (x, None))
            rule.def_bwd(backward)
        return rule

    options = {"checks": ("forward", "reverse"), "nonlinear": True, "raises": False}
    for wrap, verdict in ((eqg.custom_vjp, "passed"), (jax.custom_vjp, "skipped")):
        reference = clipped(bound, wrap)
        report = eqgt.check_rule(clipped(0.5), POINT, reference=reference, **options)
        assert [f.check for f in report.failures] == ["reverse"] * (bound != 0.5)
        assert report["forward"][0].verdict == verdict


WRONG_SHAPES = {
    "a scalar": lambda x, y: jnp.sum(x * y),
    "two outputs": lambda x, y: (x * y, x),
    "none": lambda x, y: 3,
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_reference_with_other_outputs(name):
    options = {"reference": WRONG_SHAPES[name], "checks": "reverse", "raises": False}
    report = eqgt.check_rule(lambda x, y: x * y, POINT, POINT, **options)
    assert "`reference` does not return what `<lambda>` returns" in str(report)
    assert "`<lambda>`: float" in str(report)


def test_forward_mode_of_a_rule_without_def_jvp():
    rule = eqg.custom_vjp(lambda x: jnp.floor(2 * x))
    rule.def_fwd(lambda x: (rule(x), None))
    rule.def_bwd(lambda _, ct: (2 * ct,))
    options = {"reference": lambda x: 2 * x, "checks": ("forward", "reverse")}
    report = eqgt.check_rule(rule, POINT, raises=False, **options)
    assert [failure.check for failure in report.failures] == ["forward"]
    text = " ".join(str(report).split())
    assert "forward mode is the derivative of the function, as of every `custom_vjp`" in text
    rule.def_jvp(lambda primals, ts: (rule(*primals), 2 * ts[0]))
    eqgt.check_rule(rule, POINT, **options)


@pytest.mark.slow
def test_solvers_are_no_reference_of_second_order():
    """Autodiff of a solver on the host, which stops at a tolerance, is zero."""
    optimize = pytest.importorskip("scipy.optimize")
    objective = lambda w, a, b: jnp.sum(jnp.cosh(w) - a * w + b * w**2 / 2)

    @eqg.implicit(jax.grad(objective))
    @eqg.host_function(out=lambda a, b: a)
    def fit(a, b):
        slope = lambda w: np.sinh(w) - a + b * w
        both = lambda w: (np.sum(np.cosh(w) - a * w + b * w**2 / 2), slope(w))
        start, options = np.zeros(3), {"gtol": 1e-12}
        found = optimize.minimize(both, start, jac=True, method="BFGS", options=options)
        return found.x.astype(a.dtype)

    with jax.enable_x64(True):
        args = jnp.array([0.3, 1.0, 2.0], "float64"), jnp.array(0.5, "float64")
        checks = ("forward", "reverse", "order")
        eqgt.check_rule(fit, *args, checks=checks)
        wrong = eqg.custom_vjp(lambda a, b: fit(a, b))
        wrong.def_fwd(lambda a, b: (fit(a, b), (a, b)))
        stopped = jax.lax.stop_gradient
        wrong.def_bwd(lambda res, ct: jax.vjp(fit, *map(stopped, res))[1](ct))
        report = eqgt.check_rule(wrong, *args, checks=checks, raises=False)
        assert {failure.check for failure in report.failures} == {"order"}
