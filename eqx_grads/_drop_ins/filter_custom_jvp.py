"""`filter_custom_jvp`: a forward rule in Equinox's calling convention."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx

from .._errors import check_function, name_of, place_of, rule_error
from .._rules.call import call_with_rules
from .._rules.convention import EQUINOX
from .._rules.custom_jvp import ForwardRules
from .._rules.rule import Rule
from .._rules.wrapper import AbstractWrapper, P, set_metadata, T, unwrap_method


class filter_custom_jvp(AbstractWrapper[P, T]):
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

    Unlike Equinox's, the function may return anything, be a method, and close over traced
    values, and so may its rule. See [Equinox](../coming-from/equinox.md#change-one-import).

    **Derivative:**

    The forward rule is yours (see `def_jvp`), and the reverse rule is its transpose. Both
    modes and all orders. The library does not check that the rule is linear in its tangents. If
    it is not, forward mode returns the result of the rule, and JAX raises in reverse mode.
    """

    fn: Callable[..., Any]
    _rules: ForwardRules = eqx.field(static=True)
    _binding: str = eqx.field(static=True)
    _has_rules: ClassVar[bool] = True

    def __init__(self, fn: Callable[P, T] | staticmethod | classmethod):
        self.fn, self._binding = unwrap_method(fn)
        self._rules = ForwardRules(EQUINOX)
        set_metadata(self, self.fn)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return call_with_rules(self.fn, self._rules, args, kwargs)

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

    def defjvps(self, *rules: Any, **options: Any) -> Any:
        """An error, as in Equinox."""
        del rules, options
        raise rule_error(
            f"`{name_of(self)}.defjvps` was called, which `filter_custom_jvp` does not have.",
            place_of(self.fn),
            do="Use `def_jvp`, or `eqx_grads.elementwise` for one line per argument.",
        )
