"""The base of all diagnoses: the traced loss, the lines of the user's code, and the number of
an equation, which its derivatives keep."""

import functools as ft
import inspect

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import optax
import pytest
from eqx_grads._diagnosis.origins import NumberedLoss
from eqx_grads._diagnosis.source_lines import source_line
from eqx_grads._diagnosis.traced_loss import trace_loss
from eqx_grads._jaxprs.structure import equations, inner_programs

from .helpers import assert_close


pytestmark = pytest.mark.versions


KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 3)


def traced(loss, model, *args, **kwargs):
    return trace_loss("explain_nan", loss, model, args, kwargs)


def line_of(fn, text):
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


class Stack(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


MODEL = Stack([eqx.nn.Linear(3, 3, key=KEY) for _ in range(2)])


@eqg.custom_vjp
def doubled(x):
    return 2 * x


doubled.def_fwd(lambda x: (2 * x, None))
doubled.def_bwd(lambda residuals, ct: (2 * ct,))


LOSSES = {
    "plain": lambda m, x: jnp.sum(m(x) ** 2),
    "vmap": lambda m, x: jnp.sum(jax.vmap(m)(jnp.stack([x, 2 * x])) ** 2),
    "scan": lambda m, x: jnp.sum(jax.lax.scan(lambda h, _: (m(h), h), x, length=4)[1]),
    "filter_scan": lambda m, x: jnp.sum(
        eqg.filter_scan(lambda h, _: (m(h), None), x, None, length=4, checkpoint=2)[0]
    ),
    "cond": lambda m, x: jnp.sum(jax.lax.cond(x[0] > 0, lambda x: m(x), lambda x: 2 * m(x), x)),
    "checkpoint": lambda m, x: jnp.sum(jax.checkpoint(lambda x: m(x))(x)),
    "custom_jvp": lambda m, x: jnp.sum(jax.nn.relu(m(x)) + jax.nn.softplus(m(x))),
    "ours": lambda m, x: jnp.sum(doubled(m(x))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_derivative_keeps_the_numbers(name):
    program = traced(LOSSES[name], MODEL, X)
    numbered = NumberedLoss(program)
    differentiated = lambda values, ct: jax.vjp(numbered, *values)[1](ct)
    values = program.values
    derivative = jax.make_jaxpr(differentiated)(values, 1.0)

    def unnumbered(program):
        for eqn in program.eqns:
            if numbered.origin_of(eqn) is None:
                yield eqn
            for inner in inner_programs(eqn):
                if numbered.origin_of(eqn) is None:
                    yield from unnumbered(inner)

    # Only loops that JAX makes have equations without a number: those that count steps, or
    # add up the cotangents.
    left = {eqn.primitive.name for eqn in unnumbered(derivative)}
    assert left <= {"add_any", "broadcast_in_dim", "mul", "jit"}, left
    named = [numbered.origin_of(eqn) for eqn in equations(derivative)]
    assert {o.path for o in named if o} >= {"layers[0]", "layers[1]"}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradient_are_unchanged(name):
    loss = LOSSES[name]
    program = traced(loss, MODEL, X)
    numbered = NumberedLoss(program)
    arrays, static = eqx.partition(MODEL, eqx.is_inexact_array)
    want = jax.value_and_grad(lambda a: loss(eqx.combine(a, static), X))(arrays)
    n = len(program.leaves)
    rest = program.values[n:]
    got = jax.value_and_grad(lambda a: numbered(*a, *rest))(list(program.values[:n]))
    assert_close([got[0], *got[1]], [want[0], *jax.tree.leaves(want[1])])


def test_has_aux_may_be_an_argument_of_the_loss():
    assert not eqg.explain_nan(lambda x, has_aux: jnp.sum(x), X, has_aux=True)
    assert not eqg.explain_nan(lambda x, **options: jnp.sum(x), X, has_aux=True)


def test_names_of_inputs():
    def loss(model, xs, scale, *, target):
        return jnp.sum(model["w"] * xs["a"]) * scale + target

    model = {"w": jnp.ones(2), "n": jnp.arange(2), "name": "a model"}
    program = traced(loss, model, {"a": jnp.ones(2)}, 2.0, target=jnp.array(1.0))
    assert program.leaves == ["['w']"]
    assert program.inputs == ["model['w']", "model['n']", "xs['a']", "target"]
    # Through a signature that names fewer of them; and the first argument is the model.
    w, one = jnp.ones(2), jnp.array(1.0)
    several = lambda w, *rest, **options: sum(rest, jnp.sum(w)) + options["b"]
    assert traced(several, w, one, one, b=one).inputs == ["model", "rest[0]", "rest[1]", "b"]
    renamed = lambda params, model: jnp.sum(params) * model
    assert traced(renamed, w, one).inputs == ["model", "args[0]"]
    partial = ft.partial(lambda scale, w, x: jnp.sum(w) * x * scale, 2.0)
    assert traced(partial, w, one).inputs == ["model", "x"]


def test_lines():
    def loss(w):
        y = jnp.sqrt(w)  # HERE
        return jnp.sum(optax.losses.l2_loss(y))  # THERE

    eqns = traced(loss, jnp.ones(2)).program.eqns
    lines = {eqn.primitive.name: source_line(eqn) for eqn in equations_of(eqns)}
    assert lines["sqrt"].line == line_of(loss, "HERE")
    assert lines["sqrt"].file == __file__
    assert "jnp.sqrt(w)" in lines["sqrt"].code
    assert not lines["sqrt"].library
    inside = lines["square"] if "square" in lines else lines["integer_pow"]
    assert inside.line == line_of(loss, "THERE")
    assert inside.library.startswith("optax/losses/")


def equations_of(eqns):
    for eqn in eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from equations_of(inner.eqns)


def test_a_function_of_jax_that_was_first_traced_in_a_backward_pass():
    jax.clear_caches()

    @eqg.custom_vjp
    def positive(x):
        return x

    positive.def_fwd(lambda x: (x, None))
    positive.def_bwd(lambda _, ct: (jnp.where(ct > 0, ct, 0.0),))
    jax.make_jaxpr(jax.grad(lambda x: jnp.sum(positive(x))))(jnp.ones(7))

    def loss(w):
        return jnp.sum(jnp.where(w > 0, w, 0.0))  # HERE

    origins = NumberedLoss(traced(loss, jnp.ones(7))).origins
    (selection,) = [o for o in origins if o.primitive == "select_n"]
    assert selection.source.line == line_of(loss, "HERE")


class Tagged(eqx.Module):
    weight: jax.Array
    tag: str = eqx.field(static=True)

    def __call__(self, x):
        return self.weight * x


def test_a_loss_that_needs_the_types_of_its_layers():
    def loss(model, x):
        assert type(model) is Tagged
        return jnp.sum(model(x))

    program = traced(loss, Tagged(X, "a"), X)
    assert program.layers == []
    assert_close(NumberedLoss(program)(*program.values), jnp.sum(X * X))


def test_attributes_and_isinstance_of_layers():
    def loss(model, x):
        assert isinstance(model, Tagged)
        assert model.tag == "a"
        return jnp.sum(model(x) + eqx.tree_at(lambda m: m.weight, model, X)(x))

    assert traced(loss, Tagged(X, "a"), X).layers == ["Tagged"]


class TestErrors:
    def test_under_a_transformation(self):
        with pytest.raises(eqg.RuleError, match="inside a transformed function"):
            jax.jit(lambda w: traced(jnp.sum, w).program.out_avals and w)(jnp.ones(2))

    def test_an_error_of_the_loss_is_its_own(self):
        def loss(w):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            traced(loss, jnp.ones(2))


WRAPPED = {
    "a Module": eqg.filter_checkpoint,
    "zero_safe": eqg.zero_safe,
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_layer_has_the_path_that_users_know(wrap):
    # A dead ReLU, then the logarithm of zero.
    wrapped = Stack([wrap(layer) for layer in MODEL.layers])
    loss = lambda model, x, *, fn: jnp.sum(fn(model(x)))
    paths = ["layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias"]
    assert traced(loss, wrapped, X, fn=jnp.square).leaves == paths
    numbered = NumberedLoss(traced(loss, wrapped, X, fn=jnp.square))
    dots = [o for o in numbered.origins if o.primitive == "dot_general"]
    assert [o.path for o in dots] == ["layers[0]", "layers[1]"]

    zeros = eqg.explain_zero(loss, wrapped, X, fn=jnp.round)
    assert [r.leaf for r in zeros.found] == paths
    flow = eqg.gradient_flow(lambda m: loss(m, X, fn=jnp.square), wrapped)
    assert list(flow) == ["layers[0]", "layers[1]"]
    broken = eqx.tree_at(lambda s: jax.tree.leaves(s)[1], wrapped, jnp.full(3, jnp.nan))
    (found,) = eqg.explain_nan(loss, broken, X, fn=jnp.square).found
    assert found.leaf == "layers[0].bias"
    memory = eqg.explain_memory(loss, wrapped, X, fn=jnp.square, compiled=False)
    assert "_fn" not in str(memory)
    checked = eqgt.check_gradients(loss, wrapped, X, fn=jnp.square, skip=["layers[1]"])
    assert [leaf.leaf for leaf in checked.leaves] == paths
