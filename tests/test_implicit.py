"""`eqg.implicit`: the derivative of a solver, from the equation that it solves."""

import re
import sys

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close


lx = pytest.importorskip("lineax")

FAILS = (eqx.EquinoxRuntimeError, jax.errors.JaxRuntimeError, RuntimeError)


def newton(residual, y, *args, steps=20):
    """Newton's method with a matrix. Its steps are whole numbers of a `while_loop`, so that it
    has no reverse mode."""
    flat, unravel = jax.flatten_util.ravel_pytree(y)
    fn = lambda x: jax.flatten_util.ravel_pytree(residual(unravel(x), *args))[0]

    def step(state):
        i, x = state
        return i + 1, x - jnp.linalg.solve(jax.jacfwd(fn)(x), fn(x))

    return unravel(jax.lax.while_loop(lambda state: state[0] < steps, step, (0, flat))[1])


def residual(y, a, b):
    return {"u": jnp.sinh(y["u"]) - a * b, "v": (y["v"] + y["u"]) ** 3 - b}


@eqg.implicit(residual)
def solve(a, b, *, guess=1.0):
    """Solve for u and v."""
    y = {"u": jnp.asarray(guess, a.dtype), "v": jnp.asarray(guess, a.dtype)}
    return newton(residual, y, a, b)


def test_closures_in_scan_and_vmap():
    def loss(a):
        def step(y, x):
            residual = lambda y: jnp.sinh(y) - a * x  # closes over both

            # The last solution is the first guess, with no `stop_gradient`.
            return eqg.implicit(residual)(lambda *, guess: newton(residual, guess))(guess=y), y

        return jax.lax.scan(step, a, jnp.array([0.5, 1.0, 1.5]))[0]

    slopes = jax.jit(jax.vmap(jax.grad(loss)))(jnp.array([0.4, 0.8]))
    expected = jax.vmap(jax.grad(lambda a: jnp.arcsinh(1.5 * a)))(jnp.array([0.4, 0.8]))
    assert_close(slopes, expected, eps=100)


@pytest.mark.slow
def test_keyword_only():
    """An argument that the residual does not take has a zero derivative; the rest is
    configuration."""
    assert jax.grad(lambda g: solve(0.7, 1.3, guess=g)["u"])(1.0) == 0

    @eqg.implicit(lambda y, a, *, power: y**power - a)
    def root(a, *, power=2, unused=None):
        return a ** (1 / jnp.asarray(power, a.dtype))

    assert_close(jax.grad(root)(4.0), 0.25)
    assert_close(jax.grad(lambda a: root(a, power=3))(8.0), 1 / 12)
    with pytest.raises(
        RuleError, match=r"The keyword-only argument `power` of `root` was diff"
    ):
        jax.grad(lambda p: root(4.0, power=p))(2.0)


def test_aux():
    @eqg.implicit(lambda y, a: y**2 - a, has_aux=True)
    def root(a):
        return jnp.sqrt(a), {"steps": 3, "value": 2 * a, "name": "sqrt"}

    y, aux = root(4.0)
    assert (y, aux["steps"], aux["value"], aux["name"]) == (2.0, 3, 8.0, "sqrt")
    value, slope = jax.value_and_grad(lambda a: root(a)[0] + root(a)[1]["value"])(4.0)
    assert (value, slope) == (10.0, 0.25)
    wrong = eqg.implicit(lambda y, a: y - a, has_aux=True)(lambda a: a)
    with pytest.raises(RuleError, match=r"did not return a pair(?s:.*)`has_aux=True` says"):
        jax.grad(wrong)(1.0)


def test_empty():
    @eqg.implicit(lambda y, a: y - a)
    def identity(a):
        return a

    assert jax.grad(lambda a: jnp.sum(identity(a)))(jnp.zeros((0, 2))).shape == (0, 2)
    nothing = eqg.implicit(lambda y, a: ())(lambda a: ())
    assert jax.grad(lambda a: a + float(nothing(a) == ()))(1.0) == 1.0


class TestTheResidualIsSmall:
    wrong = staticmethod(eqg.implicit(lambda y, a: {"x": y["x"] ** 2 - a, "z": y["z"] - 1.0}))

    @pytest.mark.parametrize("transform", [lambda f: f, eqx.filter_jit, jax.vmap])
    def test_not_small(self, transform):
        @self.wrong
        def unfinished(a):
            return {"x": 1.2 * jnp.sqrt(a), "z": jnp.ones_like(a)}

        gradient = jax.grad(lambda a: unfinished(a)["x"])
        with pytest.raises(FAILS, match=r"`unfinished` is not small at the solution"):
            transform(gradient)(jnp.full((2,) if transform is jax.vmap else (), 4.0))

    def test_the_leaf_is_named(self):
        unfinished = self.wrong(lambda a: {"x": 1.2 * jnp.sqrt(a), "z": jnp.ones(())})
        with pytest.raises(FAILS, match=r"at residual\['x'\]: .* more than 1 % \(tol"):
            jax.grad(lambda a: unfinished(a)["x"])(4.0)

    def test_the_line_of_the_residual_is_named(self):
        """Even when the program that fails was compiled for an earlier call, whose stack the
        error has."""

        def close_to_root(y, a):
            return y**2 - a

        solve = eqg.implicit(close_to_root)(lambda a: jnp.full_like(a, 2.0))
        gradient = eqx.filter_jit(jax.grad(solve))
        assert gradient(4.0) == 0.25
        code = close_to_root.__code__
        place = f'in `close_to_root`, file "{code.co_filename}", line {code.co_firstlineno}'
        for again in (gradient, jax.jit(gradient), jax.grad(solve)):
            with pytest.raises(FAILS, match=re.escape(place)):
                again(9.0)

    def test_tolerance(self):
        options = {"tolerance": None}, {"tolerance": 1.0}, {"tolerance": 1e-6}
        rough = lambda a: jnp.sqrt(a) * 1.001
        first, second, strict = (
            eqg.implicit(lambda y, a: y**2 - a, **kwargs)(rough) for kwargs in options
        )
        assert_close(jax.grad(first)(4.0), 0.25 / 1.001)
        assert_close(jax.grad(second)(4.0), 0.25 / 1.001)
        with pytest.raises(FAILS, match="tolerance=1e-06"):
            jax.grad(strict)(4.0)

    @pytest.mark.parametrize("a", [0.0, 1e-12, 1e12])
    def test_small_at_all_scales(self, a):
        """A root at zero, and tiny and huge ones, of a solver with an absolute error."""
        root = eqg.implicit(lambda y, a: y**3 + y - a)
        near = root(lambda a: newton(lambda y, a: y**3 + y - a, 1 + a, a, steps=120) + 1e-6)
        assert jnp.isfinite(jax.jit(jax.grad(near))(a))


@pytest.mark.slow
def test_solvers_of_others():
    """SciPy, which sees numbers in eager mode and a callback else, and Optimistix."""
    optimize = pytest.importorskip("scipy.optimize")
    optx = pytest.importorskip("optimistix")
    residual = lambda y, a: y**3 + y - a
    brentq = lambda a: np.asarray(
        optimize.brentq(residual, -10.0, 10.0, args=(float(a),)), a.dtype
    )
    eager = eqg.implicit(residual)(lambda a: jnp.asarray(brentq(a)))
    assert_close(jax.grad(eager)(2.0), 0.25)
    assert_close(jax.hessian(eager)(2.0), -6 / 64, eps=50)

    @eqg.implicit(residual)
    def by_callback(a):
        return jax.pure_callback(brentq, a, a, vmap_method="sequential")

    slopes = jax.jit(jax.vmap(jax.grad(by_callback)))(jnp.array([2.0, 10.0]))
    assert_close(slopes, jnp.array([1 / 4, 1 / 13]))

    @eqg.implicit(lambda y, a: residual(y, a), has_aux=True)
    def by_optimistix(a):
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        solution = optx.root_find(residual, solver, jnp.ones_like(a), a)
        return solution.value, solution.stats

    assert_close(jax.jit(jax.hessian(lambda a: by_optimistix(a)[0]))(2.0), -6 / 64, eps=50)


class TestErrors:
    def test_structure(self):
        solve = lambda a: {"x": jnp.ones(2) * a, "y": a, "n": 3}
        for residual, message in [
            (
                lambda y, a: {"x": y["x"] - a},
                r"at residual\['y'\]: the solution is float\d\d\[\], the res",
            ),
            (lambda y, a: y["x"], r"the residual float\d\d\[2\]"),
            (
                lambda y, a: {**y, "x": y["x"][:1]},
                r"float\d\d\[2\], the residual float\d\d\[1\]",
            ),
            (
                lambda y, a: {**y, "y": 1j * y["y"]},
                r"float\d\d\[\], the residual complex\d+\[\]",
            ),
        ]:
            decorated = eqg.implicit(residual)(solve)
            with pytest.raises(RuleError, match=message):
                jax.grad(lambda a, f=decorated: f(a)["y"])(1.0)
        containers = eqg.implicit(lambda y, a: [y[0] - a])(lambda a: (a,))
        with pytest.raises(RuleError, match=r"the solution is \(float.*\[float"):
            jax.grad(lambda a: containers(a)[0])(1.0)
        square = eqg.implicit(lambda y, a: jnp.stack([y, y]) - a, solver=lx.LU())(lambda a: a)
        with pytest.raises(ValueError, match="square matrices"):  # Lineax says so
            jax.grad(square)(1.0)

    def test_integer_residual(self):
        rounded = eqg.implicit(lambda y, a: jnp.round(y - a).astype(int))(lambda a: a)
        with pytest.raises(
            RuleError, match=r"of `<lambda>` has no derivative.\n  at residual: "
        ):
            jax.grad(rounded)(1.0)

    def test_arguments(self):
        wrong = eqg.implicit(lambda y: y)(lambda a: a)
        with pytest.raises(
            RuleError, match=r"too many positional arguments.\n  positional argum"
        ):
            jax.grad(wrong)(1.0)

    def test_without_lineax(self, monkeypatch):
        """Only large systems need it, and systems with tags or a solver."""
        monkeypatch.setitem(sys.modules, "lineax", None)
        summed = eqg.implicit(lambda y, a: jnp.cumsum(y) - a)
        few = summed(lambda a: a * jnp.eye(2)[0])
        assert_close(jax.jacfwd(few)(0.7), jnp.array([1.0, 0.0]))
        many = summed(lambda a: a * jnp.eye(300)[0])
        with pytest.raises(
            ModuleNotFoundError, match=r"Run `pip install eqx-grads\[solvers\]`"
        ):
            jax.jacfwd(many)(0.7)


def test_a_residual_of_a_method_with_its_parameters_in_another_order():
    class Root(eqx.Module):
        a: jax.Array

        @eqg.implicit(lambda self, y, b: self.a * y**2 - b)
        def __call__(self, b):
            return jnp.sqrt(b / self.a)

    with pytest.raises(AttributeError, match=r"no attribute '?a") as error:
        jax.grad(Root(jnp.array(2.0)))(3.0)
    (note,) = [note for note in error.value.__notes__ if "residual" in note]
    assert "is called with the solution of `" in note
    assert "begin with `self`" in note


class TestWhatBeginnersGetWrong:
    def test_a_solver_that_returns_nothing(self):
        @eqg.implicit(lambda y, a: y - a)
        def forgets(a):
            jnp.sqrt(a)

        @eqg.implicit(lambda y, a: y - a, has_aux=True)
        def forgets_too(a):
            return None, a

        for solve in (forgets, forgets_too):
            for transform in (lambda f: f, jax.jit):
                match = f"`{solve.__name__}` returned no solution"
                with pytest.raises(eqg.RuleError, match=match):
                    transform(solve)(jnp.ones(2))

    @pytest.mark.parametrize("y", [{"x": 1.0}, (1.0, 2.0)], ids=["dict", "tuple"])
    def test_a_residual_with_its_arguments_in_another_order(self, y):
        def swapped(a, y):
            return {"x": y["x"] - a} if isinstance(a, dict) else (y[5] - a[0], a[1])

        solve = eqg.implicit(swapped)(lambda a: jax.tree.map(lambda x: x * a, y))
        with pytest.raises((TypeError, IndexError)) as caught:
            jax.jvp(solve, (1.0,), (1.0,))
        (note,) = [n for n in caught.value.__notes__ if "swapped" in n]
        assert "is called with the solution of" in note

    def test_fixed_point_with_other_arguments(self):
        def sweep(y, a, b):
            return y * a + b

        with pytest.raises(TypeError, match="takes 3 positional arguments") as caught:
            eqg.fixed_point(sweep, 1.0, 0.5, 1.0, 2.0, 3.0)
        (note,) = [n for n in caught.value.__notes__ if "`sweep`" in n]
        assert "4 arguments after `y0`" in note

    def test_without_a_residual(self):
        @eqg.implicit
        def solve(a):
            return a

        with pytest.raises(eqg.RuleError, match=r"`@eqg.implicit\(residual\)`") as caught:
            solve(2.0)
        assert "`solve`" in str(caught.value)

    def test_an_objective_in_place_of_its_gradient(self):
        objective = lambda y, a: jnp.sum((y - a) ** 2)
        solve = eqg.implicit(objective)(lambda a: a)
        with pytest.raises(eqg.RuleError, match=r"an objective[?] Give `jax.grad`"):
            jax.jacobian(solve)(jnp.ones(3))


def _two_equations(z, a):
    return jnp.stack([z[0] ** 2 - a, z[1] + z[0] - 1.0])


@pytest.mark.slow
def test_the_tracers_that_lineax_keeps_are_no_fault_of_a_rule():
    """From JAX 0.11 on with each trace, before Python 3.13 in a run-time check."""
    solve = lambda a: np.stack([np.sqrt(a), 1 - np.sqrt(a)])
    on_host = eqg.host_function(solve, out=lambda a: jax.ShapeDtypeStruct((2,), a.dtype))
    root = eqg.implicit(_two_equations)(on_host)
    assert eqgt.check_rule(root, jnp.array(2.0), checks=("leaks",), order=1).passed
