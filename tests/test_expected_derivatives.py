"""The derivative that is expected, as the user gives it to `check_rule`: `reference=` and
`expected_*=`, also of methods and Modules."""

import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest


class Scale(eqx.Module):
    weight: jax.Array

    def plain(self, x):
        return self.weight * x

    @eqg.custom_vjp
    def __call__(self, x):
        return self.weight * x

    @__call__.def_fwd
    def _call_fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _call_bwd(residuals, ct):
        self, x = residuals
        return eqg.tangents.of(self, weight=ct * x), ct * self.weight

    @eqg.custom_vjp
    def forgets_itself(self, x):
        return self.weight * x

    @forgets_itself.def_fwd
    def _forgets_fwd(self, x):
        return self.forgets_itself(x), (self, x)

    @forgets_itself.def_bwd
    def _forgets_bwd(residuals, ct):
        self, _ = residuals
        return None, ct * self.weight


SCALE, X = Scale(jnp.array(2.0, "float32")), jnp.array(3.0, "float32")
EXPECTED = {
    "method as the reference": lambda: {"reference": SCALE.plain},
    "formula of cotangents": lambda: {
        "expected_cotangent": lambda primals, ct: (
            Scale(ct * primals[1]),
            ct * primals[0].weight,
        )
    },
    "formula of tangents": lambda: {
        "expected_tangent": lambda primals, ts: (
            ts[0].weight * primals[1] + primals[0].weight * ts[1]
        )
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_expected_derivative_of_a_method_is_that_of_its_module_too(name):
    options = {"checks": ("forward", "reverse"), **EXPECTED[name]()}
    eqgt.check_rule(SCALE, X, **options)
    with pytest.raises(eqgt.RuleCheckError, match=r"self\.weight"):
        eqgt.check_rule(SCALE.forgets_itself, X, **options)


def test_a_reference_that_does_not_have_the_arrays_of_the_module():
    with pytest.raises(eqg.RuleError, match=r"is not a function of `self\.weight`") as error:
        eqgt.check_rule(SCALE, X, reference=lambda x: 2 * x)
    assert "check `lambda x: layer(x)`" in str(error.value)
    eqgt.check_rule(lambda x: SCALE(x), X, checks="reverse", reference=lambda x: 2 * x)


def test_numbers_of_a_module_are_static_where_a_reference_is_given():
    eqgt.check_rule(
        eqg.nn.GradientReversal(3.0), X, checks="reverse", reference=lambda x: -3 * x
    )


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
    formula = lambda primals, ct: (
        Affine(ct * primals[1], ct),
        ct * primals[0].weight,
    )
    eqgt.check_rule(right, POINT, checks="reverse", expected_cotangent=formula)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_of_the_same_module(name):
    reference = REFERENCES[name]()
    eqgt.check_rule(AFFINE.plain, POINT, checks="reverse", reference=reference)
    with pytest.raises(eqgt.RuleCheckError, match=r"self\.weight"):
        eqgt.check_rule(AFFINE, POINT, checks="reverse", reference=reference)


def test_none_is_zero_in_a_formula():
    """Of the weight, of a Module as a whole, and of an output."""
    formula = lambda primals, ct: (
        eqg.tangents.of(primals[0], bias=ct),
        ct * primals[0].weight,
    )
    eqgt.check_rule(AFFINE, POINT, checks="reverse", expected_cotangent=formula)

    rule = eqg.custom_vjp(lambda x: (x, jnp.round(x)))
    rule.def_fwd(lambda x: (rule(x), None))
    rule.def_bwd(lambda _, ct: (ct[0],))
    eqgt.check_rule(
        rule,
        POINT,
        checks=("forward", "reverse"),
        expected_tangent=lambda primals, ts: (ts[0], None),
        expected_cotangent=lambda primals, ct: (ct[0],),
        cotangents=(POINT, 0 * POINT),
    )


def test_what_is_not_perturbed_has_a_zero_tangent():
    product = lambda x, y, i: x[i] * y
    args = (POINT, jnp.array([1.5, -2.0]), jnp.array([1, 0]))

    def formula(primals, ts):
        (x, y, i), (t_x, t_y, t_i) = primals, ts
        assert t_i is None
        return t_x[i] * y + x[i] * t_y

    options = {"nondifferentiable": "y", "expected_tangent": formula}
    eqgt.check_rule(product, *args, checks="forward", **options)


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


WRONG_FORMULAS = {
    "two for one": ({"expected_tangent": lambda p, t: (t[0], t[0])}, r"for it is \(float"),
    "a sum": (
        {"expected_tangent": lambda p, t: jnp.sum(t[0])},
        "at x: the value is|the tangent is float",
    ),
    "cotangent": (
        {"expected_cotangent": lambda p, ct: (ct[0],)},
        "at x: the value is|the tangent is float",
    ),
    "given": ({"cotangents": 1.0}, "`cotangents` has an array of another shape"),
    "tangents": ({"tangents": 1.0}, "`tangents` has an array of another shape"),
}


@pytest.mark.parametrize("name", WRONG_FORMULAS)
def test_formulas_of_another_shape(name):
    options, match = WRONG_FORMULAS[name]
    report = eqgt.check_rule(lambda x: 2 * x, POINT, raises=False, **options)
    assert re.search(match, str(report))


class Fussy:
    """A node of a PyTree that looks at what it is made of."""

    def __init__(self, x):
        assert x.shape == (2,)
        self.x = x


jax.tree_util.register_pytree_node(Fussy, lambda f: ((f.x,), None), lambda _, x: Fussy(*x))


def test_nodes_that_look_at_their_children():
    eqgt.check_rule(lambda f: jnp.sin(f.x), Fussy(POINT), checks=("forward", "reverse"))


def test_a_formula_with_another_number_of_cotangents():
    formula = lambda primals, ct: (ct * primals[0].weight,)
    with pytest.raises(eqgt.RuleCheckError, match=r"one\s+cotangent for each argument"):
        eqgt.check_rule(SCALE, X, checks="reverse", expected_cotangent=formula)


# ---------------------------------------------------------------- one mode is asked for


def _half(derivative):
    rule = eqg.custom_vjp(lambda x: derivative * x)
    rule.def_fwd(lambda x: (derivative * x, None))
    rule.def_bwd(lambda _, ct: (0.5 * ct,))
    return rule


@pytest.mark.slow
def test_modes_that_are_meant_to_differ_are_not_adjoint():
    """Forward mode is that of the function, as in every `custom_vjp` of this library."""
    options = {"expected_cotangent": lambda primals, ct: (0.5 * ct,)}
    report = eqgt.check_rule(_half(1.0), jnp.ones(3), **options)
    assert [finding.verdict for finding in report["adjoint"]] == ["skipped"]
    report = eqgt.check_rule(_half(0.5), jnp.ones(3), **options)
    assert {finding.verdict for finding in report["adjoint"]} == {"passed"}
    report = eqgt.check_rule(_half(1.0), jnp.ones(3), checks="adjoint", raises=False)
    assert not report.passed


def test_arguments_that_are_not_perturbed_are_no_residuals():
    x, n = jnp.ones(6, "float32"), jnp.arange(6, dtype="float32")
    report = eqgt.check_residuals(lambda x, n: x * n, x, n, nondifferentiable=("n",))
    assert report["residuals"][0].where.startswith("0 bytes per call")
    host = np.linspace(0, 1, 6, dtype="float32")
    report = eqgt.check_residuals(lambda x, n: x * n, x, host, nondifferentiable="n")
    assert report["residuals"][0].where.startswith("0 bytes per call")
    report = eqgt.check_residuals(lambda x, *, n: x * n, x, n=n)
    assert report["residuals"][0].where.startswith("0 bytes per call")
    report = eqgt.check_residuals(lambda x, n: x * jnp.sin(n), x, n, nondifferentiable=("n",))
    assert report["residuals"][0].where.startswith("24 bytes per call")


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
