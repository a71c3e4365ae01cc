"""Find the layers of a model, and run something around each of their calls."""

import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from .._control_flow.visible_steps import AbstractCellLayer
from .._errors import show_path


class _Wrapped(eqx.Module):
    """A layer whose call is `around(layer, index, *args, **kwargs)`. Otherwise it behaves as
    the layer does."""

    _eqg_layer: Any
    _eqg_index: int = eqx.field(static=True)
    _eqg_around: Callable[..., Any] = eqx.field(static=True)

    def __call__(self, *args, **kwargs):
        return self._eqg_around(self._eqg_layer, self._eqg_index, *args, **kwargs)

    @property
    def __class__(self):  # pyright: ignore  `isinstance` sees the layer
        return type(self._eqg_layer)

    def __repr__(self):
        return type(self._eqg_layer).__name__  # JAX asks at each `vmap`: a tree takes time

    def __getattr__(self, name):
        if name.startswith("_eqg_"):
            raise AttributeError(name)
        return getattr(self._eqg_layer, name)


def cells_of(layer: Any) -> list[Any]:
    """The cells of a layer that runs some, and any other layer itself."""
    stages = layer.cells if isinstance(layer, AbstractCellLayer) else ()
    return [cell for stage in stages for cell in stage if is_layer(cell)] or [layer]


def own_cells(model: PyTree) -> list[Any]:
    """The cells of layers that have a backward pass of their own, such as `nn.GRU`."""
    is_own = lambda node: isinstance(node, AbstractCellLayer) and hasattr(node, "keep")
    found = filter(is_own, jax.tree.leaves(model, is_leaf=is_own))
    return [cell for layer in found for cell in cells_of(layer)]


def is_layer(node: Any) -> bool:
    return isinstance(node, eqx.Module) and callable(node)


def has_arrays(node: PyTree) -> bool:
    """Whether a layer has an array as a direct child."""
    is_inner = lambda n: n is not node and is_layer(n)
    return any(map(eqx.is_array, jax.tree.leaves(node, is_leaf=is_inner)))


def group_of(path: str) -> str:
    """The part that the paths of similar layers share: `blocks[*].mlp` of `blocks[3].mlp`."""
    return re.sub(r"\[\d+\]", "[*]", path)


def wrap_layers(
    model: PyTree, selects: Callable[[Any], bool], around: Callable[..., Any]
) -> tuple[list[str], PyTree]:
    """The paths of the selected layers, outer layers first, and the model with them wrapped."""
    paths: list[str] = []

    def wrap(node, path):
        is_inner = lambda n: n is not node and is_layer(n)
        parts, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_inner)
        is_selected = is_layer(node) and selects(node)
        index = len(paths)
        if is_selected:
            paths.append(path.removeprefix(".") or type(node).__name__)
        inner = [
            wrap(part, path + show_path(p)) if is_layer(part) else part for p, part in parts
        ]
        node = jax.tree.unflatten(treedef, inner)
        return _Wrapped(node, index, around) if is_selected else node

    return paths, wrap(model, "")
