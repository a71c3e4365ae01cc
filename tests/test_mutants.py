"""What no other quick test noticed in a mutant of the library (`make mutants`)."""

import functools as ft

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.nn as nn
import eqx_grads.solvers as eqg_solvers
import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest
from eqx_grads._control_flow.carry import same_static
from eqx_grads._control_flow.chunked_scan import near_divisor
from eqx_grads._jaxprs.evaluate import bind, enter, evaluate
from eqx_grads._rules.rule import CheckCache
from eqx_grads._rules.without_tangents import call_without_tangents
from jax.experimental import checkify  # noqa: TID251  an interpreter of others

from .helpers import assert_close


# ---------------------------------------------------------------- rules


def test_a_value_with_something_that_is_no_gradient():
    f = eqg.custom_gradient(lambda x: (x * x, 2 * x))
    with pytest.raises(eqg.RuleError, match="did not return a value and a function"):
        jax.grad(f)(2.0)


def test_a_call_without_tangents():
    f = lambda x, y: x * jnp.sin(y)
    value = lambda x: call_without_tangents(f, (x,), {"y": x}) + 3 * x
    assert_close(jax.grad(value)(2.0), 3.0)
    assert_close(value(2.0), 2.0 * jnp.sin(2.0) + 6.0)


@pytest.mark.parametrize(
    "result", [lambda x, t: (x, t, t), lambda x, t: t], ids=["three", "one"]
)
def test_a_forward_rule_that_does_not_return_a_pair(result):
    f = eqg.custom_jvp(jnp.sin)
    f.def_jvp(lambda primals, tangents: result(*primals, *tangents))
    with pytest.raises(eqg.RuleError, match="did not return a pair"):
        jax.grad(f)(1.0)


def test_the_partials_of_an_elementwise_function_may_be_a_list():
    f = eqg.elementwise(jnp.multiply, lambda out, x, y: [y, x])
    assert_close(jax.grad(f, (0, 1))(2.0, 3.0), (3.0, 2.0))


@pytest.mark.parametrize("decorator", [eqg.custom_jvp, eqg.custom_vjp])
def test_a_decorated_function_has_the_name_of_the_function(decorator):
    def cube(x):
        """x to the third."""
        return x**3

    decorated = decorator(cube)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(decorated, name) == getattr(cube, name)


def test_checks_are_kept_for_so_many_types_of_arguments():
    f = eqg.custom_jvp(jnp.sin)
    f.def_jvp(lambda primals, tangents: (f(*primals), jnp.cos(*primals) * tangents[0]))
    cache = CheckCache()
    for i in range(CheckCache.most + 1):
        cache.get(_CallOfType(i), "check", lambda: None)
    assert 0 < len(cache._results) <= CheckCache.most


class _CallOfType:
    operands = ()

    def __init__(self, i):
        self.i = i

    @property
    def flat(self):
        return self

    def key(self, operands):
        return self.i


def test_the_function_of_a_batching_rule_may_use_the_name_of_the_axis():
    @eqg.custom_jvp
    def centered(x):
        return x - jax.lax.pmean(x, "batch")

    @centered.def_vmap
    def centered_vmap(size, batched, x):
        return x - jnp.mean(x, 0), True

    @centered.def_jvp
    def centered_jvp(primals, tangents):
        return centered(*primals), tangents[0] - jax.lax.pmean(tangents[0], "batch")

    x = jnp.array([1.0, 2.0, 6.0])
    assert_close(jax.vmap(centered, axis_name="batch")(x), x - 3.0)


def test_checkify_of_a_call_with_an_unused_output_and_a_constant():
    factor = jnp.array([2.0, 3.0])

    @eqg.custom_jvp
    def f(x):
        checkify.check(jnp.all(x > 0), "negative")
        return factor * x**2, jnp.exp(x)

    @f.def_jvp
    def f_jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        exp = jnp.exp(x)
        return (factor * x**2, exp), (2 * factor * x * t, exp * t)

    x = jnp.array([1.0, 2.0])
    value = lambda x: jnp.sum(checkify.checkify(f)(x)[1][0])
    assert_close(jax.jit(jax.grad(value))(x), 2 * factor * x)
    assert_close(jax.jvp(jax.jit(value), (x,), (x,))[1], jnp.sum(2 * factor * x * x))


def test_a_dead_term_in_a_while_loop_is_never_computed():
    @eqg.custom_jvp
    def f(x, y):
        return x + y

    @f.def_jvp
    def f_jvp(primals, tangents):
        def step(carry):
            i, t_x, t_y = carry
            return i + 1, 0.5 * t_x + jnp.inf * t_y, t_y

        t_x, t_y = tangents
        _, t_out, _ = jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, t_x, t_y))
        return f(*primals), t_out

    assert jax.jvp(lambda x: f(x, 1.0), (2.0,), (8.0,))[1] == 1.0


def test_evaluation_of_a_batched_while_loop_leaves_what_is_done():
    def halvings(x):
        return jax.lax.while_loop(lambda x: x > 1.0, lambda x: x / 2.0, x)

    x = jnp.array([0.5, 3.0, 20.0])
    program = jax.make_jaxpr(jax.vmap(halvings))(x)

    def hook(eqn, values):
        if eqn.primitive.name != "while":
            return bind(eqn, values)
        return enter(eqn, values, lambda program, values, _: evaluate(program, values))

    assert_close(evaluate(program, [x], hook), [jnp.array([0.5, 0.75, 0.625])])


# ---------------------------------------------------------------- straight-through


def test_a_tree_is_rounded_leaf_by_leaf_and_an_integer_array_is_refused():
    tree = {"a": jnp.array([-0.3, 2.0]), "b": 3, "c": jnp.array(1)}
    assert_close(eqg.ste.sign(tree), {"a": jnp.array([-1.0, 1.0]), "b": 3, "c": jnp.array(1)})
    with pytest.raises(eqg.RuleError, match=r"`ste.sign`(?s:.)*is int"):
        eqg.ste.sign(jnp.array([1, 2]))


def test_vector_quantization_with_a_codebook_in_another_precision():
    with jax.enable_x64(True):
        z = jnp.array([[0.1, 0.9], [0.8, 0.2]], "float32")
        codebook = jnp.array([[1.0, 0.0], [0.0, 1.0]], "float64")
        for a, b in ((z, codebook), (z.astype("float64"), codebook.astype("float32"))):
            value, index = eqg.ste.vector_quantize(a, b)
            assert index.tolist() == [1, 0]
            assert value.dtype == a.dtype


# ---------------------------------------------------------------- recurrent layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "batch", "mapped"),
    [
        *[(nn.GRU, batch, name) for batch in (None, 2) for name in ("xs", "state", "lengths")],
        (nn.LSTM, 2, "state"),
        (nn.RNN, 2, "state"),
    ],
)
def test_vmap_over_one_argument_of_a_recurrent_layer(make, batch, mapped, getkey):
    """The arguments that are not mapped are the same for every example."""
    layer = make(3, 4, key=getkey())
    sizes = () if batch is None else (batch,)
    xs = jr.normal(getkey(), (*sizes, 5, 3))
    state = jax.tree.map(lambda s: jr.normal(getkey(), s.shape), layer(xs)[1])
    lengths = jnp.full(sizes, 4)
    several = lambda x: jnp.stack([x, x + 0.3, -x])
    args = {"xs": xs, "state": state, "lengths": lengths}
    args[mapped] = jax.tree.map(several, args[mapped])
    if mapped == "lengths":
        args["lengths"] = jnp.stack([lengths, lengths - 2, lengths - 4])
    axes = {name: 0 if name == mapped else None for name in args}

    def call(layer, xs, state, lengths):
        return layer(xs, state, lengths=lengths)

    def vmapped(layer, xs, state):
        axes_of_args = (None, *axes.values())
        return eqx.filter_vmap(call, in_axes=axes_of_args)(layer, xs, state, args["lengths"])

    def one_by_one(layer, xs, state):
        given = {"xs": xs, "state": state, "lengths": args["lengths"]}
        example = lambda i: given | {mapped: jax.tree.map(lambda x: x[i], given[mapped])}
        outs = [call(layer, **example(i)) for i in range(3)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    def both(f):
        def loss(inputs):
            out = f(*inputs)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

        run = eqx.filter_value_and_grad(loss, has_aux=True)
        return eqx.filter_jit(run)((layer, args["xs"], args["state"]))

    assert_close(both(vmapped), both(one_by_one), tolerance=1e-5)


# ---------------------------------------------------------------- scans


@pytest.mark.parametrize("reverse", [False, True])
def test_truncation_of_steps_that_run_once_keeps_the_derivative_of_the_first_carry(reverse):
    """A step with an effect is not run again, so its own loop is cut: at every window but the
    first, which the first carry enters."""
    xs = jnp.linspace(-1.0, 1.0, 7)

    def loss(h, effect):
        def step(h, x):
            if effect:
                jax.debug.callback(lambda: None)
            h = jnp.tanh(0.7 * h + x)
            return h, h

        return jnp.sum(eqg.filter_scan(step, h, xs, truncate=3, reverse=reverse)[1])

    def first_window(h):
        steps = xs[::-1] if reverse else xs
        total = 0.0
        for x in steps[:3]:
            h = jnp.tanh(0.7 * h + x)
            total += h
        return total

    expected = jax.grad(first_window)(0.3)
    assert abs(expected) > 0.1
    assert_close(jax.grad(loss)(0.3, True), expected)
    assert_close(jax.grad(loss)(0.3, False), expected)


def test_replay_of_a_step_with_several_inputs():
    def loss(h, xs, checkpoint):
        def step(h, x):
            h = jnp.tanh(0.5 * h * x["gain"] + x["shift"] ** 2 + jnp.sin(x["last"]))
            return h, h

        return jnp.sum(eqg.filter_scan(step, h, xs, checkpoint=checkpoint)[1])

    h = jnp.array([0.1, -0.3])
    xs = {
        name: jr.normal(jr.key(i), (5, 2)) for i, name in enumerate(("gain", "shift", "last"))
    }
    grad = jax.grad(loss, (0, 1))
    assert_close(grad(h, xs, "replay"), grad(h, xs, None))


def test_a_step_that_returns_three_values():
    step = lambda h, x: (h, x, None)
    with pytest.raises(eqg.RuleError, match="a step of `filter_scan`, did not return a pair"):
        eqg.filter_scan(step, jnp.zeros(2), jnp.ones((3, 2)))


def test_online_gradients_of_a_step_with_a_jitted_function():
    def loss(weight, online):
        xs = jnp.array([0.3, -0.7, 1.1])
        step = jax.jit(lambda h, x: (jnp.tanh(weight * h + x), h))
        return jnp.sum(eqg.filter_scan(step, jnp.array([0.2, -0.4]), xs, online=online)[1])

    weight = jnp.array([0.5, -0.9])
    assert_close(jax.grad(loss)(weight, True), jax.grad(loss)(weight, False))


def test_static_values_of_two_types_are_not_the_same():
    assert same_static("a", "a")
    assert not same_static(1, True)
    assert not same_static(1, 1.0)


def test_a_chunk_may_be_as_long_as_allowed():
    assert near_divisor(7, 5) == 7
    assert near_divisor(13, 5) == 5


@pytest.mark.parametrize("method", ["scan", "associative"])
def test_the_method_of_a_linear_recurrence_is_the_one_asked_for(method):
    run = lambda a, b: eqg.linear_recurrence(a, b, method=method)
    program = str(jax.make_jaxpr(run)(jnp.ones((4, 2)), jnp.ones((4, 2))))
    assert ("scan[" in program) == (method == "scan")


# ---------------------------------------------------------------- linear recurrent layers

LINEAR = {
    "MinGRU": ft.partial(nn.MinGRU, 3, 4),
    "MinLSTM": ft.partial(nn.MinLSTM, 3, 4),
    "LRU": ft.partial(nn.LRU, 3, 4, 5),
    "S5": ft.partial(nn.S5, 3, 4, 6),
}


@pytest.mark.parametrize("method", ["scan", "associative"])
@pytest.mark.parametrize("name", LINEAR)
def test_the_method_of_a_layer_is_the_one_asked_for(name, method, getkey):
    layer = LINEAR[name](method=method, key=getkey())
    program = str(jax.make_jaxpr(layer)(jnp.ones((5, 3))))
    assert ("scan[" in program) == (method == "scan")


@pytest.mark.parametrize("name", LINEAR)
def test_an_initial_state_is_learned_on_request_only(name, getkey):
    key = getkey()
    leaves = lambda **options: jax.tree.leaves(LINEAR[name](key=key, **options))
    assert len(leaves(learn_initial_state=True)) > len(leaves())


def test_the_initial_weights_of_an_lru_have_the_published_spread(getkey):
    """Orvieto et al., "Resurrecting recurrent neural networks", appendix A."""
    cell = nn.LRU(128, 64, 96, key=getkey()).cells[0][0]
    assert jnp.allclose(jnp.std(cell.weight_in), (2 * 128) ** -0.5, rtol=0.05)
    assert jnp.allclose(jnp.std(cell.weight_out), 96**-0.5, rtol=0.05)


def test_the_initial_weights_of_a_weighted_cell_are_those_of_a_linear_layer(getkey):
    cell = nn.WeightedCell(64, nn.LIFCell(50, 0.9), key=getkey())
    for x in (cell.weight_ih, cell.bias):
        assert 0.8 / 8 < jnp.max(jnp.abs(x)) <= 1 / 8


# ---------------------------------------------------------------- quantized layers


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_calibration_of_a_convolution_with_a_scale_for_each_index(axis, getkey):
    layer = eqx.nn.Conv2d(2, 3, 3, key=getkey())
    images = jr.normal(getkey(), (4, 2, 5, 6)) * jnp.arange(1.0, 7.0)[None, None, None]
    inputs = nn.FakeQuantize(8, channel_axis=axis, learn_scale=True)
    rules = {eqx.nn.Conv2d: (nn.LSQ(4), inputs)}
    quantized, _ = nn.quantize_model(layer, rules, calibrate=images)
    others = tuple(i for i in range(4) if i != 1 + axis % 3)
    expected = jnp.max(jnp.abs(images), others, keepdims=True)[0] / 127
    assert_close(quantized.input_quantizer.scale, expected)


@pytest.fixture
def _without_type_checks():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_without_type_checks")
@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (ft.partial(nn.VectorQuantizer, 4, 3, key=jr.key(0)), ["ema"]),
        (ft.partial(nn.RNNCell, 3, 4, key=jr.key(0)), ["use_bias"]),
        (ft.partial(nn.Recurrent, nn.LIFCell(3, 0.9)), ["reverse", "time_major"]),
    ],
)
def test_a_flag_that_is_no_bool(make, flags):
    for flag in flags:
        with pytest.raises(eqg.RuleError, match=f"The `{flag}` of .* is not a bool"):
            make(**{flag: "yes"})


# ---------------------------------------------------------------- spiking layers


def test_the_step_that_does_not_fit_the_neurons_is_shown():
    layer = nn.LIF.from_cell(nn.LIFCell(3, 0.9))
    with pytest.raises(eqg.RuleError, match=r"a step of `xs` is float\d+\[5\]"):
        layer(jnp.ones((2, 7, 5)))


@pytest.mark.parametrize(
    "cell",
    [
        nn.LIFCell(3, 0.9),
        nn.ALIFCell(3, 0.9, 0.95),
        nn.CuBaLIFCell(3, 0.9, 0.95),
        nn.LICell(3, 0.9),
    ],
    ids=lambda cell: type(cell).__name__,
)
def test_a_neuron_learns_nothing_by_default(cell):
    assert not jax.tree.leaves(eqx.filter(cell, eqx.is_array))


@pytest.mark.parametrize("make", [ft.partial(nn.LI, 3, 4, 0.9), ft.partial(nn.GRU, 3, 4)])
def test_an_option_of_a_layer_is_not_a_leaf(make, getkey):
    layer = make(key=getkey())
    assert isinstance(layer.keep, str)
    assert not any(isinstance(leaf, str) for leaf in jax.tree.leaves(layer))


# ---------------------------------------------------------------- zero_safe


def _root_of_positive(x):
    """Its derivative at zero is NaN in plain JAX, and zero where `zero_safe` sees it dead."""
    return jnp.where(x > 0, jnp.sqrt(x), 0.0)


def test_zero_safe_of_a_product_of_matrices():
    """Of the product, some rows are used: other rows of the left factor have no derivative."""
    w = jnp.arange(1.0, 7.0).reshape(3, 2)

    def loss(x):
        out = jnp.sqrt(x) @ w
        return jnp.sum(jnp.where(jnp.arange(4)[:, None] < 2, out, 0.0))

    x = jnp.ones((4, 3)).at[2:].set(0.0)
    grads = jax.grad(eqg.zero_safe(loss))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sqrt(x[:2]) @ w))(x[:2])
    assert_close(grads, jnp.concatenate([expected, jnp.zeros((2, 3))]))


def test_zero_safe_of_the_second_part_of_a_carry():
    def loss(x):
        def step(carry, x):
            count, kept = carry
            return (count + 1.0, jnp.where(x > 0, kept + _root_of_positive(x), kept)), None

        (count, kept), _ = jax.lax.scan(step, (jnp.zeros(2), jnp.zeros(2)), x)
        return jnp.sum(jnp.where(kept > 0, jnp.sqrt(kept), 0.0)) + jnp.sum(count)

    x = jnp.array([[4.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    grads = jax.grad(eqg.zero_safe(loss))(x)
    shared = 0.5 / jnp.sqrt(3.0)
    assert_close(grads, jnp.array([[0.25 * shared, 0.0], [0.5 * shared, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("constant", [0.0, 1.0])
@pytest.mark.parametrize("is_first", [True, False])
def test_zero_safe_of_a_selection_of_a_constant(is_first, constant):
    """Neither a zero nor a one is the predicate."""

    def loss(x):
        cases = (jnp.sqrt(x), jnp.full_like(x, constant))
        return jnp.sum(
            jnp.where(x > 0, *cases) if is_first else jnp.where(x <= 0, *cases[::-1])
        )

    grads = jax.grad(eqg.zero_safe(loss))(jnp.array([4.0, 0.0, 1.0]))
    assert_close(grads, jnp.array([0.25, 0.0, 0.5]))


@pytest.mark.parametrize("is_first", [True, False])
def test_zero_safe_of_a_branch_with_two_operands(is_first):
    def loss(x, y):
        branches = (lambda x, y: jnp.sum(_root_of_positive(x)) + jnp.sum(y),) * 2
        return jax.lax.cond(jnp.sum(y) > 0, *branches, x, _root_of_positive(y))

    x, y = jnp.array([4.0, 0.0]), jnp.array([0.0, 1.0])
    args = (x, y) if is_first else (y, x)
    grads = jax.grad(eqg.zero_safe(loss), (0, 1))(*args)
    slopes = {0.0: 0.0, 1.0: 0.5, 4.0: 0.25}
    assert_close(grads, tuple(jnp.array([slopes[float(v)] for v in arg]) for arg in args))


# ---------------------------------------------------------------- solvers and host functions


@pytest.mark.thorough
def test_a_solution_may_be_some_roundings_off_in_half_precision():
    eps = float(jnp.finfo(jnp.float16).eps)

    @eqg.implicit(lambda y, x: y - x, tolerance=1e-6)
    def identity(x):
        return x * jnp.asarray(1 + 4 * eps, x.dtype)

    x = jnp.ones(3, jnp.float16)
    assert_close(jax.grad(lambda x: jnp.sum(identity(x)))(x), x)


def test_anderson_of_small_differences():
    """Four differences span the space, however small they are."""
    matrix = jnp.diag(jnp.array([0.99, 0.95, 0.9, 0.5]))
    fn = lambda y, x: matrix @ y + x
    x = 1e-3 * jnp.ones(4)
    solver = eqg_solvers.Anderson(rtol=1e-5, atol=1e-7)
    solution = eqg.fixed_point(fn, jnp.zeros(4), x, solver=solver, max_steps=100)
    assert solution.stats["num_steps"] < 20
    assert_close(solution.value, x / (1 - jnp.diagonal(matrix)), tolerance=1e-3)


def test_the_types_of_residuals_of_a_host_function():
    n_calls = []

    @ft.partial(eqg.host_function, out=lambda x: x)
    def cube(x):
        return x**3

    @cube.def_fwd(residuals=lambda x: x, keep=0)
    def _fwd(x):
        n_calls.append(x)
        return x**3, 3 * x**2

    @cube.def_bwd
    def _bwd(slope, ct):
        return (ct * slope,)

    assert_close(jax.jit(jax.value_and_grad(cube))(2.0), (8.0, 12.0))
    assert len(n_calls) == 1  # JAX keeps the residuals, and they are not computed again


def test_a_host_function_that_returns_the_inner_axis_of_two_vmaps():
    """It may where no argument is batched by the outer one."""

    @ft.partial(eqg.host_function, out=lambda x, y: y, vmap_method="expand_dims")
    def second(x, y):
        return np.asarray(y)[0] if np.ndim(y) == 3 else np.asarray(y)

    x, y = jnp.arange(24.0).reshape(2, 4, 3), jnp.arange(12.0).reshape(4, 3)
    inner = jax.vmap(second)
    assert_close(jax.vmap(inner, (0, None))(x, y), jnp.broadcast_to(y, (2, 4, 3)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="returned another shape"):
        jax.block_until_ready(jax.vmap(inner)(x, 2 * x))


def test_calls_of_a_rule_for_complex_numbers():
    @ft.partial(eqg.host_function, out=lambda x: x, max_rule_calls=5)
    def square(x):
        return x * x

    @square.def_jvp
    def _jvp(primals, tangents):
        (x,), (t,) = primals, tangents
        return x * x, 2 * x * t

    loss = lambda x: jnp.sum(jnp.abs(square(x)))
    with pytest.raises(eqg.RuleError, match="takes 6 calls of the rule `_jvp`"):
        jax.grad(loss)(jnp.ones(3, jnp.complex64))


# ---------------------------------------------------------------- layers and drop-ins


@pytest.mark.parametrize("cell", [nn.MinGRU, nn.MinLSTM])
def test_the_first_weights_of_gates_differ(cell):
    """Uniform between the bounds, as those of `equinox.nn.Linear` are."""
    layer = cell(16, 64, key=jr.key(0))
    weights = [x for x in jax.tree.leaves(layer) if eqx.is_inexact_array(x)]
    assert weights
    for x in weights:
        assert jnp.min(x) < -0.2
        assert jnp.max(x) > 0.2
        assert abs(jnp.std(x) - 0.25 / 3**0.5) < 0.03


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        *((nn.RNN, 6), (nn.GRU, 6), (nn.LSTM, 6), (ft.partial(nn.LSTM, proj_size=8), 6)),
        # Several chunks of the forward and of the backward pass.
        *((nn.RNN, 1100), (ft.partial(nn.LSTM, proj_size=8), 130)),
    ],
)
def test_a_reversed_layer_with_wide_inputs(make, steps):
    """The forward pass computes the products with the inputs of all steps at once."""
    layer = lambda reverse: make(32, 64, reverse=reverse, key=jr.key(0))
    xs = 0.5 * jr.normal(jr.key(1), (1, steps, 32))

    def loss(layer, xs, flip):
        ys, _ = layer(flip(xs))
        ys = flip(ys)
        return jnp.sum(ys * jnp.cos(jnp.arange(ys.size)).reshape(ys.shape)), ys

    of = eqx.filter_value_and_grad(lambda args, flip: loss(*args, flip), has_aux=True)
    (_, got), grads = eqx.filter_jit(of)((layer(True), xs), lambda x: x)
    (_, want), expected = eqx.filter_jit(of)((layer(False), xs), lambda x: x[:, ::-1])
    assert_close(got, want, eps=100)
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(expected), eps=2000)


@pytest.mark.slow
def test_the_state_space_of_s5_starts_from_unit_variance():
    """Real and imaginary parts of as many weights as there are states, in conjugate pairs."""
    layer = nn.S5(32, 16, 64, key=jr.key(0))
    is_cell = lambda x: hasattr(x, "weight_in")
    (cell,) = filter(is_cell, jax.tree.leaves(layer, is_leaf=is_cell))
    assert cell.log_decay.shape == cell.frequency.shape == cell.log_step.shape == (32,)
    scale = lambda x, n: float(jnp.mean(x[0] ** 2 + x[1] ** 2)) * n
    assert 0.8 < scale(cell.weight_in, 32) < 1.2
    assert 0.8 < scale(cell.weight_out, 64) < 1.2


def test_a_rule_of_a_drop_in_is_a_function():
    with pytest.raises(TypeError, match="def_jvp"):
        eqg.filter_custom_jvp(jnp.sin).def_jvp(3)


def test_errors_of_drop_ins_name_the_place_of_the_rule():
    def fwd(perturbed, x):
        return x

    forward = eqg.filter_custom_vjp(lambda x: x)
    forward.def_fwd(fwd)
    forward.def_bwd(lambda residuals, ct, perturbed, x: ct)
    with pytest.raises(TypeError, match=r"`fwd`, file .*test_mutants.py"):
        jax.grad(forward)(1.0)

    def jvp(primals, tangents):
        return primals[0]

    forward = eqg.jax_custom_jvp(lambda x: x)
    forward.defjvp(jvp)
    with pytest.raises(TypeError, match=r"`jvp`, file .*test_mutants.py"):
        jax.grad(forward)(1.0)


# ---------------------------------------------------------------- diagnosis


def test_a_diagnosis_looks_on_where_jax_would_stop():
    root = lambda x: jnp.sum(jnp.sqrt(x))
    for switch in (jax.debug_nans, jax.debug_infs):
        with switch(True):
            (record,) = eqg.explain_nan(root, jnp.zeros(2)).found
            assert record.kind == "true singularity"
    with jax.debug_nans(True):
        eqg.explain_nan(root, jnp.zeros(2))
        assert jax.config.jax_debug_nans


def test_rounding_of_what_is_random_is_no_sample():
    noise = jr.uniform(jr.key(0), (3,))
    (record,) = eqg.explain_zero(lambda x: jnp.sum(jnp.round(x + noise)), jnp.ones(3)).found
    assert record.kind == "rounding"


def test_the_largest_product_is_shown_and_not_the_largest_cotangent():
    factors = jnp.array([1e-30, 1e25], "float32")
    cotangents = jnp.array([1e30, 1e20], "float32")

    def loss(s):
        y = factors * jnp.full(2, s)
        return jnp.dot(y, cotangents)

    (record,) = eqg.explain_nan(loss, jnp.array(1e-30, "float32")).found
    assert record.kind == "overflow"
    assert_close(record.cotangent, float(cotangents[1]))
    assert_close(record.operands[0], float(factors[1]))
