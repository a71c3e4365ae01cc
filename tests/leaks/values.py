"""Values that go in and out of a rule: integers, keys, Python numbers, text, zeros."""

import jax
import jax.numpy as jnp

from .compositions import both_ways, x, xs, ys
from .registry import both, composition, op_of, ran, shape


@composition
def argument_perturbed_in_one_branch(f):
    """What JAX can't see to be zero is an argument like any other."""

    def loss(x):
        t = jax.lax.cond(x > 0, lambda x: x**2, lambda x: jax.lax.stop_gradient(x), x)
        return f(x, t)

    return both_ways(loss, x())


@both
def integer_and_key_in_a_carry(ruled):
    f = ruled(lambda x, n, key: (jnp.sin(x), n + 1, jax.random.split(key)[0]))

    def loss(x, key):
        init = (x, jnp.array(0), key)
        carry, _ = jax.lax.scan(lambda carry, _: (f(*carry), None), init, None, length=3)
        return carry[0], (carry[1], jax.random.key_data(carry[2]))

    key = jax.random.key(0)
    inner = jax.jit(jax.value_and_grad(loss, has_aux=True))(x(), key)
    return inner, jax.value_and_grad(jax.jit(loss), has_aux=True)(x(), key)


@both
def text_and_numbers_as_outputs(ruled):
    rest = {"text": None, "int": None, "float": None}
    f = ruled(
        lambda x: {"x": jnp.sin(x), "text": "text", "int": 3, "float": 0.5},
        lambda x, t: {"x": jnp.cos(x) * t, **rest},
        lambda x, ct: (jnp.cos(x) * ct["x"],),
    )

    def loss(x):
        def step(x, y):
            out = f(x)
            assert out["text"] == "text"
            return out["x"] * out["float"], out["x"] * y * out["int"]

        x, outs = jax.lax.scan(step, x, ys())
        return x + jnp.sum(outs)

    return both_ways(loss, x())


@both
def unused_output(ruled):
    """One output is dead code: https://github.com/jax-ml/jax/issues/31448"""
    f = ruled(lambda x, y: (jnp.sin(x) * y, jnp.exp(x)))

    def loss(x, keep):
        def step(x, y):
            out = f(x, y)
            return out[keep], out[1 - keep]

        return jax.lax.scan(step, x, ys())[0]

    return both_ways(lambda x: loss(x, 0), x()), both_ways(lambda x: loss(x, 1), x())


@shape
def zero_tangent_of_an_output(rules):
    """`None` for an output that does not move, of a carry that does elsewhere:
    https://github.com/jax-ml/jax/issues/16614"""

    def jvp(primals, tangents):
        (x, y), (t_x, _) = primals, tangents
        return f(x, y), ran((None if t_x is None else jnp.cos(x) * t_x, None))

    f = rules.jvp(lambda x, y: (jnp.sin(x), jax.lax.stop_gradient(y)), jvp, symbolic_zeros=True)

    def loss(x, y):
        step = lambda carry, _: (f(*carry), None)
        (x, y), _ = jax.lax.scan(step, (x, y), None, length=3)
        return x * y

    total = lambda v, y: jnp.sum(jax.vmap(loss, in_axes=(0, None))(v, y))
    return both_ways(loss, x(), x()), both_ways(total, xs(), x())


@shape
def residuals_that_depend_on_the_mask(rules):
    """https://github.com/jax-ml/jax/issues/16614"""

    def value(x, y):
        return jnp.sin(x) * y

    def fwd(x, y, *, perturbed):
        kept = {"slope": jnp.cos(x) * y} if perturbed[0] else {}
        if perturbed[1]:
            kept["sin"] = jnp.sin(x)
        return f(x, y), ran(kept)

    def bwd(kept, ct, *, perturbed):
        return tuple(
            kept[name] * ct if live else None
            for name, live in zip(("slope", "sin"), perturbed, strict=True)
        )

    f = rules.vjp(value, fwd, bwd)
    loss = lambda x, y: jax.lax.scan(lambda x, y: (f(x, y), None), x, y)[0]
    grad_y = jax.grad(lambda y, x: loss(x, y))
    return both_ways(loss, x(), ys()), jax.jit(grad_y)(ys(), x()), grad_y(ys(), x())


@shape
def carry_that_becomes_perturbed(rules):
    """On the second round: the rule runs once for each pattern of zeros."""
    f = op_of("jvp", rules)

    def loss(x):
        step = lambda carry, y: ((f(carry[1], y), carry[0]), None)
        (a, b), _ = jax.lax.scan(step, (x, jnp.array(0.3)), ys())
        return a + b

    return both_ways(loss, x())
