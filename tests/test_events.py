"""`event_time` and `jump`, against closed forms and finite differences, and the threads they answer."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .helpers import assert_close, checking_leaks, skip_without_checkpointed_loops


G = 9.8


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def jacobians(order):
    """Every way to differentiate so often."""
    ways = {"": lambda fn: fn}
    for _ in range(order):
        ways = {
            name + letter: lambda fn, outer=outer, inner=inner: outer(inner(fn))
            for name, inner in ways.items()
            for letter, outer in (("f", jax.jacfwd), ("r", jax.jacrev))
        }
    return ways


def compare(fn, closed_form, params, orders=(1, 2)):
    """`fn` has the value and the derivatives of `closed_form`, in all modes."""
    for order in (0, *orders):
        ways = jacobians(order)
        expected = jax.jit(ways["f" * order](closed_form))(params)
        for name, way in ways.items():
            got = jax.jit(way(fn))(params)
            try:
                assert_close(got, expected, eps=200.0)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


# ---------------------------------------------------------------- closed forms


def flight(y, gravity, dt):
    height, velocity = y
    return height + velocity * dt - gravity * dt**2 / 2, velocity - gravity * dt


def time_to_ground(y, gravity):
    height, velocity = y
    return (velocity + jnp.sqrt(velocity**2 + 2 * gravity * height)) / gravity


def bounces(params, n, duration):
    """The ball after so many bounces and so much time. No comparison, but also no solver."""
    gravity, restitution = params["gravity"], params["restitution"]
    fall = lambda t, y: (y[1], -gravity)
    t, y = jnp.zeros(()), (params["height"], jnp.zeros_like(gravity))
    for _ in range(n):
        t_hit = t + jax.lax.stop_gradient(time_to_ground(y, gravity))
        y = flight(y, gravity, t_hit - t)
        t, y = eqg.event_time(lambda t, y: y[0], y, fall, t_hit)
        t, y = eqg.jump(lambda t, y: (y[0], -restitution * y[1]), y, fall, t)
    return flight(y, gravity, duration - t)


def bounces_closed_form(params, n, duration):
    gravity, restitution = params["gravity"], params["restitution"]
    speed = jnp.sqrt(2 * gravity * params["height"])
    t = speed / gravity
    for i in range(1, n):
        t = t + 2 * restitution**i * speed / gravity
    return flight((0.0, restitution**n * speed), gravity, duration - t)


def ball(dtype=None):
    return {
        "height": jnp.asarray(3.0, dtype),
        "gravity": jnp.asarray(9.8, dtype),
        "restitution": jnp.asarray(0.8, dtype),
    }


def test_bouncing_ball_through_several_bounces(float64):
    compare(
        lambda params: bounces(params, 3, 3.5),
        lambda params: bounces_closed_form(params, 3, 3.5),
        ball(),
    )


def test_bouncing_ball_in_single_precision():
    fn = lambda params: bounces(params, 3, 3.5)[0]
    closed_form = lambda params: bounces_closed_form(params, 3, 3.5)[0]
    expected = jax.grad(closed_form)(ball("float32"))
    assert_close(jax.jit(jax.grad(fn))(ball("float32")), expected, tolerance=1e-5)
    assert_close(jax.jit(jax.jacfwd(fn))(ball("float32")), expected, tolerance=1e-5)


def test_thrown_ball(float64):
    """Range, time of flight and speed, with a state that is a Module."""

    class Ball(eqx.Module):
        position: jax.Array
        velocity: jax.Array

    def throw(params):
        speed, angle, gravity = params
        fall = lambda t, ball: Ball(ball.velocity, jnp.stack([0 * gravity, -gravity]))
        t = jax.lax.stop_gradient(2 * speed * jnp.sin(angle) / gravity)
        velocity = speed * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
        down = jnp.stack([0 * gravity, gravity])
        landed = Ball(velocity * t - down * t**2 / 2, velocity - down * t)
        t, landed = eqg.event_time(lambda t, ball: ball.position[1], landed, fall, t)
        return t, landed.position[0], landed.velocity

    def closed_form(params):
        speed, angle, gravity = params
        velocity = speed * jnp.stack([jnp.cos(angle), -jnp.sin(angle)])
        time = 2 * speed * jnp.sin(angle) / gravity
        return time, speed**2 * jnp.sin(2 * angle) / gravity, velocity

    compare(throw, closed_form, (jnp.array(5.0), jnp.array(0.6), jnp.array(9.8)))


def logistic(params):
    """A field and a state that are not linear: y' = r y (1 - y) reaches a."""
    r, y0, a = params
    t = jax.lax.stop_gradient(logistic_closed_form(params)[0])
    y = 1 / (1 + (1 / y0 - 1) * jnp.exp(-r * t))
    return eqg.event_time(lambda t, y: y - a, y, lambda t, y: r * y * (1 - y), t)


def logistic_closed_form(params):
    r, y0, a = params
    return jnp.log(a * (1 - y0) / (y0 * (1 - a))) / r, a


def two_decays(params):
    """A condition that depends on time: y0 exp(-k t) meets a exp(-m t)."""
    k, m, a = params
    t = jax.lax.stop_gradient(two_decays_closed_form(params)[0])
    y = {"y": 2.0 * jnp.exp(-k * t)}
    condition = lambda t, y: y["y"] - a * jnp.exp(-m * t)
    t, y = eqg.event_time(condition, y, lambda t, y: {"y": -k * y["y"]}, t)
    return t, y["y"]


def two_decays_closed_form(params):
    k, m, a = params
    t = jnp.log(2.0 / a) / (k - m)
    return t, a * jnp.exp(-m * t)


def accelerated(params):
    """A field that depends on time: y' = 2 q t, reset, and then y' = q t."""
    q, y0, a = params
    t = jax.lax.stop_gradient(jnp.sqrt((a - y0) / q))
    t, y = eqg.event_time(lambda t, y: y - a, y0 + q * t**2, lambda t, y: 2 * q * t, t)
    t, y = eqg.jump(lambda t, y: t * y, y, lambda t, y: q * t, t)
    return y + q * (2.0**2 - t**2) / 2


def accelerated_closed_form(params):
    q, y0, a = params
    t = jnp.sqrt((a - y0) / q)
    return t * a + q * (2.0**2 - t**2) / 2


@pytest.mark.parametrize(
    ("fn", "closed_form", "params"),
    [
        (logistic, logistic_closed_form, (1.3, 0.1, 0.7)),
        (two_decays, two_decays_closed_form, (0.9, 0.2, 0.5)),
        (accelerated, accelerated_closed_form, (0.8, 0.3, 2.0)),
    ],
    ids=["field is not linear", "condition depends on time", "field depends on time"],
)
def test_fields_and_conditions(float64, fn, closed_form, params):
    compare(fn, closed_form, tuple(map(jnp.asarray, params)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "closed_form", "params"),
    [
        (logistic, logistic_closed_form, (1.3, 0.1, 0.7)),
        (accelerated, accelerated_closed_form, (0.8, 0.3, 2.0)),
    ],
    ids=["field is not linear", "field depends on time"],
)
def test_third_derivatives(float64, fn, closed_form, params):
    compare(fn, closed_form, tuple(map(jnp.asarray, params)), orders=(3,))


def test_lif_neuron_that_is_driven_by_a_current(float64):
    def spike_time(params):
        tau, current, threshold = params
        t = jax.lax.stop_gradient(closed_form(params))
        v = current * (1 - jnp.exp(-t / tau))
        rate = lambda t, v: (current - v) / tau
        return eqg.event_time(lambda t, v: v - threshold, v, rate, t)[0]

    def closed_form(params):
        tau, current, threshold = params
        return -tau * jnp.log(1 - threshold / current)

    compare(spike_time, closed_form, (jnp.array(0.9), jnp.array(1.7), jnp.array(1.0)))


def decay(state, dt):
    """Membrane with tau = 2 and synaptic current with tau = 1, for which there is a closed
    form: Göltz et al. (2021), Nature Machine Intelligence 3."""
    v, i = state
    slow, fast = jnp.exp(-dt / 2), jnp.exp(-dt)
    return v * slow + 2 * i * (slow - fast), i * fast


def test_eventprop_spike_time(float64):
    """The time of a spike by the times and the weights of the spikes that it answers, each of
    which is a jump of the current in a scan."""
    rate = lambda t, state: (state[1] - state[0] / 2, -state[1])

    def spike_time(params):
        weights, times = params

        def arrive(carry, spike):
            t, state = carry
            time, weight = spike
            found = jax.lax.stop_gradient(time)
            state = decay(state, found - t)
            t, state = eqg.event_time(lambda t, state: t - time, state, rate, found)
            return eqg.jump(lambda t, s: (s[0], s[1] + weight), state, rate, t), None

        start = (jnp.zeros(()), (jnp.zeros(()), jnp.zeros(())))
        (t, state), _ = jax.lax.scan(arrive, start, (times, weights))
        found = jax.lax.stop_gradient(closed_form(params))
        state = decay(state, found - t)
        return eqg.event_time(lambda t, state: state[0] - 1.0, state, rate, found)[0]

    def closed_form(params):
        weights, times = params
        a = jnp.sum(2 * weights * jnp.exp(times / 2))
        b = jnp.sum(2 * weights * jnp.exp(times))
        return -2 * jnp.log((a + jnp.sqrt(a**2 - 4 * b)) / (2 * b))

    params = (jnp.array([1.1, 0.7, 0.9]), jnp.array([0.1, 0.3, 0.4]))
    assert closed_form(params) > 0.4
    compare(spike_time, closed_form, params)


# ---------------------------------------------------------------- the threads


def in_a_scan(params, n_steps, dt, scan=jax.lax.scan, bounce=True, jump=True):
    """A ball simulated with fixed steps. If it crosses the ground in a step, the time of the
    impact is bisected."""
    gravity, restitution = params["gravity"], params["restitution"]
    fall = lambda t, y: (y[1], -gravity)

    def step(y, t):
        y_next = flight(y, gravity, dt)
        hits = y_next[0] < 0

        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) / 2
            is_above = flight(y, gravity, middle)[0] > 0
            return jnp.where(is_above, middle, low), jnp.where(is_above, high, middle)

        low, high = jax.lax.fori_loop(0, 60, halve, (0 * dt, dt))
        t_hit = t + high
        y_hit = flight(y, gravity, t_hit - t)
        reset = lambda t, y: (y[0], -restitution * y[1])
        if jump:
            t_hit, y_hit = eqg.event_time(lambda t, y: y[0], y_hit, fall, t_hit, where=hits)
            t_hit, y_hit = eqg.jump(reset, y_hit, fall, t_hit)
        else:
            y_hit = reset(t_hit, y_hit)
        y_hit = flight(y_hit, gravity, t + dt - t_hit)
        y = jax.tree.map(lambda a, b: jnp.where(hits & bounce, a, b), y_hit, y_next)
        return y, y[0]

    start = (params["height"], jnp.zeros_like(gravity))
    return scan(step, start, dt * jnp.arange(n_steps))


@pytest.mark.parametrize("scan", [jax.lax.scan, eqg.filter_scan])
def test_brax_73_the_ball_that_bounces_in_a_scan(float64, scan):
    """google/brax#73: "When I try taking the derivative of the final height with respect to the
    initial height, it always returns 1"."""
    dt = jnp.array(0.05)
    final = lambda params: in_a_scan(params, 70, dt, scan)[0]
    closed_form = lambda params: bounces_closed_form(params, 3, 3.5)
    compare(final, closed_form, ball(), orders=(1,))
    plain = jax.grad(lambda params: in_a_scan(params, 20, dt, jump=False)[0][0])(ball())
    ours = jax.grad(lambda params: in_a_scan(params, 20, dt)[0][0])(ball())
    truth = jax.grad(lambda params: bounces_closed_form(params, 1, 1.0)[0])(ball())
    assert_close(plain["height"], jnp.array(1.0))
    assert truth["height"] < -0.1
    assert_close(ours, truth, eps=200.0)


def test_second_derivative_in_a_scan(float64):
    final = lambda params: in_a_scan(params, 20, jnp.array(0.05))[0][0]
    closed_form = lambda params: bounces_closed_form(params, 1, 1.0)[0]
    expected = jax.hessian(closed_form)(ball())
    assert_close(jax.jit(jax.hessian(final))(ball()), expected, eps=500.0)
    assert_close(jax.jit(jax.jacrev(jax.grad(final)))(ball()), expected, eps=500.0)


def test_brax_317_higher_start_lower_end(float64):
    """google/brax#317: without gravity, a sphere that starts higher ends lower, one to one."""

    def final(height):
        t = jax.lax.stop_gradient(height / 4.0)  # it falls with speed 4
        y = jnp.stack([height - 4.0 * t, -4.0 + 0 * height])
        move = lambda t, y: jnp.stack([y[1], 0 * y[1]])
        t, y = eqg.event_time(lambda t, y: y[0], y, move, t)
        t, y = eqg.jump(lambda t, y: -y, y, move, t)
        return y[0] + y[1] * (1.0 - t)

    assert_close(jax.grad(final)(2.9), jnp.array(-1.0))


def solve(f, t0, t1, y0, event=None, dt=0.01):
    dfx = pytest.importorskip("diffrax")
    skip_without_checkpointed_loops()
    term = dfx.ODETerm(lambda t, y, args: f(t, y))
    stepsize = dfx.PIDController(rtol=1e-11, atol=1e-11)
    solution = dfx.diffeqsolve(
        term, dfx.Tsit5(), t0, t1, dt, y0, event=event, stepsize_controller=stepsize
    )
    return solution


def test_diffrax_451_derivative_of_the_final_time(float64):
    """patrick-kidger/diffrax#451: the gradient of the time at which a cannonball lands is always
    zero, as the event is a boolean."""
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
