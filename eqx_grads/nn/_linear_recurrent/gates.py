"""What layers over linear recurrences share: gates, precision, and padding."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ..._control_flow.linear_recurrence import linear_recurrence
from ..._errors import rule_error, type_of
from ..._tangent_spaces import promote
from .._recurrent.layer import check_features, common_dtype


class LinearGates(eqx.Module):
    """The parameters of gates that see the input, and not the state."""

    weight: Float[Array, "gates in"]
    bias: Float[Array, " gates"] | None
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)

    def __init__(self, n_gates, input_size, hidden_size, *, use_bias, dtype, key):
        limit = input_size**-0.5
        dtype = default_dtype(dtype)
        keys = jr.split(key)
        shape = (n_gates * hidden_size, input_size)
        self.weight = jr.uniform(keys[0], shape, dtype, -limit, limit)
        self.bias = jr.uniform(keys[1], shape[:1], dtype, -limit, limit) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size


def gates(cell: LinearGates, xs: Array) -> list[Array]:
    """The arguments of the gates for all steps, in single precision at least."""
    xs, weight, bias = common_dtype(xs, cell.weight, cell.bias)
    out = product(xs, weight)
    out = out if bias is None else out + bias.astype(out.dtype)[None, None]
    return jnp.split(out, weight.shape[0] // cell.hidden_size, -1)


def states(
    a: Array, b: Array, state: Array, valid: Array | None, reverse: bool, method: str
) -> tuple[Array, Array]:
    """All states of the recurrence, and the last one. Where not `valid`, they stay."""
    state = state.astype(promote([b, state]))
    if valid is not None:
        a, b = jnp.where(valid[:, :, None], a, 1), jnp.where(valid[:, :, None], b, 0)
    hs = linear_recurrence(a, b, state, reverse=reverse, method=method)
    if len(hs) == 0:
        return hs, state
    return hs, hs[0 if reverse else -1]


def product(x: Array, weight: Array) -> Array:
    """`x @ weight.T` for all steps, summed in single precision at least."""
    # One product of matrices, as XLA for CPUs is slow at others: without the reshape, twice as
    # slow a gradient for a batch that comes first.
    flat = x.reshape(-1, x.shape[-1])
    out = jnp.matmul(flat, weight.T, preferred_element_type=promote([x, jnp.float32]))
    return out.reshape(*x.shape[:-1], weight.shape[0])


def default_dtype(dtype):
    return jnp.zeros(()).dtype if dtype is None else dtype


def check_real(layer: str, cell, xs: Array, state: Array | None = None) -> None:
    """Inputs of the right size that are real, and for some layers a state that is."""
    check_features(layer, cell, xs)
    for name, x in (("xs", xs), ("state", state)):
        if x is not None and jnp.iscomplexobj(x):
            raise rule_error(
                f"`{layer}` was given complex numbers.",
                f"`{name}` is {type_of(x)}",
                do="Pass real ones. Real and imaginary parts may be features of their own.",
            )
