"""What all spiking cells share: their states, their parameters and the reset."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._errors import rule_error, type_of
from ..._gradient_ops.value_or_gradient_only import on_forward
from ..._tangent_spaces import broadcasts_to
from ...surrogates import AbstractSurrogate, atan


Parameter: TypeAlias = (
    float | int | np.floating | np.ndarray | Array | list[Any] | tuple[Any, ...]
)
Surrogate: TypeAlias = AbstractSurrogate | Callable[[Array], Any]
Reset: TypeAlias = Literal["subtract", "zero", "none"]
RESETS = ("subtract", "zero", "none")
State = TypeVar("State")


class LIFState(eqx.Module):
    """The state of an [`eqx_grads.nn.LIFCell`][]: what it emits, then what it remembers.

    - `spikes`: zeros and ones.
    - `membrane`: the potential that they were compared at, before the reset.
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


def shape_of_layer(cell: str, hidden_size: Any) -> tuple[int, ...]:
    shape = hidden_size if isinstance(hidden_size, tuple) else (hidden_size,)
    if not shape or not all(_is_size(n) for n in shape):
        raise rule_error(
            f"`{cell}` was given a size that is not a positive integer.",
            f"`hidden_size` is {hidden_size!r:.80}",
            do="Give the number of neurons, or the shape of the layer: a tuple of such.",
        )
    return shape


def check_number(cell: str, hidden_size: Any) -> None:
    """As `shape_of_layer`, of a layer that is a vector."""
    if isinstance(hidden_size, tuple):
        raise rule_error(
            f"`{cell}` was given the shape of a layer.",
            f"`hidden_size` is {hidden_size!r:.80}",
            do="Give the number of neurons: those that listen to one another are a vector.",
        )
    shape_of_layer(cell, hidden_size)


def _is_size(n) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and bool(n >= 1)


def parameter(
    cell: str, name: str, value: Any, shape: tuple[int, ...], learn: bool, dtype: Any
) -> Any:
    """One value for all neurons or one for each; an array where it is learned."""
    value = _numbers(cell, name, value)
    if _can_be_seen(value) and np.any(np.isnan(value)):
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
    return jnp.asarray(value, dtype) if learn else value


def decay(
    cell: str, name: str, value: Any, shape: tuple[int, ...], learn: bool, dtype: Any
) -> Any:
    """As `parameter`, from zero to one."""
    value = _numbers(cell, name, value)
    if _can_be_seen(value) and not np.all((value >= 0) & (value <= 1)):
        raise rule_error(
            f"`{cell}` was given a `{name}` that is not between zero and one.",
            f"`{name}` is {value!r:.80}",
            do=f"`{name}` is the part that is left after a step: `exp(-dt / tau)` for a time "
            "constant `tau`.",
        )
    return parameter(cell, name, value, shape, learn, dtype)


def _numbers(cell, name, value) -> Any:
    """A real number, or an array of such; a list becomes an array."""
    numbers = value
    if isinstance(value, list | tuple):
        # Tracers, and lists of several lengths, stay what they are.
        with contextlib.suppress(TypeError, ValueError):
            numbers = np.asarray(value)
    if _is_array(numbers):
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


def _is_array(x) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _can_be_seen(value) -> bool:
    """Whether a parameter is looked at when a cell is made. Of arrays of JAX, only the shape
    and the dtype are: they may be traced."""
    return isinstance(value, float | int | np.ndarray | np.generic)


def check_reset(cell: str, reset: Any) -> None:
    if reset not in RESETS:
        raise rule_error(
            f"`{cell}` does not know this way to reset.",
            f"`reset` is {reset!r}",
            do='Choose one of "subtract", "zero" and "none".',
        )


def known_surrogate(cell: str, surrogate: Any) -> Surrogate:
    if surrogate is None:
        return atan()
    # A class is callable, too: it is `atan` in place of `atan()`.
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
    if dtype is None:
        return jnp.zeros(()).dtype
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
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
        if not _is_array(array):
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


def like_last(new: State, last: State) -> State:
    """A state in the dtypes of the last one, as a scan needs it."""
    return jax.tree.map(lambda n, s: n.astype(s.dtype), new, last)


def value_of(value: Any, learn: bool, like: Array) -> Any:
    """A parameter that is learned, or a constant."""
    if isinstance(value, float | int | np.number):
        return float(value)  # which is part of the program, not of what a scan keeps
    value = jnp.asarray(value).astype(like.dtype)
    return value if learn else jax.lax.stop_gradient(value)


def decay_of(value: Any, learn: bool, like: Array) -> Any:
    """As `value_of`, clipped to [0, 1] with a straight-through gradient, so that a learned
    value outside of the interval can return."""
    is_array = isinstance(value, jax.Array)  # of anything else, the constructor has seen it
    value = value_of(value, learn, like)
    return on_forward(value, _clip_to_unit) if is_array else value


def _clip_to_unit(x):
    return jnp.clip(x, 0.0, 1.0)


def next_membrane(cell: Any, current: Array, spikes: Array, membrane: Array) -> Array:
    """Leak, add what comes in, and take off the last spike."""
    beta = decay_of(cell.beta, cell.learn_beta, membrane)
    if cell.reset == "none":
        return beta * membrane + current
    last = jax.lax.stop_gradient(spikes) if cell.detach_reset else spikes
    if cell.reset == "zero":
        return beta * (membrane * (1 - last)) + current
    threshold = value_of(cell.threshold, cell.learn_threshold, membrane)
    return beta * membrane + current - last * threshold
