"""The Module that a decorator returns: metadata, methods, copies, pickles (clause 9)."""

import abc
import dataclasses
import functools as ft
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import equinox as eqx

from .._errors import check_function, name_of, rule_error
from .call import call_with_rules
from .rule import AbstractRules, Rule


P = ParamSpec("P")
T = TypeVar("T")


class AbstractWrapper(eqx.Module, Generic[P, T]):
    """A function that stands in the place of `fn`, which is a PyTree child."""

    fn: eqx.AbstractVar[Callable[..., Any]]
    _binding: eqx.AbstractVar[str]

    @property
    def __wrapped__(self):
        return self.fn

    @abc.abstractmethod
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if self._binding == "static" or (instance is None and self._binding != "class"):
            return self
        if self._binding == "class":
            return _bind(self, owner if instance is None else type(instance))
        return _bind(self, instance)

    def __reduce__(self):
        return reduce_by_name(self, self.fn)

    def __repr__(self):
        # `eqx.filter` and `eqx.partition` put `None` in the place of a function.
        return f"<eqx_grads.{type(self).__name__} of {name_of(self.fn or self)}>"


class AbstractDecorated(AbstractWrapper[P, T]):
    """A function with rules. The function is a PyTree child, the rules are static."""

    fn: Callable[..., Any]
    _rules: eqx.AbstractVar[AbstractRules]
    _binding: str = eqx.field(static=True)
    _has_rules: ClassVar[bool] = True

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return call_with_rules(self.fn, self._rules, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        hint = _HINT if name.startswith("def") else ""
        raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.{hint}")

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the call its own batching rule.

        It is applied to the call itself, before differentiation: `grad(vmap(f))` differentiates
        the batching rule. Without a batching rule, `vmap` batches the derivative rules. For an
        argument that is not batched (a weight), this means one cotangent per example, summed
        afterwards.

        Each output that can have a tangent then has the batch dimension if an argument has it:
        `jax.vmap(..., out_axes=None)` is an error for such an output. A batching rule may
        return the output without the batch dimension.

        !!! example

            ```python
            import eqx_grads as eqg
            import jax
            import jax.numpy as jnp

            @eqg.custom_jvp
            def linear(weight, x):
                return x @ weight.T

            @linear.def_jvp
            def linear_jvp(primals, tangents):
                weight, x = primals
                t_weight, t_x = tangents
                return linear(weight, x), x @ t_weight.T + t_x @ weight.T

            @linear.def_vmap
            def linear_vmap(axis_size, batched, weight, x):
                if batched != (False, True):
                    return NotImplemented
                return linear(weight, x), True  # one product for the whole batch

            weight, xs = jnp.ones((2, 3)), jnp.ones((5, 3))
            print(jax.vmap(linear, in_axes=(None, 0))(weight, xs).shape)
            ```

            ```text
            (5, 2)
            ```

        **Arguments:**

        - `rule`: called as `rule(axis_size, batched, *args, **kwargs)`. `batched` is a tuple
            with one entry for each positional argument: the argument's tree with Python
            bools for leaves (just a bool if it is an array). Batched leaves have the batch
            axis in front. Returns `out, out_batched`; the second is a bool or a tree of bools
            which is a prefix of `out`. Or returns `NotImplemented`: the derivative rules are
            then batched as without `def_vmap`.

        **Returns:**

        `rule`.
        """
        self._rules.vmap_rule = Rule(rule)
        return rule


class _BoundRule(eqx.Module):
    """A method with a rule, bound to an instance. A PyTree: the instance can be
    differentiated."""

    __func__: AbstractWrapper
    __self__: Any

    @property
    def __wrapped__(self):
        return types.MethodType(self.__func__.__wrapped__, self.__self__)

    def __call__(self, /, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    def __repr__(self):
        return f"<bound {self.__func__!r} of {self.__self__!r}>"

    def __get__(self, instance, owner=None):  # like a bound method, bound for good
        return self


def _bind(decorated, instance):
    bound = _BoundRule(decorated, instance)
    set_metadata(bound, decorated.__wrapped__)
    return bound


def reduce_by_name(wrapper: Any, fn: Any) -> Any:
    """What `__reduce__` returns for a wrapper of the function `fn`.

    Like a function: by reference where it has a name to refer to. The function itself can't be
    pickled in any other way, as its name leads to the wrapper.
    """
    try:
        found = _find(fn.__module__, fn.__qualname__) if _is_named(fn) else None
    except (ImportError, AttributeError, ValueError):  # it was made or renamed while running
        found = None
    # In a tree that was rebuilt, a wrapper is another object of the same parts.
    is_rebuilt = type(found) is type(wrapper) and isinstance(found, eqx.Module)
    is_same = found is wrapper or (is_rebuilt and _parts(found) == _parts(wrapper))
    if is_same and not (fn.__module__ == "__main__" and _is_pickled_by_value()):
        by_name = (fn.__module__, fn.__qualname__)
        return fn.__qualname__ if found is wrapper else (_find, by_name)
    # The state comes after the object, as the function may refer to it.
    return _empty, (type(wrapper),), dict(vars(wrapper))


def _find(module: str, qualname: str) -> Any:
    return ft.reduce(getattr, qualname.split("."), importlib.import_module(module))


def _parts(wrapper: Any) -> list[int]:
    """Of its fields: the metadata of the function are not in a wrapper that was rebuilt."""
    return [id(getattr(wrapper, field.name)) for field in dataclasses.fields(wrapper)]


def _empty(cls):
    return object.__new__(cls)


def _is_pickled_by_value() -> bool:
    """Whether the pickler is one that stores the functions of `__main__` themselves.

    What cloudpickle does for functions it can't do for an object that only wraps one: it
    asks the object, and the object has no other way to know who asks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("cloudpickle", "dill"):
            return True
        frame = frame.f_back
    return False


def set_metadata(wrapper: eqx.Module, fn: Callable[..., Any]) -> None:
    """Name, docstring and the rest, as `functools.update_wrapper` would copy them."""
    # Equinox carries these names through `tree_flatten`.
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        value = getattr(fn, name, None)
        if value is not None:
            object.__setattr__(wrapper, name, value)
    if getattr(fn, "__isabstractmethod__", False):
        object.__setattr__(wrapper, "__isabstractmethod__", True)


_HINT = (
    " A `custom_jvp` has `def_jvp`; a `custom_vjp` has `def_fwd`, `def_bwd` and `def_jvp`. "
    "`eqx_grads.jax_custom_jvp` and `eqx_grads.jax_custom_vjp` have JAX's methods, and "
    "`eqx_grads.linear_function` has an adjoint."
)


def check_options(decorator: str, options: dict[str, Any]) -> None:
    """Raise if the user passed an option, such as an option of JAX's decorators."""
    if options:
        raise rule_error(
            f"`{decorator}` was given an option that it does not have.",
            f"it is `{next(iter(options))}`",
            do="Pass values that can't be differentiated (functions, strings, integers, ...) "
            "unchanged; configuration is a keyword-only parameter of the function; "
            "`symbolic_zeros` is an option of `def_jvp` and `def_bwd`. "
            f"`eqx_grads.jax_{decorator}` has JAX's `nondiff_argnums`.",
        )


def decorate(wrapper: Any, fn: Any, rules: AbstractRules) -> None:
    """Make `wrapper` stand in the place of a function."""
    wrapper.fn, wrapper._binding = unwrap_method(fn, "fn", type(wrapper).__name__)
    wrapper._rules = rules
    set_metadata(wrapper, wrapper.fn)


def unwrap_method(fn: Any, argument: str, caller: str) -> tuple[Callable[..., Any], str]:
    """The function, and how it binds as an attribute of a class."""
    if isinstance(fn, staticmethod):
        return fn.__func__, "static"
    if isinstance(fn, classmethod):
        return fn.__func__, "class"
    check_function(fn, argument, caller)
    return fn, "method"


def _is_named(fn) -> bool:
    return isinstance(fn, types.FunctionType) and "<locals>" not in fn.__qualname__
