"""Calibration: run a model on a batch, gather the inputs of its layers, fit quantizers to them.

A layer is called inside `vmap`, `scan` or `jit`, so its inputs are gathered by a callback:
one for all examples and tokens that a `vmap` runs at once.
"""

import functools as ft
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ..._errors import rule_error
from ..._rules.custom_jvp import custom_jvp
from .quantizers import AbstractQuantizer


class Uncalibrated(NamedTuple):
    """A layer of a model, and the quantizer of its inputs, which has no scale yet."""

    layer: Any
    path: str
    quantizer: AbstractQuantizer


def fit_to_inputs(
    model: PyTree,
    layers: Mapping[int, Uncalibrated],
    batch: PyTree,
    call: Callable[[Any, Any], Any] | None,
) -> dict[int, Any]:
    """Fitted quantizers, by the `id` of their layers. An ensemble of layers gets a quantizer
    for each member, stacked as its weights are."""
    gathered = _Gathered()
    is_pending = lambda node: id(node) in layers
    recording = jax.tree.map(
        lambda node: _recorder(node, gathered) if is_pending(node) else node,
        model,
        is_leaf=is_pending,
    )
    run = _call_over_batch if call is None else call
    try:
        outputs = run(eqx.nn.inference_mode(recording), batch)
    except TypeError as error:
        if call is None:
            error.add_note(
                "`quantize_model` calls the model with one example of `calibrate` after "
                "another. Of a model that takes more, such as a state, say how: "
                "`call=lambda model, batch: ...`."
            )
        raise
    jax.block_until_ready(list(filter(eqx.is_array, jax.tree.leaves(outputs))))
    jax.effects_barrier()
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(outputs))
    if is_traced and not gathered.inputs:
        raise rule_error(
            "`quantize_model` can't calibrate while JAX traces it: no inputs have values yet.",
            "it is inside of `jax.jit`, `equinox.filter_eval_shape` or the like",
            do="Calibrate outside of it. To make the model that a file is read into, leave "
            "`calibrate` out and give the input quantizer `scale=1.0`: the file has the scale.",
        )
    fitted = {key: _fit_members(key, layer, gathered.inputs) for key, layer in layers.items()}
    _warn_of_negative(layers, gathered.inputs)
    return fitted


@eqx.filter_jit
def _call_over_batch(model, batch):
    # One example after another, which needs the memory of one.
    _, outputs = jax.lax.scan(lambda carry, x: (carry, model(x)), None, batch)
    return outputs


class _Gathered:
    """The inputs of each layer and each member of it, on the host: a list of stacks of them."""

    def __init__(self):
        self.inputs: dict[tuple[int, int], list[np.ndarray]] = {}

    def add(self, key: int, rank: int, members: Any, xs: Any) -> None:
        """Inputs of `rank` axes, behind the axes of `vmap`, which the members have too."""
        members, xs = np.ravel(members), np.asarray(xs)
        xs = xs.reshape(-1, *xs.shape[xs.ndim - rank :])
        for member in np.unique(members):
            chunks = self.inputs.setdefault((key, int(member)), [])
            chunks.append(xs[members == member])


@custom_jvp
def _gather(member, x, *, gathered, key, rank):
    jax.debug.callback(ft.partial(gathered.add, key, rank), member, x)


@_gather.def_jvp
def _gather_jvp(primals, tangents, *, gathered, key, rank):
    del tangents
    return _gather(*primals, gathered=gathered, key=key, rank=rank), None


@_gather.def_vmap
def _gather_vmap(axis_size, batched, *args, gathered, key, rank):
    # JAX would call back once for each example, and the program would grow with their number.
    stacked = [
        x if is_batched else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
        for x, is_batched in zip(args, batched, strict=True)
    ]
    return _gather(*stacked, gathered=gathered, key=key, rank=rank), None


class _Recorder(eqx.Module):
    """A layer that gives its inputs to a callback. Otherwise it behaves as the layer does."""

    _eqg_layer: Any
    _eqg_member: Array  # sliced by a `vmap` or a `scan` over members, as the weights are
    _eqg_key: int = eqx.field(static=True)
    _eqg_gathered: _Gathered = eqx.field(static=True)

    def __call__(self, x, **kwargs):
        options = {"gathered": self._eqg_gathered, "key": self._eqg_key}
        _gather(self._eqg_member, x, rank=jnp.ndim(x), **options)
        return self._eqg_layer(x, **kwargs)

    def __getattr__(self, name):
        if name.startswith("_eqg_"):
            raise AttributeError(name)
        return getattr(self._eqg_layer, name)


def _recorder(layer, gathered):
    shape = members_of(layer)
    members = jnp.arange(math.prod(shape)).reshape(shape)
    return _Recorder(layer, members, id(layer), gathered)


def members_of(layer: Any) -> tuple[int, ...]:
    """The axes of an ensemble, in front of those of a weight."""
    kernel = getattr(getattr(layer, "layer", layer), "num_spatial_dims", 0)
    return layer.weight.shape[: layer.weight.ndim - 2 - kernel]


def _fit_members(key, uncalibrated, inputs):
    layer, path, quantizer = uncalibrated
    shape = members_of(layer)
    fitted = []
    for member in range(math.prod(shape)):
        if (key, member) not in inputs:
            where = f"`{path}`" if path else "the model itself"
            raise rule_error(
                "`quantize_model` has no inputs to calibrate a layer with.",
                f"{where} is not called when the model is run on `calibrate`",
                do="Give its input quantizer a scale, or run the part of the model that calls "
                "it: `call=lambda model, batch: ...`.",
            )
        fitted.append(_fit(quantizer, inputs[key, member]))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *fitted)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), stacked)


def _warn_of_negative(layers, inputs):
    """One warning for all layers whose unsigned quantizer met negative inputs."""
    names = []
    for key, (layer, path, quantizer) in layers.items():
        members = range(math.prod(members_of(layer)))
        stacks = [x for member in members for x in inputs[key, member]]
        share = sum(np.sum(x < 0) for x in stacks) / max(1, sum(x.size for x in stacks))
        if share > 0.01 and not getattr(quantizer, "signed", True):
            names.append(f"{f'`{path}`' if path else 'the model itself'} ({share:.0%})")
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        warnings.warn(
            "Negative inputs of layers whose input quantizer is unsigned become zero, in "
            f"{', '.join(names[:_MOST_NAMES])}{more}. Give these layers a signed quantizer, by "
            "a rule of their own.",
            stacklevel=4,
        )


_MOST_NAMES = 20


def _fit(quantizer, stacks):
    """The quantizer with a scale for these inputs, in the layout of one of them."""
    axis = getattr(quantizer, "channel_axis", None)
    if axis is None:
        return quantizer.fit(jnp.asarray(np.concatenate([x.ravel() for x in stacks])))
    stacked = np.concatenate(stacks)
    ndim = stacked.ndim - 1
    if ndim == 1:
        fitted = quantizer.fit(jnp.asarray(stacked if axis < 0 else stacked.T))
        return eqx.tree_at(lambda q: q.scale, fitted, fitted.scale.reshape(-1))
    # The examples become part of an axis that shares a scale.
    other = 1 if ndim > 0 and axis % ndim == 0 else 0
    merged = np.moveaxis(stacked, 0, other)
    shape = list(stacked.shape[1:])
    shape[other : other + 1] = [-1]
    return quantizer.fit(jnp.asarray(merged.reshape(shape)))
