"""The second derivative of a made-up derivative, inside of scans: the rule decides, not the
function.

In raw JAX before 0.12 it is the derivative of the function: for a rounding it is zero.
"""

import functools as ft

import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest

from .helpers import fails_with_remat3, REMAT3_HAS_NO_SECOND_ORDER


pytestmark = pytest.mark.versions


X = jnp.array([0.7, -1.3, 2.2])
STEPS = 4
ste = eqg.ste

OPS = {
    "ste.lsq": lambda x: ste.lsq(x, 0.31, bits=4),
    "spike": ft.partial(eqg.surrogates.spike, surrogate=eqg.surrogates.superspike()),
    "clip_gradient": lambda x: eqg.clip_gradient(x, -0.5, 1.0),
}


def scanned(scan, op, c):
    step = lambda c, u: (jnp.sin(op(c) * c) + u * c, None)
    return scan(step, c, jnp.linspace(0.5, 1.0, STEPS))[0]


def nested(scan, op, c):
    us = jnp.linspace(0.5, 1.0, STEPS).reshape(2, STEPS // 2)
    step = lambda c, u: (jnp.sin(op(c) * c) + u * c, None)
    return scan(lambda c, us: scan(step, c, us), c, us)[0]


def in_python(step, carry, xs, truncate=None):
    ys = []
    for t in range(len(xs)):
        if truncate is not None and t > 0 and t % truncate == 0:
            carry = jax.lax.stop_gradient(carry)
        carry, y = step(carry, xs[t])
        ys.append(y)
    return carry, None if ys[0] is None else jnp.stack(ys)


LOOPS = {
    "lax.scan": ft.partial(scanned, jax.lax.scan),
    "nested": ft.partial(nested, jax.lax.scan),
    "nested filter_scan": ft.partial(nested, eqg.filter_scan),
    "sqrt": ft.partial(scanned, ft.partial(eqg.filter_scan, checkpoint="sqrt")),
    "replay": ft.partial(scanned, ft.partial(eqg.filter_scan, checkpoint="replay")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPS)
def test_the_derivative_of_the_rule(name, loop, request):
    if loop == "sqrt" and name.endswith("_gradient"):
        fails_with_remat3(request, REMAT3_HAS_NO_SECOND_ORDER)

    def second_derivative(loop):
        """A Hessian times a vector, over all elements."""
        loss = lambda c: jnp.sum(jnp.cos(loop(OPS[name], c)))
        return jax.jit(jax.grad(lambda c: jnp.sum(jax.grad(loss)(c) * jnp.arange(1.0, 4.0))))(X)

    expected = second_derivative(ft.partial(scanned, in_python))
    eqgt.assert_trees_close(second_derivative(LOOPS[loop]), expected)


def test_the_smallest_example():
    """2.0, and not 1.0."""
    f = lambda c: jax.lax.scan(lambda c, _: (ste.round(c) * c, None), c, None, length=1)[0]
    assert jax.grad(jax.grad(f))(1.0) == 2.0


# ---------------------------------------------------------------- rules of two arguments


def vjp_rule(fn, backward, custom_vjp=eqg.custom_vjp):
    rule = custom_vjp(fn)
    fwd = lambda x, w: (rule(x, w), (x, w))
    if custom_vjp is eqg.jax_custom_vjp:
        rule.defvjp(fwd, lambda r, ct: backward(*r, ct))
    else:
        rule.def_fwd(fwd)
        rule.def_bwd(lambda r, ct: backward(*r, ct))
    return rule


# Its backward rule calls it, and says something else of `x` and `w` than autodiff.
calls_itself = vjp_rule(
    lambda x, w: jnp.sin(x * w),
    lambda x, w, ct: (1.3 * ct * w * calls_itself(x, w), 0.7 * ct * calls_itself(x, x)),
)
# Its backward rule applies it to the cotangent.
product = vjp_rule(
    lambda x, w: x * w, lambda x, w, ct: (0.5 * product(ct, w), 2.0 * product(ct, x))
)
# Its forward rule applies it to the tangents.
forward = eqg.custom_jvp(lambda x, w: x * w)
forward.def_jvp(
    lambda p, t: (
        forward(*p), 0.5 * forward(t[0], p[1]) + 1.5 * forward(p[0], t[1]) * jnp.cos(p[1])
    )
)  # fmt: skip
rule_of_rules = vjp_rule(
    lambda x, w: jnp.sin(x) + 0.0 * w,
    lambda x, w, ct: (forward(ct, w), product(ct, x) + product(x, ct)),
)
drop_in = vjp_rule(
    lambda x, w: jnp.sin(x * w),
    lambda x, w, g: (0.5 * product(g, drop_in(x, w)), g * drop_in(x, x + 0.3)),
    eqg.jax_custom_vjp,
)
OF_TWO = {
    "jump": lambda x, w: eqg.jump(None, x, lambda _, x: -w, x * x)[1],
    "calls itself": calls_itself,
    "product": lambda x, w: product(jnp.sin(x), w),
    "forward": forward,
    "rule of rules": rule_of_rules,
    "drop-in": drop_in,
    "replace_gradient": lambda x, w: eqg.replace_gradient(jnp.sin(x * w), jnp.tanh(x + w)),
    "clip_gradient": lambda x, w: eqg.clip_gradient(jnp.sin(x * w), -0.4, 0.3),
}
# An online scan follows no backward rule that is not seen to be linear, which is an error.
NOT_ONLINE = ("jump", "product", "rule of rules", "drop-in", "clip_gradient")
F, R = jax.jacfwd, jax.jacrev
SECOND = {"RR": (R, R), "FR": (R, F), "RF": (F, R)}  # the innermost first
P = (jnp.array(0.7), jnp.array(1.3), jnp.array(0.9))


def of_two(rule, scan, p):
    h, w, u = p

    def step(c, x):
        c = c + 0.5 * x * rule(c + x, w)
        return c, c * w

    c, ys = scan(step, h, jnp.array([0.3, 0.5, 0.4]) * u)
    return c**2 + jnp.sum(ys * jnp.array([0.2, 0.4, 0.6]))


METHODS = {
    "none": {"checkpoint": None},
    "sqrt": {"checkpoint": "sqrt"},
    "replay": {"checkpoint": "replay"},
    "truncate, replay": {"truncate": 2, "checkpoint": "replay"},
    "online": {"online": True},
}


def derivatives(scan, rule, inputs):
    of_inputs = lambda values: of_two(OF_TWO[rule], scan, [*values, *P[len(inputs) :]])
    run = lambda v: {n: outer(inner(of_inputs))(v) for n, (inner, outer) in SECOND.items()}
    return jax.jit(run)(inputs)


@ft.cache
def in_a_python_loop(truncate, rule, n_inputs):
    return derivatives(ft.partial(in_python, truncate=truncate), rule, P[:n_inputs])


QUICK = ("product", "jump")
RULES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OF_TWO]


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", RULES)
def test_all_modes_of_the_second_derivative(rule, method):
    options = METHODS[method]
    n_inputs = 2 if "online" in options else 3  # `online` has no derivative in `xs`
    run = lambda: derivatives(ft.partial(eqg.filter_scan, **options), rule, P[:n_inputs])
    if "online" in options and rule in NOT_ONLINE:
        with pytest.raises(eqg.RuleError, match="can't be followed online"):
            run()
        return
    expected = in_a_python_loop(options.get("truncate"), rule, n_inputs)
    eqgt.assert_trees_close(run(), expected)
