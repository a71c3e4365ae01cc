"""`event_time` and `jump` against closed forms, and the threads that they answer."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import pytest

from .helpers import assert_close, skip_without_checkpointed_loops


G = 9.8


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def compare(fn, closed_form, params):
    """`fn` has the value and the derivative of `closed_form`, in both modes."""
    expected = jax.jit(lambda p: (closed_form(p), jax.jacfwd(closed_form)(p)))(params)
    for mode in (jax.jacfwd, jax.jacrev):
        got = jax.jit(lambda p, mode=mode: (fn(p), mode(fn)(p)))(params)
        assert_close(got, expected, eps=200)


# ---------------------------------------------------------------- closed forms


def flight(y, gravity, dt):
    height, velocity = y
    return height + velocity * dt - gravity * dt**2 / 2, velocity - gravity * dt


def time_to_ground(y, gravity):
    height, velocity = y
    return (velocity + jnp.sqrt(velocity**2 + 2 * gravity * height)) / gravity


def bounces_closed_form(params, n, duration):
    gravity, restitution = params["gravity"], params["restitution"]
    speed = jnp.sqrt(2 * gravity * params["height"])
    t = speed / gravity
    for i in range(1, n):
        t = t + 2 * restitution**i * speed / gravity
    return flight((0.0, restitution**n * speed), gravity, duration - t)


def ball():
    return {name: jnp.array(x) for name, x in PARAMETERS.items()}


PARAMETERS = {"height": 3.0, "gravity": 9.8, "restitution": 0.8}


# ---------------------------------------------------------------- the threads


def in_a_scan(params, n_steps, dt, scan):
    """A ball simulated with fixed steps. If it crosses the ground in a step, the time of the
    impact is bisected."""
    gravity, restitution = params["gravity"], params["restitution"]
    fall = lambda t, y: (y[1], -gravity)
    reset = lambda t, y: (y[0], -restitution * y[1])

    def step(y, t):
        y_next = flight(y, gravity, dt)
        hits = y_next[0] < 0

        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) / 2
            is_above = flight(y, gravity, middle)[0] > 0
            return jnp.where(is_above, middle, low), jnp.where(is_above, high, middle)

        t_hit = t + jax.lax.fori_loop(0, 60, halve, (0 * dt, dt))[1]
        y_hit = flight(y, gravity, t_hit - t)
        t_hit, y_hit = eqg.event_time(lambda t, y: y[0], y_hit, fall, t_hit, where=hits)
        t_hit, y_hit = eqg.jump(reset, y_hit, fall, t_hit)
        y_hit = flight(y_hit, gravity, t + dt - t_hit)
        return jax.tree.map(lambda a, b: jnp.where(hits, a, b), y_hit, y_next), None

    start = (params["height"], jnp.zeros_like(gravity))
    return scan(step, start, dt * jnp.arange(n_steps, dtype=dt.dtype))[0]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [jax.lax.scan, eqg.filter_scan])
def test_brax_73_the_ball_that_bounces_in_a_scan(float64, scan):
    """google/brax#73: "When I try taking the derivative of the final height with respect to the
    initial height, it always returns 1"."""
    dt = jnp.array(0.05, "float64")
    final = lambda params: in_a_scan(params, 70, dt, scan)
    compare(final, lambda params: bounces_closed_form(params, 3, 3.5), ball())


def solve(f, t0, t1, y0, event=None, dt=0.01):
    dfx = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()
    term = dfx.ODETerm(lambda t, y, args: f(t, y))
    stepsize = dfx.PIDController(rtol=1e-11, atol=1e-11)
    return dfx.diffeqsolve(
        term, dfx.Tsit5(), t0, t1, dt, y0, event=event, stepsize_controller=stepsize
    )


@pytest.mark.slow
def test_diffrax_451_derivative_of_the_final_time(float64):
    """diffrax#451: the gradient of the time at which a cannonball lands is always zero, as the
    event is a boolean."""
    dfx = pytest.importorskip("diffrax")

    def land(drag, real):
        def fall(t, y):
            return jnp.stack([y[1], -G - drag * y[1]])

        crosses = lambda t, y, args, **_: y[0] if real else y[0] < 0
        optx = pytest.importorskip("optimistix")
        root_finder = optx.Newton(1e-10, 1e-10) if real else None
        y0 = jnp.array([10.0, 0.0])
        solution = solve(fall, 0.0, 9.0, y0, dfx.Event(crosses, root_finder))
        found, y = solution.ts[-1], solution.ys[-1]
        return found, eqg.event_time(
            lambda t, y: y[0], y, fall, found, where=solution.event_mask
        )

    def height(drag, t):  # the solution, for a time that is given
        return 10.0 - G / drag * t + G / drag**2 * (1 - jnp.exp(-drag * t))

    slopes = {}
    for real in (True, False):
        t, slope = jax.jit(jax.value_and_grad(lambda x: land(x, real)[1][0]))(0.3)  # noqa: B023
        slopes[real] = slope
        by_drag, by_time = jax.grad(height, (0, 1))(0.3, t)
        if real:
            assert_close(height(0.3, t), jnp.array(0.0), tolerance=1e-8)
            assert_close(slope, -by_drag / by_time, tolerance=1e-8)
    # The boolean event is found at the end of a step, after the ground.
    assert jax.jit(jax.grad(lambda x: land(x, False)[0]))(0.3) == 0.0
    assert_close(slopes[False], slopes[True], tolerance=0.2)
    assert slopes[False] != 0.0


@pytest.mark.slow
def test_diffrax_729_state_after_the_event(float64):
    """diffrax#729: "state sensitivity in post-event simulations is now always wrong". The field
    is 1 until the event and 0 afterwards, so y(2) is the time of the event."""
    dfx, optx = pytest.importorskip("diffrax"), pytest.importorskip("optimistix")
    on = lambda t, y: jnp.ones_like(y)
    off = lambda t, y: jnp.zeros_like(y)

    def final(time, slope):
        condition = lambda t, y: time - t + slope * (y[0] - 0.98)
        event = dfx.Event(lambda t, y, args, **_: condition(t, y), optx.Newton(1e-10, 1e-10))
        solution = solve(on, 0.0, 2.0, jnp.zeros(1), event)
        t, y = eqg.event_time(condition, solution.ys[-1], on, solution.ts[-1])
        t, y = eqg.jump(None, y, off, t)
        return solve(off, t, 2.0, y).ys[-1][0]

    value_and_grad = jax.jit(jax.value_and_grad(final, (0, 1)))
    value, slopes = value_and_grad(0.98, 0.0)
    assert_close((value, slopes), (jnp.array(0.98), (jnp.array(1.0), jnp.array(0.0))), eps=2e3)
    # An event that depends on the state: time - t + slope * (t - 0.98) = 0.
    assert_close(value_and_grad(0.98, 0.5)[1][0], jnp.array(2.0), tolerance=1e-8)


@pytest.mark.slow
def test_diffrax_13_events_that_do_not_end_the_simulation(float64):
    """diffrax#13: differentiable events, several of them, in a scan over calls of
    `diffeqsolve`. The event is a boolean, and has no derivative of its own."""
    dfx = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()

    def final(params, n, duration):
        fall = lambda t, y: jnp.stack([y[1], -params["gravity"]])
        reset = lambda t, y: jnp.stack([y[0], -params["restitution"] * y[1]])
        event = dfx.Event(lambda t, y, args, **_: (y[0] < 0) & (y[1] < 0))

        def bounce(carry, _):
            t, y = carry
            coarse = solve(fall, t, duration, y, event)
            # The end of a step, a little after the impact.
            y, found = coarse.ys[-1], coarse.ts[-1]
            back = jax.lax.stop_gradient(time_to_ground((y[0], y[1]), params["gravity"]))
            y = jnp.stack(flight((y[0], y[1]), params["gravity"], back))
            t, y = eqg.event_time(lambda t, y: y[0], y, fall, found + back)
            return eqg.jump(reset, y, fall, t), None

        start = (jnp.zeros(()), jnp.stack([params["height"], 0 * params["gravity"]]))
        (t, y), _ = jax.lax.scan(bounce, start, length=n)
        return solve(fall, t, duration, y).ys[-1][0]

    gradient = jax.jit(jax.grad(lambda params: final(params, 2, 2.5)))(ball())
    expected = jax.grad(lambda params: bounces_closed_form(params, 2, 2.5)[0])(ball())
    assert_close(gradient, expected, tolerance=1e-8)


# ---------------------------------------------------------------- parameters and states


class Growth(eqx.Module):
    """A field with parameters, a static field and what JAX can't differentiate."""

    rate: jax.Array
    steps: jax.Array
    power: int = eqx.field(static=True)

    def __call__(self, t, y):
        return self.rate * y**self.power


class Threshold(eqx.Module):
    level: jax.Array

    def above(self, t, y):
        return y - self.level


def test_parameters_of_modules_and_closures_are_differentiated():
    """As leaves of a Module, a bound method, a `Partial`, a closure and a default argument."""

    def by_modules(a, k, y0):
        field = Growth(k, jnp.array(3), 1)
        t = jax.lax.stop_gradient(jnp.log(a / y0) / k)
        return eqg.event_time(Threshold(a).above, y0 * jnp.exp(k * t), field, t)[0]

    def by_defaults(a, k, y0):
        t = jax.lax.stop_gradient(jnp.log(a / y0) / k)
        grow = lambda t, y, k=k: k * y
        condition = jax.tree_util.Partial(lambda a, t, y: y - a, a)
        return eqg.event_time(condition, y0 * jnp.exp(k * t), grow, t)[0]

    closed_form = lambda params: jnp.log(params[0] / params[2]) / params[1]
    for fn in (by_modules, by_defaults):
        compare(lambda p, fn=fn: fn(*p), closed_form, tuple(map(jnp.array, (1.5, 0.8, 0.5))))


def test_a_time_with_a_derivative(float64):
    """The time that was found may have a derivative, right or wrong, if the state was computed
    at this time."""

    def fn(params):
        k, a, wrong = params
        t = jnp.log(a / 0.5) / k
        t = jax.lax.stop_gradient(t - wrong) + wrong
        y = 0.5 * jnp.exp(k * t)
        t, y = eqg.event_time(lambda t, y: y - a, y, lambda t, y: k * y, t)
        fixed, after = eqg.jump(lambda t, y: 2 * y, y, lambda t, y: -y, t)
        return t, y, after * jnp.exp(-(3.0 - fixed))

    def closed_form(params):
        k, a, _ = params
        t = jnp.log(a / 0.5) / k
        return t, a, 2 * a * jnp.exp(-(3.0 - t))

    compare(fn, closed_form, (jnp.array(0.8), jnp.array(1.5), jnp.array(0.3)))


# ---------------------------------------------------------------- no event, and a grazing one


def test_a_spike_that_never_happens_is_no_nan_in_the_loss():
    """The time is infinite, and the field at this time is not finite."""

    def loss(weight):
        rate = lambda t, v: weight * jnp.exp(-t) - v + 0 * jnp.sin(t)
        never = jnp.where(weight > 5, 1.0, jnp.inf)
        t, v = eqg.event_time(lambda t, v: v - 1.0 + 0 * t, weight * 0.1, rate, never)
        t, v = eqg.jump(lambda t, v: 0 * v, v, rate, t)
        return jnp.exp(-t) + v

    assert jax.grad(loss)(2.0) == 0.0
    assert jnp.isfinite(jax.grad(loss)(6.0))


def test_a_grazing_event_is_not_finite():
    """A ball thrown up to a ceiling that it only just touches: the time has the derivative of a
    square root at zero."""

    def time(velocity):
        t = jax.lax.stop_gradient(velocity / 10.0)
        y = (velocity * t - 5.0 * t**2, velocity - 10.0 * t)
        return eqg.event_time(lambda t, y: y[0] - 5.0, y, lambda t, y: (y[1], -10.0), t)[0]

    assert not jnp.isfinite(jax.grad(time)(10.0))
    assert not jnp.isfinite(jax.jacfwd(time)(10.0))


# ---------------------------------------------------------------- edges


def test_nothing_is_called_without_differentiation():
    def fail(*_):
        raise AssertionError

    t, y = eqg.event_time(fail, {"a": 1.0, "b": None}, fail, 2.0)
    assert (t, y["a"], y["b"]) == (2.0, 1.0, None)
    t, y = eqg.jump(None, (), fail, 2.0)
    assert (t, y) == (2.0, ())


def test_states_with_other_leaves():
    """Integers, keys, functions, `None` and empty arrays stay what they are."""

    def fn(x):
        others = {"key": jax.random.key(0), "none": None, "fn": jnp.sin, "empty": jnp.ones(0)}
        y = {"x": x, "mode": jnp.array(3), **others}
        rate = lambda t, y: {**jax.tree.map(lambda _: None, y), "x": 2.0 * y["x"]}
        t, y = eqg.event_time(lambda t, y: y["x"] - 1.0, y, rate, 0.0)
        t, y = eqg.jump(lambda t, y: {**y, "mode": y["mode"] + 1}, y, rate, t)
        assert y["fn"] is jnp.sin
        return y["x"], y["mode"]

    slope, mode = jax.grad(fn, has_aux=True)(1.0)
    assert mode == 4
    assert slope == 1.0  # the reset does nothing to x, and the field is the same


@pytest.mark.thorough
def test_a_state_in_single_and_a_time_in_double_precision(float64):
    def fn(k):
        t, y = eqg.event_time(lambda t, y: y - 1, k, lambda t, y: 2 * y, jnp.array(0.5))
        assert (t.dtype, y.dtype) == ("float64", "float32")
        return t

    for way in (jax.jacfwd, jax.jacrev):
        assert way(fn)(jnp.array(1.0, "float32")) == -0.5


# ---------------------------------------------------------------- cost


@pytest.mark.cost
def test_first_derivative_costs_what_the_formula_costs():
    """One evaluation of the field, in both modes, and nothing for the higher orders."""
    weight = jnp.eye(64)

    def ours(y):
        t, y = eqg.event_time(lambda t, y: y[0], y, lambda t, y: jnp.tanh(weight @ y), 1.0)
        return t + jnp.sum(y)

    def formula(y, ct):
        rate = jnp.tanh(weight @ y)
        return ct.at[0].add(-(1 + jnp.sum(rate)) / rate[0])

    analyze = lambda fn, *args: jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]
    y = jnp.linspace(1.0, 2.0, 64)
    expected = analyze(formula, y, jnp.ones(64))
    assert_close(jax.jit(jax.grad(ours))(y), formula(y, jnp.ones(64)))
    assert analyze(jax.grad(ours), y) <= 1.02 * expected
    assert analyze(lambda y, t_y: jax.jvp(ours, (y,), (t_y,))[1], y, y) <= 1.05 * expected
