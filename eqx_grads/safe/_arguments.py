"""Arguments of all functions of this room: arrays, axes, masks and options, checked and
converted in one place."""

import functools as ft
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TYPE_CHECKING, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._errors import check_flags, rule_error, type_of
from .._rules.float_args import as_axes, as_axis, is_number, widen
from .._tangent_spaces import broadcasts_to, dtype_of_array, promote


if TYPE_CHECKING:
    # In the body of a function they are what `on_arrays` makes of them.
    Numbers: TypeAlias = Any
    Axis: TypeAlias = Any
else:
    Numbers = ArrayLike
    Axis = int | Sequence[int] | None
P = ParamSpec("P")
T = TypeVar("T")


def on_arrays(
    *names: str, real: bool = False, broadcast: bool = True
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function of the arrays `names`. All other parameters are options.

    The function is compiled. Its arrays have one inexact dtype, which is single precision for
    half, and one shape if they are `broadcast`. An `axis` is a tuple of numbers from zero up,
    and `where` has the shape of the first array. The result is rounded once, to the dtype of
    the arguments. A function with an option `keepdims` keeps the axes that it reduces, and they
    are squeezed here.
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        body: Callable[..., Any] = fn
        signature = inspect.signature(fn)
        name = f"safe.{fn.__name__.lstrip('_')}"
        options = [p for p in signature.parameters if p not in (*names, "where")]

        @ft.partial(jax.jit, static_argnames=options)
        @ft.wraps(fn)
        def compiled(**given: Any) -> Any:
            dtype = given[names[0]].dtype
            wide = {n: widen(given[n]) for n in names if given[n] is not None}
            out: Any = body(**given | wide)
            if not given.get("keepdims", True):
                out = jax.tree.map(lambda y: jnp.squeeze(y, given["axis"]), out)
            # A real result of complex numbers is of the real dtype of theirs.
            of = lambda y: dtype if jnp.iscomplexobj(y) else jnp.finfo(dtype).dtype
            return jax.tree.map(lambda y: y.astype(of(y)), out)

        @ft.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:  # which does not name the function
                raise TypeError(f"`{name}` {error}") from None
            bound.apply_defaults()
            given = bound.arguments
            has_default = lambda n: given[n] is signature.parameters[n].default
            xs = {n: given[n] for n in names if not has_default(n)}
            given |= _as_arrays(name, xs, real, broadcast)
            x = given[names[0]]
            for option in options:
                parameter = signature.parameters[option]
                given[option] = _as_option(name, parameter, given[option], x, names[0])
            if given.get("where") is not None:
                given["where"] = _as_mask(name, given["where"], x)
            return compiled(**given)

        return checked

    return decorate


def _as_arrays(name, xs, real, broadcast) -> dict[str, Array]:
    """The arguments as arrays of one inexact dtype, to which they promote as in NumPy: Python
    numbers take the dtype of the arrays, and integers alone take the default."""
    show = lambda argument: f"`{argument}` is {type_of(xs[argument])}"
    for argument, x in xs.items():
        dtype = dtype_of_array(x)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if dtype is None or not jnp.issubdtype(dtype, np.number) or (real and is_complex):
            what = f"something that is not an array of {'real ' * real}numbers"
            do = "Use the function of `jax.numpy`, or pass the real and the imaginary part."
            do = do if is_complex else "Pass an array of floats, or a number."
            raise rule_error(f"`{name}` was given {what}.", show(argument), do=do)
    # `asarray` and `promote` take longer than the computation of a small array.
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in xs.values()]
    dtype = arrays[0].dtype if len({x.dtype for x in arrays}) == 1 else promote(arrays)
    if not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.zeros(()).dtype
    arrays = [x if x.dtype == dtype else x.astype(dtype) for x in arrays]
    if broadcast and len({x.shape for x in arrays}) > 1:
        try:
            shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
        except ValueError:
            raise rule_error(
                f"The arguments of `{name}` do not broadcast together.",
                ", ".join(map(show, xs)),
                do="Give them shapes that are equal, or one where an axis is shared.",
            ) from None
        arrays = [jnp.broadcast_to(x, shape) for x in arrays]
    return dict(zip(xs, arrays, strict=True))


def _as_mask(name, where, x) -> Array:
    if dtype_of_array(where) != jnp.bool_ or not broadcasts_to(jnp.shape(where), x.shape):
        raise rule_error(
            f"The `where` of `{name}` has to be booleans that broadcast to the array.",
            f"the array is {type_of(x)}, `where` is {type_of(where)}",
            do="Pass `True` for each element to be included.",
        )
    return jnp.broadcast_to(jnp.asarray(where), x.shape)


# For options that are numbers: the smallest and the largest, and what to do.
_LARGEST = float(np.finfo(np.float64).max)
_NUMBERS = {
    "ord": (-math.inf, math.inf, "Give a number, or leave it out for 2."),
    "ddof": (-_LARGEST, _LARGEST, "Give a number of Python: 1 for the unbiased variance."),
    "tolerance": (0, _LARGEST, "Give a finite number, at least zero: `1e-5`, or `None`."),
}


def _as_option(name, parameter, value, x, argument) -> Any:
    option, default = parameter.name, parameter.default
    if isinstance(default, bool):
        check_flags(name, **{option: value})
        return bool(value)
    if option == "axis":
        as_given = as_axis if parameter.annotation is int else as_axes
        return as_given(name, value, x, argument)
    if value is None and default is None:
        return None
    least, largest, do = _NUMBERS[option]
    number = float(value) if is_number(value) else math.nan
    if not least <= number <= largest:
        what = f"The `{option}` of `{name}` is not a number that it accepts."
        raise rule_error(what, f"`{option}` is {type_of(value)}", do=do)
    return number
