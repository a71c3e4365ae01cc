"""`filter_custom_jvp` and `filter_custom_vjp`: rules in Equinox's calling convention."""

import functools as ft
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._errors import check_function, is_pair, name_of, place_of, rule_error, show_path
from .._rules.custom_jvp import ForwardRules
from .._rules.custom_vjp import ReverseRules
from .._rules.rule import Rule
from .._rules.signature import EQUINOX, Signature
from .._rules.wrapper import AbstractDecorated, decorate, P, T
from .._tangent_spaces import is_numeric_array


class filter_custom_jvp(AbstractDecorated[P, T]):
    """Replace `equinox.filter_custom_jvp`, with the rules of this library: change the import,
    and nothing else.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax.numpy as jnp

        @eqg.filter_custom_jvp
        def call(x, y, *, fn):
            return fn(x, y)

        @call.def_jvp
        def call_jvp(primals, tangents, *, fn):
            x, y = primals
            t_x, t_y = tangents
            assert t_y is None  # `y` is not being differentiated below
            return call(x, y, fn=fn), 2 * t_x

        grad = eqx.filter_grad(call)(jnp.array(2.0), jnp.array(3.0), fn=jnp.add)
        print(grad)
        ```

        ```text
        2.0
        ```

    A new rule is shorter with [`eqx_grads.custom_jvp`][], which also checks it: there the
    tangents are never `None`, and a rule that is not linear is an error.

    **Arguments:**

    - `fn`: a function, a method, or any callable PyTree. An argument that is passed by position
        can be differentiated, if it is a JAX or NumPy array of floats or complex numbers.
        Python numbers are static: the function gets them as they are, under `jit` too.
        Differentiating with respect to a keyword argument is an error.

    Unlike Equinox's, the function may return anything and be a method. The function and its
    rule may close over traced values. See
    [Equinox](../coming-from/equinox.md#change-one-import).

    **Derivative:**

    The forward rule is yours (see `def_jvp`), and the reverse rule is its transpose. Both
    modes and all orders. The library does not check that the rule is linear in its tangents. If
    it is not, forward mode returns the result of the rule, and JAX raises an error in reverse
    mode.
    """

    _rules: ForwardRules = eqx.field(static=True)

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod):
        decorate(self, fn, ForwardRules(EQUINOX))

    def def_jvp(self, fn_jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Give the forward rule. Use it as a decorator.

        **Arguments:**

        - `fn_jvp`: called as `fn_jvp(primals, tangents, **kwargs)`, with the arguments by
            position, their tangents, and the arguments by keyword. The tangent of whatever is
            not being differentiated is `None`. Returns `out, t_out`. Any part of `t_out` that
            is zero may be `None`.

        **Returns:**

        `fn_jvp`.
        """
        check_function(fn_jvp, "fn_jvp", "def_jvp")
        self._rules.set_jvp(Rule(fn_jvp, symbolic_zeros=True, surely_linear=True))
        return fn_jvp

    def defjvp(self, fn_jvp: Callable[..., Any]) -> Callable[..., Any]:
        """As `def_jvp`, but the tangents of all arrays of floats are arrays. Equinox deprecated
        this method in its version 0.10.7 and raises a warning; so does this class."""
        warnings.warn(
            "`filter_custom_jvp.defjvp` is deprecated, as it is in Equinox. Use `def_jvp`, "
            "whose rule gets `None` for the tangent of an array that is not being "
            "differentiated; or `eqx_grads.custom_jvp`, whose rule gets arrays.",
            stacklevel=2,
        )
        self._rules.set_jvp(Rule(fn_jvp, surely_linear=True))
        return fn_jvp


class filter_custom_vjp(AbstractDecorated[P, T]):
    """Replace `equinox.filter_custom_vjp`, with the rules of this library: change the import,
    and nothing else.

    !!! example

        ```python
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        @eqg.filter_custom_vjp
        def clip_gradient(x, limit):
            return x

        @clip_gradient.def_fwd
        def clip_gradient_fwd(perturbed, x, limit):
            return x, None

        @clip_gradient.def_bwd
        def clip_gradient_bwd(residuals, grad_out, perturbed, x, limit):
            return jnp.clip(grad_out, -limit, limit)

        print(jax.grad(lambda x: 10 * clip_gradient(x, 1.0))(2.0))
        print(jax.jvp(lambda x: clip_gradient(x, 1.0), (2.0,), (1.0,))[1])
        ```

        ```text
        1.0
        1.0
        ```

    A new rule is shorter with [`eqx_grads.custom_vjp`][], which differentiates all
    arguments that are passed by position.

    **Arguments:**

    - `fn`: a function, a method, or any callable PyTree, called as
        `fn(vjp_arg, *args, **kwargs)`. The arrays of floats or complex numbers in `vjp_arg`,
        any PyTree, can be differentiated. Differentiating with respect to any other argument
        is an error. Python numbers are static: the function gets them as they are, under `jit`
        too. So does the caller if the function returns them.

    Unlike Equinox's, the function has forward mode too, may be a method, and may close over
    traced values, as its rules may. See [Equinox](../coming-from/equinox.md#change-one-import).

    **Derivative:**

    The reverse rule is yours (see `def_fwd` and `def_bwd`). It need not be linear. Forward
    mode is the derivative of `fn` itself. Higher orders differentiate your rules.
    """

    _rules: ReverseRules = eqx.field(static=True)

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod):
        decorate(self, fn, ReverseRules(_CONVENTION))

    def def_fwd(self, fn_fwd: Callable[..., Any]) -> Callable[..., Any]:
        """Give the rule for the forward pass. Use it as a decorator.

        **Arguments:**

        - `fn_fwd`: called as `fn_fwd(perturbed, vjp_arg, *args, **kwargs)`. `perturbed` is
            like `vjp_arg`, with a Python bool for each leaf: whether it is being
            differentiated. Returns `out, residuals`, where `residuals` is any PyTree.

        **Returns:**

        `fn_fwd`.
        """
        return self._set("fwd", fn_fwd, with_perturbed=True)

    def def_bwd(self, fn_bwd: Callable[..., Any]) -> Callable[..., Any]:
        """Give the rule for the backward pass. Use it as a decorator.

        **Arguments:**

        - `fn_bwd`: called as `fn_bwd(residuals, grad_out, perturbed, vjp_arg, *args,
            **kwargs)`. `grad_out` is like the output, with `None` for each leaf that is not
            an array of floats, or is not used. Returns the cotangent of `vjp_arg`: a
            PyTree like `vjp_arg`, with `None` for any part that is zero.

        **Returns:**

        `fn_bwd`.
        """
        return self._set("bwd", fn_bwd, with_perturbed=True)

    def defvjp(self, fn_fwd: Callable[..., Any], fn_bwd: Callable[..., Any]) -> None:
        """Give both rules, without `perturbed`: `fn_fwd(vjp_arg, *args, **kwargs)` and
        `fn_bwd(residuals, grad_out, vjp_arg, *args, **kwargs)`, where the cotangents of all
        arrays of floats are arrays. Equinox deprecated this method in its version 0.10.7 and
        raises a warning; so does this class."""
        warnings.warn(
            "`filter_custom_vjp.defvjp` is deprecated, as it is in Equinox. Use `def_fwd` and "
            "`def_bwd`, whose rules also get `perturbed`, and `None` for the cotangent of an "
            "output that is not used; or `eqx_grads.custom_vjp`.",
            stacklevel=2,
        )
        self._set("fwd", fn_fwd, with_perturbed=False)
        self._set("bwd", fn_bwd, with_perturbed=False)

    def _set(self, which, fn, with_perturbed):
        check_function(fn, f"fn_{which}", f"def_{which}")
        rule = Rule(fn, conventions=_CONVENTIONS.format("perturbed, " * with_perturbed))
        options = {"name": rule.name, "source": rule.fn}
        if which == "fwd":
            owner = name_of(self.fn), place_of(self.fn), Signature(self.fn).names
            fwd = ft.partial(_fwd, rule, with_perturbed, owner)
            self._rules.fwd_rule = Rule(fwd, **options)
        else:
            bwd = ft.partial(_bwd, rule, with_perturbed)
            self._rules.bwd_rule = Rule(bwd, symbolic_zeros=with_perturbed, **options)
        return fn


def _fwd(rule, with_perturbed, owner, /, *args, perturbed, **kwargs):
    """A user's rule for the forward pass, called as `custom_vjp` calls one."""
    _check_first_only(owner, perturbed)
    first = perturbed[:1] if with_perturbed else ()
    result = rule(*first, *args, **kwargs)
    if not is_pair(result):
        return result  # an error
    out, residuals = result
    return out, (residuals, args, kwargs)


def _bwd(rule, with_perturbed, residuals, ct, *, perturbed):
    """A user's rule for the backward pass, called as `custom_vjp` calls one."""
    residuals, args, kwargs = residuals
    first = perturbed[:1] if with_perturbed else ()
    ct_first = rule(residuals, ct, *first, *args, **kwargs)
    return ct_first, *(None for _ in args[1:])


def _check_first_only(owner, perturbed):
    name, place, names = owner
    others = jax.tree_util.tree_leaves_with_path(perturbed[1:])
    paths = [path for path, is_perturbed in others if is_perturbed]
    if paths:
        raise rule_error(
            f"`{name}` was differentiated with respect to an argument other than its first.",
            *(f"at `{names[path[0].idx + 1]}{show_path(path[1:])}`" for path in paths),
            place,
            do=_WAY_OUT,
        )


_WAY_OUT = (
    "`filter_custom_vjp` gives derivatives with respect to its first argument, which may be a "
    "tuple: put the value into it, or pass `jax.lax.stop_gradient` of the value."
)
_CONVENTION = EQUINOX._replace(
    outputs=is_numeric_array,
    configuration=("an argument that was passed by keyword", _WAY_OUT),
)
_CONVENTIONS = (
    "The rules of `filter_custom_vjp` are called as `fwd({0}vjp_arg, *args, **kwargs)` and "
    "`bwd(residuals, grad_out, {0}vjp_arg, *args, **kwargs)`."
)
