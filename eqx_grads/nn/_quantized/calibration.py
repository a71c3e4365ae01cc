"""Calibration: run a model on a batch, gather the inputs of its layers, fit quantizers to them.

A layer is called inside `vmap`, `scan` or `jit`, so its inputs are gathered by a callback:
one for all examples and tokens that a `vmap` runs at once.
"""

import collections
import functools as ft
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ..._errors import rule_error
from ..._rules.replace_gradient import replace_gradient
from .quantized import ensemble_shape, Quantized, with_input_quantizer
from .quantizer import AbstractQuantizer
from .report import place_of


def fit_to_inputs(
    model: PyTree,
    layers: Mapping[Any, tuple[Any, str, AbstractQuantizer]],
    batch: PyTree,
    call: Callable[[Any, Any], Any] | None,
) -> dict[Any, Any]:
    """The fitted quantizers. `layers` are layers with their paths and quantizers. An ensemble
    gets a quantizer for each member, stacked as its weights are."""
    # On the host, by layer and its members: a list of stacks of inputs.
    inputs: dict[tuple[int, int], list[np.ndarray]] = collections.defaultdict(list)
    pending = {id(layer) for layer, *_ in layers.values()}
    is_pending = lambda node: id(node) in pending
    recording = jax.tree.map(
        lambda node: _recording(node, inputs) if is_pending(node) else node,
        model,
        is_leaf=is_pending,
    )
    run = eqx.filter_jit(jax.lax.map) if call is None else call
    outputs = run(eqx.nn.inference_mode(recording), batch)
    jax.block_until_ready(eqx.filter(outputs, eqx.is_array))
    return {key: _fit_members(*layer, inputs) for key, layer in layers.items()}


class _Recorder(eqx.Module):
    """In place of an input quantizer: it gives the inputs to a callback."""

    member: Array  # sliced by a `vmap` or a `scan` over members, as the weights are
    add: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, x):
        # With "broadcast_all", there is one callback for all that a `vmap` runs at once.
        args = jax.lax.stop_gradient((self.member, x))
        add = ft.partial(self.add, jnp.ndim(x))
        same = jax.pure_callback(add, args[1], *args, vmap_method="broadcast_all")
        return replace_gradient(same, x)


def _recording(layer, inputs):
    """A layer that adds its inputs to a list for each of its members."""

    def add(rank, members, given):
        # Behind the axes of `vmap`, which the members have too, inputs have `rank` axes.
        members, given = np.ravel(members), np.asarray(given)
        xs = given.reshape(-1, *given.shape[given.ndim - rank :])
        for member in np.unique(members):
            inputs[id(layer), int(member)].append(xs[members == member])
        return given

    shape = ensemble_shape(layer)
    members = jnp.arange(math.prod(shape)).reshape(shape)
    quantized = layer if isinstance(layer, Quantized) else Quantized(layer)
    return with_input_quantizer(quantized, _Recorder(members, add))


def _fit_members(layer, path, quantizer, inputs):
    shape = ensemble_shape(layer)
    members = [inputs.get((id(layer), member)) for member in range(math.prod(shape))]
    if None in members:
        raise rule_error(
            "`quantize_model` has no inputs to calibrate a layer with.",
            f"{place_of(path)} is not called when the model is run on `calibrate`, or nothing "
            "that is returned depends on it",
            do="Run the part of the model that calls it, `call=lambda model, batch: ...`, "
            "outside of `jax.jit`, where inputs have values. Or give its input quantizer a "
            "scale. `scale=1.0` is enough if you then read the scale from a file.",
        )
    negative = np.mean([np.mean(x < 0) for xs in members for x in xs if x.size] or [0])
    is_signed = getattr(quantizer, "signed", True) or getattr(quantizer, "asymmetric", False)
    if negative > 0.01 and not is_signed:
        warnings.warn(
            f"The input quantizer of {place_of(path)} is unsigned, and {negative:.0%} of its "
            "inputs are negative: they become zero. Give it a signed one, by its own rule.",
            stacklevel=5,
        )
    fitted = [_fit(quantizer, stacks) for stacks in members]
    stack = lambda *leaves: jnp.stack(leaves).reshape(*shape, *jnp.shape(leaves[0]))
    return jax.tree.map(stack, *fitted)


def _fit(quantizer, stacks):
    """The quantizer with a scale for these inputs, in the layout of one of them."""
    axis = getattr(quantizer, "channel_axis", None)
    if getattr(quantizer, "group_size", None) is not None:
        # Its scale would have a group for each of the inputs that it is fitted to.
        raise rule_error(
            "`quantize_model` can't fit an input quantizer with a `group_size`.",
            do="Give it a `channel_axis`, or leave out `learn_scale`: then each call computes "
            "the scales.",
        )
    if axis is None:
        return quantizer.fit(jnp.asarray(np.concatenate([x.ravel() for x in stacks])))
    # The examples are an axis that shares a scale, at the end where it is not counted.
    stacked = np.concatenate(stacks)
    fitted = quantizer.fit(jnp.asarray(stacked if axis < 0 else np.moveaxis(stacked, 0, -1)))
    return jax.tree.map(lambda s: jnp.squeeze(s, 0 if axis < 0 else -1), fitted)
