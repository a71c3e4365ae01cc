"""`filter_cond`, `filter_while_loop` and `filter_checkpoint`, against JAX's own."""

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from eqx_grads import RuleError

from .helpers import assert_close, checking_leaks
from .ops import sin_times_vjp


pytestmark = [pytest.mark.versions, pytest.mark.x64]


class Model(eqx.Module):
    """Arrays, an activation function, a Python number, a static field, and nothing."""

    weight: jax.Array
    activation: object
    count: int
    bias: None
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return self.activation(self.weight @ x)


def model(scale=1.0, count=0, name="a"):
    weight = scale * jr.normal(jr.key(0), (3, 3), jnp.zeros(()).dtype)
    return Model(weight, jnp.tanh, count, None, name)


def vector():
    return jnp.arange(1.0, 4.0, dtype=jnp.zeros(()).dtype)


def branches(choose):
    def f(p, x, flag):
        return choose(flag, lambda x: sin_times_vjp(x, p), lambda x: x * jnp.cos(p), x)

    return f


def test_numbers_that_branches_return():
    out = jax.jit(
        lambda flag: list(
            map(type, eqg.filter_cond(flag, lambda: (1, 2, 0.5), lambda: (1, 3, 0.5)))
        )
    ).__wrapped__(jnp.array(True))
    assert out[0] is int
    assert not issubclass(out[1], int)
    both = eqg.filter_cond(jnp.array(False), lambda: (1000, 2, 0.5), lambda: (999 + 1, 3, 0.25))
    assert both == (1000, 3, 0.25)
    assert isinstance(both[0], int)
    with jax.disable_jit():
        assert eqg.filter_cond(True, lambda: (1, "a"), lambda: (2, "b")) == (1, "a")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (lambda: model(), lambda: model(name="b"), r"containers differ: .*name='a'.*name='b'"),
        (lambda: (jnp.sin, 1.0), lambda: (jnp.cos, 1.0), r"at out\[0\]: .*not an array is"),
        (lambda: 1, lambda: 2.0, r"at out: .*int.*float.*one dtype"),
    ],
)
def test_branches_that_differ(one, other, message):
    pattern = rf"(?s)branches of `filter_cond`.*{message}"
    with pytest.raises(RuleError, match=pattern):
        eqg.filter_cond(jnp.array(True), one, other)


def _decay(x, n, **options):
    """`n` steps; after them, the body is not finite where it is not evaluated."""
    step = lambda c: (c[0] + 1, jnp.sqrt(n - c[0]) * jnp.sin(c[1]), jr.split(c[2])[0])
    init = (jnp.zeros_like(x), x, jr.key(0))
    return eqg.filter_while_loop(lambda c: c[0] < n, step, init, **options)[1]


def _decay_written_out(x, n):
    for i in range(n):
        x = jnp.sqrt(n - i) * jnp.sin(x)
    return x


@pytest.mark.parametrize("checkpoint", ["sqrt", 1, 4, 100, None])
def test_each_example_of_a_bounded_loop_has_its_own_length(checkpoint):
    lengths, xs = [0, 5, 13, 1, 7], jnp.linspace(0.1, 0.9, 5)
    options = {"max_steps": 13, "checkpoint": checkpoint}
    pair = jax.value_and_grad(lambda x, n: _decay(x, n, **options))
    got = jax.jit(jax.vmap(pair))(xs, jnp.array(lengths, xs.dtype))
    each = [
        jax.value_and_grad(_decay_written_out)(x, n) for x, n in zip(xs, lengths, strict=True)
    ]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *each), eps=50)
    total = lambda xs: jnp.sum(jax.vmap(lambda x, n: _decay(x, n, **options))(xs, lengths_f))
    lengths_f = jnp.array(lengths, xs.dtype)
    assert_close(jax.jit(jax.grad(total))(xs), got[1], eps=50)


def test_a_bounded_loop_stops_after_its_bound():
    step = lambda x: 2 * x
    for n in (0, 1, 5):
        loop = lambda x: eqg.filter_while_loop(lambda x: x < 1e6, step, x, max_steps=n)  # noqa: B023
        assert jax.value_and_grad(loop)(3.0) == (3.0 * 2**n, 2.0**n)


def test_the_condition_of_a_bounded_loop_has_no_derivative():
    """As in `lax.while_loop`, it may call what JAX can't differentiate."""

    def loss(x, bound, run):
        on_host = lambda y: jax.pure_callback(np.exp, jax.ShapeDtypeStruct((), y.dtype), y)
        return run(lambda y: on_host(y) < on_host(bound), lambda y: y * y + x, x)

    loop = lambda *a: eqg.filter_while_loop(*a, max_steps=10)
    bounded = lambda x, bound: loss(x, bound, loop)
    x, bound = jnp.array(0.7), jnp.array(2.0)
    with checking_leaks():
        got = jax.jit(jax.grad(bounded, (0, 1)))(x, bound)
    # Forward mode of JAX's loop.
    unbounded = lambda x: loss(x, bound, jax.lax.while_loop)
    assert_close(got, (jax.jacfwd(unbounded)(x), jnp.zeros(())), eps=50)


def test_a_bounded_loop_across_a_named_axis():
    """Examples that go on see the last carry of the examples that have ended."""

    def run(x, loop):
        step = lambda c: 1.2 * c + 0.1 * jnp.sin(jax.lax.psum(c, "b"))
        one = lambda x: loop(lambda c: c < 10, step, x)
        return jax.vmap(one, axis_name="b")(x)

    x = jnp.array([0.5, 4.0, 20.0])
    bounded = lambda x: run(x, lambda *a: eqg.filter_while_loop(*a, max_steps=50))
    unbounded = lambda x: run(x, jax.lax.while_loop)
    assert_close(bounded(x), unbounded(x), eps=50)
    # Forward mode of JAX's loop.
    assert_close(jax.jacrev(bounded)(x), jax.jacfwd(unbounded)(x), eps=100)


@pytest.mark.parametrize("result", [None, (True,), 1.0, np.ones(3, bool)])
def test_a_condition_that_is_no_boolean(result):
    with pytest.raises(TypeError, match="cond_fun must return a boolean scalar"):
        eqg.filter_while_loop(lambda x: result, lambda x: x, 1.0, max_steps=3)


def test_a_bounded_loop_skips_the_chunks_after_its_end():
    calls = []

    def step(x):
        jax.debug.callback(calls.append, x)
        return x + 1

    run = lambda x: eqg.filter_while_loop(lambda x: x < 3, step, x, max_steps=100, checkpoint=5)
    jax.block_until_ready(jax.jit(run)(0.0))
    jax.effects_barrier()
    assert len(calls) == 5


def test_the_memory_of_a_bounded_loop():
    """Weights are not among the residuals of each step, or chunk."""
    weight = jnp.ones((64, 64)) / 64

    def loss(weight, x, checkpoint):
        step = lambda c: (c[0] + 1, jnp.tanh(weight @ c[1]))
        run = eqg.filter_while_loop(
            lambda c: c[0] < 900, step, (0, x), max_steps=1024, checkpoint=checkpoint
        )
        return jnp.sum(run[1])

    def temporary(checkpoint):
        gradient = jax.jit(jax.grad(lambda w, x: loss(w, x, checkpoint)))
        compiled = gradient.lower(weight, jnp.ones(64)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # 32 carries, and the two arrays that 32 steps save, beside a few arrays like the weight.
    assert temporary("sqrt") < 3 * 32 * 64 * 4 + 6 * weight.nbytes
    assert temporary(256) > temporary(64) > temporary("sqrt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": -1}, "`max_steps` of `filter_while_loop` is not an integer"),
        ({"max_steps": 2.0}, "`max_steps` of .*\n  it is 2.0"),
        ({"max_steps": True}, "`max_steps` of"),
        ({"max_steps": 3, "checkpoint": 0}, "`checkpoint` of `filter_while_loop`"),
        ({"max_steps": 3, "checkpoint": "replay"}, "`checkpoint` of .*\n  it is 'replay'"),
    ],
)
def test_options_of_a_bounded_loop(options, message):
    with pytest.raises(RuleError, match=message):
        eqg.filter_while_loop(lambda x: x < 1, lambda x: x, 1.0, **options)


def test_checkpoint_is_like_the_function():
    @eqg.filter_checkpoint
    def double(x, how: str = "twice"):
        """Twice."""
        return 2 * x, how

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice."
    assert double(vector(), how="so")[1] == "so"

    class Net(eqx.Module):
        weight: jax.Array

        @eqg.filter_checkpoint
        def __call__(self, x):
            return jnp.sum(self.weight * x)

    net = Net(vector())
    assert_close(eqx.filter_grad(lambda n: n(vector()))(net).weight, vector(), eps=500)
    wrapped = eqg.filter_checkpoint(model())  # in place of a layer whose attributes are read
    assert_close(wrapped.weight, model().weight)
    with pytest.raises(AttributeError, match="no_such"):
        _ = wrapped.no_such
    with pytest.raises(AttributeError, match="_private"):
        _ = wrapped._private
    layers = [eqg.filter_checkpoint(model())]  # a PyTree
    grads = eqx.filter_grad(lambda layers: jnp.sum(layers[0](vector())))(layers)
    expected = eqx.filter_grad(lambda m: jnp.sum(m(vector())))(model())
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(expected), eps=500)


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_a_counter_without_jit(loop):
    """Without `jit`, a step may depend on values."""

    def step(state):
        count, x = state
        return count + 1, 2 * x if x > 0 else x

    with jax.disable_jit():
        if loop == "scan":
            state = eqg.filter_scan(
                lambda c, _: (step(c), None), (0, jnp.array(1.5)), length=3
            )[0]
        else:
            state = eqg.filter_while_loop(lambda c: c[0] < 3, step, (0, jnp.array(1.5)))
    assert (int(state[0]), float(state[1])) == (3, 12.0)
