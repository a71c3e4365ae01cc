"""What `check_rule` says of a rule that raised, and of a solver that stops at a tolerance."""

import equinox as eqx
import eqx_grads as eqg
import eqx_grads.testing as eqgt
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array


class _Repeated(eqx.Module):
    weight: Array
    count: Array

    @eqg.custom_jvp
    def __call__(self, x):
        return self.weight * x * self.count

    @__call__.def_jvp
    def _call_jvp(primals, tangents):
        (self, x), (t_self, t_x) = primals, tangents
        t_out = (t_self.weight * x + self.weight * t_x) * self.count
        return self(x), t_out + self.weight * x * t_self.count


def test_a_rule_that_raised():
    module = _Repeated(jnp.array(1.5), jnp.array(3))
    report = eqgt.check_rule(module, jnp.array(2.0), checks=("forward",), raises=False)
    (finding,) = report["forward"]
    assert finding.error is None
    assert finding.raised.startswith("TypeError: unsupported operand")
    (row,) = [line for line in str(report).splitlines() if line.startswith("forward")]
    assert row.split()[1:3] == ["FAILED", "raised"]
    assert row.endswith("the tangents: TypeError")
    assert str(report).count("it raised TypeError: unsupported operand") == 1
    assert "inf of" not in str(report)
    assert "`None` is the tangent or cotangent of a leaf that can't be" in str(report)


def test_the_tangent_of_an_integer_field_is_none():
    module = _Repeated(jnp.array(1.5), jnp.array(3))
    with pytest.raises(TypeError, match="NoneType") as caught:
        jax.jvp(module, (jnp.array(2.0),), (jnp.array(1.0),))
    (note,) = [n for n in caught.value.__notes__ if "_call_jvp" in n]
    assert "(an integer, a key)" in note


def _residual(y, a):
    return y**3 + y - a


def _bisection(a):
    def halve(ends):
        low, high = ends
        middle = (low + high) / 2
        above = _residual(middle, a) > 0
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    is_long = lambda ends: ends[1] - ends[0] > 1e-3
    low, high = jax.lax.while_loop(is_long, halve, (jnp.zeros_like(a), jnp.full_like(a, 10)))
    return (low + high) / 2


def test_a_solver_that_stops_at_a_tolerance():
    root = eqg.implicit(_residual)(_bisection)
    checks = ("forward", "reverse")
    report = eqgt.check_rule(root, jnp.array(2.0), checks=checks, raises=False)
    assert not report.passed
    assert str(report).count("a solver that stops at a tolerance") == 1
    assert "has no influence" not in str(report)


def test_a_function_that_is_constant():
    @eqg.custom_jvp
    def constant(x):
        return jnp.zeros_like(x)

    constant.def_jvp(lambda primals, tangents: (constant(*primals), tangents[0]))
    report = eqgt.check_rule(constant, jnp.array(2.0), checks=("forward",), raises=False)
    assert "it should be zero: `x` has no influence here" in str(report)
