"""What goes in and out of a rule: integers, keys, Python numbers, text, zeros."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .compositions import x, xs, ys
from .registry import for_each, op_of, ran, shape


def both_ways(loss, *args):
    inner = jax.jit(jax.grad(loss))(*args)
    return inner, jax.grad(jax.jit(loss))(*args), jax.grad(loss)(*args)


def scaled(rules, kind):
    """`f(x, t) = sin(x) * t`, whose rules have nothing to say of `t`."""

    def value(x, t):
        return jnp.sin(x) * t

    def jvp(primals, tangents):
        (x, t), (t_x, _) = primals, tangents
        return f(x, t), ran(jnp.cos(x) * t * t_x)

    def fwd(x, t):
        return f(x, t), ran((x, t))

    def bwd(residuals, ct):
        x, t = residuals
        return jnp.cos(x) * t * ct, None

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    return f


@for_each(("jvp", "vjp"))
def constant_argument_in_scan(rules, kind):
    f = scaled(rules, kind)
    loss = lambda x, t: jax.lax.scan(lambda x, _: (f(x, t), None), x, None, length=3)[0]
    return both_ways(loss, x(), x())


@for_each(("jvp", "vjp"))
def constant_argument_in_scan_carry(rules, kind):
    f = scaled(rules, kind)

    def loss(x, t):
        step = lambda carry, _: ((f(*carry), carry[1] + 1), None)
        return jax.lax.scan(step, (x, t), None, length=3)[0][0]

    return both_ways(loss, x(), x())


@for_each(("jvp", "vjp"))
def stopped_argument(rules, kind):
    f = scaled(rules, kind)
    loss = lambda x: f(x, jax.lax.stop_gradient(x) ** 2)
    return both_ways(loss, x())


@for_each(("jvp", "vjp"))
def stopped_argument_from_both_branches(rules, kind):
    f, stop = scaled(rules, kind), jax.lax.stop_gradient

    def loss(x):
        t = jax.lax.cond(x > 0, lambda x: stop(x), lambda x: stop(2 * x), x)
        return f(x, t)

    return both_ways(loss, x())


@for_each(("jvp", "vjp"))
def argument_perturbed_in_one_branch(rules, kind):
    """What JAX can't see to be zero is an argument like any other."""
    f = op_of(kind, rules)

    def loss(x):
        t = jax.lax.cond(x > 0, lambda x: x**2, lambda x: jax.lax.stop_gradient(x), x)
        return f(x, t)

    return both_ways(loss, x())


def configured(rules):
    def jvp(primals, tangents, *, t):
        (x,), (t_x,) = primals, tangents
        return f(x, t=t), ran(jnp.cos(x) * t * t_x)

    f = rules.jvp(lambda x, *, t: jnp.sin(x) * t, jvp)
    return f


@shape(error="keyword-only argument.\n.*`t`")
def perturbed_configuration(rules):
    jax.grad(lambda x: configured(rules)(x, t=x))(x())


@shape(error="keyword-only argument.\n.*`t`")
def perturbed_configuration_in_scan(rules):
    f = configured(rules)
    loss = lambda x: jax.lax.scan(lambda c, y: (f(c, t=x * y), None), x, ys())[0]
    jax.jit(jax.grad(loss))(x())


@shape(error="keyword-only argument.\n.*`t`")
def perturbed_configuration_in_one_branch(rules):
    def loss(x):
        t = jax.lax.cond(x > 0, lambda x: x**2, lambda x: jax.lax.stop_gradient(x), x)
        return configured(rules)(x, t=t)

    jax.grad(jax.jit(loss))(x())


@shape
def stopped_configuration(rules):
    f = configured(rules)
    loss = lambda x: f(x, t=jax.lax.stop_gradient(x) * 2)
    return both_ways(loss, x()), jax.vmap(jax.grad(loss))(xs())


@for_each(("jvp", "vjp"))
def python_number_closed_over(rules, kind):
    scale = 2.5
    f = op_of(kind, rules)
    return both_ways(lambda x: f(x, scale) + f(scale, x), x())


@for_each(("jvp", "vjp"))
def numpy_arrays_and_python_numbers_in_a_tree(rules, kind):
    def value(tree):
        return jnp.sin(tree["x"]) * tree["n"] + jnp.sum(tree["np"]) * tree["f"]

    def jvp(primals, tangents):
        (tree,), (t,) = primals, tangents
        t_sum = jnp.sum(t["np"]) * tree["f"] + jnp.sum(tree["np"]) * t["f"]
        return f(tree), ran(jnp.cos(tree["x"]) * tree["n"] * t["x"] + t_sum)

    def fwd(tree):
        return f(tree), ran(tree)

    def bwd(tree, ct):
        ct_np = jnp.broadcast_to(ct * tree["f"], (3,))
        ct_f = ct * jnp.sum(tree["np"])
        ct_x = jnp.cos(tree["x"]) * tree["n"] * ct
        return ({"x": ct_x, "n": None, "np": ct_np, "f": ct_f, "text": None},)

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    rest = {"n": 3, "np": np.linspace(0, 1, 3, dtype=x().dtype), "f": 0.5, "text": "text"}
    loss = lambda x: f({"x": x, **rest})
    step = lambda x, _: (loss(x), None)
    loop = lambda x: jax.lax.scan(step, x, None, length=2)[0]
    return both_ways(loss, x()), both_ways(loop, x())


@for_each(("jvp", "vjp"))
def numpy_primal(rules, kind):
    f = op_of(kind, rules)
    total = lambda v, w: jnp.sum(f(v, w))
    v = np.linspace(0, 1, 3, dtype=x().dtype)
    return jax.grad(total, (0, 1))(v, v), jax.jit(jax.grad(total, (0, 1)))(v, v)


@for_each(("jvp", "vjp"))
def python_primal(rules, kind):
    f = op_of(kind, rules)
    forward = eqx.filter_jvp(lambda y: f(0.5, y), (x(),), (x(),))
    return forward, jax.grad(f)(0.5, x()), jax.grad(f, 1)(0.5, 0.25)


@for_each(("jvp", "vjp"))
def integer_argument(rules, kind):
    f = scaled(rules, kind)
    loss = lambda x, n: f(f(x, n.astype(float)), 2)
    total = lambda x, n: jnp.sum(jax.vmap(loss, in_axes=(None, 0))(x, n))
    scan = lambda x, n: jax.lax.scan(lambda x, n: (loss(x, n), None), x, n)[0]
    n = jnp.arange(1, 4)
    return both_ways(total, x(), n), both_ways(scan, x(), n)


def counting(rules, kind):
    """`(x, n, key) -> (sin(x), n + 1, next key)`."""

    def value(x, n, key):
        return jnp.sin(x), n + 1, jax.random.split(key)[0]

    def jvp(primals, tangents):
        assert tangents[1:] == (None, None)
        return f(*primals), ran((jnp.cos(primals[0]) * tangents[0], None, None))

    def fwd(x, n, key):
        return f(x, n, key), ran((x, n, key))

    def bwd(residuals, ct):
        x, _, _ = residuals
        assert ct[1:] == (None, None)
        return jnp.cos(x) * ct[0], None, None

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    return f


@for_each(("jvp", "vjp"))
def integer_and_key_in_a_carry(rules, kind):
    f = counting(rules, kind)

    def loss(x, key):
        init = (x, jnp.array(0), key)
        carry, _ = jax.lax.scan(lambda carry, _: (f(*carry), None), init, None, length=3)
        return carry[0], (carry[1], jax.random.key_data(carry[2]))

    key = jax.random.key(0)
    inner = jax.jit(jax.value_and_grad(loss, has_aux=True))(x(), key)
    return inner, jax.value_and_grad(jax.jit(loss), has_aux=True)(x(), key)


@for_each(("jvp", "vjp"))
def integer_and_key_under_vmap(rules, kind):
    f = counting(rules, kind)
    keys, n = jax.random.split(jax.random.key(0), 4), jnp.arange(4)

    def loss(v):
        v, n_out, keys_out = jax.vmap(f)(v, n, keys)
        return jnp.sum(v), (n_out, jax.random.key_data(keys_out))

    return jax.jit(jax.grad(loss, has_aux=True))(xs()), jax.grad(loss, has_aux=True)(xs())


@for_each(("jvp", "vjp"))
def text_and_numbers_as_outputs(rules, kind):
    def value(x):
        return {"x": jnp.sin(x), "text": "text", "int": 3, "float": 0.5}

    def jvp(primals, tangents):
        t_out = {"x": ran(jnp.cos(primals[0]) * tangents[0])}
        return f(*primals), {**t_out, "text": None, "int": None, "float": None}

    def fwd(x):
        return f(x), ran(x)

    def bwd(x, ct):
        assert ct["text"] is None
        return (jnp.cos(x) * ct["x"],)

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)

    def loss(x):
        def step(x, y):
            out = f(x)
            assert out["text"] == "text"
            return out["x"] * out["float"], out["x"] * y * out["int"]

        x, outs = jax.lax.scan(step, x, ys())
        return x + jnp.sum(outs)

    return both_ways(loss, x())


@for_each(("jvp", "vjp"))
def module_with_static_text_as_output(rules, kind):
    """https://github.com/patrick-kidger/equinox/issues/962"""

    class Out(eqx.Module):
        x: jax.Array
        text: str = eqx.field(static=True)

    def value(x):
        return Out(jnp.sin(x), "text")

    def jvp(primals, tangents):
        return f(*primals), Out(ran(jnp.cos(primals[0]) * tangents[0]), "text")

    def fwd(x):
        return f(x), ran(x)

    def bwd(x, ct):
        return (jnp.cos(x) * ct.x,)

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)
    return both_ways(lambda x: f(f(x).x).x, x())


@for_each(("jvp", "vjp"))
def unused_output(rules, kind):
    """One output is dead code: https://github.com/jax-ml/jax/issues/31448"""

    def value(x, y):
        return jnp.sin(x) * y, jnp.exp(x)

    def jvp(primals, tangents):
        (x, y), (t_x, t_y) = primals, tangents
        t_first = jnp.cos(x) * y * t_x + jnp.sin(x) * t_y
        return f(x, y), ran((t_first, jnp.exp(x) * t_x))

    def fwd(x, y):
        return f(x, y), ran((x, y))

    def bwd(residuals, ct):
        x, y = residuals
        return jnp.cos(x) * y * ct[0] + jnp.exp(x) * ct[1], jnp.sin(x) * ct[0]

    f = rules.jvp(value, jvp) if kind == "jvp" else rules.vjp(value, fwd, bwd)

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


@shape
def nondifferentiable_carry(rules):
    f = op_of("vjp", rules)

    def loss(x):
        def step(carry, y):
            x, t = carry
            return (f(x, y * t), rules.nondifferentiable(t)), None

        return jax.lax.scan(step, (x, jnp.array(0.5)), ys())[0][0]

    return both_ways(loss, x())


@shape(error="must not be")
def nondifferentiable_carry_that_is_differentiated(rules):
    step = lambda t, y: (rules.nondifferentiable(t) * y, None)
    jax.jit(jax.grad(lambda x: jax.lax.scan(step, x, ys())[0]))(x())
