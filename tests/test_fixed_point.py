"""Fixed points against closed forms, NumPy, and autodiff of the steps written out."""

import importlib
import sys

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optimistix as optx
import pytest
from eqx_grads import RuleError, solvers

from .helpers import (
    assert_close,
    temp_bytes,
)


EXACT = ("implicit", "fixed_point")
# Enough terms for an exact derivative, where the contraction factor is one half.
SERIES = solvers.NeumannAdjoint(30)
APPROXIMATE = {
    "neumann": solvers.NeumannAdjoint(5),
    "phantom": solvers.PhantomAdjoint(5, 0.5),
    "one_step": solvers.OneStepAdjoint(),
}


def tight():
    """As exact as the precision allows."""
    tolerance = 2e-7 if jnp.zeros(()).dtype == jnp.float32 else 1e-14
    return optx.FixedPointIteration(rtol=tolerance, atol=tolerance)


def linear(z, w, u, x):
    return w @ z + u @ x


def nonlinear(z, w, u, x):
    return jnp.tanh(w @ z + u @ x)


def problem(getkey, n=5, factor=0.5):
    w, u = jr.normal(getkey(), (n, n)), jr.normal(getkey(), (n, 3))
    w = factor * w / jnp.linalg.norm(w, 2)
    return w, u, jr.normal(getkey(), (3,))


def solve(fn, *args, n=5, **options):
    options = {"solver": tight(), **options}
    return eqg.fixed_point(fn, jnp.zeros(n), *args, **options).value


def steps(fn, *args, n=5, number=60):
    z = jnp.zeros(n)
    for _ in range(number):
        z = fn(z, *args)
    return z


# ---------------------------------------------------------------- the linear case


def relative(got, expected):
    return np.max(np.abs(np.asarray(got, np.float64) - expected)) / np.max(np.abs(expected))


# ---------------------------------------------------------------- exact derivatives


def test_no_contraction():
    """The plain iteration diverges, and neither a root finder nor the linear solve does."""
    away = lambda y, x: 3.0 * y - x  # the fixed point is x / 2
    newton = optx.Newton(rtol=1e-5, atol=1e-5)
    ours = lambda x: eqg.fixed_point(away, 1.0, x, solver=newton).value
    value, slope = jax.value_and_grad(ours)(3.0)
    assert_close((value, slope), (jnp.array(1.5), jnp.array(0.5)))


# ---------------------------------------------------------------- approximate derivatives


def in_steps(fn, args, number, tau):
    """The definition in the papers: damped steps that start at the fixed point, which is taken
    as a constant."""
    z = jax.lax.stop_gradient(steps(fn, *args))
    for _ in range(number):
        z = (1 - tau) * z + tau * fn(z, *args)
    return z


# Each adjoint, how many steps it is the gradient of, and their damping.
DEFINITIONS = [
    (solvers.OneStepAdjoint(), 1, 1.0),
    (solvers.NeumannAdjoint(0), 1, 1.0),
    (solvers.NeumannAdjoint(3), 4, 1.0),
    (solvers.PhantomAdjoint(1, 0.3), 1, 0.3),
    (solvers.PhantomAdjoint(4, 0.5), 4, 0.5),
    (solvers.PhantomAdjoint(np.int64(2), 1), 2, 1.0),
]


@pytest.mark.parametrize(("backward", "number", "tau"), DEFINITIONS, ids=str)
def test_approximate_derivatives_are_the_published_ones(getkey, backward, number, tau):
    with jax.enable_x64(True):
        args = problem(getkey)
        directions = tuple(jr.normal(getkey(), a.shape) for a in args)
        ours = lambda *args: solve(nonlinear, *args, backward=backward)
        theirs = lambda *args: in_steps(nonlinear, args, number, tau)
        ct = jr.normal(getkey(), (5,))
        both = lambda f: (jax.vjp(f, *args)[1](ct), jax.jvp(f, args, directions)[1])
        assert_close(jax.jit(lambda: both(ours))(), jax.jit(lambda: both(theirs))(), eps=1e3)


# ---------------------------------------------------------------- transformations


class Damped(eqx.Module):
    weight: jax.Array
    damping: float = 0.5

    def __call__(self, y, x):
        # A branch on the number: it has to be static.
        return self.damping * jnp.tanh(self.weight * y) + x if self.damping > 0 else x


@pytest.mark.parametrize("adjoint", [solvers.ImplicitAdjoint(), SERIES], ids=str)
def test_numbers_of_python_in_optimistix(adjoint):
    step = lambda y, args: Damped(args[0], args[1])(y, args[2])
    weight, x = jnp.array([0.3, 0.8]), jnp.array([1.0, -0.5])

    def solution(weight, damping):
        args = (weight, damping, x)
        return optx.fixed_point(step, tight(), jnp.zeros(2), args, adjoint=adjoint).value

    closure = lambda weight: (
        eqg.fixed_point(
            lambda y: Damped(weight, 0.5)(y, x), jnp.zeros(2), solver=tight(), backward=adjoint
        ).value
    )
    got = jax.jacrev(solution)(weight, 0.5)
    assert_close(got, jax.jacrev(closure)(weight), tolerance=1e-5)


def test_the_start_has_no_gradient(getkey):
    args = problem(getkey)
    fn = lambda z0: jnp.sum(eqg.fixed_point(nonlinear, z0, *args).value)
    assert jnp.array_equal(jax.grad(fn)(jnp.ones(5)), jnp.zeros(5))


@pytest.mark.cost
@pytest.mark.parametrize("backward", [*EXACT, *APPROXIMATE])
def test_memory_does_not_depend_on_the_number_of_steps(backward):
    fn = lambda z, x: 0.9 * jnp.tanh(jnp.sin(z)) + x
    x = jnp.linspace(0, 1, 1000)

    def gradient(number):
        z0 = jnp.zeros(1000)
        if number is None:
            find = lambda x: jax.lax.scan(lambda z, _: (fn(z, x), None), z0, None, 100)[0]
        else:
            solver = optx.FixedPointIteration(rtol=0.0, atol=1e-30)  # takes all steps
            options = {"solver": solver, "backward": backward, "throw": False}
            find = lambda x: eqg.fixed_point(fn, z0, x, max_steps=number, **options).value
        return temp_bytes(jax.grad(lambda x: jnp.sum(find(x))), x)

    few, many = gradient(10), gradient(100)
    assert few == many
    assert many < 0.2 * gradient(None)


# ---------------------------------------------------------------- in Optimistix


@pytest.mark.slow
def test_tags_reach_the_linear_solve(getkey):
    w, u, x = problem(getkey)
    w = -w @ w.T  # so that w - 1 is negative definite
    tags = lx.negative_semidefinite_tag
    cholesky = solvers.ImplicitAdjoint(lx.Cholesky())
    loss = lambda w, **options: jnp.sum(solve(linear, w, u, x, **options))
    got = jax.grad(loss)(w, backward=cholesky, tags=tags)
    assert_close(got, jax.grad(loss)(w), tolerance=1e-5)
    with pytest.raises(ValueError, match="Cholesky"):
        jax.grad(loss)(w, backward=cholesky)


# ---------------------------------------------------------------- what is returned


def test_each_example_of_a_batch_has_its_own_count():
    solution = jax.vmap(lambda x: eqg.fixed_point(lambda y, x: x * y + 1, 0.0, x))
    counts = solution(jnp.array([0.1, 0.5, 0.9])).stats["num_steps"]
    assert counts[0] < counts[1] < counts[2]


def conjugating(z, c):
    return 0.3 * z * jnp.conj(z) + 0.2j * jnp.conj(z) + c


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Complex support in Optimistix")
@pytest.mark.parametrize("backward", EXACT)
def test_complex(backward):
    """The function is not holomorphic: its derivative is linear over the reals only."""
    with jax.enable_x64(True):

        def loss(z):
            return jnp.real(z) + 2 * jnp.imag(z)

        ours = lambda c: loss(eqg.fixed_point(conjugating, 0j, c, backward=backward).value)
        plain = lambda c: loss(
            jax.lax.scan(lambda z, _: (conjugating(z, c), None), 0j * c, None, length=80)[0]
        )
        both = lambda f: (jax.grad(f)(0.3 + 0.4j), jax.jvp(f, (0.3 + 0.4j,), (1 + 2j,))[1])
        assert_close(both(ours), both(plain), tolerance=1e-9)


@pytest.mark.thorough
def test_without_jit():
    with jax.disable_jit():
        fn = lambda x: eqg.fixed_point(lambda y, x: 0.5 * y + x, 0.0, x, backward="neumann")
        assert jax.grad(lambda x: fn(x).value)(1.0) == 63 / 32


def double(y, x):
    return 2 * y + x


def test_a_map_that_is_no_contraction(getkey):
    """A result code or an error, by choice."""
    solution = eqg.fixed_point(double, 1.0, 1.0, throw=False, max_steps=None)
    assert solution.result == optx.RESULTS.nonfinite
    solution = eqg.fixed_point(double, 1.0, 1.0, throw=False, max_steps=10)
    assert solution.result == optx.RESULTS.nonlinear_max_steps_reached
    assert solution.stats["num_steps"] == 10
    assert solution.value == 2047
    with pytest.raises(eqx.EquinoxRuntimeError, match="fixed point of `double` was not found"):
        eqg.fixed_point(double, 1.0, 1.0)
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"`max_steps`[\s\S]*test_fixed_point.py"):
        eqg.fixed_point(double, 1.0, 1.0, max_steps=10)


def test_a_derivative_that_does_not_converge():
    newton = optx.Newton(rtol=1e-5, atol=1e-5)

    def slope(backward):
        fn = lambda x: eqg.fixed_point(double, 1.0, x, solver=newton, backward=backward).value
        return eqx.filter_jit(jax.grad(fn))(1.0)

    with pytest.raises(
        eqx.EquinoxRuntimeError, match="`FixedPointAdjoint` was still iterating"
    ):
        slope("fixed_point")
    quiet = solvers.FixedPointAdjoint(max_steps=3, throw=False)
    assert slope(quiet) == 15  # 1 + 2 + 4 + 8
    anderson = solvers.FixedPointAdjoint(solvers.Anderson(rtol=1e-5, atol=1e-5))
    assert_close(slope(anderson), jnp.array(-1.0), tolerance=1e-4)


def test_a_small_cotangent_is_not_taken_for_zero(getkey):
    args = problem(getkey)
    for backward in EXACT:
        fn = lambda x, scale, backward=backward: (
            scale * jnp.sum(solve(nonlinear, *args[:2], x, backward=backward))
        )
        gradient = jax.jit(jax.grad(fn))
        small, large = gradient(args[2], 1e-20), gradient(args[2], 1.0)
        assert_close(small * 1e20, large, tolerance=1e-5)
        assert jnp.array_equal(gradient(args[2], 0.0), jnp.zeros(3))


# ---------------------------------------------------------------- edges and bad input


def test_kinds_of_leaves():
    fn = lambda y, n, x: {"a": y["a"] * 0.5 + x[0], "none": None, "empty": y["empty"]}
    start = {"a": 1, "none": None, "empty": jnp.zeros((0, 2))}
    start["a"] = np.float32(1)
    value = eqg.fixed_point(fn, start, 3, (2.0, "name")).value
    assert_close(value["a"], jnp.array(4.0, value["a"].dtype), tolerance=1e-4)
    assert value["empty"].shape == (0, 2)
    assert value["none"] is None


def grows(y):
    return jnp.concatenate([y, y])


def casts(y):
    return y.astype("float16")


def nests(y):
    return {"y": y}


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (grows, r"`grows` returned something other[\s\S]*at y: it was given float\d\d\[2\]"),
        (casts, r"`casts` returned something other[\s\S]*and returned float16\[2\]"),
        (nests, r"`nests` returned something other[\s\S]*Return a PyTree with the structure"),
    ],
)
def test_a_function_that_changes_its_argument(fn, text):
    with pytest.raises(RuleError, match=text):
        eqg.fixed_point(fn, jnp.zeros(2))


def test_bad_arguments():
    identity = lambda y: y
    with pytest.raises(RuleError, match=r"start that is not floating[\s\S]*y0\['n'\] is int"):
        eqg.fixed_point(identity, {"n": 0})
    with pytest.raises(
        RuleError,
        match=r"`backward` of `fixed_point` is not known[\s\S]*'implicit', 'fixed_point'",
    ):
        eqg.fixed_point(identity, 0.0, backward="newton")
    with pytest.raises(RuleError, match=r"start without arrays[\s\S]*`y0` is \(None,\)"):
        eqg.fixed_point(identity, (None,))
    with pytest.raises(RuleError, match="`backward` of `fixed_point` is not known"):
        eqg.fixed_point(identity, 0.0, backward=solvers.OneStepAdjoint)
    with pytest.raises(RuleError, match="`solver` of `fixed_point` is not one of Optimistix"):
        eqg.fixed_point(identity, 0.0, solver="anderson")
    with pytest.raises(RuleError, match="`<lambda>` did not return a pair"):
        eqg.fixed_point(identity, 0.0, has_aux=True)
    for k in (-1, 1.5, True):
        with pytest.raises(RuleError, match="`k` of `NeumannAdjoint` is not an integer"):
            solvers.NeumannAdjoint(k)
    with pytest.raises(
        RuleError, match="`k` of `PhantomAdjoint` is not an integer of at least"
    ):
        solvers.PhantomAdjoint(0)
    for tau in (0, 1.5, "half"):
        with pytest.raises(RuleError, match="`tau` of `PhantomAdjoint` is not a damping"):
            solvers.PhantomAdjoint(2, tau)
    with pytest.raises(RuleError, match="`history` of `Anderson` is not an integer"):
        solvers.Anderson(rtol=1e-3, atol=1e-3, history=0)


def test_without_optimistix(monkeypatch):
    monkeypatch.setitem(sys.modules, "optimistix", None)
    with pytest.raises(ModuleNotFoundError, match="needs `optimistix`"):
        eqg.fixed_point(lambda y: y, 0.0)
    with pytest.raises(ModuleNotFoundError, match=r"`eqx_grads.solvers` needs `optimistix`"):
        importlib.reload(sys.modules["eqx_grads._solvers.optimistix"])


# ---------------------------------------------------------------- Anderson acceleration


def test_anderson_needs_few_steps(getkey):
    """With a history as large as the state, a linear problem takes as many steps as it has
    dimensions, as GMRES does (Walker and Ni, 2011), and the plain iteration takes thousands."""
    with jax.enable_x64(True):
        args = problem(getkey, n=8, factor=1.0)
        w = args[0] * 0.99 / np.max(np.abs(np.linalg.eigvals(np.asarray(args[0]))))
        anderson = solvers.Anderson(rtol=1e-10, atol=1e-10, history=8)
        solution = eqg.fixed_point(linear, jnp.zeros(8), w, *args[1:], solver=anderson)
        assert solution.stats["num_steps"] <= 14
        expected = np.linalg.solve(np.eye(8) - np.asarray(w), np.asarray(args[1] @ args[2]))
        assert relative(solution.value, expected) < 1e-8
        plain = optx.FixedPointIteration(rtol=1e-10, atol=1e-10)
        slow = eqg.fixed_point(
            linear, jnp.zeros(8), w, *args[1:], solver=plain, max_steps=300, throw=False
        )
        assert slow.result == optx.RESULTS.nonlinear_max_steps_reached


# ---------------------------------------------------------------- the layer


class Cell(eqx.Module):
    of_input: eqx.nn.Linear
    of_state: eqx.nn.Linear

    def __init__(self, size, hidden, *, key):
        key1, key2 = jr.split(key)
        self.of_input = eqx.nn.Linear(size, hidden, key=key1)
        of_state = eqx.nn.Linear(hidden, hidden, use_bias=False, key=key2)
        weight = 0.5 * of_state.weight / jnp.linalg.norm(of_state.weight, 2)
        self.of_state = eqx.tree_at(lambda layer: layer.weight, of_state, weight)

    def __call__(self, x, z):
        return jnp.tanh(self.of_input(x) + self.of_state(z))


def test_layer_statistics_and_start(getkey):
    layer = eqg.nn.FixedPoint(Cell(3, 4, key=getkey()), (4,))
    x = jr.normal(getkey(), (3,))
    cold = layer.solve(x)
    warm = layer.solve(x, cold.value)
    assert warm.stats["num_steps"] < cold.stats["num_steps"]
    assert cold.result == optx.RESULTS.successful
    assert jnp.array_equal(layer(x), cold.value)
    net = eqx.nn.Sequential([layer, eqx.nn.Linear(4, 2, key=getkey())])
    assert net(x, key=getkey()).shape == (2,)


def test_layer_errors(getkey):
    for shape in (0, 2.5, (3, -1), "four"):
        with pytest.raises(RuleError, match="`FixedPoint` was given a shape"):
            eqg.nn.FixedPoint(Cell(3, 4, key=getkey()), shape)
    with pytest.raises(RuleError, match="`throw` of `FixedPoint` is not a bool"):
        eqg.nn.FixedPoint(Cell(3, 4, key=getkey()), 4, throw="no")
    layer = eqg.nn.FixedPoint(lambda x, z: jnp.append(z, x), 4)
    with pytest.raises(RuleError, match=r"`<lambda>` returned[\s\S]*at y: it was given"):
        layer(jnp.ones(3))
    explodes = eqg.nn.FixedPoint(lambda x, z: 2 * z + x, 3)
    with pytest.raises(eqx.EquinoxRuntimeError, match="fixed point of `<lambda>`"):
        explodes(jnp.ones(3))
    quiet = eqg.nn.FixedPoint(lambda x, z: 2 * z + x, 3, throw=False)
    assert quiet.solve(jnp.ones(3)).result != optx.RESULTS.successful
