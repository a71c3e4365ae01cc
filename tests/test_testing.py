"""`eqx_grads.testing` proves itself: it catches all planted faults, accuses no right rule."""

import gc
import re

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jaxtyping import Array

from .faults import FAULTS
from .right_rules import RIGHT


@pytest.fixture(autouse=True)
def _forget():
    """Hundreds of small programs are compiled here; do not keep them all."""
    yield
    jax.clear_caches()
    gc.collect()


# ---------------------------------------------------------------- planted faults


@pytest.mark.conformance
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    fault = FAULTS[name]
    fn, args, options = fault.make()
    report = eqgt.check_rule(fn, *args, checks=(fault.check,), raises=False, **options)
    texts = [f"{failure.where} {failure.text}" for failure in report.failures]
    assert any(re.search(fault.match, text) for text in texts), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_same_rule_without_the_fault_passes(name):
    fn, args, options = FAULTS[name].right()
    eqgt.check_rule(fn, *args, checks=(FAULTS[name].check,), **options)


# ---------------------------------------------------------------- right rules

# One of each kind for every change; all of them are slow tests.
SOME = [
    "nested_containers_with_none",
    "straight_through",
    "implicit_derivative",
]


def _check_right(name, dtype, **options):
    case = RIGHT[name](jnp.dtype(dtype), jr.key(0))
    if case is None:
        pytest.skip(f"this rule does not exist in {dtype}")
    fn, args, own = case
    skip = (*own.pop("skip", ()), *options.pop("skip", ()))
    eqgt.check_rule(fn, *args, skip=skip, **own, **options)


@pytest.mark.conformance
@pytest.mark.parametrize("name", SOME)
def test_right_rule_is_not_accused(name):
    _check_right(name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_rule_is_not_accused_over_20_seeds(name, dtype):
    with jax.enable_x64(dtype == "float64" or jax.config.jax_enable_x64):
        # Transformations and leaks are much the same in each.
        skip = () if dtype == "float32" else ("transforms", "leaks", "zeros")
        _check_right(name, dtype, seed=range(20), skip=skip)


@pytest.mark.thorough
def test_the_dense_tangents_of_jax_are_not_held_against_a_function():
    """`softplus` of JAX, which `log_sigmoid` is made of, makes arrays of zero tangents."""
    f = lambda x, y: jax.nn.log_sigmoid(x) - jax.nn.log_sigmoid(y)
    eqgt.check_rule(f, jnp.array([0.5, 1.0]), jnp.array([0.2, -1.0]), checks="zeros")


# ---------------------------------------------------------------- the report


def wrong(x, y):
    return jnp.sin(x) * y


wrong_jvp = eqg.custom_jvp(wrong)
wrong_jvp.def_jvp(lambda p, t: (wrong_jvp(*p), jnp.cos(p[0]) * p[1] * t[0]))
POINT = jnp.array([0.5, 1.0]), jnp.array([2.0, -3.0])


@pytest.mark.slow
def test_a_check_draws_the_same_directions_alone_as_among_others():
    checks = ("forward", "linear", "order")
    together = eqgt.check_rule(wrong_jvp, *POINT, checks=checks, seed=3, raises=False)
    for name in checks:
        alone = eqgt.check_rule(wrong_jvp, *POINT, checks=name, seed=3, raises=False)
        errors = [f.error for f in together.findings if f.check == name]
        assert errors == [f.error for f in alone.findings]
        assert any(errors)  # which differ between directions


def test_it_raises_with_the_report():
    with pytest.raises(eqgt.RuleCheckError, match="the term of `y` is missing") as error:
        eqgt.check_rule(wrong_jvp, *POINT, checks="forward")
    text = str(error.value)
    for part in ("The rule of `wrong`: FAILED", "forward", "at `y`", "expected", "got"):
        assert part in text
    assert isinstance(error.value, AssertionError)


@pytest.mark.slow
def test_checks_and_skip():
    everything = eqgt.check_rule(jnp.sin, 1.0)
    names = {finding.check for finding in everything.findings}
    assert len(names) == 12
    without = eqgt.check_rule(jnp.sin, 1.0, skip=("leaks", "transforms"))
    assert {f.check for f in without.findings} == names - {"leaks", "transforms"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"checks": ("forwards",)}, "no check `forwards`"),
        ({"skip": "backward"}, "no check `backward`"),
        ({"nondifferentiable": ("z",)}, "names `z`, which is not a positional argument"),
        ({"nondifferentiable": ("x.z",)}, "names `x.z`(.|\n)*there are `x`"),
    ],
)
def test_options_that_make_no_sense(options, match):
    with pytest.raises(eqg.RuleError, match=match):
        eqgt.check_rule(wrong, *POINT, **options)


def test_names_of_a_method_are_those_of_its_arrays():
    class Scale(eqx.Module):
        factor: Array

        @eqg.custom_jvp
        def __call__(self, x):
            return self.factor * x

    with pytest.raises(eqg.RuleError, match=r"there are `x`, `self\.factor`\n"):
        eqgt.check_rule(Scale(jnp.ones(())).__call__, 1.0, nondifferentiable=("factor",))


def test_nothing_to_differentiate():
    with pytest.raises(eqg.RuleError, match="nothing that can be differentiated"):
        eqgt.check_rule(lambda n: n + 1, 3)


def test_single_checks_are_that_check():
    checks = ("forward", "reverse", "adjoint", "linear", "transforms", "leaks", "residuals")
    for name in checks:
        report = getattr(eqgt, f"check_{name}")(jnp.sin, jnp.array([0.5, 1.0]))
        assert {finding.check for finding in report.findings} == {name}


# ---------------------------------------------------------------- the pieces


def test_numerical_jacobian_of_what_it_does_not_take():
    with pytest.raises(TypeError, match="real arrays that return one array"):
        eqgt.numerical_jacobian(lambda x: (x, x), jnp.ones(2))
    with pytest.raises(TypeError, match="real arrays"):
        eqgt.numerical_jacobian(jnp.sin, jnp.ones(2, complex))


# ---------------------------------------------------------------- the plugin

pytest_plugins = ["pytester"]


@pytest.mark.thorough
def test_the_plugin_adds_the_report_and_the_seed(pytester):
    pytester.makepyfile(
        """
        import jax.numpy as jnp

        def test_right(check_rule):
            report = check_rule(jnp.sin, 1.0, checks=("forward",))
            assert report.numbers["seed"] == 7

        def test_wrong(check_rule):
            check_rule(jnp.sin, 1.0, checks=("forward",), reference=jnp.exp)
        """
    )
    result = pytester.runpytest_subprocess("--eqx-grads-seed", "7", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*The rule of `sin`: FAILED (seed 7)*"])


class _Part(eqx.Module):
    scale: Array
    frozen: Array


class _WithFrozen(eqx.Module):
    """Its rule has no cotangent for what is called frozen, which the function uses."""

    weight: Array
    parts: list
    table: dict

    @eqg.custom_vjp
    def __call__(self, x):
        (part,) = self.parts
        return self.weight * x * part.scale * part.frozen * self.table["frozen"]

    @__call__.def_fwd
    def _call_fwd(self, x):
        return self(x), (self, x)

    @__call__.def_bwd
    def _call_bwd(residuals, ct):
        self, x = residuals
        (part,) = self.parts
        ct = ct * part.frozen * self.table["frozen"]
        parts = [_Part(jnp.sum(ct * self.weight * x), None)]
        weight = jnp.sum(ct * x * part.scale)
        return eqg.tangents.of(self, weight=weight, parts=parts), ct * self.weight * part.scale


_QUICK = {"checks": ("reverse", "zeros", "adjoint", "order"), "raises": False}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "passes"),
    [
        (("self.parts[0].frozen", "self.table['frozen']"), True),
        (("self.parts[0].frozen", 'self.table["frozen"]'), True),
        (("self.parts[0].frozen", "self.table"), True),
        (("self.parts", "self.table"), True),
        ("self", True),
        (("self.parts[0].scale", "self.table"), False),
        (("self.table",), False),
    ],
)
def test_fields_that_are_not_perturbed(names, passes):
    module = _WithFrozen(
        jnp.array(2.0), [_Part(jnp.array(1.5), jnp.array(0.7))], {"frozen": jnp.array(1.1)}
    )
    x = jnp.array([1.5, 0.2])
    report = eqgt.check_rule(module, x, nondifferentiable=names, **_QUICK)
    assert report.passed == passes
    if not passes:
        assert "`self.parts[0].frozen`" in str(report)
