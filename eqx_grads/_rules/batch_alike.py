"""One JAX primitive: the identity on the outputs of a call, batched whenever an input is.

`vmap` of a staged `jax.custom_jvp` fixes which outputs are batched when it batches the
function, and finds shapes that do not fit when a tangent turns out to be batched and its
output is not. A reverse rule gives all tangents at once, so all of them are batched as soon
as one is; with this, so are the outputs. It leaves nothing behind in the compiled program.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._tangent_spaces import is_differentiable


def batch_alike(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """`outputs`, each that can have a tangent being batched if any of `inputs` is."""
    # One equation each, so that JAX can drop those that nobody needs.
    return [alike_p.bind(x, *inputs) if is_differentiable(x) else x for x in outputs]


alike_p = Primitive("eqg_batch_alike")


def _impl(output, *_):
    return output


def _jvp(primals, tangents):
    return alike_p.bind(primals[0]), tangents[0]


def _transpose(ct, _, *inputs):
    return [ct, *(None for _ in inputs)]


def _batch(axis_data, operands, dims):
    if all(dim is None for dim in dims):
        return operands[0], None
    moved = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands, dims, strict=True)
    ]
    if dims[0] is None:
        moved[0] = jnp.broadcast_to(moved[0], (axis_data.size, *moved[0].shape))
    # Bound again, for the `vmap` around this one.
    return alike_p.bind(*moved), 0


alike_p.def_impl(_impl)
alike_p.def_abstract_eval(lambda output, *_: output)
ad.primitive_jvps[alike_p] = _jvp
ad.primitive_transposes[alike_p] = _transpose
batching.fancy_primitive_batchers[alike_p] = _batch
mlir.register_lowering(alike_p, mlir.lower_fun(_impl, multiple_results=False))
