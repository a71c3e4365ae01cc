"""What all spiking cells share: their states, their parameters and the reset."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._errors import rule_error, type_of
from .._gradient_ops_one_way import clip_preserve_gradient
from ..surrogates import AbstractSurrogate, atan


Parameter: TypeAlias = float | int | np.floating | np.ndarray | Array
Surrogate: TypeAlias = AbstractSurrogate | Callable[[Array], Any]
Reset: TypeAlias = Literal["subtract", "zero", "none"]
RESETS = ("subtract", "zero", "none")


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


def shape_of_layer(cell: str, hidden_size: int | tuple[int, ...]) -> tuple[int, ...]:
    shape = hidden_size if isinstance(hidden_size, tuple) else (hidden_size,)
    if not shape or any(n < 1 for n in shape):
        raise rule_error(
            f"`{cell}` was given a size that is not positive.",
            f"`hidden_size` is {hidden_size}",
            do="Give the number of neurons, or the shape of the layer.",
        )
    return shape


def parameter(
    cell: str, name: str, value: Any, shape: tuple[int, ...], learn: bool, dtype: Any
) -> Any:
    """One value for all neurons or one for each; an array where it is learned."""
    if np.shape(value) != () and not _broadcasts(np.shape(value), shape):
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
    known = isinstance(value, float | int | np.ndarray | np.generic)
    if known and not np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)):
        raise rule_error(
            f"`{cell}` was given a `{name}` that is not between zero and one.",
            f"`{name}` is {value!r:.80}",
            do=f"`{name}` is the part that is left after a step: `exp(-dt / tau)` for a time "
            "constant `tau`.",
        )
    return parameter(cell, name, value, shape, learn, dtype)


def _broadcasts(shape, to) -> bool:
    return len(shape) == len(to) and all(n in (1, m) for n, m in zip(shape, to, strict=True))


def check_reset(cell: str, reset: Any) -> None:
    if reset not in RESETS:
        raise rule_error(
            f"`{cell}` does not know this way to reset.",
            f"`reset` is {reset!r}",
            do='Choose one of "subtract", "zero" and "none".',
        )


def known_surrogate(surrogate: Surrogate | None) -> Surrogate:
    return atan() if surrogate is None else surrogate


def float_dtype(dtype: Any) -> Any:
    return jnp.zeros(()).dtype if dtype is None else jnp.dtype(dtype)


# ---------------------------------------------------------------- one step


def check_inputs(
    cell: str, hidden_size: int | tuple[int, ...], x: Array, state: Any, expected: type
) -> None:
    if not isinstance(state, expected):
        raise rule_error(
            f"`{cell}` was given something that is not its state.",
            f"`state` is {state!r:.80}",
            do="Pass `cell.initial_state()`, or what the cell returned for the step before.",
        )
    shape = hidden_size if isinstance(hidden_size, tuple) else (hidden_size,)
    for argument, array in (("x", x), ("state.membrane", state.membrane)):
        if jnp.shape(array) != shape:
            raise rule_error(
                f"`{cell}` was given something of another shape than its neurons have.",
                f"`{argument}` is {type_of(array)}, and the shape of the neurons is {shape}",
                do="A cell takes one step of one example: use `jax.vmap` for a batch, and a "
                "scan for time.",
            )


def value_of(value: Any, learn: bool, like: Array) -> Any:
    """A parameter that is learned, or a constant."""
    if isinstance(value, float | int | np.number):
        return float(value)  # which is part of the program, not of what a scan keeps
    value = jnp.asarray(value).astype(like.dtype)
    return value if learn else jax.lax.stop_gradient(value)


def decay_of(value: Any, learn: bool, like: Array) -> Any:
    """Likewise, kept between zero and one; the gradient passes, so that what is learned and
    has left comes back."""
    is_array = isinstance(value, jax.Array)  # of anything else, the constructor has seen it
    value = value_of(value, learn, like)
    return clip_preserve_gradient(value, 0.0, 1.0) if is_array else value


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
