"""The decorated function as Python sees it: name, docstring, methods, copies, pickles.

This is clause 9 of the contract. It is a thin `eqx.Module` around an `AbstractDefinition`.
"""

import functools as ft
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import equinox as eqx

from .._errors import name_of, rule_error
from .call import AbstractDefinition
from .rule import Rule


P = ParamSpec("P")
T = TypeVar("T")


class AbstractDecorated(eqx.Module, Generic[P, T]):
    """A function with rules of its own."""

    _definition: eqx.AbstractVar[AbstractDefinition]
    _binding: eqx.AbstractVar[str]

    @property
    def __wrapped__(self):
        return self._definition.fn

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._definition.call(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if self._binding == "static" or (instance is None and self._binding != "class"):
            return self
        if self._binding == "class":
            return _bind(self, owner if instance is None else type(instance))
        return _bind(self, instance)

    def __reduce__(self):
        # Like a function: by reference where it has a name to refer to. Its own function
        # can't be pickled in any other way, as its name leads to `self`.
        fn = self._definition.fn
        module = sys.modules.get(fn.__module__) if _is_named(fn) else None
        try:
            found = ft.reduce(getattr, fn.__qualname__.split("."), module)
        except AttributeError:
            found = None
        if found is self:
            return fn.__qualname__
        return _restore, (type(self), vars(self))

    def __repr__(self):
        return f"<eqx_grads.{type(self).__name__} of {name_of(self._definition.fn)}>"

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the call a batching rule of its own.

        It is applied to the call itself, before differentiation: `grad(vmap(f))`
        differentiates what the rule calls. Without one, `vmap` batches the derivative
        rules, which for an argument that is not batched (a weight) means one cotangent per
        example, summed afterwards.

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
            assert jax.vmap(linear, in_axes=(None, 0))(weight, xs).shape == (5, 2)
            ```

        **Arguments:**

        - `rule`: called as `rule(axis_size, batched, *args, **kwargs)`. `batched` is a tuple
            with one entry for each positional argument: the argument's tree with Python
            bools for leaves (just a bool if it is an array). Batched leaves have the batch
            axis in front. Returns `out, out_batched`, the second being a bool or a tree
            of bools which is a prefix of `out`. Or returns `NotImplemented`, and then the
            derivative rules are batched as they are without `def_vmap`.

        **Returns:**

        `rule`.
        """
        self._definition.vmap_rule = Rule(rule)
        return rule


class _BoundRule(eqx.Module):
    """A method with a rule, bound to an instance. A PyTree: the instance can be
    differentiated."""

    __func__: AbstractDecorated
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


def _restore(cls, state):
    decorated = object.__new__(cls)
    vars(decorated).update(state)
    return decorated


def set_metadata(wrapper: eqx.Module, fn: Callable[..., Any]) -> None:
    """Name, docstring and the rest, as `functools.update_wrapper` would copy them."""
    # Equinox carries these names through `tree_flatten`.
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        value = getattr(fn, name, None)
        if value is not None:
            object.__setattr__(wrapper, name, value)


def unwrap_method(fn: Any) -> tuple[Callable[..., Any], str]:
    """The function, and how it binds as an attribute of a class."""
    if isinstance(fn, staticmethod):
        return fn.__func__, "static"
    if isinstance(fn, classmethod):
        return fn.__func__, "class"
    if not callable(fn):
        raise rule_error(
            "A rule was asked for something that can't be called.",
            f"it is a `{type(fn).__qualname__}`",
            do="Decorate a function, a method or a callable Module.",
        )
    return fn, "method"


def _is_named(fn) -> bool:
    return isinstance(fn, types.FunctionType) and "<locals>" not in fn.__qualname__
