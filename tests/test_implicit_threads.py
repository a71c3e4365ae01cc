"""`eqg.implicit`: what people asked for, each by the name of its thread."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from .helpers import assert_close, temp_bytes


lx = pytest.importorskip("lineax")


def bisection(fn, low, high, n_steps=60):
    """The root of an increasing function, elementwise, by a `while_loop`."""

    def halve(state):
        i, low, high = state
        middle = (low + high) / 2
        above = fn(middle) > 0
        return i + 1, jnp.where(above, low, middle), jnp.where(above, middle, high)

    _, low, high = jax.lax.while_loop(lambda s: s[0] < n_steps, halve, (0, low, high))
    return (low + high) / 2


@pytest.mark.slow
def test_jaxopt_474_hessian(getkey):
    """Ridge regression under `custom_root`: `jax.hessian` has no forward mode there."""
    x, y = jr.normal(getkey(), (20, 3)), jr.normal(getkey(), (20,))

    def objective(w, theta, x, y):
        return jnp.sum((x @ w - y) ** 2) / 2 + theta * jnp.sum(w**2) / 2

    def closed_form(theta, x, y):
        return jnp.linalg.solve(x.T @ x + theta * jnp.eye(3), x.T @ y)

    ridge = eqg.implicit(eqx.filter_grad(objective), tags=lx.positive_semidefinite_tag)(
        closed_form
    )
    loss = lambda solve: lambda *args: jnp.sum(jnp.sin(solve(*args)))
    for transform in (jax.hessian, jax.jacfwd, jax.jacrev, lambda f: jax.grad(jax.grad(f))):
        got = jax.jit(transform(loss(ridge)))(2.0, x, y)
        assert_close(got, jax.jit(transform(loss(closed_form)))(2.0, x, y), eps=200)
    mixed = lambda f: jax.jit(jax.jacfwd(jax.grad(f, 1), 0))(2.0, x, y)
    assert_close(mixed(loss(ridge)), mixed(loss(closed_form)), eps=200)


@pytest.mark.slow
def test_discopt_380_hessian_of_a_block(getkey):
    """A cyclic block, solved by Newton's method, inside the objective of an optimizer."""
    a = jnp.eye(3) * 3 + jr.normal(getkey(), (3, 3)) / 3

    def residual(v, u):
        return a @ v + jnp.tanh(v) - jnp.sin(u)

    def newton(u):
        def step(_, v):
            r, matvec = jax.linearize(lambda v: residual(v, u), v)
            return v - jnp.linalg.solve(jax.vmap(matvec, out_axes=1)(jnp.eye(3)), r)

        return jax.lax.fori_loop(0, 10, step, jnp.zeros(3))

    def custom_root(u):
        solve = lambda f, y0: newton(u)
        tangent = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
        return jax.lax.custom_root(lambda v: residual(v, u), jnp.zeros(3), solve, tangent)

    block = eqg.implicit(residual)(newton)
    u = jr.normal(getkey(), (3,))
    hessian = lambda solve: jax.jit(jax.hessian(lambda u: jnp.sum(solve(u) ** 3 * u)))(u)
    assert_close(hessian(block), hessian(custom_root), eps=100)


class Aerosol(eqx.Module):
    """Modes of an aerosol, as in pyrcel: the supersaturation solves a balance."""

    numbers: jax.Array
    kappas: jax.Array
    name: str = "sulfate"

    def balance(self, s, updraft):
        critical = 2e-3 / jnp.sqrt(self.kappas)
        return s * (1 + jnp.sum(self.numbers * jax.nn.sigmoid((s - critical) / 5e-4))) - (
            updraft * 1e-2
        )

    @eqg.implicit(lambda s, self, updraft: self.balance(s, updraft))
    def supersaturation(self, updraft, *, low=0.0, high=0.1):
        return bisection(
            lambda s: self.balance(s, updraft), jnp.asarray(low), jnp.asarray(high)
        )


@pytest.mark.slow
def test_pyrcel_56_bisection():
    """A maximum supersaturation of a few thousandths, by bisection in a `while_loop`."""
    aerosol = Aerosol(jnp.array([1.0, 3.0]), jnp.array([0.6, 0.1]))
    loss = lambda aerosol, updraft: aerosol.supersaturation(updraft)
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(aerosol, 0.5)
    with jax.enable_x64(True):
        double = jax.tree.map(
            lambda x: jnp.asarray(x, "float64") if eqx.is_array(x) else x, aerosol
        )
        for name in ("numbers", "kappas"):
            for i in range(2):
                moved = lambda h, name=name, i=i: loss(
                    eqx.tree_at(
                        lambda m: getattr(m, name), double, replace_fn=lambda x: x.at[i].add(h)
                    ),
                    0.5,
                )
                difference = (moved(1e-4) - moved(-1e-4)) / 2e-4
                assert np.isclose(getattr(gradient, name)[i], difference, rtol=1e-3)
    updrafts = jnp.array([0.3, 0.5, 1.0])
    slopes = jax.vmap(jax.grad(aerosol.supersaturation))(updrafts)
    one = jax.grad(lambda u: aerosol.supersaturation(u, low=u * 0, high=u))(0.5)
    assert_close(slopes[1], one, eps=2000)  # a bracket that depends on it changes nothing


@pytest.fixture(scope="module")
def bnaf():
    """A block neural autoregressive flow, whose inverse is by bisection."""
    flows = pytest.importorskip("flowjax.flows")
    distributions = pytest.importorskip("flowjax.distributions")
    return flows.block_neural_autoregressive_flow(
        jr.key(0),
        base_dist=distributions.Normal(jnp.zeros(3)),
        nn_block_dim=3,
        invert=False,
        use_implicit_differentation=False,
    ).bijection


@pytest.mark.slow
def test_flowjax_176_inverse_of_a_flow(bnaf, getkey):
    @eqg.implicit(lambda x, flow, y: flow.transform(x) - y)
    def inverse(flow, y):
        return flow.inverse(y)

    y = jr.normal(getkey(), (3,)) / 2
    without = jax.jacrev(bnaf.inverse)(y)
    assert np.array_equal(without, np.zeros((3, 3)))  # as reported: silently zero
    x = inverse(bnaf, y)
    jacobian = jax.jit(jax.jacrev(lambda y: inverse(bnaf, y)))(y)
    # The witness: the Jacobian of the flow itself.
    assert_close(jacobian @ jax.jacfwd(bnaf.transform)(x), jnp.eye(3), tolerance=1e-3)

    # With respect to the parameters: inverse(flow, flow.transform(x)) is x for each flow.
    def round_trip(flow):
        return jnp.sum(inverse(flow, flow.transform(x)))

    part = eqx.filter_jit(eqx.filter_grad(lambda flow: jnp.sum(inverse(flow, y))))(bnaf)
    whole = eqx.filter_jit(eqx.filter_grad(round_trip))(bnaf)
    size = lambda tree: max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(tree))
    assert size(part) > 0.1
    assert size(whole) < 1e-3 * size(part)


def _optimistix_218(n, key):
    """The reproduction of the thread: a residual that has a Jacobian in it."""
    optx = pytest.importorskip("optimistix")
    key_a, key_b = jr.split(key)
    args = jr.normal(key_a, (n, n)) / n, jr.normal(key_b, (n,))

    def residual(y, args):
        a, b = args
        inner = lambda x: jnp.tanh(a @ x + b)
        return y - 0.25 * inner(y) - 0.02 * jnp.sum(jax.jacrev(inner)(y), axis=1)

    def solve(solver, args):
        return optx.root_find(residual, solver, jnp.zeros(n), args).value

    dogleg, newton = optx.Dogleg(rtol=1e-6, atol=1e-6), optx.Newton(rtol=1e-6, atol=1e-6)
    ours = eqg.implicit(residual, solver=lx.LU())(lambda args: solve(dogleg, args))
    losses = {
        "ours": lambda args: jnp.sum(ours(args)),
        "dogleg": lambda args: jnp.sum(solve(dogleg, args)),
        "newton": lambda args: jnp.sum(solve(newton, args)),
    }
    return {name: jax.grad(loss) for name, loss in losses.items()}, args


@pytest.mark.slow
def test_optimistix_218_gradient(getkey):
    """The residual gives the derivative, and not the loss that Dogleg minimizes."""
    gradients, args = _optimistix_218(6, getkey())
    got = {name: jax.jit(gradient)(args) for name, gradient in gradients.items()}
    assert_close(got["ours"], got["newton"], tolerance=1e-4)
    assert_close(got["ours"], got["dogleg"], tolerance=1e-3)


@pytest.mark.cost
@pytest.mark.slow
def test_optimistix_218_memory(getkey):
    gradients, args = _optimistix_218(128, getkey())
    used = {name: temp_bytes(gradient, args) for name, gradient in gradients.items()}
    assert used["ours"] < 0.1 * used["dogleg"], used


@pytest.mark.slow
def test_jax_5309_reverse_mode_by_gmres(getkey):
    """GMRES in a forward rule of JAX's has no transpose."""
    a = jnp.eye(10) * 3 + jr.normal(getkey(), (10, 10)) / 3

    def solve(p):
        return jnp.linalg.solve(a, p)

    gmres = lx.GMRES(rtol=1e-6, atol=1e-6)
    ours = eqg.implicit(lambda x, p: a @ x - p, solver=gmres)(solve)
    p = jr.normal(getkey(), (10,))
    inverse = np.linalg.inv(a)
    assert_close(jax.jit(jax.jacrev(ours))(p), inverse, tolerance=1e-5)
    assert_close(jax.jit(jax.jacfwd(ours))(p), inverse, tolerance=1e-5)


@pytest.mark.slow
def test_jaxopt_141_second_order_of_bisection():
    """The solver's own derivative is zero, which the second derivative must not use."""
    forward = lambda x, aux: (aux[0] * x**2 + aux[1] * x) / (aux[0] + aux[1])

    @eqg.implicit(lambda x, y, aux: forward(x, aux) - y)
    def inverse(y, aux):
        return bisection(lambda x: forward(x, aux) - y, jnp.array(0.0), jnp.array(1.0))

    def closed_form(y, aux):
        a, b = aux
        return (-b + jnp.sqrt(b**2 + 4 * a * (a + b) * y)) / (2 * a)

    def of_value_and_grad(which, solve):
        return lambda y, aux: jax.value_and_grad(solve)(y, aux)[which]

    aux = (jnp.array(2.0), jnp.array(1.0))
    for which in (0, 1):
        got = jax.jit(jax.grad(of_value_and_grad(which, inverse), (0, 1)))(0.5, aux)
        expected = jax.grad(of_value_and_grad(which, closed_form), (0, 1))(0.5, aux)
        assert_close(got, expected, eps=200)
    third = jax.jit(jax.grad(jax.grad(jax.grad(inverse))))(0.5, aux)
    assert_close(third, jax.grad(jax.grad(jax.grad(closed_form)))(0.5, aux), eps=2000)
