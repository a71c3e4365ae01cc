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

    state = 0, jnp.asarray(low), jnp.asarray(high)
    _, low, high = jax.lax.while_loop(lambda s: s[0] < n_steps, halve, state)
    return (low + high) / 2


@pytest.mark.slow
def test_jaxopt_474_hessian(getkey):
    """Ridge regression under `custom_root`: `jax.hessian` has no forward mode there."""
    args = 2.0, jr.normal(getkey(), (20, 3)), jr.normal(getkey(), (20,))

    def objective(w, theta, x, y):
        return jnp.sum((x @ w - y) ** 2) / 2 + theta * jnp.sum(w**2) / 2

    def closed_form(theta, x, y):
        return jnp.linalg.solve(x.T @ x + theta * jnp.eye(3), x.T @ y)

    tags = lx.positive_semidefinite_tag
    ridge = eqg.implicit(eqx.filter_grad(objective), tags=tags)(closed_form)
    for transform in (jax.hessian, lambda f: jax.jacfwd(jax.grad(f, 1), 0)):
        of = lambda f, how=transform: jax.jit(how(lambda *args: jnp.sum(jnp.sin(f(*args)))))
        assert_close(of(ridge)(*args), of(closed_form)(*args), eps=200)


@pytest.mark.slow
def test_discopt_380_hessian_of_a_block(getkey):
    """A cyclic block, solved by Newton's method, inside the objective of an optimizer."""
    a = jnp.eye(3) * 3 + jr.normal(getkey(), (3, 3)) / 3

    def residual(v, u):
        return a @ v + jnp.tanh(v) - jnp.sin(u)

    def newton(u):
        fn = lambda v: residual(v, u)
        step = lambda _, v: v - jnp.linalg.solve(jax.jacfwd(fn)(v), fn(v))
        return jax.lax.fori_loop(0, 10, step, jnp.zeros(3))

    def custom_root(u):
        solve = lambda f, y0: newton(u)
        tangent = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
        return jax.lax.custom_root(lambda v: residual(v, u), jnp.zeros(3), solve, tangent)

    u = jr.normal(getkey(), (3,))
    hessian = lambda solve: jax.jit(jax.hessian(lambda u: jnp.sum(solve(u) ** 3 * u)))(u)
    assert_close(hessian(eqg.implicit(residual)(newton)), hessian(custom_root), eps=100)


class Aerosol(eqx.Module):
    """Modes of an aerosol, as in pyrcel: the supersaturation solves a balance."""

    numbers: jax.Array
    kappas: jax.Array
    name: str = "sulfate"

    def balance(self, s, updraft):
        critical = 2e-3 / jnp.sqrt(self.kappas)
        activated = jnp.sum(self.numbers * jax.nn.sigmoid((s - critical) / 5e-4))
        return s * (1 + activated) - updraft * 1e-2

    @eqg.implicit(lambda s, self, updraft: self.balance(s, updraft))
    def supersaturation(self, updraft, *, low=0.0, high=0.1):
        return bisection(lambda s: self.balance(s, updraft), low, high)


@pytest.mark.slow
def test_pyrcel_56_bisection():
    """A maximum supersaturation of a few thousandths, by bisection in a `while_loop`."""
    aerosol = Aerosol(jnp.array([1.0, 3.0]), jnp.array([0.6, 0.1]))
    loss = lambda aerosol, updraft: aerosol.supersaturation(updraft)
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(aerosol, 0.5)
    with jax.enable_x64(True):
        leaves = np.array([[1.0, 3.0], [0.6, 0.1]])
        moved = lambda h: loss(Aerosol(*map(jnp.asarray, leaves + h)), 0.5)
        for i, got in enumerate(np.ravel([gradient.numbers, gradient.kappas])):
            h = 1e-4 * np.eye(4)[i].reshape(2, 2)
            assert np.isclose(got, (moved(h) - moved(-h)) / 2e-4, rtol=1e-3)
    slopes = jax.vmap(jax.grad(aerosol.supersaturation))(jnp.array([0.3, 0.5, 1.0]))
    one = jax.grad(lambda u: aerosol.supersaturation(u, low=u * 0, high=u))(0.5)
    assert_close(slopes[1], one, eps=2000)  # a bracket that depends on it changes nothing


@pytest.mark.slow
def test_flowjax_176_inverse_of_a_flow(getkey):
    """A block neural autoregressive flow, whose inverse is by bisection."""
    flows = pytest.importorskip("flowjax.flows")
    normal = pytest.importorskip("flowjax.distributions").Normal(jnp.zeros(3))
    options = {"nn_block_dim": 3, "invert": False, "use_implicit_differentation": False}
    bnaf = flows.block_neural_autoregressive_flow(jr.key(0), base_dist=normal, **options)
    flow = bnaf.bijection

    @eqg.implicit(lambda x, flow, y: flow.transform(x) - y)
    def inverse(flow, y):
        return flow.inverse(y)

    y = jr.normal(getkey(), (3,)) / 2
    # As reported: silently zero.
    assert np.array_equal(jax.jacrev(flow.inverse)(y), np.zeros((3, 3)))
    jacobian = jax.jit(jax.jacrev(lambda y: inverse(flow, y)))(y)
    # The witness: the Jacobian of the flow itself.
    expected = jax.jacfwd(flow.transform)(inverse(flow, y))
    assert_close(jacobian @ expected, jnp.eye(3), tolerance=1e-3)

    # With respect to the parameters: inverse(flow, flow.transform(x)) is x for each flow.
    def size(of):
        grads = eqx.filter_jit(eqx.filter_grad(lambda flow: jnp.sum(of(flow))))(flow)
        return max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))

    part, x = size(lambda flow: inverse(flow, y)), inverse(flow, y)
    assert part > 0.1
    assert size(lambda flow: inverse(flow, flow.transform(x))) < 1e-3 * part


def _optimistix_218(n, key):
    """The reproduction of the thread: a residual that has a Jacobian in it."""
    optx = pytest.importorskip("optimistix")
    key_a, key_b = jr.split(key)
    args = jr.normal(key_a, (n, n)) / n, jr.normal(key_b, (n,))

    def residual(y, args):
        inner = lambda x: jnp.tanh(args[0] @ x + args[1])
        return y - 0.25 * inner(y) - 0.02 * jnp.sum(jax.jacrev(inner)(y), axis=1)

    def by(solver):
        return lambda args: optx.root_find(residual, solver, jnp.zeros(n), args).value

    dogleg = by(optx.Dogleg(rtol=1e-6, atol=1e-6))
    ours = eqg.implicit(residual, solver=lx.LU())(dogleg)
    solves = {"ours": ours, "dogleg": dogleg, "newton": by(optx.Newton(rtol=1e-6, atol=1e-6))}
    gradient = lambda solve: jax.grad(lambda args: jnp.sum(solve(args)))
    return {name: gradient(solve) for name, solve in solves.items()}, args


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
    gmres = lx.GMRES(rtol=1e-6, atol=1e-6)
    solve = eqg.implicit(lambda x, p: a @ x - p, solver=gmres)(lambda p: jnp.linalg.solve(a, p))
    for mode in (jax.jacrev, jax.jacfwd):
        assert_close(jax.jit(mode(solve))(jnp.ones(10)), np.linalg.inv(a), tolerance=1e-5)


@pytest.mark.slow
def test_jaxopt_141_second_order_of_bisection():
    """The solver's own derivative is zero, which the second derivative must not use."""
    forward = lambda x, aux: (aux[0] * x**2 + aux[1] * x) / (aux[0] + aux[1])

    @eqg.implicit(lambda x, y, aux: forward(x, aux) - y)
    def inverse(y, aux):
        return bisection(lambda x: forward(x, aux) - y, 0.0, 1.0)

    def closed_form(y, aux):
        a, b = aux
        return (-b + jnp.sqrt(b**2 + 4 * a * (a + b) * y)) / (2 * a)

    aux = jnp.array(2.0), jnp.array(1.0)
    first = lambda f: jax.value_and_grad(f, (0, 1))(0.5, aux)
    assert_close(first(inverse), first(closed_form), eps=200)
    second = lambda f: jax.jit(jax.grad(jax.grad(f), (0, 1)))(0.5, aux)
    assert_close(second(inverse), second(closed_form), eps=200)
    third = lambda f: jax.jit(jax.grad(jax.grad(jax.grad(f))))(0.5, aux)
    assert_close(third(inverse), third(closed_form), eps=2000)
