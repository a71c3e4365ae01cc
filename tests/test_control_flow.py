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
from .ops import sin_times_jvp, sin_times_vjp


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


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("flag", [False, True])
def test_cond_of_modules(flag, jit):
    def f(model, x, flag):
        def double(model):
            return eqx.tree_at(lambda m: m.weight, model, 2 * model.weight)

        return eqg.filter_cond(flag, double, lambda model: model, model)(x)

    f = eqx.filter_jit(f) if jit else f
    expected = model(2.0 if flag else 1.0)(vector())
    with checking_leaks():
        assert_close(f(model(), vector(), jnp.array(flag)), expected, eps=500)
    chosen = eqg.filter_cond(flag, lambda m: m, lambda m: m, model())
    assert (chosen.activation, chosen.count, chosen.name) == (jnp.tanh, 0, "a")


def branches(choose):
    def f(p, x, flag):
        return choose(flag, lambda x: sin_times_vjp(x, p), lambda x: x * jnp.cos(p), x)

    return f


@pytest.mark.slow
@pytest.mark.parametrize("flag", [False, True])
def test_all_orders_of_cond(flag):
    def all_of_it(f):
        f = lambda p, x, f=f: jnp.sum(f(p, x, jnp.array(flag)) ** 2)
        args = (vector(), 2 * vector())
        gradient = jax.grad(f, (0, 1))
        square = lambda p, x: sum(jnp.sum(g**2) for g in gradient(p, x))
        return (
            f(*args),
            jax.jvp(f, args, args),
            gradient(*args),
            jax.jvp(gradient, args, args),
            jax.grad(square)(*args),
        )

    assert_close(
        all_of_it(branches(eqg.filter_cond)), all_of_it(branches(jax.lax.cond)), eps=500
    )


def test_cond_of_a_batch():
    flags = jnp.array([True, False])
    xs = jnp.stack([vector(), -vector()])

    def batch(choose):
        f = lambda p, x, flag: jnp.sum(branches(choose)(p, x, flag))
        return jax.vmap(jax.grad(f), (None, 0, 0))(vector(), xs, flags)

    assert_close(batch(eqg.filter_cond), batch(jax.lax.cond), eps=500)


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
        (lambda: (1.0, 2.0), lambda: [1.0, 2.0], r"at out: .*a tuple of 2, and .* a list of 2"),
        (lambda: {"a": (1.0, None)}, lambda: {"a": (1.0, 2.0)}, r"at out\['a'\]\[1\]: .*None"),
        (lambda: model(), lambda: model(name="b"), r"at out\.name: .*'a', .*'b', a static"),
        (lambda: (jnp.sin, 1.0), lambda: (jnp.cos, 1.0), r"at out\[0\]: .*not an array is"),
        (lambda: jnp.ones(2), lambda: jnp.ones(3), r"at out: .*\[2\], and .*\[3\]"),
        (lambda: jnp.ones(2), lambda: jnp.ones(2, int), r"at out: .*float.*int.*one dtype"),
        (lambda: 1, lambda: 2.0, r"at out: .*int.*float.*one dtype"),
    ],
)
def test_branches_that_differ(one, other, message):
    pattern = rf"(?s)branches of `filter_cond`.*{message}"
    with pytest.raises(RuleError, match=pattern):
        eqg.filter_cond(jnp.array(True), one, other)


def collatz(loop, start):
    """The counter is a Python number to begin with, and the state a Module."""

    def step(carry):
        state, count = carry
        return eqx.tree_at(lambda m: m.weight, state, 0.5 * state.weight), count + 1

    far = lambda carry: jnp.max(jnp.abs(carry[0].weight)) > 0.1
    return loop(far, step, (start, 0))


@pytest.mark.parametrize("jit", [False, True])
def test_while_loop_of_modules(jit):
    run = lambda m: collatz(eqg.filter_while_loop, m)
    run = eqx.filter_jit(run) if jit else run
    with checking_leaks():
        got, count = run(model())
    expected = np.asarray(model().weight)
    steps = 0
    while np.max(np.abs(expected)) > 0.1:
        expected, steps = 0.5 * expected, steps + 1
    assert_close(got.weight, expected, eps=500)
    assert count == steps
    assert (got.activation, got.count) == (jnp.tanh, 0)


def test_a_while_loop_that_does_not_run():
    with jax.disable_jit():
        assert eqg.filter_while_loop(lambda c: c[0] < 0, lambda c: c, (1, "a")) == (1, "a")
    last = eqg.filter_while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, c[1]), (1, "a"))
    assert last == (1, "a")


def test_forward_mode_and_batches_of_a_while_loop():
    def newton(loop):
        def root(x):
            far = lambda y: jnp.abs(y**2 - x) > 1e-6
            return loop(far, lambda y: 0.5 * (y + x / y), x)

        xs = jnp.array([2.0, 9.0], jnp.zeros(()).dtype)
        return (
            jax.jvp(root, (xs[0],), (xs[1],)),
            jax.vmap(root)(xs),
            jax.jacfwd(jax.jacfwd(root))(xs[0]),
        )

    assert_close(newton(eqg.filter_while_loop), newton(jax.lax.while_loop), eps=500)
    double = lambda carry: (carry[0] + 1, 2 * carry[1])
    last = lambda x: eqg.filter_while_loop(lambda carry: carry[0] < 3, double, (x, x))[1]
    with pytest.raises(ValueError, match=r"[Rr]everse-mode differentiation does not work"):
        jax.grad(last)(1.0)


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
    """Examples that go on see the last carry of those that have ended."""

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


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda c: (c[0], c[1], 0), r"at carry: it was a tuple of 2, and is a tuple of 3"),
        (
            lambda c: (c[0], "b"),
            r"at carry\[1\]: it was str \('a'\), and is str \('b'\).*static",
        ),
        (lambda c: (jnp.ones(3), c[1]), r"at carry\[0\]: it was float.*\[2\], and is"),
    ],
)
def test_a_body_that_changes_the_carry(step, message):
    with pytest.raises(RuleError, match=rf"(?s)the body of `filter_while_loop`.*{message}"):
        eqg.filter_while_loop(lambda c: True, step, (jnp.ones(2), "a"))


def module_with_rules(rule):
    class Layer(eqx.Module):
        weight: jax.Array
        activation: object

        def __call__(self, x, *, shift=0.0):
            return self.activation(rule(self.weight @ x, x)) + shift

    weight = jr.normal(jr.key(0), (3, 3), jnp.zeros(()).dtype)
    return Layer(weight, jnp.tanh)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [sin_times_jvp, sin_times_vjp])
def test_checkpoint_of_a_module(rule):
    layer = module_with_rules(rule)

    def loss(wrap):
        return lambda layer, x: jnp.sum(wrap(layer)(x, shift=1.0) ** 2)

    def all_of_it(f):
        gradient = eqx.filter_grad(f)
        square = lambda layer, x: jnp.sum(gradient(layer, x).weight ** 2)
        return (
            f(layer, vector()),
            gradient(layer, vector()),
            eqx.filter_jit(gradient)(layer, vector()),
            eqx.filter_grad(square)(layer, vector()),
            jax.jvp(lambda x: f(layer, x), (vector(),), (vector(),)),
            jax.vmap(lambda x: gradient(layer, x).weight)(jnp.stack([vector()] * 2)),
        )

    with checking_leaks():  # where `eqx.filter_checkpoint(layer)` leaks
        got = all_of_it(loss(eqg.filter_checkpoint))
    assert_close(
        jax.tree.leaves(eqx.filter(got, eqx.is_array)),
        jax.tree.leaves(eqx.filter(all_of_it(loss(lambda layer: layer)), eqx.is_array)),
        eps=500,
    )


def test_checkpoint_keeps_nothing():
    def kept(wrap):
        layer = wrap(lambda x: jnp.sin(jnp.sin(jnp.sin(jnp.sin(x)))))
        return len(jax.tree.leaves(jax.vjp(lambda x: layer(layer(x)), jnp.ones(3))[1]))

    assert kept(lambda f: f) == 8
    assert kept(eqg.filter_checkpoint) == 2
    everything = jax.checkpoint_policies.everything_saveable
    assert kept(lambda f: eqg.filter_checkpoint(f, policy=everything)) == 8


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


@pytest.mark.slow
def test_nothing_is_kept_alive():
    """No traced value after the trace (`eqx.filter_checkpoint` keeps a few for each)."""
    import gc

    def traced():
        gc.collect()
        return sum(isinstance(x, jax.core.Tracer) for x in gc.get_objects())

    before = traced()
    for _ in range(3):
        jax.make_jaxpr(
            lambda w: eqg.filter_checkpoint(eqx.tree_at(lambda m: m.weight, model(), w))(
                vector()
            )
        )(model().weight)
    assert traced() <= before


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
