"""Claim: the gradient of `eqg.implicit` costs 1.0 to 1.1 times a hand-written rule with LU, and
1.3 to 1.4 times with GMRES (Optimistix: 1.2, and 1.6 to 1.7).

For roots that need a division only it takes 0.05 to 0.15 ms more for the check. Without `jit`,
LU takes twice as long as `custom_root` does (Optimistix too), as Lineax compiles each time.

The peers are `jax.lax.custom_root`, the rule of Optimistix's `ImplicitAdjoint`, and a
`jax.custom_jvp` written by hand. Each is around the same solver and is given the same kind of
linear solver: a division, LU, and GMRES. The loss is the sum of squares of the solution, in
single precision. "Gradient" and "second" (the derivative of the gradient along one direction)
are processor times with the solver in them: the median over rounds of the ratio to the rule by
hand. "ms" is the least time of a gradient, and "bytes" is the temporary memory of the compiled
gradient. "Error" is the largest difference from the gradient by hand in double precision,
relative to the largest entry of a leaf. "Eager" is a gradient without `jit`, in ms.

    python benchmarks/implicit.py [--quick] [--rounds 11]
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import optimistix as optx
from timing import busy_time, compiled, in_turn, speed


def roots_residual(y, args):
    return y**3 + args["scale"] * y - args["a"]


def roots(args):
    """Many roots of one equation each, by bisection."""

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        above = roots_residual(middle, args) > 0
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    start = -10 * jnp.ones_like(args["a"]), 10 * jnp.ones_like(args["a"])
    return sum(jax.lax.fori_loop(0, 40, halve, start)) / 2


def system_residual(y, args):
    return 3 * y + args["w"] @ jnp.tanh(y) - args["a"]


def system(args):
    """Coupled equations, by Newton's method."""

    def step(_, y):
        matrix = jax.jacfwd(system_residual)(y, args)
        return y - jnp.linalg.solve(matrix, system_residual(y, args))

    return jax.lax.fori_loop(0, 6, step, jnp.zeros_like(args["a"]))


def equilibrium_residual(y, args):
    return y - jnp.tanh(args["w"] @ y + args["a"])


def equilibrium(args):
    """The equilibrium of a layer, by iteration."""
    step = lambda _, y: y - equilibrium_residual(y, args)
    return jax.lax.fori_loop(0, 40, step, jnp.zeros_like(args["a"]))


def divide(matvec, b):
    return b / matvec(jnp.ones_like(b))


def by_lu(matvec, b):
    return jnp.linalg.solve(jax.jacfwd(matvec)(b), b)


def by_gmres(matvec, b):
    """GMRES that has a transpose: without `custom_linear_solve`, reverse mode raises."""

    def solve(matvec, b):
        return jax.scipy.sparse.linalg.gmres(matvec, b, tol=1e-6, solve_method="batched")[0]

    return jax.lax.custom_linear_solve(matvec, b, solve, solve)


class Problem(NamedTuple):
    name: str
    solve: Callable[[Any], Any]
    residual: Callable[[Any, Any], Any]
    tangent_solve: Callable[[Callable[[Any], Any], Any], Any]
    lineax_solver: Any
    lineax_tags: frozenset[object]
    args: Any


def problems(quick):
    key = jr.key(0)
    n_roots, n_system, n_equilibrium = (10, 5, 10) if quick else (10_000, 100, 1000)
    weight = lambda n: 0.5 * jr.normal(key, (n, n)) / n**0.5
    gmres = lx.GMRES(rtol=1e-6, atol=1e-6)
    return [
        Problem(
            f"{n_roots} roots, division",
            roots,
            roots_residual,
            divide,
            lx.Diagonal(well_posed=True),
            frozenset([lx.diagonal_tag]),
            {"scale": jnp.array(1.5), "a": jr.normal(key, (n_roots,))},
        ),
        Problem(
            f"{n_system} coupled equations, LU",
            system,
            system_residual,
            by_lu,
            lx.LU(),
            frozenset(),
            {"w": weight(n_system), "a": jr.normal(key, (n_system,))},
        ),
        Problem(
            f"equilibrium of {n_equilibrium} units, GMRES",
            equilibrium,
            equilibrium_residual,
            by_gmres,
            gmres,
            frozenset(),
            {"w": weight(n_equilibrium), "a": jr.normal(key, (n_equilibrium,))},
        ),
    ]


def _optimistix_primal(inputs):
    solve, _, args, _ = inputs
    return solve(args), None


def _optimistix_rewrite(y, _, inputs):
    _, residual, args, _ = inputs
    return residual(y, args)


def variants(p: Problem):
    @jax.custom_jvp
    def by_hand(args):
        return p.solve(args)

    @by_hand.defjvp
    def _(primals, tangents):
        (args,), (t_args,) = primals, tangents
        y = by_hand(args)
        _, t_residual = jax.jvp(lambda args: p.residual(y, args), (args,), (t_args,))
        _, matvec = jax.linearize(lambda y: p.residual(y, args), y)
        return y, p.tangent_solve(matvec, -t_residual)

    def custom_root(args):
        fn = lambda y: p.residual(y, args)
        guess = jnp.zeros_like(args["a"])
        return jax.lax.custom_root(fn, guess, lambda *_: p.solve(args), p.tangent_solve)

    def by_optimistix(args):
        adjoint = optx.ImplicitAdjoint(p.lineax_solver)
        inputs = p.solve, p.residual, args
        rule = _optimistix_primal, _optimistix_rewrite
        return adjoint.apply(*rule, inputs, p.lineax_tags)[0]

    return {
        "eqg.implicit": eqg.implicit(p.residual)(p.solve),
        "without its check": eqg.implicit(p.residual, tolerance=None)(p.solve),
        "custom_root": custom_root,
        "Optimistix": by_optimistix,
        "by hand": by_hand,
    }


def gradients(p: Problem):
    return {
        name: jax.grad(lambda args, solve=solve: jnp.sum(solve(args) ** 2))
        for name, solve in variants(p).items()
    }


def eager_seconds(gradient, args):
    jax.block_until_ready(gradient(args))
    start = busy_time()
    jax.block_until_ready(gradient(args))
    return busy_time() - start


def relative_error(p, gradient):
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(x, "float64"), p.args)
        exact = jax.tree.leaves(jax.device_get(jax.jit(gradients(p)["by hand"])(args)))
    got = jax.tree.leaves(jax.device_get(jax.jit(gradient)(p.args)))
    gaps = [np.max(np.abs(x - y)) / np.max(np.abs(y)) for x, y in zip(got, exact, strict=True)]
    return max(gaps)


_WIDTH = {"ms": 8, "gradient": 8, "second": 8, "bytes": 11, "error": 8, "eager": 8}


def measure(p: Problem, rounds):
    by_name = gradients(p)
    second = {
        name: lambda args, gradient=gradient: jax.jvp(gradient, (args,), (args,))[1]
        for name, gradient in by_name.items()
    }
    first_order = {name: compiled(fn, p.args) for name, fn in by_name.items()}
    second_order = {name: compiled(fn, p.args) for name, fn in second.items()}
    runs = lambda programs: {name: program.run for name, program in programs.items()}
    times = in_turn(runs(first_order), rounds, busy_time)
    times_second = in_turn(runs(second_order), rounds, busy_time)
    print(f"\n{p.name}")
    columns = ("ms", "gradient", "second", "bytes", "error", "eager")
    print(f"{'':18}", *(f"{column:>{_WIDTH[column]}}" for column in columns))
    for name, gradient in by_name.items():
        ratio = 1 / speed(times, name, "by hand")
        ratio_second = 1 / speed(times_second, name, "by hand")
        print(
            f"{name:18} {1e3 * min(times[name]):8.2f} {ratio:8.2f} {ratio_second:8.2f} "
            f"{first_order[name].memory:11,} "
            f"{relative_error(p, gradient):8.0e} {1e3 * eager_seconds(gradient, p.args):8.0f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    for problem in problems(options.quick):
        measure(problem, 2 if options.quick else options.rounds)


if __name__ == "__main__":
    main()
