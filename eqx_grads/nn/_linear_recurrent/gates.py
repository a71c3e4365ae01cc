"""Code that layers over linear recurrences share: gates, matrix products, the recurrence."""

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ..._control_flow.linear_recurrence import linear_recurrence
from ..._tangent_spaces import promote
from .._dtypes import common_dtype


class LinearGates(eqx.Module):
    """The parameters of gates that are functions of the input, and not of the state."""

    weight: Float[Array, "gates in"]
    bias: Float[Array, " gates"] | None
    input_size: int = eqx.field(static=True)
    hidden_size: int = eqx.field(static=True)

    def __init__(self, input_size, *, hidden_size, n_gates, use_bias, dtype, key):
        limit = input_size**-0.5
        keys = jr.split(key)
        shape = (n_gates * hidden_size, input_size)
        self.weight = jr.uniform(keys[0], shape, dtype, -limit, limit)
        self.bias = jr.uniform(keys[1], shape[:1], dtype, -limit, limit) if use_bias else None
        self.input_size = input_size
        self.hidden_size = hidden_size

    def initial_state(self) -> Array:
        return jnp.zeros(self.hidden_size, self.weight.dtype)


def gate_inputs(cell: LinearGates, xs: Array) -> list[Array]:
    """The arguments of each gate for all steps, in single precision at least."""
    xs, weight, bias = common_dtype(xs, cell.weight, cell.bias)
    out = matmul_f32(xs, weight)
    out = out if bias is None else out + bias.astype(out.dtype)[None, None]
    return jnp.split(out, weight.shape[0] // cell.hidden_size, -1)


def run_recurrence(
    a: Array, b: Array, state: Array, valid: Array | None, reverse: bool, method: str
) -> tuple[Array, Array]:
    """All states of the recurrence, and the last one. A step that is not `valid` does not
    change the state."""
    state = state.astype(promote([b, state]))
    if valid is not None:
        a, b = jnp.where(valid[:, :, None], a, 1), jnp.where(valid[:, :, None], b, 0)
    hs = linear_recurrence(a, b, state, reverse=reverse, method=method)
    if hs.shape[0] == 0:
        return hs, state
    return hs, hs[0 if reverse else -1]


def matmul_f32(x: Array, weight: Array) -> Array:
    """`x @ weight.T` for all steps, summed in single precision at least."""
    return jnp.matmul(x, weight.T, preferred_element_type=promote([x, jnp.float32]))
