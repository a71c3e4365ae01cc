"""Arguments of a function with a rule: calls, leaves, outputs; and those that are not
differentiated, which are no part of the answer, whatever their values."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def jvp_of(fn):
    decorated = eqg.custom_jvp(fn)
    decorated.def_jvp(lambda primals, tangents: (fn(*primals), 2 * primals[0] * tangents[0]))
    return decorated


def vjp_of(fn):
    decorated = eqg.custom_vjp(fn)
    decorated.def_fwd(lambda x: (decorated(x), x))
    decorated.def_bwd(lambda x, ct: (2 * x * ct,))
    return decorated


class Affine(eqx.Module):
    @eqg.custom_vjp
    @staticmethod
    def double(x):
        return 2 * x

    @double.def_fwd
    @staticmethod
    def _double_fwd(x):
        return 2 * x, None

    @double.def_bwd
    @staticmethod
    def _double_bwd(residuals, ct):
        return (7 * ct,)

    @eqg.custom_vjp
    @classmethod
    def named(cls, x):
        return len(cls.__name__) * x

    @named.def_fwd
    def _named_fwd(cls, x):
        return cls.named(x), None

    @named.def_bwd
    def _named_bwd(residuals, ct):
        return None, 8 * ct

    @staticmethod
    @eqg.custom_jvp
    def cube(x):
        return x**3

    @classmethod
    @eqg.custom_jvp
    def square(cls, x):
        return x**2


Affine.cube.def_jvp(lambda p, t: (p[0] ** 3, 5 * t[0]))
Affine.__dict__["square"].__func__.def_jvp(lambda p, t: (p[1] ** 2, 6 * t[1]))


@pytest.mark.parametrize("owner", [Affine, Affine()])
def test_static_and_class_methods(owner):
    assert (owner.double(3.0), owner.named(3.0)) == (6.0, 18.0)
    assert (jax.grad(owner.double)(3.0), jax.grad(owner.named)(3.0)) == (7.0, 8.0)
    assert (jax.grad(owner.cube)(1.0), jax.grad(owner.square)(1.0)) == (5.0, 6.0)


SCALARS = [3.0, np.float32(3.0), np.array(3.0, np.float32), jnp.array(3.0)]


@pytest.mark.parametrize("with_rule", [jvp_of, vjp_of])
@pytest.mark.parametrize("x", SCALARS, ids=lambda x: type(x).__name__)
def test_python_and_numpy_numbers(with_rule, x):
    """A Python number is a number: Equinox's `filter_custom_vjp` returns zero here."""
    f = with_rule(lambda x: x * x)
    assert f(x) == 9.0
    assert isinstance(f(x), jax.Array)
    assert jax.grad(f)(x) == jax.jit(jax.grad(f))(x) == jax.grad(jax.jit(f))(x) == 6.0
    assert jax.hessian(f)(x) == 2.0
    assert jax.grad(lambda y: f(y) * f(x))(2.0) == 36.0
    # A weak type stays weak.
    half = jnp.array(1.0, "bfloat16")
    assert (f(1.0) * half).dtype == half.dtype
    assert jax.grad(f)(1.0).weak_type


class Variable:
    """An object that JAX converts to an array, as the variables of several libraries."""

    def __init__(self, value):
        self.value = value
        self.shape, self.dtype = value.shape, value.dtype
        self.ndim, self.size = value.ndim, value.size

    def __jax_array__(self):
        return self.value


Y = jnp.linspace(0.25, 2.0, 6).reshape(2, 3)
FUNCTIONS = {
    "add": lambda x: eqg.tangents.add(x, x),
    "scale": lambda x: eqg.tangents.scale(Y, x),
    "norm": eqg.safe.norm,
    "ste.ternary": lambda x: eqg.ste.ternary(Y, threshold=x),
    "linear_recurrence": lambda x: eqg.linear_recurrence(x, x),
    "scale_gradient": lambda x: jax.grad(lambda y: jnp.sum(eqg.scale_gradient(y, x)))(Y),
    "substitute": lambda x: eqg.safe.where(Y > 1, jnp.sqrt, Y, 0.0, substitute=x),
}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_object_that_jax_converts(name):
    assert_close(FUNCTIONS[name](Variable(Y)), FUNCTIONS[name](Y))


# ---------------------------------------------------------------- what is not differentiated


# The derivative with respect to `y` is infinite or NaN wherever `x` is not positive.
def power(x, y):
    return x**y


dense, reverse = eqg.custom_jvp(power), eqg.custom_vjp(power)
of_x, of_y = lambda x, y: y * x ** (y - 1), lambda x, y: x**y * jnp.log(x)
dense.def_jvp(lambda p, t: (dense(*p), of_x(*p) * t[0] + of_y(*p) * t[1]))
reverse.def_fwd(lambda x, y: (reverse(x, y), (x, y)))
reverse.def_bwd(lambda saved, ct: (of_x(*saved) * ct, of_y(*saved) * ct))
partials = eqg.elementwise(power, (lambda _, *xy: of_x(*xy), lambda _, *xy: of_y(*xy)))
RULES = {"dense": dense, "elementwise": partials, "reverse": reverse}
MODES = [
    jax.grad,
    lambda f: jax.jit(jax.grad(f)),
    lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))[0],
    lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 1)[0]),
    lambda f: jax.grad(jax.checkpoint(f)),
    lambda f: jax.grad(lambda x: jax.lax.cond(x < 5, f, f, x)),
]


@pytest.mark.parametrize("name", RULES)
def test_dead_argument(name):
    """With respect to `x` alone, at a point where the term of `y` is NaN."""
    f = RULES[name]
    for x in (0.0, -2.0):
        for mode in MODES:
            assert mode(lambda x: f(x, 2.0))(jnp.array(x)) == 2 * x
    assert jax.jit(jax.hessian(lambda x: f(x, 2.0)))(jnp.array(-2.0)) == 2.0
    assert jnp.isnan(jax.grad(f, 1)(-2.0, 2.0))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacrev])
def test_dead_output(transform):
    """The cotangent of an output that nobody uses: zero times infinity does not arise."""
    both = eqg.custom_vjp(lambda x: (x, x))
    both.def_fwd(lambda x: (both(x), x))
    both.def_bwd(lambda x, cts: (2 * cts[0] + jnp.inf * cts[1],))
    assert transform(lambda x: both(x)[0])(1.0) == 2.0
    assert transform(lambda x: jax.vmap(both)(jnp.stack([x, x]))[0].sum())(1.0) == 4.0
    assert transform(lambda x: both(x)[1])(1.0) == jnp.inf
    # Of a rule that is not linear, nothing may be dropped: it gets zeros, and is just called.
    both = eqg.custom_vjp(lambda x: (x, x))
    both.def_fwd(lambda x: ((x, x), None))
    both.def_bwd(lambda _, cts: (jnp.clip(cts[0], -1.0, 1.0) + jnp.cos(cts[1]),))
    assert transform(lambda x: 10 * both(x)[0])(1.0) == 2.0


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd])
def test_an_output_that_does_not_move_is_zero_for_what_follows(derivative):
    """`sqrt` has an infinite slope at 0, which multiplies the tangent of the second output."""
    outputs = eqg.custom_jvp(lambda x, y: (x, y))
    outputs.def_jvp(lambda p, t: (outputs(*p), (2 * t[0], 3 * t[1])))

    def loss(x):
        first, second = outputs(x, jnp.zeros(()))
        return first + jnp.sqrt(second)

    assert derivative(loss)(jnp.array(1.0)) == 2.0
