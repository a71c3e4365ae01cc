"""Rules written as a line of partial derivatives."""

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


@pytest.mark.thorough
def test_one_argument():
    f = eqg.elementwise(jnp.sin, lambda out, x: jnp.cos(x))
    x = jnp.linspace(-1.0, 1.0, 5)
    total = lambda f: lambda x: jnp.sum(f(x) ** 2)
    for transform in (jax.grad, jax.hessian, jax.jacfwd, lambda f: jax.jit(jax.grad(f))):
        assert_close(transform(total(f))(x), transform(total(jnp.sin))(x))
    assert f.__name__ == "sin"
    tuple_form = eqg.elementwise(jnp.sin, lambda out, x: (jnp.cos(x),))
    assert jax.grad(tuple_form)(0.0) == 1.0


def test_decorator_forms():
    @eqg.elementwise(lambda out, x: 2 * x)
    def first(x):
        return x**2

    @eqg.elementwise(derivative=lambda out, x: 2 * x)
    def second(x):
        """A square."""
        return x**2

    assert jax.grad(first)(3.0) == jax.grad(second)(3.0) == 6.0
    assert (second.__name__, second.__doc__) == ("second", "A square.")


def test_out_is_differentiated_by_the_rule_itself():
    exp = eqg.elementwise(jnp.exp, lambda out, x: out)
    third = jax.grad(jax.grad(jax.grad(exp)))
    assert jnp.allclose(third(0.5), jnp.exp(0.5))
    assert jnp.allclose(jax.jacfwd(jax.jacrev(exp))(0.5), jnp.exp(0.5))


SHAPES = [((3,), (3,)), ((), (3,)), ((2, 1), (1, 3)), ((2, 3), (1, 1)), ((1,), (4,))]


@pytest.mark.slow
@pytest.mark.parametrize("shapes", SHAPES)
def test_broadcasting(shapes, getkey):
    x, y = (jax.random.uniform(getkey(), shape, minval=0.5) for shape in shapes)
    f = eqg.elementwise(jnp.arctan2, lambda o, x, y: (y / (x**2 + y**2), -x / (x**2 + y**2)))
    loss = lambda f: lambda *args: jnp.sum(jnp.sin(f(*args)))
    for transform in (jax.grad, lambda f, n: jax.jit(jax.grad(f, n)), jax.hessian):
        assert_close(
            transform(loss(f), (0, 1))(x, y), transform(loss(jnp.arctan2), (0, 1))(x, y)
        )
    assert_close(jax.jvp(f, (x, y), (x, y)), jax.jvp(jnp.arctan2, (x, y), (x, y)))


def test_setup_is_shared_and_run_once():
    calls = []

    def setup(out, x, y):
        calls.append(out)
        return 1 / out

    partials = (lambda out, x, y, r: x * r, lambda out, x, y, r: y * r)
    for derivative in (partials, lambda out, x, y, r: (x * r, y * r)):
        hypot = eqg.elementwise(jnp.hypot, derivative, setup=setup)
        calls.clear()
        assert jnp.allclose(jnp.stack(jax.grad(hypot, (0, 1))(3.0, 4.0)), jnp.array([0.6, 0.8]))
        assert len(calls) == 1


def test_only_the_partials_that_are_needed():
    def fail(*_):
        raise AssertionError("called")

    f = eqg.elementwise(lambda x, y: x * y, (lambda out, x, y: y, fail))
    assert jax.grad(f)(2.0, 3.0) == 3.0
    with pytest.raises(AssertionError, match="called"):
        jax.grad(f, 1)(2.0, 3.0)


def test_none_is_zero():
    for derivative in ((lambda out, x, n: n, None), lambda out, x, n: (n, None)):
        f = eqg.elementwise(lambda x, n: x * n, derivative)
        assert jax.grad(f, (0, 1))(2.0, 3.0) == (3.0, 0.0)
        assert jax.grad(f)(2.0, 3) == 3.0


def test_keyword_only_arguments():
    @eqg.elementwise(lambda out, x, *, slope: slope * jnp.ones_like(x))
    def f(x, *, slope, unused=None):
        return x * slope

    assert jax.grad(lambda x: f(x, slope=5.0))(1.0) == 5.0
    g = eqg.elementwise(
        lambda x, *, slope: x, lambda out, x, s: s, setup=lambda out, x, *, slope: slope
    )
    assert jax.grad(lambda x: g(x, slope=7.0))(1.0) == 7.0


def test_defaults_of_keyword_only_arguments():
    power = eqg.elementwise(lambda x, *, k=2.0: x**k, lambda out, x, *, k: k * x ** (k - 1))
    assert jax.grad(power)(3.0) == 6.0
    assert jax.grad(lambda x: power(x, k=3.0))(2.0) == 12.0


def test_dtypes():
    f = eqg.elementwise(jnp.tanh, lambda out, x: 1 - out**2)
    for dtype in ("float16", "bfloat16", "float32", "complex64"):
        x = jnp.array([0.5, 1.5], dtype)
        _, t = jax.jvp(f, (x,), (x,))
        assert t.dtype == dtype
    mixed = eqg.elementwise(
        lambda x, y: x.astype("float32") * y, lambda out, x, y: (y, x.astype("float32"))
    )
    grads = jax.grad(mixed, (0, 1))(jnp.array(2.0, "bfloat16"), jnp.array(3.0, "float32"))
    assert [g.dtype for g in grads] == ["bfloat16", "float32"]
    assert eqg.elementwise(jnp.abs, lambda out, x: 3)(jnp.array(-1.0)) == 1.0
    assert jax.grad(eqg.elementwise(jnp.abs, lambda out, x: 3))(1.0) == 3.0


@pytest.mark.thorough
def test_partials_may_close_over_traced_values():
    def loss(x, slope):
        return eqg.elementwise(jnp.sign, lambda out, x: slope * x)(x)

    slope = jnp.array(5.0)
    for transform in (
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: lambda x, s: jax.vmap(jax.grad(f), (None, 0))(x, s[None])[0],
    ):
        assert transform(loss)(2.0, slope) == 10.0


def test_arguments_left_to_their_defaults():
    f = eqg.elementwise(
        jax.nn.leaky_relu, lambda out, x, slope=0.01: (jnp.where(x > 0, 1.0, slope), None)[:1]
    )
    assert jax.grad(f)(-2.0) == jax.grad(jax.nn.leaky_relu)(-2.0)
    with pytest.raises(RuleError, match="`leaky_relu` has 2 arguments, and was given 1"):
        jax.grad(f)(-2.0, 0.5)
    gelu = eqg.elementwise(jax.nn.gelu, lambda out, x: jax.nn.sigmoid(1.702 * x))
    assert jnp.allclose(jax.grad(gelu)(1.0), jax.nn.sigmoid(1.702))


class TestErrors:
    def test_no_derivative(self):
        with pytest.raises(RuleError, match="given no derivative"):
            eqg.elementwise()

    def test_number_of_partials(self):
        f = eqg.elementwise(jnp.arctan2, lambda out, x, y: (x,))
        with pytest.raises(
            RuleError, match=r"`arctan2` has 2 arguments, and was given 1 partial"
        ):
            jax.grad(f)(1.0, 2.0)
        f = eqg.elementwise(jnp.sin, (None, None))
        with pytest.raises(RuleError, match="`sin` has 1 arguments, and was given 2 partial"):
            jax.grad(f)(1.0)

    def test_shape(self):
        f = eqg.elementwise(jnp.sin, lambda out, x: jnp.ones(5))
        with pytest.raises(
            RuleError, match=r"number 0 of `sin` does not broadcast(?s:.)*\[5\]"
        ):
            jax.jvp(f, (jnp.ones(3),), (jnp.ones(3),))

    def test_not_elementwise(self):
        f = eqg.elementwise(jnp.sum, lambda out, x: 1.0)
        with pytest.raises(RuleError, match=r"does not broadcast(?s:.)*acts on each element"):
            jax.grad(f)(jnp.ones(3))

    def test_outputs(self):
        f = eqg.elementwise(lambda x: (x, x), lambda out, x: 1.0)
        with pytest.raises(RuleError, match="did not return one array of floats"):
            jax.grad(lambda x: f(x)[0])(1.0)

    def test_numpy(self):
        """It runs eagerly, and in the derivative of an eager call."""
        f = eqg.elementwise(np.sin, lambda out, x: jnp.cos(x))
        assert jnp.allclose(jax.grad(f)(1.0), jnp.cos(1.0))
        error = jax.errors.TracerArrayConversionError
        with pytest.raises(error, match="traced array") as caught:
            jax.jit(f)(1.0)
        notes = caught.value.__notes__
        assert sum("`eqx_grads.host_function`" in note for note in notes) == 1

    def test_complex(self):
        f = eqg.elementwise(jnp.real, lambda out, x: 1.0)
        with pytest.raises(RuleError, match="gives a complex tangent to a real output"):
            jax.grad(f)(1j)
