"""`check_rule` of functions that round to lower precision: an output or an intermediate result
in float32 or less, whatever the precision of the arguments.

The rules are right, or have a planted fault. `test_the_right_rules_are_right` compares them
with autodiff of the same function without conversions.
"""

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads.testing._differences import directional
from eqx_grads.testing._lowest_precision import lowest_precisions


pytestmark = pytest.mark.x64


DERIVATIVES = ("forward", "reverse", "adjoint", "linear")
FAULTS = ("factor", "sign", "dropped", "missing")
X, Y = jnp.array(0.7), jnp.array(1.3)


def _slope(m, x, y, fault):
    """Of `sin(x) y` and `cos(y) + x` along `y`, with NumPy or `jax.numpy` as `m`."""
    first, second = m.sin(x), -m.sin(y)
    match fault:
        case "factor":
            return 1.01 * first, 1.01 * second
        case "sign":
            return first, -second
        case "dropped":
            return first, 0 * second
        case "missing":
            return 0 * first, 0 * second
    return first, second


def _curve(m, x, y):
    return m.stack([m.sin(x) * y, m.cos(y) + x])


def on_host(fault=None, **options):
    curve = eqg.host_function(
        lambda x, y: _curve(np, x, y), out=jnp.zeros(2, "float32"), **options
    )

    @curve.def_bwd
    def bwd(residuals, ct):
        x, y = residuals
        first, second = _slope(np, x, y, fault)
        return ct[0] * np.cos(x) * y + ct[1], ct[0] * first + ct[1] * second

    return curve


def with_cast(dtype, fault=None, *, of_output=False):
    """The curve, rounded to `dtype`: the output, or an intermediate result."""

    def fn(x, y):
        rounded = _curve(jnp, x, y).astype(dtype)
        return rounded if of_output else rounded.astype(x.dtype)

    curve = eqg.custom_vjp(fn)
    curve.def_fwd(lambda x, y: (fn(x, y), (x, y)))

    @curve.def_bwd
    def bwd(residuals, ct):
        x, y = residuals
        first, second = _slope(jnp, x, y, fault)
        ct = ct.astype(x.dtype)
        return ct[0] * jnp.cos(x) * y + ct[1], ct[0] * first + ct[1] * second

    return curve


MAKERS = {
    "host": on_host,
    "output in float32": lambda fault=None: with_cast("float32", fault, of_output=True),
    "output in bfloat16": lambda fault=None: with_cast("bfloat16", fault, of_output=True),
    "through float32": lambda fault=None: with_cast("float32", fault),
    "through float16": lambda fault=None: with_cast("float16", fault),
    "through bfloat16": lambda fault=None: with_cast("bfloat16", fault),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_right_rules_pass_for_every_seed(name):
    """A host rule failed for one in 15 seeds: "it should be zero, `y` has no influence"."""
    seeds = (4, 24, 35, 43, *range(5, 10))  # the first four failed
    eqgt.check_rule(MAKERS[name](), X, Y, order=1, checks=DERIVATIVES, seed=seeds)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", MAKERS)
def test_wrong_rules_fail_for_every_seed(name, fault):
    rule = MAKERS[name](fault)
    options = {"checks": ("forward", "reverse"), "order": 1, "seed": range(5), "raises": False}
    report = eqgt.check_rule(rule, X, Y, **options)
    for mode in ("forward", "reverse"):
        failures = [f for f in report.failures if f.check == mode]
        # Forward mode of a `custom_vjp` without a `def_jvp` is that of the function.
        if mode == "reverse" or name == "host":
            assert len(failures) >= 5, report


# ---------------------------------------------------------------- finite differences


def test_differences_of_values_in_single_precision():
    fn = lambda x: [np.float32(np.exp(x)), np.float32(np.sin(x))]
    for t in np.geomspace(0.01, 1.0, 30):
        found = directional(fn, [np.array(0.9)], [np.array(t)])
        exact = [t * np.exp(0.9), t * np.cos(0.9)]
        for got, want, error in zip(found.tangents_out, exact, found.errors, strict=True):
            assert abs(got - want) <= error < 3e-4


def test_differences_of_what_does_not_depend_on_an_argument():
    fn = lambda x: [np.float32(np.exp(x)), np.full_like(x, 0.1, np.float32)]
    _, constant = directional(fn, [np.array(0.9)], [np.array(0.3)]).tangents_out
    assert constant == 0.0


def test_a_jacobian_of_a_function_in_single_precision():
    on_host = eqg.host_function(lambda x: np.exp(x), out=jnp.zeros(3, "float32"))
    x = np.array([0.3, 0.9, -1.1])
    jacobian = eqgt.numerical_jacobian(on_host, x)
    assert np.allclose(jacobian, np.diag(np.exp(x)), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the precision of a program


def _lowest(fn, *args, opaque=False):
    with jax.enable_x64(True):
        program = jax.make_jaxpr(fn)(*(jnp.asarray(x, "float64") for x in args))
        return lowest_precisions(program, opaque=opaque)


def test_the_lowest_precision_on_the_way_to_each_output():
    def fn(x, y):
        half = jax.jit(lambda x: jnp.sin(x.astype("float16")).astype("float32"))(x)
        constant = jnp.arange(2.0, dtype="bfloat16").astype("float64")
        step = lambda c, _: ((c * y).astype("float32").astype("float64"), None)
        loop = jax.lax.scan(step, x, None, length=2)[0]
        return x * y, half, y * constant, jnp.float32(1.0), loop, jnp.round(x).astype(int)

    found = _lowest(fn, 1.0, 2.0)
    assert found == [None, np.float16, None, None, np.float32, None]


def test_the_lowest_precision_of_what_is_not_evaluated_in_float64():
    def fn(x):
        return on_host()(x, x), x.astype("float16")

    assert _lowest(fn, 1.0) == [np.float32, np.float16]
    assert _lowest(fn, 1.0, opaque=True) == [np.float32, None]


# ---------------------------------------------------------------- residuals


@pytest.mark.parametrize("rule", ["eqg", "jax", "none"])
def test_a_python_number_that_is_an_argument_is_no_residual(rule):
    """JAX makes its own array, which was counted."""
    fn = lambda x, y: x * y
    if rule == "eqg":
        fn = eqg.custom_vjp(fn)
        fn.def_fwd(lambda x, y: (x * y, (x, y)))
        fn.def_bwd(lambda residuals, ct: (ct * residuals[1], jnp.sum(ct * residuals[0])))
    if rule == "jax":
        fn = jax.custom_vjp(fn)
        fn.defvjp(
            lambda x, y: (x * y, (x, y)),
            lambda residuals, ct: (ct * residuals[1], jnp.sum(ct * residuals[0])),
        )
    finding = eqgt.check_residuals(fn, jnp.arange(3.0), 2.0, max_residual_bytes=0)
    where = finding["residuals"][0].where
    assert where == "0 bytes per call, without the arguments (plain autodiff: 0)"


# ---------------------------------------------------------------- faults in half precision


def _with_backward(fn, backward):
    rule = eqg.custom_vjp(fn)
    rule.def_fwd(lambda x: (fn(x), x))
    rule.def_bwd(lambda x, ct: (backward(x, ct),))
    return rule


def test_a_number_that_is_rounded_in_the_function_only():
    """The factor of the function is 0.0996, and the factor of its rule 0.1."""
    fn = lambda x: 0.1 * x.astype("bfloat16")
    x = jnp.linspace(-1.0, 1.3, 5)
    rule = _with_backward(fn, lambda x, ct: 0.1 * ct.astype(x.dtype))
    eqgt.check_rule(rule, x, order=1, checks=DERIVATIVES, seed=range(3))
    wrong = _with_backward(fn, lambda x, ct: 0.12 * ct.astype(x.dtype))
    with pytest.raises(eqgt.RuleCheckError, match="reverse"):
        eqgt.check_reverse(wrong, x, order=1)
