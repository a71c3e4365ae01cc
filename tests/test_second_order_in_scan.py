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
    "ste.round": ste.round,
    "ste.lsq": lambda x: ste.lsq(x, 0.31, bits=4),
    "surrogates.superspike": ft.partial(
        eqg.surrogates.spike, surrogate=eqg.surrogates.superspike()
    ),
    "reverse_gradient": lambda x: eqg.reverse_gradient(x, 0.5),
    "clip_gradient": lambda x: eqg.clip_gradient(x, -0.5, 1.0),
}


def step(op, c, u):
    return jnp.sin(op(c) * c) + u * c, None


def unrolled(op, c):
    for u in jnp.linspace(0.5, 1.0, STEPS):
        c, _ = step(op, c, u)
    return c


def scanned(scan, op, c):
    return scan(ft.partial(step, op), c, jnp.linspace(0.5, 1.0, STEPS))[0]


def nested(scan, op, c):
    us = jnp.linspace(0.5, 1.0, STEPS).reshape(2, STEPS // 2)
    return scan(lambda c, us: scan(ft.partial(step, op), c, us), c, us)[0]


def filter_scan(checkpoint):
    return ft.partial(scanned, ft.partial(eqg.filter_scan, checkpoint=checkpoint))


def truncated(scan, op, c):
    """Two windows, cut by hand."""
    us = jnp.linspace(0.5, 1.0, STEPS)
    if scan is None:
        for t, u in enumerate(us):
            c = jax.lax.stop_gradient(c) if t == STEPS // 2 else c
            c, _ = step(op, c, u)
        return c
    return scan(ft.partial(step, op), c, us, truncate=STEPS // 2)[0]


LOOPS = {
    "lax.scan": ft.partial(scanned, jax.lax.scan),
    "nested": ft.partial(nested, jax.lax.scan),
    "nested filter_scan": ft.partial(nested, eqg.filter_scan),
    **{f"checkpoint={k!r}": filter_scan(k) for k in (None, 2, "sqrt", "replay", "auto")},
}


def second_derivative(loop, op):
    """A Hessian times a vector, over all elements."""
    loss = lambda c: jnp.sum(jnp.cos(loop(op, c)))
    return jax.jit(jax.grad(lambda c: jnp.sum(jax.grad(loss)(c) * jnp.arange(1.0, 4.0))))(X)


@ft.cache
def expected(name):
    return second_derivative(unrolled, OPS[name])


@pytest.mark.thorough
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", OPS)
def test_the_derivative_of_the_rule(name, loop, request):
    if loop in ("checkpoint=2", "checkpoint='sqrt'") and name.endswith("_gradient"):
        fails_with_remat3(request, REMAT3_HAS_NO_SECOND_ORDER)
    eqgt.assert_trees_close(second_derivative(LOOPS[loop], OPS[name]), expected(name))


def test_the_smallest_example():
    """2.0, and not 1.0."""
    f = lambda c: jax.lax.scan(lambda c, _: (ste.round(c) * c, None), c, None, length=1)[0]
    assert jax.grad(jax.grad(f))(1.0) == 2.0


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("checkpoint", [None, "replay"])
def test_windows(name, checkpoint):
    """The last carry has the derivative of the last window, to all orders."""
    op = OPS[name]
    scan = ft.partial(eqg.filter_scan, checkpoint=checkpoint)
    loss = lambda scan, w: jnp.sum(jnp.cos(truncated(scan, lambda x: op(w * x), X)))

    def second(scan):
        first = jax.grad(ft.partial(loss, scan))
        return jax.jit(jax.grad(lambda w: jnp.sum(first(w) * jnp.arange(1.0, 4.0))))(X)

    eqgt.assert_trees_close(second(scan), second(None))


# ---------------------------------------------------------------- rules of two arguments


@eqg.custom_vjp
def calls_itself(x, w):
    """Its backward rule calls it, and says something else of `x` and `w` than autodiff."""
    return jnp.sin(x * w)


calls_itself.def_fwd(lambda x, w: (calls_itself(x, w), (x, w)))


@calls_itself.def_bwd
def _calls_itself_bwd(residuals, ct):
    x, w = residuals
    return 1.3 * ct * w * calls_itself(x, w), 0.7 * ct * calls_itself(x, x)


@eqg.custom_vjp
def product(x, w):
    """Its backward rule applies it to the cotangent."""
    return x * w


product.def_fwd(lambda x, w: (product(x, w), (x, w)))


@product.def_bwd
def _product_bwd(residuals, ct):
    x, w = residuals
    return 0.5 * product(ct, w), 2.0 * product(ct, x)


@eqg.custom_jvp
def forward(x, w):
    """Its forward rule applies it to the tangents."""
    return x * w


@forward.def_jvp
def _forward_jvp(primals, tangents):
    (x, w), (t_x, t_w) = primals, tangents
    return forward(x, w), 0.5 * forward(t_x, w) + 1.5 * forward(x, t_w) * jnp.cos(w)


@eqg.custom_vjp
def rule_of_rules(x, w):
    return jnp.sin(x) + 0.0 * w


rule_of_rules.def_fwd(lambda x, w: (rule_of_rules(x, w), (x, w)))
rule_of_rules.def_bwd(lambda r, ct: (forward(ct, r[1]), product(ct, r[0]) + product(r[0], ct)))


@eqg.jax_custom_vjp
def drop_in(x, w):
    return jnp.sin(x * w)


drop_in.defvjp(
    lambda x, w: (drop_in(x, w), (x, w)),
    lambda r, g: (0.5 * product(g, drop_in(*r)), g * drop_in(r[0], r[0] + 0.3)),
)


@eqg.jax_custom_jvp
def forward_drop_in(x, w):
    return jnp.sin(x * w)


@forward_drop_in.defjvp
def _forward_drop_in_jvp(primals, tangents):
    (x, w), (t_x, t_w) = primals, tangents
    return forward_drop_in(x, w), 0.5 * forward(t_x, w) + t_w * forward_drop_in(x, x)


OF_TWO = {
    "jump": lambda x, w: eqg.jump(None, x, lambda _, x: -w, x * x)[1],
    "calls itself": calls_itself,
    "product": lambda x, w: product(jnp.sin(x), w),
    "forward": forward,
    "rule of rules": rule_of_rules,
    "drop-in": drop_in,
    "forward drop-in": forward_drop_in,
    "replace_gradient": lambda x, w: eqg.replace_gradient(jnp.sin(x * w), jnp.tanh(x + w)),
    "custom_gradient": eqg.custom_gradient(
        lambda x, w: (jnp.sin(x * w), lambda ct: (product(ct, x) * w, 2 * ct * x * w))
    ),
    "scale_gradient": lambda x, w: eqg.scale_gradient(jnp.sin(x * w), w),
    "on_backward": lambda x, w: eqg.on_backward(x, lambda ct: ct * 0.5) * w,
    "straight-through": lambda x, w: ste.round(3 * x * w) * jnp.cos(x),
    "clip_gradient": lambda x, w: eqg.clip_gradient(jnp.sin(x * w), -0.4, 0.3),
    "reverse_gradient": lambda x, w: eqg.reverse_gradient(jnp.sin(x * w), 0.7),
}
# An online scan follows no backward rule that is not seen to be linear, which is an error.
NOT_ONLINE = ("jump", "product", "rule of rules", "drop-in", "custom_gradient", "clip_gradient")
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


def in_python(step, carry, xs, truncate=None):
    ys = []
    for t in range(len(xs)):
        if truncate is not None and t > 0 and t % truncate == 0:
            carry = jax.lax.stop_gradient(carry)
        carry, y = step(carry, xs[t])
        ys.append(y)
    return carry, jnp.stack(ys)


WITHOUT_INPUTS = (0, 1)  # `online` has no derivative in `xs`
METHODS = {
    **{f"checkpoint={k!r}": {"checkpoint": k} for k in (None, 2, "sqrt", "replay", "auto")},
    "truncate": {"truncate": 2},
    "truncate, replay": {"truncate": 2, "checkpoint": "replay"},
    "online": {"online": True},
}


def derivatives(program, scan, rule, orders, inputs):
    def of_inputs(values):
        p = list(P)
        for i, value in zip(inputs, values, strict=True):
            p[i] = value
        return program(OF_TWO[rule], scan, p)

    def derivative(values, modes):
        fn = of_inputs
        for mode in modes:
            fn = mode(fn)
        return fn(values)

    values = [P[i] for i in inputs]
    return jax.jit(lambda v: {name: derivative(v, orders[name]) for name in orders})(values)


@ft.cache
def in_a_python_loop(program, truncate, rule, orders, inputs):
    scan = ft.partial(in_python, truncate=truncate)
    return derivatives(program, scan, rule, dict(orders), inputs)


def check_orders(rule, program, method, orders):
    options = METHODS[method]
    inputs = WITHOUT_INPUTS if "online" in options else (0, 1, 2)
    if "online" in options and rule in NOT_ONLINE:
        with pytest.raises(eqg.RuleError, match="can't be followed online"):
            derivatives(program, ft.partial(eqg.filter_scan, **options), rule, orders, inputs)
        return
    truncate = options.get("truncate")
    expected = in_a_python_loop(program, truncate, rule, tuple(orders.items()), inputs)
    found = derivatives(program, ft.partial(eqg.filter_scan, **options), rule, orders, inputs)
    eqgt.assert_trees_close(found, expected)


QUICK = ("product", "jump")
slowly = lambda names, quick: [
    n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names
]


@pytest.mark.thorough
@pytest.mark.every(4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", slowly(OF_TWO, QUICK))
def test_all_modes_of_the_second_derivative(rule, method):
    check_orders(rule, of_two, method, SECOND)
