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

from ._spaces import is_differentiable


def batch_alike(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """`outputs`, each that can have a tangent being batched if any of `inputs` is."""
    places = [i for i, x in enumerate(outputs) if is_differentiable(x)]
    alike = list(outputs)
    if places:
        bound = alike_p.bind(*(outputs[i] for i in places), *inputs, n=len(places))
        for i, x in zip(places, bound, strict=True):
            alike[i] = x
    return alike


alike_p = Primitive("eqg_batch_alike")
alike_p.multiple_results = True


def _impl(*operands, n):
    return list(operands[:n])


def _jvp(primals, tangents, *, n):
    return alike_p.bind(*primals, n=n), list(tangents[:n])


def _transpose(cts, *operands, n):
    through = [None if type(ct) is ad.Zero else ct for ct in cts]
    return through + [None] * (len(operands) - n)


def _batch(axis_data, operands, dims, *, n):
    if all(dim is None for dim in dims):
        return list(operands[:n]), [None] * n
    out = [
        jnp.broadcast_to(x, (axis_data.size, *x.shape))
        if dim is None
        else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands[:n], dims[:n], strict=True)
    ]
    # Bound again, with the inputs as they are, for the `vmap` around this one.
    inputs = [
        x if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(operands[n:], dims[n:], strict=True)
    ]
    return alike_p.bind(*out, *inputs, n=n), [0] * n


alike_p.def_impl(_impl)
alike_p.def_abstract_eval(lambda *avals, n: list(avals[:n]))
ad.primitive_jvps[alike_p] = _jvp
ad.primitive_transposes[alike_p] = _transpose
batching.fancy_primitive_batchers[alike_p] = _batch
mlir.register_lowering(alike_p, mlir.lower_fun(_impl, multiple_results=True))
