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

from .helpers import assert_close, temp_bytes


EXACT = ("implicit", "fixed_point")


def solve(fn, *args, n=5, **options):
    """As exact as single precision allows."""
    options = {"solver": optx.FixedPointIteration(rtol=2e-7, atol=2e-7), **options}
    return eqg.fixed_point(fn, jnp.zeros(n), *args, **options).value


def problem(getkey, n=5):
    w, u = jr.normal(getkey(), (n, n)), jr.normal(getkey(), (n, 3))
    return 0.5 * w / jnp.linalg.norm(w, 2), u, jr.normal(getkey(), (3,))


def double(y, x):
    return 2 * y + x


# ---------------------------------------------------------------- derivatives


class Damped(eqx.Module):
    weight: jax.Array
    damping: float = 0.5

    def __call__(self, y, x):
        # A branch on the number: it has to be static.
        return self.damping * jnp.tanh(self.weight * y) + x if self.damping > 0 else x


# Of the series, enough terms for an exact derivative.
@pytest.mark.parametrize("adjoint", [solvers.ImplicitAdjoint(), solvers.NeumannAdjoint(30)])
def test_numbers_of_python_in_optimistix(adjoint):
    step = lambda y, args: Damped(args[0], args[1])(y, args[2])
    weight, x = jnp.array([0.3, 0.8]), jnp.array([1.0, -0.5])
    solver = optx.FixedPointIteration(rtol=2e-7, atol=2e-7)

    def solution(weight, damping):
        args = (weight, damping, x)
        return optx.fixed_point(step, solver, jnp.zeros(2), args, adjoint=adjoint).value

    got = jax.jacrev(solution)(weight, 0.5)
    closure = lambda weight: solve(lambda y: Damped(weight)(y, x), n=2, backward=adjoint)
    assert_close(got, jax.jacrev(closure)(weight), tolerance=1e-5)


def test_a_small_cotangent_is_not_taken_for_zero(getkey):
    w, u, x = problem(getkey)
    fn = lambda z, x: jnp.tanh(w @ z + u @ x)
    for backward in EXACT:
        loss = lambda x, scale, how=backward: scale * jnp.sum(solve(fn, x, backward=how))
        gradient = jax.jit(jax.grad(loss))
        small, large = gradient(x, 1e-20), gradient(x, 1.0)
        assert_close(small * 1e20, large, tolerance=1e-5)
        assert jnp.array_equal(gradient(x, 0.0), jnp.zeros(3))


@pytest.mark.slow
def test_tags_reach_the_linear_solve(getkey):
    w, u, x = problem(getkey)
    w = -w @ w.T  # so that w - 1 is negative definite
    cholesky = solvers.ImplicitAdjoint(lx.Cholesky())
    loss = lambda w, **options: jnp.sum(solve(lambda z, w: w @ z + u @ x, w, **options))
    got = jax.grad(loss)(w, backward=cholesky, tags=lx.negative_semidefinite_tag)
    assert_close(got, jax.grad(loss)(w), tolerance=1e-5)
    with pytest.raises(ValueError, match="Cholesky"):
        jax.grad(loss)(w, backward=cholesky)


def conjugating(z, c):
    return 0.3 * z * jnp.conj(z) + 0.2j * jnp.conj(z) + c


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Complex support in Optimistix")
@pytest.mark.parametrize("backward", EXACT)
def test_complex(backward):
    """The function is not holomorphic: its derivative is linear over the reals only."""
    with jax.enable_x64(True):
        of_parts = lambda find: lambda c: jnp.real(find(c)) + 2 * jnp.imag(find(c))
        ours = lambda c: eqg.fixed_point(conjugating, 0j, c, backward=backward).value
        plain = lambda c: jax.lax.scan(
            lambda z, _: (conjugating(z, c), None), 0j * c, None, length=80
        )[0]
        both = lambda f: (jax.grad(f)(0.3 + 0.4j), jax.jvp(f, (0.3 + 0.4j,), (1 + 2j,))[1])
        assert_close(both(of_parts(ours)), both(of_parts(plain)), tolerance=1e-9)


@pytest.mark.thorough
def test_without_jit():
    with jax.disable_jit():
        fn = lambda x: eqg.fixed_point(lambda y, x: 0.5 * y + x, 0.0, x, backward="neumann")
        assert jax.grad(lambda x: fn(x).value)(1.0) == 63 / 32


@pytest.mark.cost
@pytest.mark.parametrize("backward", [*EXACT, "neumann", "phantom", "one_step"])
def test_memory_does_not_depend_on_the_number_of_steps(backward):
    fn = lambda z, x: 0.9 * jnp.tanh(jnp.sin(z)) + x
    x, z0 = jnp.linspace(0, 1, 1000), jnp.zeros(1000)
    solver = optx.FixedPointIteration(rtol=0.0, atol=1e-30)  # takes all steps
    options = {"solver": solver, "backward": backward, "throw": False}
    gradient = lambda find: temp_bytes(jax.grad(lambda x: jnp.sum(find(x))), x)
    ours = lambda n: lambda x: eqg.fixed_point(fn, z0, x, max_steps=n, **options).value
    plain = lambda x: jax.lax.scan(lambda z, _: (fn(z, x), None), z0, None, 100)[0]
    assert gradient(ours(10)) == gradient(ours(100))
    assert gradient(ours(100)) < 0.2 * gradient(plain)


# ---------------------------------------------------------------- what converges, and what not


def test_each_example_of_a_batch_has_its_own_count():
    solution = jax.vmap(lambda x: eqg.fixed_point(lambda y, x: x * y + 1, 0.0, x))
    counts = solution(jnp.array([0.1, 0.5, 0.9])).stats["num_steps"]
    assert counts[0] < counts[1] < counts[2]


def test_a_map_that_is_no_contraction():
    """A result code or an error, by choice."""
    solution = eqg.fixed_point(double, 1.0, 1.0, throw=False, max_steps=None)
    assert solution.result == optx.RESULTS.nonfinite
    solution = eqg.fixed_point(double, 1.0, 1.0, throw=False, max_steps=10)
    assert solution.result == optx.RESULTS.nonlinear_max_steps_reached
    assert (solution.stats["num_steps"], solution.value) == (10, 2047)
    with pytest.raises(eqx.EquinoxRuntimeError, match="fixed point of `double` was not found"):
        eqg.fixed_point(double, 1.0, 1.0)
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"`max_steps`[\s\S]*test_fixed_point.py"):
        eqg.fixed_point(double, 1.0, 1.0, max_steps=10)


def test_a_derivative_that_does_not_converge():
    """Where the iteration diverges, and neither a root finder nor the linear solve does."""
    newton = optx.Newton(rtol=1e-5, atol=1e-5)

    def slope(backward):
        fn = lambda x: eqg.fixed_point(double, 1.0, x, solver=newton, backward=backward).value
        return eqx.filter_jit(jax.grad(fn))(1.0)

    assert_close(slope("implicit"), jnp.array(-1.0))
    with pytest.raises(eqx.EquinoxRuntimeError, match="`FixedPointAdjoint` was still iterat"):
        slope("fixed_point")
    quiet = solvers.FixedPointAdjoint(max_steps=3, throw=False)
    assert slope(quiet) == 15  # 1 + 2 + 4 + 8
    anderson = solvers.FixedPointAdjoint(solvers.Anderson(rtol=1e-5, atol=1e-5))
    assert_close(slope(anderson), jnp.array(-1.0), tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:Complex support in Optimistix")
@pytest.mark.parametrize(("n", "factor"), [(8, 0.99), (4, 0.99j)])
def test_anderson_needs_few_steps(n, factor, getkey):
    """With a history as large as the state, a linear problem takes as many steps as it has real
    dimensions, as GMRES does (Walker and Ni, 2011)."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        w, u, x = problem(getkey, n=n)
        w = w * factor / np.max(np.abs(np.linalg.eigvals(np.asarray(w))))
        anderson = solvers.Anderson(rtol=1e-10, atol=1e-10, history=8)
        solution = eqg.fixed_point(lambda z: w @ z + u @ x, 0 * w[0], solver=anderson)
        assert solution.stats["num_steps"] <= 14
        expected = np.linalg.solve(np.eye(n) - np.asarray(w), np.asarray(u @ x))
        assert_close(solution.value, expected, tolerance=1e-7)


# ---------------------------------------------------------------- edges and bad input


def test_kinds_of_leaves():
    fn = lambda y, n, x: {"a": y["a"] * 0.5 + x[0], "none": None, "empty": y["empty"]}
    start = {"a": np.float32(1), "none": None, "empty": jnp.zeros((0, 2))}
    value = eqg.fixed_point(fn, start, 3, (2.0, "name")).value
    assert_close(value["a"], jnp.array(4.0, value["a"].dtype), tolerance=1e-4)
    assert (value["empty"].shape, value["none"]) == ((0, 2), None)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: eqg.fixed_point(lambda y: y.astype("float16"), 0.0), "and returned float16"),
        (
            lambda: eqg.fixed_point(lambda y: y, 0.0, backward=solvers.OneStepAdjoint),
            r"(?s)`backward` of `fixed_point` is not known.*'implicit'.*NeumannAdjoint\(",
        ),
        (lambda: solvers.PhantomAdjoint(2, 0), "`tau` of `PhantomAdjoint` is not a damping"),
    ],
)
def test_errors(call, text):
    with pytest.raises(RuleError, match=text):
        call()


def test_arguments_of_another_number():
    def sweep(y, a, b):
        return y * a + b

    with pytest.raises(TypeError, match="takes 3 positional arguments") as caught:
        eqg.fixed_point(sweep, 1.0, 0.5, 1.0, 2.0, 3.0)
    (note,) = [n for n in caught.value.__notes__ if "`sweep`" in n]
    assert "4 arguments after `y0`" in note


def test_without_optimistix(monkeypatch):
    monkeypatch.setitem(sys.modules, "optimistix", None)
    with pytest.raises(ModuleNotFoundError, match="needs `optimistix`"):
        eqg.fixed_point(lambda y: y, 0.0)
    with pytest.raises(ModuleNotFoundError, match=r"`eqx_grads.solvers` needs `optimistix`"):
        importlib.reload(sys.modules["eqx_grads._solvers.optimistix"])


# ---------------------------------------------------------------- the layer


def test_the_layer(getkey):
    linear = eqx.nn.Linear(3, 4, key=getkey())
    layer = eqg.nn.FixedPoint(lambda x, z: jnp.tanh(linear(x) + 0.5 * z), (4,))
    x = jr.normal(getkey(), (3,))
    cold = layer.solve(x)
    assert layer.solve(x, cold.value).stats["num_steps"] < cold.stats["num_steps"]
    assert cold.result == optx.RESULTS.successful
    net = eqx.nn.Sequential([layer, eqx.nn.Linear(4, 2, key=getkey())])
    assert net(x, key=getkey()).shape == (2,)
    diverges = lambda x, z: 2 * z + x
    with pytest.raises(eqx.EquinoxRuntimeError, match="fixed point of `<lambda>`"):
        eqg.nn.FixedPoint(diverges, 3)(jnp.ones(3))
    quiet = eqg.nn.FixedPoint(diverges, 3, throw=False)
    assert quiet.solve(jnp.ones(3)).result != optx.RESULTS.successful
