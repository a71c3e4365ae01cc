"""Traced programs: the evaluator and its hooks, the table of inner programs, and what is
decided on them. Each program is written as a function of `f`, so that the same program with
another `f` says what a hook should have made."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads._jaxprs.diagonal import has_diagonal_jacobian
from eqx_grads._jaxprs.evaluate import (
    bind,
    enter,
    evaluate,
)
from eqx_grads._jaxprs.interpret import Domain, interpret
from eqx_grads._jaxprs.linearity import (
    CONSTANT,
    LINEAR,
    linear_in,
    output_statuses,
    surely_linear,
    why_nonlinear,
)
from eqx_grads._jaxprs.primitives import ELEMENTWISE
from eqx_grads._jaxprs.structure import (
    Checkpoint,
    equations,
    holds,
    Scan,
    ShardMap,
    structure,
)
from eqx_grads.testing import assert_trees_close
from jax.extend.core import jaxpr_as_fun, Primitive, primitives
from jax.sharding import PartitionSpec as P


pytestmark = [pytest.mark.versions, pytest.mark.x64]


def custom_jvp(f, x):
    @jax.custom_jvp
    def g(x):
        return f(x) * x

    g.defjvp(lambda x, t: (g(*x), 2 * t[0]))
    return g(x)


def custom_vjp(f, x):
    @jax.custom_vjp
    def g(x):
        return f(x) * x

    g.defvjp(lambda x: (g(x), None), lambda _, ct: (2 * ct,))
    return g(x)


def scan(f, x):
    """Constants, two parts of the carry, inputs and outputs; an outer array; backwards."""

    def body(carry, y):
        a, n = carry
        return (f(a) * y + x[0], n + 1), a * y

    init = (jnp.sum(x), 0)
    carry, ys = jax.lax.scan(body, init, x + np.arange(3.0, dtype=x.dtype), reverse=True)
    return carry[0], ys, carry[1]


def while_loop(f, x):
    y, _ = jax.lax.while_loop(
        lambda c: c[1] < jnp.sum(x) + 3,
        lambda c: (f(c[0]) + x, c[1] + 1),
        (x, jnp.zeros((), x.dtype)),
    )
    return y


def nested(f, x):
    def body(c, y):
        c = jax.lax.cond(y > 0.5, lambda c: jax.jit(f)(c), lambda c: 2 * c, c)
        return jax.checkpoint(lambda c: f(c) * y)(c), custom_jvp(f, c)

    def step(c, _):
        return jax.lax.scan(body, c, x)

    return jax.lax.scan(step, x[0], None, length=2)


PROGRAMS = {
    "plain": lambda f, x: (f(x) * 2, x, 1.0),
    "jit": lambda f, x: jax.jit(lambda x: f(x) + np.arange(3.0, dtype=x.dtype))(x),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: f(f(x) * x))(x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "scan": scan,
    "while": while_loop,
    "cond": lambda f, x: jax.lax.cond(x[0] > 0, f, lambda x: -x, x),
    "switch": lambda f, x: jax.lax.switch(jnp.int32(2), [f, jnp.exp, lambda x: f(x) * x], x),
    "nested": nested,
}
programs = pytest.mark.parametrize("name", PROGRAMS)
x = jnp.array([0.3, 0.6, 0.9])


def trace(name: str, f=jnp.sin):
    return jax.make_jaxpr(lambda x: jax.tree.leaves(PROGRAMS[name](f, x)))(x)


def cos_for_sin(program, args, extra=None):
    """Evaluates a program with another function instead of the sine, at any depth."""
    del extra

    def hook(eqn, values):
        if eqn.primitive is jax.lax.sin_p:
            return [jnp.cos(*values)]
        return bind(eqn, values) if structure(eqn) is None else enter(eqn, values, cos_for_sin)

    return evaluate(program, args, hook)


def floats(outputs):
    return sum(jnp.sum(y) for y in outputs if jnp.issubdtype(jnp.result_type(y), jnp.inexact))


class TestEvaluate:
    @programs
    def test_without_a_hook(self, name):
        program = trace(name)
        assert_trees_close(evaluate(program, [x]), jaxpr_as_fun(program)(x))
        if name != "while":  # which has no reverse mode
            grad = jax.grad(lambda x: floats(evaluate(program, [x])))(x)
            assert_trees_close(grad, jax.grad(lambda x: floats(jaxpr_as_fun(program)(x)))(x))

    @programs
    @pytest.mark.parametrize("compile", [True, False])
    def test_a_hook_that_enters_everything(self, name, compile):
        run = lambda x: cos_for_sin(trace(name), [x])
        want = jax.tree.leaves(PROGRAMS[name](jnp.cos, x))
        assert_trees_close((jax.jit(run) if compile else run)(x), want)

    def test_checkpoint_scan_and_their_options_are_kept(self):
        def f(x):
            body = jax.checkpoint(
                lambda c, x: (jnp.sin(c) * x, None),
                policy=jax.checkpoint_policies.everything_saveable,
                prevent_cse=False,
            )
            return jax.lax.scan(body, 1.0, x, reverse=True, unroll=3)[0]

        again = jax.make_jaxpr(lambda x: cos_for_sin(jax.make_jaxpr(f)(x), [x]))(x)
        [scan] = [s for s in map(structure, again.eqns) if isinstance(s, Scan)]
        assert (scan.length, scan.reverse, scan.unroll) == (3, True, 3)
        [checkpoint] = [
            s for s in map(structure, equations(again)) if isinstance(s, Checkpoint)
        ]
        assert checkpoint.policy is jax.checkpoint_policies.everything_saveable
        assert checkpoint.prevent_cse is False


# ---------------------------------------------------------------- the table, and the walk


class TestStructure:
    @programs
    def test_the_walk_sees_every_sine(self, name):
        assert holds(trace(name), "sin")
        assert not holds(trace(name), "cos")
        assert not holds(trace(name, jnp.cos), "sin")
        n_cos = sum(e.primitive is jax.lax.cos_p for e in equations(trace(name, jnp.cos)))
        assert n_cos == sum(e.primitive is jax.lax.sin_p for e in equations(trace(name)))

    def test_shard_map(self):
        mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        f = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
        program = jax.make_jaxpr(f)(x)
        assert holds(program, ShardMap)
        assert holds(program, "sin")
        assert linear_in(program, [False]) == [CONSTANT]
        with pytest.raises(NotImplementedError, match=r"`shard_map` can't be entered"):
            cos_for_sin(program, [x])

    def test_a_branch_for_each_platform(self):
        f = lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
        program = jax.make_jaxpr(f)(x)
        [cond] = [s for s in map(structure, program.eqns) if s is not None]
        assert cond.by_platform
        with jax.default_device(jax.devices("cpu")[0]):
            assert_trees_close(evaluate(program, [x]), [jnp.sin(x)])
        with pytest.raises(NotImplementedError, match=r"`cond` can't be entered"):
            cos_for_sin(program, [x])


# ---------------------------------------------------------------- what is decided on programs


def by_scan(f):
    return lambda x: jax.lax.scan(lambda c, y: (f(y) + 2 * c, c), 0 * x[0], x)


ENTERED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": lambda f: lambda x: custom_jvp(lambda x: f(x) / x, x),
    "scan": by_scan,
    "scan of jit": lambda f: by_scan(jax.jit(f)),
    "switch": lambda f: lambda x: jax.lax.switch(jnp.int32(1), [f, lambda x: -x], x),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=P("i"),
        out_specs=P("i"),
    ),
}


class TestLinearity:
    @pytest.mark.parametrize("name", [name for name in ENTERED if name != "custom_jvp"])
    def test_through_inner_programs(self, name):
        program = jax.make_jaxpr(ENTERED[name](lambda x: 3 * x))(x)
        assert surely_linear(output_statuses(program))
        assert why_nonlinear(output_statuses(program)) is None

    @pytest.mark.parametrize("name", ENTERED)
    def test_what_is_not_linear_inside(self, name):
        program = jax.make_jaxpr(ENTERED[name](jnp.sin))(x)
        assert not surely_linear(output_statuses(program))
        assert "`sin`" in str(why_nonlinear(output_statuses(program)))

    def test_a_branch_that_depends_on_the_argument(self):
        program = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, lambda: x, lambda: -x))(1.0)
        assert why_nonlinear(output_statuses(program)) == "it applies `gt` to a tangent"

    def test_a_carry_that_becomes_dependent(self):
        def f(x):
            body = lambda c, y: ((y, c[0]), c[1])
            return jax.lax.scan(body, (0.0, 0.0), x)

        assert output_statuses(jax.make_jaxpr(f)(x)) == [LINEAR] * 3


# ---------------------------------------------------------------- the abstract interpreter


def test_a_bound_that_moves_is_widened():
    """Without widening, the count of a loop would have no fixed point."""
    upper = Domain[float](
        constant=float,
        join=max,
        apply=lambda eqn, ins, path: [sum(ins)] * len(eqn.outvars),
        widen=lambda a, b: a if b <= a else float("inf"),
    )
    fn = lambda x: jax.lax.scan(lambda c, _: (c + 1.0, None), x, None, length=5)[0]
    assert interpret(jax.make_jaxpr(fn)(0.0), [0.0], upper).outs == [float("inf")]
    same = lambda x: jax.lax.scan(lambda c, _: (c + 0.0, None), x, None, length=5)[0]
    assert interpret(jax.make_jaxpr(same)(0.0), [3.0], upper).outs == [3.0]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: jax.lax.cond(True, lambda x: x, jnp.sin, x), True),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda x: x, jnp.sin, x), False),
        (lambda x, y: jax.lax.while_loop(lambda z: jnp.int32(0) > 1, jnp.sin, x), True),
        (lambda x, y: jax.lax.while_loop(lambda z: z[0] > 1, jnp.sin, x), False),
        (lambda x, y: jax.lax.while_loop(lambda z: False, lambda z: z + x[::-1], x), False),
        (lambda x, y: jax.lax.scan(lambda c, z: (c + z, None), x, y)[0], False),
    ],
)
def test_a_diagonal_jacobian_through_branches_and_loops(fn, expected):
    both = lambda x, y: (fn(x, y), y)
    program = jax.make_jaxpr(both)(jnp.arange(1.0, 4.0), jnp.ones((3, 3)))
    assert has_diagonal_jacobian(program) == expected


# ---------------------------------------------------------------- the elementwise primitives


def _primitives():
    found = [*vars(jax.lax).values(), *vars(primitives).values()]
    return {p.name: p for p in found if isinstance(p, Primitive)}


PRIMITIVES = _primitives()
# Primitives that behave as if they were elementwise, and are not in the table.
EXCEPTIONS = {
    "stage": "returns what it is given, of any type, without a derivative",
}
# For those that need other parameters than these.
PARAMS = ({}, {"accuracy": None})
MORE = {
    "convert_element_type": {"new_dtype": jnp.float32, "weak_type": False, "sharding": None},
    "integer_pow": {"y": 3},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 3},
    "round": {"rounding_method": jax.lax.RoundingMethod.TO_NEAREST_EVEN},
}
XS = (
    jnp.array([1.3, 2.5, 0.7]),
    jnp.array([1, 2, 3]),
    jnp.array([True, False, False]),
    jnp.array([1 + 0.2j, 0.2, 0.3j]),
)


def _is_elementwise(primitive) -> bool:
    """Whether, for operands of some types, the output for reversed operands is reversed."""
    options = [MORE[primitive.name]] if primitive.name in MORE else PARAMS
    same_types = [[x] * n for x in XS for n in (1, 2, 3)]
    for xs, params in itertools.product([*same_types, [XS[2], XS[0], XS[0]]], options):
        try:
            out = primitive.bind(*xs, **params)
            of_reversed = primitive.bind(*(x[::-1] for x in xs), **params)
        except Exception:  # not for operands of these types, or with these parameters
            continue
        if jnp.shape(out) == (3,):
            is_float = jnp.issubdtype(out.dtype, jnp.inexact)
            return bool(jnp.array_equal(out[::-1], of_reversed, equal_nan=is_float))
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(PRIMITIVES))
def test_each_primitive(name):
    with warnings.catch_warnings(action="ignore"):
        is_elementwise = _is_elementwise(PRIMITIVES[name])
    if is_elementwise:
        assert name in ELEMENTWISE or name in EXCEPTIONS
    else:
        # These can't be bound to arrays alone, or have another output than operands.
        assert name not in ELEMENTWISE or name in ("pvary", "polygamma", "sharding_constraint")
