"""Traced programs: the evaluator and its hooks, the table of inner programs, and what is
decided on them. Each program is written as a function of `f`, so that the same program with
another `f` says what a hook should have made of it."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_grads._jaxprs.dependence import depends, free_variables, needed
from eqx_grads._jaxprs.evaluate import (
    bind,
    enter,
    evaluate,
    evaluate_equations,
)
from eqx_grads._jaxprs.linearity import (
    CONSTANT,
    LINEAR,
    linear_in,
    output_statuses,
    surely_linear,
    UNKNOWN,
    why_nonlinear,
)
from eqx_grads._jaxprs.structure import (
    Call,
    CallWithRule,
    Checkpoint,
    Cond,
    equations,
    holds,
    inner_programs,
    Scan,
    ShardMap,
    structure,
    While,
)
from eqx_grads._jaxprs.versions import as_closed
from eqx_grads.testing import assert_trees_close
from jax.extend.core import jaxpr_as_fun, Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P


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
KINDS = {
    "jit": Call,
    "checkpoint": Checkpoint,
    "custom_jvp": CallWithRule,
    "custom_vjp": CallWithRule,
    "scan": Scan,
    "while": While,
    "cond": Cond,
    "switch": Cond,
    "nested": Scan,
}
programs = pytest.mark.parametrize("name", PROGRAMS)
x = jnp.array([0.3, 0.6, 0.9])


def trace(name: str, f=jnp.sin):
    return jax.make_jaxpr(lambda x: jax.tree.leaves(PROGRAMS[name](f, x)))(x)


def cos_for_sin(program, args, extra=None):
    """Evaluates a program with another function in place of the sine, at any depth."""
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

    @pytest.mark.parametrize("name", ["jit", "checkpoint", "scan", "cond", "switch"])
    def test_derivatives_of_what_was_entered(self, name):
        f = lambda x: floats(jax.tree.leaves(PROGRAMS[name](jnp.cos, x)))
        run = lambda x: floats(cos_for_sin(trace(name), [x]))
        assert_trees_close(jax.grad(run)(x), jax.grad(f)(x))
        assert_trees_close(jax.jvp(run, [x], [x]), jax.jvp(f, [x], [x]))

    def test_a_rule_is_kept_by_bind_and_dropped_by_enter(self):
        program = trace("custom_jvp")
        assert jnp.all(jax.grad(lambda x: floats(evaluate(program, [x])))(x) == 2)
        grad = jax.grad(lambda x: floats(cos_for_sin(program, [x])))(x)
        assert_trees_close(grad, jax.grad(lambda x: jnp.sum(jnp.cos(x) * x))(x))

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

    def test_names_and_context_are_those_of_the_equation(self):
        def f(x):
            with jax.named_scope("outer"), jax.threefry_partitionable(False):
                return jax.jit(jax.named_scope("inner")(jnp.sin))(x)

        assert jax.config.jax_threefry_partitionable
        program = jax.make_jaxpr(f)(x)
        again = jax.make_jaxpr(lambda x: cos_for_sin(program, [x]))(x)
        [eqn] = again.eqns
        assert eqn.primitive is jax.lax.cos_p
        assert str(eqn.source_info.name_stack) == "outer/inner"
        assert not eqn.ctx.threefry_partitionable

    def test_a_hook_sees_the_line_of_the_user(self):
        seen = []

        def hook(eqn, values):
            seen.extend(frame.file_name for frame in eqn.source_info.traceback.frames)
            return bind(eqn, values)

        evaluate(jax.make_jaxpr(lambda x: jnp.sin(x))(x), [x], hook)
        assert __file__ in seen

    def test_none_is_a_known_zero(self):
        """Dead terms: nothing is computed for what is zero, and so nothing is NaN."""

        def f(x, y):
            return jax.jit(lambda x, y: x * jnp.inf + 2 * y)(x, y), 3 * x

        def without_zeros(program, args, extra=None):
            del extra
            return evaluate(program, args, hook)

        def hook(eqn, values):
            if isinstance(structure(eqn), Call):
                return enter(eqn, values, without_zeros)
            if eqn.primitive is jax.lax.mul_p and None in values:
                return [None]
            if eqn.primitive is jax.lax.add_p and None in values:
                return [next((v for v in values if v is not None), None)]
            return bind(eqn, values)

        out = without_zeros(jax.make_jaxpr(f)(1.0, 2.0), [None, jnp.array(2.0)])
        assert out == [4.0, None]

    @pytest.mark.parametrize("name", ["jit", "checkpoint", "scan", "while", "cond", "nested"])
    def test_values_may_be_pytrees(self, name):
        """Each value is a pair: itself, and whether it depends on a sine."""

        def pair(x, flag=False):
            return x, jnp.broadcast_to(flag, jnp.shape(x))

        def pairs(program, args, extra=None):
            del extra
            return evaluate(program, args, hook, constant=pair)

        def condition_or_body(program, args, extra):
            out = pairs(program, args, extra)
            return [value for value, _ in out] if program.out_avals[0].dtype == bool else out

        def hook(eqn, values):
            known = structure(eqn)
            if isinstance(known, Cond):
                return enter(eqn, [values[0][0], *values[1:]], pairs)
            if known is not None:
                run = condition_or_body if isinstance(known, While) else pairs
                return enter(eqn, values, run)
            flag = eqn.primitive is jax.lax.sin_p
            for _, other in values:
                flag |= jnp.any(other)
            return [pair(y, flag) for y in bind(eqn, [y for y, _ in values])]

        program = trace(name)
        out = pairs(program, [pair(x)])
        assert_trees_close([y for y, _ in out], jaxpr_as_fun(program)(x))
        assert all(flag.shape == jnp.shape(y) for y, flag in out)
        assert jnp.any(out[0][1])

    def test_extras_of_a_scan_are_sliced(self):
        """The index of the step, and an array for each step and branch."""

        def f(x):
            body = lambda c, x: (jax.lax.cond(x > 0.5, jnp.sin, jnp.cos, c), None)
            return jax.lax.scan(body, 1.0, x)[0]

        def run(program, args, extra):
            def hook(eqn, values):
                if isinstance(structure(eqn), Scan):
                    return enter(eqn, values, run, [jnp.arange(3)])
                if isinstance(structure(eqn), Cond):
                    # The branches are the false one and the true one.
                    return enter(eqn, values, run, [extra, 10 * extra])
                if eqn.primitive in (jax.lax.sin_p, jax.lax.cos_p):
                    return [values[0] + extra.astype(values[0].dtype)]
                return bind(eqn, values)

            return evaluate(program, args, hook)

        [out] = jax.jit(lambda x: run(jax.make_jaxpr(f)(x), [x], None))(x)
        assert_trees_close(out, jnp.array(31.0))

    def test_some_equations(self):
        program = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * y, y + 1))(1.0, 2.0)
        [_, y] = program.jaxpr.invars
        [sin, *rest] = program.eqns
        env = {sin.outvars[0]: 10.0, y: 2.0}
        assert evaluate_equations(rest, env, program.jaxpr.outvars) == [20.0, 3.0]
        assert y in env
        assert len(env) == 2


# ---------------------------------------------------------------- the table, and the walk

opaque_p = Primitive("test_opaque")
opaque_p.multiple_results = True


def _opaque_impl(*args, programs):
    return jaxpr_as_fun(programs["one"][0])(*args)


opaque_p.def_impl(_opaque_impl)
opaque_p.def_abstract_eval(lambda *avals, programs: programs["one"][0].out_avals)
mlir.register_lowering(opaque_p, mlir.lower_fun(_opaque_impl, multiple_results=True))


def opaque(f, x):
    program = jax.make_jaxpr(f)(x)
    return opaque_p.bind(x, programs=Hashable(one=[program]))[0]


class Hashable(dict):
    def __hash__(self):
        return id(self)


class TestStructure:
    @pytest.mark.parametrize("name", KINDS)
    def test_the_table(self, name):
        kinds = {type(structure(eqn)) for eqn in trace(name).eqns}
        assert KINDS[name] in kinds

    def test_the_transpose_of_a_scan(self):
        fn = lambda x: jax.lax.scan(lambda h, t: (jnp.sin(h * t), h), x, jnp.arange(3.0))[0]
        program = jax.make_jaxpr(lambda x, ct: jax.vjp(fn, x)[1](ct))(1.0, 1.0)
        known = [structure(eqn) for eqn in program.eqns if eqn.primitive.name == "scan"]
        [scan] = [k for k in known if isinstance(k, Scan) and k.reverse]
        assert len(known) == 2
        assert scan.n_carry == 1
        assert scan.n_consts + scan.n_carry < len(scan.programs[0].in_avals)

    def test_what_a_scan_is_made_of(self):
        [scan] = [s for s in map(structure, trace("scan").eqns) if isinstance(s, Scan)]
        assert (scan.n_consts, scan.n_carry) == (1, 2)
        assert (scan.length, scan.reverse) == (3, True)

    def test_what_a_while_loop_is_made_of(self):
        [loop] = [s for s in map(structure, trace("while").eqns) if isinstance(s, While)]
        assert (loop.n_cond_consts, loop.n_body_consts) == (1, 1)
        assert [len(p.in_avals) for p in loop.programs] == [3, 3]

    @programs
    def test_the_walk_sees_every_sine(self, name):
        assert holds(trace(name), "sin")
        assert not holds(trace(name), "cos")
        assert not holds(trace(name, jnp.cos), "sin")
        n_cos = sum(e.primitive is jax.lax.cos_p for e in equations(trace(name, jnp.cos)))
        assert n_cos == sum(e.primitive is jax.lax.sin_p for e in equations(trace(name)))

    def test_kinds_and_names(self):
        program = trace("nested")
        assert holds(program, Cond)
        assert holds(program, While, Checkpoint)
        assert holds(program, "while", "cond")
        assert not holds(program, While)

    def test_a_call_of_our_own(self):
        program = trace("custom_jvp")
        [eqn] = [e for e in program.eqns if isinstance(structure(e), CallWithRule)]
        ours = lambda **params: types.SimpleNamespace(
            primitive=Primitive("eqg_call"), params=params, invars=eqn.invars
        )
        assert structure(ours(call=None)) is None
        assert inner_programs(ours(call=None)) == ()
        inner = structure(eqn).programs
        assert structure(ours(call=None, call_jaxpr=inner[0])) == CallWithRule(inner, True)

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

    @pytest.mark.parametrize("flag", ["jax_custom_jvp3", "jax_custom_vjp3", "jax_remat3"])
    def test_experimental_flags(self, flag):
        if not hasattr(jax.config, flag):
            pytest.skip("This version of JAX has no such flag.")
        name = {"jax_remat3": "checkpoint"}.get(flag, flag[4:-1])
        jax.config.update(flag, True)
        try:
            program = trace(name)
            assert holds(program, "sin")
            assert holds(program, Checkpoint) == (flag == "jax_remat3")
            assert_trees_close(evaluate(program, [x]), [PROGRAMS[name](jnp.sin, x)])
            if flag == "jax_remat3":
                assert_trees_close(cos_for_sin(program, [x]), [PROGRAMS[name](jnp.cos, x)])
        finally:
            jax.config.update(flag, False)


def test_constants_without_values_become_inputs_without_names():
    constant = jnp.arange(3.0)
    program = as_closed(jax.make_jaxpr(lambda x: constant * x)(x).jaxpr)
    names = program.jaxpr.debug_info.arg_names
    assert names is None or len(names) == len(program.in_avals)
    with jax.enable_checks(True):  # JAX counts the names
        args = [constant, x][-len(program.in_avals) :]  # JAX 0.11 leaves them where they are
        assert_trees_close(jaxpr_as_fun(program)(*args), [constant * x])


class TestOpaque:
    program = jax.make_jaxpr(lambda x: opaque(lambda x: jnp.sin(x) * x, 2 * x))(x)

    def test_is_computed_as_it_is(self):
        assert_trees_close(evaluate(self.program, [x]), [jnp.sin(2 * x) * 2 * x])
        assert_trees_close(cos_for_sin(self.program, [x]), [jnp.sin(2 * x) * 2 * x])

    def test_is_seen_by_the_walk_and_not_entered(self):
        assert holds(self.program, "sin")
        eqn = self.program.eqns[-1]
        assert structure(eqn) is None
        assert len(inner_programs(eqn)) == 1
        with pytest.raises(NotImplementedError, match=r"`test_opaque` can't be entered"):
            enter(eqn, [x], cos_for_sin)

    def test_nothing_is_known_of_its_derivative(self):
        assert output_statuses(self.program) == [UNKNOWN]
        assert linear_in(self.program, [False]) == [CONSTANT]

    @pytest.mark.parametrize("name", ["jit", "scan", "while", "cond"])
    def test_a_primitive_whose_parameters_have_other_names(self, name):
        eqn = next(e for e in trace(name).eqns if structure(e) is not None)
        renamed = {f"new_{key}": value for key, value in eqn.params.items()}
        eqn = eqn.replace(params=renamed)
        assert structure(eqn) is None
        assert len(inner_programs(eqn)) == len(structure_of(name).programs)

    def test_a_reduction_with_an_operation_of_its_own(self):
        """Its parameter `jaxpr` is not a program of its operands."""
        multiply = lambda a, b: a * b * jnp.cos(a - a)
        one = np.ones((), x.dtype)[()]
        program = jax.make_jaxpr(lambda x: jax.lax.reduce(x, one, multiply, (0,)))(x)
        assert output_statuses(program) == [UNKNOWN]


def structure_of(name: str) -> Any:
    return next(s for s in map(structure, trace(name).eqns) if s is not None)


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


class TestDependence:
    program = jax.make_jaxpr(lambda x, y: (jnp.sin(x) * y, y + 1.0, x * 3.0))(1.0, 2.0)

    def test_depends(self):
        outputs = self.program.jaxpr.outvars
        of_x, of_y = (depends(self.program, flags) for flags in ([True, False], [False, True]))
        assert [v in of_x for v in outputs] == [True, False, True]
        assert [v in of_y for v in outputs] == [True, True, False]
        assert not depends(self.program, [False, False])

    def test_needed_and_free(self):
        jaxpr = self.program.jaxpr
        names = lambda eqns: [eqn.primitive.name for eqn in eqns]
        eqns, used = needed(jaxpr.eqns, jaxpr.outvars[:1])
        assert names(eqns) == ["sin", "mul"]
        assert free_variables(eqns, jaxpr.outvars[:1]) == jaxpr.invars
        assert used == {*jaxpr.invars, eqns[0].outvars[0], jaxpr.outvars[0]}
        eqns, _ = needed(jaxpr.eqns, jaxpr.outvars[:1], given={eqns[0].outvars[0]})
        assert names(eqns) == ["mul"]
        assert free_variables([], jaxpr.outvars) == jaxpr.outvars
