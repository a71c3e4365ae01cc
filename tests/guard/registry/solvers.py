"""Implicit functions, fixed points, events: against closed forms and steps written out."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
from eqx_grads import solvers

from .entry import entry


# A line has as many arguments as there is room for.
# fmt: off
LEAKS = {"leaks": False}
OPTION = LEAKS | {"transforms": False, "costs": False, "orders": ("value", "jvp", "vjp", "RF")}
M = np.array([[2.0, -0.6, 0.3], [0.5, 1.7, -0.2], [-0.9, 0.4, 1.2]])
A, B = np.array([0.5, -1.2, 2.0]), np.array([0.7, 1.3, -0.4])


def solved(x):
    """A solution without any derivative, as a solver returns it."""
    return jax.lax.stop_gradient(x)


# ---------------------------------------------------------------- implicit


def sinh_system(a, m):
    """sinh(M u) = a, and v^3 = u."""
    return jnp.linalg.solve(m, jnp.arcsinh(a))


def implicit(solver=None, tags=(), **options):
    def fn(a, b, m, guess):
        def residual(y, a, b, *, power):
            # The matrix is closed over; one part is alone, and the last one has no equation.
            v = jnp.sign(y["v"]) * jnp.abs(y["v"]) ** power
            u = jnp.sinh(m @ y["u"]) - a * b
            return {"u": u, "v": v - y["u"], "w": y["w"] ** power - b, "n": None}

        @eqg.implicit(residual, solver=solver, tags=tags, has_aux=True, **options)
        def solve(a, b, *, power, guess):
            u = sinh_system(a * b, m) + 1e-13 * guess
            # The derivatives of the solver itself are never used.
            v = jnp.where(guess > 0, jnp.nan, jnp.sign(u)) * jnp.abs(u) ** (1 / power)
            return {"u": u, "v": v, "w": jnp.cbrt(b), "n": jnp.arange(2)}, jnp.sum(a) + guess

        y, aux = solve(a, b=b, power=3, guess=guess)
        return y, aux

    return fn


def implicit_plain(a, b, m, guess):
    u = sinh_system(a * b, m)
    v = jnp.sign(u) * jnp.abs(u) ** (1 / 3)
    return {"u": u, "v": v, "w": jnp.cbrt(b), "n": jnp.arange(2)}, solved(jnp.sum(a) + guess)


_args = A, B, M, np.array(-0.7)
entry("implicit", implicit(), *_args, plain=implicit_plain, costs=False, **LEAKS)
for _name, _options in {
    "iterative": {"solver": lx.GMRES(rtol=1e-13, atol=1e-13)},
    "least squares": {"solver": lx.SVD(), "tolerance": None},
}.items():
    entry(f"implicit: {_name}", implicit(**_options), *_args, plain=implicit_plain,
        tolerance32=1e-2, precisions=("float64",), **OPTION)


def ridge(x, y):
    return jnp.linalg.solve(x.T @ x + 0.3 * jnp.eye(x.shape[1], dtype=x.dtype), x.T @ y)


ridge_objective = lambda w, x, y: jnp.sum((x @ w - y) ** 2) / 2 + 0.15 * jnp.sum(w**2)
_tagged = eqg.implicit(eqx.filter_grad(ridge_objective), tags=lx.positive_semidefinite_tag)
entry("implicit: a minimum", _tagged(ridge), M[:, :2], A, plain=ridge, **OPTION)


N = 263  # unknowns, for which no matrix is formed
neighbors = lambda y: 0.3 * jnp.roll(y, 1) - 0.2 * jnp.roll(y, -3)


def many(a, c):
    solve = lambda a: jnp.linalg.solve(
        jnp.eye(N, dtype=a.dtype) + c * jax.jacobian(neighbors)(a), a
    )
    return eqg.implicit(lambda y, a: y + c * neighbors(y) - a)(lambda a: solved(solve(a)))(a)


def many_plain(a, c):
    return jnp.linalg.solve(jnp.eye(N, dtype=a.dtype) + c * jax.jacobian(neighbors)(a), a)


entry("implicit: many unknowns", many, np.sin(np.arange(N) ** 1.1), np.array(0.8),
    plain=many_plain, precisions=("float64",), **OPTION | {"orders": ("jvp", "vjp")})


def conjugates(solve):
    """y + 0.3 conj(y) = a b: not holomorphic."""

    def fn(a, b):
        right = a * b
        y = (right - 0.3 * jnp.conj(right)) / (1 - 0.09)
        return solve(y, a, b)

    return fn


entry("implicit: complex", conjugates(
        lambda y, a, b: eqg.implicit(lambda y, a, b: y + 0.3 * jnp.conj(y) - a * b)(
            lambda a, b: solved(y)
        )(a, b)
    ), A, B, plain=conjugates(lambda y, a, b: y), complex_args=(A + 0.4j * B, B - 0.2j),
    **OPTION)

# ---------------------------------------------------------------- fixed points

W = np.array([[0.3, -0.2, 0.1], [0.1, 0.25, 0.2], [-0.15, 0.1, 0.3]])
cell = lambda z, x, w: {"h": jnp.tanh(w @ z["h"] + x), "s": 0.5 * z["s"] + jnp.sum(z["h"])}
start = lambda x: {"h": jnp.zeros_like(x), "s": jnp.zeros((), x.dtype)}


def fixed_point(**options):
    def fn(x, w):
        tolerance = float(jnp.finfo(x.dtype).eps) ** 0.97
        chosen = {"solver": optx.FixedPointIteration(tolerance, tolerance)}
        chosen |= {k: v(tolerance) if callable(v) else v for k, v in options.items()}
        # The weights are closed over.
        return eqg.fixed_point(lambda z, x: cell(z, x, w), start(x), x, **chosen).value

    return fn


steps = lambda x, w: jax.lax.fori_loop(0, 70, lambda _, z: cell(z, x, w), start(x))


def steps_reverse(x, w):
    return jax.lax.scan(lambda z, _: (cell(z, x, w), None), start(x), None, length=70)[0]


entry("fixed_point", fixed_point(), A, W, plain=steps_reverse, costs=False, **LEAKS)
for _name, _options in {
    "Newton": {
        "solver": lambda e: optx.Newton(e, e), "backward": solvers.ImplicitAdjoint(lx.QR()),
    },
    "iterated backward": {
        "backward": lambda e: solvers.FixedPointAdjoint(optx.FixedPointIteration(e, e)),
        "max_steps": 90,
    },
    # An acceleration that is none would take more steps.
    "Anderson": {
        "solver": lambda e: solvers.Anderson(100 * e, 100 * e, history=4, mixing=0.9),
        "backward": lambda e: solvers.FixedPointAdjoint(solvers.Anderson(100 * e, 100 * e), 24),
        "max_steps": 22,
    },
}.items():
    entry(f"fixed_point: {_name}", fixed_point(**_options), A, W, plain=steps_reverse, **OPTION)


def approximate(series):
    """The textbook's derivative with another matrix instead of the inverse of `I - J`."""

    @jax.custom_jvp
    def solve(x, w):
        return steps(x, w)

    @solve.defjvp
    def solve_jvp(primals, tangents):
        z = solve(*primals)
        flat, unravel = jax.flatten_util.ravel_pytree(z)
        of_flat = lambda f: jax.flatten_util.ravel_pytree(cell(unravel(f), *primals))[0]
        b = jax.jvp(lambda *p: cell(z, *p), primals, tangents)[1]
        b = jax.flatten_util.ravel_pytree(b)[0]
        return z, unravel(series(jax.jacobian(of_flat)(flat)) @ b)

    return solve


def damped(k, tau):
    def series(j):
        b = tau * j + (1 - tau) * jnp.eye(len(j), dtype=j.dtype)
        power, total = jnp.eye(len(j), dtype=j.dtype), jnp.zeros_like(j)
        for _ in range(k):
            power, total = power @ b, total + tau * power
        return total

    return approximate(series)


for _backward, _plain in (
    ("neumann", damped(6, 1.0)), (solvers.NeumannAdjoint(2), damped(3, 1.0)),
    ("phantom", damped(5, 0.5)), (solvers.PhantomAdjoint(3, 0.7), damped(3, 0.7)),
    ("one_step", damped(1, 1.0)),
):
    entry(f"fixed_point: {_backward}", fixed_point(backward=_backward), A, W, plain=_plain,
        precisions=("float64",), **OPTION)


def with_aux(x, w):
    """A Module, with a start that has a derivative, by the default solver."""
    y0 = {"h": x + 0.1, "s": jnp.sum(w)}
    fn = lambda z, x, w: (cell(z, x, w), (z["s"] * x, "name"))
    solution = eqg.fixed_point(fn, y0, x, w, has_aux=True, max_steps=None)
    return solution.value, solution.aux[0]


def with_aux_plain(x, w):
    z = steps_reverse(x, w)
    return z, z["s"] * x


entry("fixed_point: aux", with_aux, A, W, plain=with_aux_plain, tolerance=1e-8, **OPTION)


# ---------------------------------------------------------------- events
# A force that grows with time: y'' = -g t, from the height and the velocity at time zero.


def flight(y, g, t, t0=0.0):
    """From the state at `t0` to the state at `t`."""
    h, v = y
    t, t0 = (jnp.asarray(x, g.dtype) for x in (t, t0))
    dt = t - t0
    return h + v * dt - g * (dt**3 / 6 + t0 * dt**2 / 2), v - g * (t**2 - t0**2) / 2


def landing(y, g, floor):
    """When the height, above a floor that rises, is zero: by Newton from a time nearby."""
    t = 2.5 + 0 * jnp.real(g)

    def step(t, _):
        h, v = map(jnp.real, flight(y, g, t))
        return t - (h - floor * t) / (v - floor), None

    return jax.lax.scan(step, t, None, length=9)[0]


def hit(h, v, g, floor):
    fall = lambda t, y: jnp.stack([y[1], -g * jnp.asarray(t, g.dtype)])
    t = solved(landing((h, v), g, floor))
    condition = lambda t, y: 3.0 * (jnp.real(y[0]) - floor * t) * (1 + t)
    return eqg.event_time(condition, jnp.stack(flight((h, v), g, t)), fall, t)


def bounce(h, v, g, floor):
    t, y = hit(h, v, g, floor)
    back = lambda t, y: (y[1] + floor, -2.0 * g * t)
    reset = lambda t, y: (y[0] + 0.1 * t, -0.8 * g * y[1])
    t, y = eqg.jump(reset, y, back, t)
    up, v_up = flight(y, 2.0 * g, 3.5, t)
    return up + floor * (3.5 - t), v_up, t


def hit_plain(h, v, g, floor):
    t = landing((h, v), g, floor)
    return t, jnp.stack(flight((h, v), g, t))


def bounce_plain(h, v, g, floor):
    t, (h, v) = hit_plain(h, v, g, floor)
    up, v_up = flight((h + 0.1 * t, -0.8 * g * v), 2.0 * g, 3.5, t)
    return up + floor * (3.5 - t), v_up, solved(t)


_start = np.array(1.5), np.array(0.7), np.array(0.9), np.array(0.2)
entry("event_time", hit, *_start, plain=hit_plain, **OPTION | {"leaks": True},
    complex_args=(_start[0] + 0.3j, _start[1] - 0.2j, _start[2] + 0.1j, _start[3]))
_orders = {"leaks": True, "orders": ("value", "jvp", "vjp", "FR", "RR")}
entry("jump", bounce, *_start, plain=bounce_plain, **OPTION | _orders)


def none(h, v, g, floor):
    """No event, twice, and a vector field that changes at a time that moves."""
    fall = lambda t, y: (y[1], -g * t)
    y = flight((h, v), g, floor)
    t, y = eqg.event_time(lambda t, y: y[0] * h, y, fall, floor, where=h < 0)
    never = eqg.event_time(lambda t, y: y[0], y, fall, solved(jnp.inf * h))[0]
    t, y = eqg.jump(None, y, lambda t, y: (y[1], -3.0 * g * t), t)
    return flight(y, 3.0 * g, 1.5, t), never


def none_plain(h, v, g, floor):
    y = flight((h, v), g, floor)
    return flight(y, 3.0 * g, 1.5, floor), solved(jnp.inf * h)


entry("event_time: no event", none, *_start, plain=none_plain, orders=("value", "jvp", "vjp"),
    transforms=False, costs=False)
