"""The parameters of neurons, the states of cells, and the checks of both."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._errors import check_flags, rule_error, type_of
from ..._rules.float_args import as_dtype
from ..._rules.replace_gradient import replace_gradient
from ..._tangent_spaces import broadcasts_to, holds_numbers, is_arraylike
from ...surrogates import AbstractSurrogate, atan
from .._argument_checks import is_size
from .._dtypes import default_dtype


Parameter: TypeAlias = (
    float | int | np.floating | np.ndarray | Array | list[Any] | tuple[Any, ...]
)
Surrogate: TypeAlias = AbstractSurrogate | Callable[[Array], Any]
Reset: TypeAlias = Literal["subtract", "zero", "none"]
RESETS = ("subtract", "zero", "none")


class LIFState(eqx.Module):
    """The state of an [`eqx_grads.nn.LIFCell`][].

    - `spikes`: zeros and ones, the output of the cell.
    - `membrane`: the potential that was compared with the threshold, before the reset.
    """

    spikes: Float[Array, "*hidden"]
    membrane: Float[Array, "*hidden"]


class ALIFState(eqx.Module):
    """The state of an [`eqx_grads.nn.ALIFCell`][].

    - `spikes`, `membrane`: as in [`eqx_grads.nn.LIFState`][].
    - `adaptation`: the trace of the spikes that raises the threshold.
    """

    spikes: Float[Array, "*hidden"]
    membrane: Float[Array, "*hidden"]
    adaptation: Float[Array, "*hidden"]


class CuBaLIFState(eqx.Module):
    """The state of an [`eqx_grads.nn.CuBaLIFCell`][].

    - `spikes`, `membrane`: as in [`eqx_grads.nn.LIFState`][].
    - `current`: the synaptic current.
    """

    spikes: Float[Array, "*hidden"]
    current: Float[Array, "*hidden"]
    membrane: Float[Array, "*hidden"]


class LIState(eqx.Module):
    """The state of an [`eqx_grads.nn.LICell`][].

    - `membrane`: the potential.
    """

    membrane: Float[Array, "*hidden"]


# ---------------------------------------------------------------- parameters


class NeuronParameter(eqx.Module):
    """One value for all neurons or one for each of them, and whether it is learned.

    A value that is learned is an array. A number that is not learned stays a Python number,
    which is part of the program and no array of the cell. An array that is not learned is
    an array of the cell whose gradient is zero.
    """

    value: Parameter
    learned: bool = eqx.field(static=True)
    is_decay: bool = eqx.field(static=True)

    def __init__(
        self,
        cell: str,
        name: str,
        value: Any,
        shape: tuple[int, ...],
        dtype: Any,
        *,
        learned: bool = False,
        is_decay: bool = False,
    ):
        check_flags(cell, **{f"learn_{name}": learned})
        value = _numbers(cell, name, value)
        if is_decay:
            _check_decay(cell, name, value)
        _check_parameter(cell, name, value, shape)
        self.value = jnp.asarray(value, dtype) if learned else value
        self.learned = learned
        self.is_decay = is_decay

    def cast(self, like: Array) -> float | Array:
        """The value in the dtype of an array, and a constant unless it is learned.

        A decay factor is clipped to [0, 1] with a straight-through gradient, so that a learned
        value outside the interval can return.
        """
        value = self.value
        if isinstance(value, float | int | np.number):
            return float(value)
        # The constructor has checked the range of all arrays but JAX's.
        is_clipped = self.is_decay and isinstance(value, jax.Array)
        value = jnp.asarray(value).astype(like.dtype)
        constant = jax.lax.stop_gradient(value)
        if is_clipped:
            constant = jnp.clip(constant, 0.0, 1.0)
        if not self.learned:
            return constant
        return replace_gradient(constant, value) if is_clipped else value


def _numbers(cell, name, value) -> Any:
    """A real number or an array of real numbers. A list becomes an array."""
    numbers = value
    if isinstance(value, list | tuple):
        # Tracers, and lists of several lengths, can't become an array of NumPy.
        with contextlib.suppress(TypeError, ValueError):
            numbers = np.asarray(value)
    if _is_array(numbers) and is_arraylike(numbers):
        kinds = (jnp.floating, jnp.integer)
        real = any(jnp.issubdtype(numbers.dtype, kind) for kind in kinds)
    else:
        real = isinstance(numbers, float | int) and not isinstance(numbers, bool)
    if not real:
        raise rule_error(
            f"`{cell}` was given a `{name}` that is not of real numbers.",
            f"`{name}` is {type_of(value)}",
            do="Give a number, or an array with one for each neuron.",
        )
    return numbers


def _check_decay(cell, name, value):
    if _is_known(value) and not np.all((value >= 0) & (value <= 1)):
        raise rule_error(
            f"`{cell}` was given a `{name}` that is not between zero and one.",
            f"`{name}` is {value!r:.80}",
            do=f"`{name}` is the decay factor per step: `exp(-dt / tau)` for a time constant "
            "`tau`.",
        )


def _check_parameter(cell, name, value, shape):
    if _is_known(value) and np.any(np.isnan(np.asarray(value, np.float64))):
        raise rule_error(
            f"`{cell}` was given a `{name}` that is not a number.",
            f"`{name}` is {value!r:.80}",
            do="Is there a division by zero where it comes from?",
        )
    axes = len(np.shape(value))
    if axes and not (axes == len(shape) and broadcasts_to(np.shape(value), shape)):
        raise rule_error(
            f"`{cell}` was given a `{name}` that does not fit its neurons.",
            f"`{name}` is {type_of(value)}, and there are {shape} neurons",
            do="Give one number, or an array with as many axes as the layer has, which "
            "broadcasts to its shape.",
        )


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_known(value) -> bool:
    """Whether the values are checked when a cell is made. Arrays of JAX may be traced: only
    their shapes and dtypes are checked."""
    return isinstance(value, float | int | np.ndarray | np.generic)


# ---------------------------------------------------------------- other arguments


def shape_of_layer(cell: str, hidden_size: Any) -> tuple[int, ...]:
    shape = hidden_size if isinstance(hidden_size, tuple) else (hidden_size,)
    if not shape or not all(is_size(n) for n in shape):
        raise rule_error(
            f"`{cell}` was given a size that is not a positive integer.",
            f"`hidden_size` is {hidden_size!r:.80}",
            do="Give the number of neurons, or the shape of the layer as a tuple.",
        )
    return shape


def check_number(cell: str, hidden_size: Any) -> None:
    """As `shape_of_layer`, for a layer that has to be a vector."""
    if isinstance(hidden_size, tuple):
        raise rule_error(
            f"`{cell}` was given the shape of a layer.",
            f"`hidden_size` is {hidden_size!r:.80}",
            do="Give the number of neurons: recurrently connected neurons are a vector.",
        )
    shape_of_layer(cell, hidden_size)


def check_reset(cell: str, reset: Any, detach_reset: Any) -> None:
    check_flags(cell, detach_reset=detach_reset)
    if not isinstance(reset, str) or reset not in RESETS:
        raise rule_error(
            f"`{cell}` was given an unknown way to reset.",
            f"`reset` is {reset!r:.60}",
            do='Choose one of "subtract", "zero" and "none".',
        )


def known_surrogate(cell: str, surrogate: Any) -> Surrogate:
    if surrogate is None:
        return atan()
    # A class is callable, too: somebody wrote `atan` for `atan()`.
    known = isinstance(surrogate, AbstractSurrogate) or callable(surrogate)
    if not known or isinstance(surrogate, type):
        raise rule_error(
            f"`{cell}` was given something that is not a surrogate.",
            f"`surrogate` is {surrogate!r:.80}",
            do="Give it one of `eqx_grads.surrogates`, like `eqx_grads.surrogates.atan()`, or "
            "a function `derivative(v)`.",
        )
    return surrogate


def float_dtype(cell: str, dtype: Any) -> Any:
    known = as_dtype(default_dtype(dtype))
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise rule_error(
            f"`{cell}` was given a dtype that is not one of real floats.",
            f"`dtype` is {dtype!r:.80}",
            do="Choose one like `jnp.float32`: neurons need potentials between zero and one.",
        )
    return known


# ---------------------------------------------------------------- one step


def check_inputs(cell: str, hidden_size: Any, x: Any, state: Any, expected: type) -> None:
    if not isinstance(state, expected):
        raise rule_error(
            f"`{cell}` was given something that is not its state.",
            f"`state` is {state!r:.80}",
            do="Pass `cell.initial_state()`, or what the cell returned for the step before.",
        )
    shape = hidden_size if isinstance(hidden_size, tuple) else (hidden_size,)
    arrays = {"x": x}
    for field in dataclasses.fields(expected):
        arrays[f"state.{field.name}"] = getattr(state, field.name)
    for argument, array in arrays.items():
        if not (_is_array(array) and holds_numbers(array)):
            raise rule_error(
                f"`{cell}` was given something that is not an array.",
                f"`{argument}` is {type_of(array)}",
                do="Use `jnp.asarray`.",
            )
        if jnp.shape(array) != shape:
            raise rule_error(
                f"`{cell}` was given something of another shape than its neurons have.",
                f"`{argument}` is {type_of(array)}, and the shape of the neurons is {shape}",
                do="A cell takes one step of one example: use `jax.vmap` for a batch, and a "
                "scan for time.",
            )
        # An input may also be of integers: a count of spikes.
        kinds = (jnp.floating, jnp.integer, jnp.bool_) if argument == "x" else (jnp.floating,)
        if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            raise rule_error(
                f"`{cell}` was given something that is not of real numbers.",
                f"`{argument}` is {type_of(array)}",
                do="A state has to be of floats, and an input of real numbers.",
            )
