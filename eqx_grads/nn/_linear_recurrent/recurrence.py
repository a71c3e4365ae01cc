"""Code that layers over linear recurrences share: the recurrence, matrix products."""

import jax.numpy as jnp
from jaxtyping import Array

from ..._control_flow.linear_recurrence import linear_recurrence
from ..._tangent_spaces import promote


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
