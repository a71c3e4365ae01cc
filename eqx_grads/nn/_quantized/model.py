"""`quantize_model`: replace layers selected by patterns."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._errors import rule_error, RuleError, show_path, type_of
from ..._tangent_spaces import is_differentiable
from .calibration import fit_to_inputs, Uncalibrated
from .layers import (
    AbstractQuantizedLayer,
    describe,
    no_input_scale,
    QuantizedConv,
    QuantizedLinear,
    with_input_quantizer,
)
from .quantizers import AbstractQuantizer, FakeQuantize
from .report import array_row, first_of, LayerReport, QuantizationReport


def quantize_model(
    model: PyTree,
    rules: Mapping[Any, Any] | Sequence[tuple[Any, Any]],
    *,
    calibrate: PyTree = None,
    call: Callable[[Any, Any], Any] | None = None,
) -> tuple[PyTree, QuantizationReport]:
    """Replace the layers of a model by quantized ones.

    !!! example

        ```python
        import eqx_grads as eqg
        import equinox as eqx
        import jax

        key1, key2 = jax.random.split(jax.random.key(0))
        model = [eqx.nn.Linear(64, 32, key=key1), eqx.nn.Linear(32, 10, key=key2)]
        model, report = eqg.nn.quantize_model(
            model,
            {
                "[0]": eqg.nn.LSQ(bits=8),
                eqx.nn.Linear: (eqg.nn.LSQ(bits=2), eqg.nn.FakeQuantize(bits=4)),
            },
        )
        print(report)
        ```

        ```text
        swapped: 2
          [0]  Linear -> QuantizedLinear  weights 8 bits signed                        (32, 64)
          [1]  Linear -> QuantizedLinear  weights 2 bits signed  inputs 4 bits signed  (10, 32)
        left: 0
        ```

    Layers are `equinox.nn.Linear` and `equinox.nn.Conv`, in any PyTree: Modules, lists,
    dictionaries, ensembles made by `equinox.filter_vmap`, the stacked layers of an
    `equinox.nn.MLP` that scans. A layer that is one object in several places is one object
    afterwards, if one rule has it everywhere; the report says so.

    **Arguments:**

    - `model`: any PyTree.
    - `rules`: pairs of which layers and how, or a dictionary of such pairs. For each layer,
        the first rule that matches is used.
    - `calibrate`: a batch on which the model is run once, before its layers are replaced and in
        inference mode. The inputs of each layer are gathered, and its input quantizer is fitted
        to them if it has to be (an [`eqx_grads.nn.LSQ`][], or an
        [`eqx_grads.nn.FakeQuantize`][] with `learn_scale`, without a scale). All inputs of the
        batch are kept in memory until then: a few hundred examples are enough.
    - `call`: called as `call(model, calibrate)` to run the model. The default is
        `jax.lax.map(model, calibrate)`, one example after the other, which needs the memory of
        one. `jax.vmap(model)(calibrate)` is faster where that is enough.

    Which layers:

    - a type: all layers of that type, and all layers within a Module of that type.
    - a path, `"encoder.layers[0]"` or `"heads['a']"`: the layer at this path, and all layers
        within the node at this path. It is written as in Python, as `jax.tree_util.keystr`
        writes it and as all reports of this library do. It may have wildcards: `?` for one
        character and `*` for any number of them, as in `"*.query_proj"` or `"layers[?]"`.
        An asterisk matches dots and brackets as well.

    How:

    - a quantizer for the weights that is a Module ([`eqx_grads.nn.LSQ`][],
        [`eqx_grads.nn.FakeQuantize`][], [`eqx_grads.nn.StraightThrough`][]), or a pair of
        quantizers for weights and inputs, each any function of an array, or `None`. The
        first two have a scale, which is fitted to the weights. A `StraightThrough` and a plain
        function have none but what the function computes: behind
        `StraightThrough(eqg.ste.ternary)`, weights are -1, 0 or 1, and a trained model, whose
        weights are much smaller, computes something else. Without a scale, begin with weights
        of about one. The layer becomes an [`eqx_grads.nn.QuantizedLinear`][] or
        [`eqx_grads.nn.QuantizedConv`][]. Of a layer that is quantized already, the weights are
        left as they are: `(None, quantizer)` gives it a quantizer for the inputs, if it has
        none, and other rules pass over it.
    - [`eqx_grads.nn.BinaryLinear`][] or [`eqx_grads.nn.TernaryLinear`][], which have a scale
        for each output.
    - a function from the layer to its replacement:
        `functools.partial(eqg.nn.BinaryLinear.from_layer, scale=False)`.
    - `None` or `False`: the layer is not replaced.

    **Returns:**

    - The new model, with the same arrays as weights and biases.
    - An [`eqx_grads.nn.QuantizationReport`][]: the layers that were swapped and that were left.
        Print it.

    **Raises:**

    [`eqx_grads.RuleError`][] if a rule is used for no layer, or is no rule; with `calibrate`,
    if there is nothing to fit, or if a layer is not called.
    """
    known = [_Rule(i, which, how) for i, (which, how) in enumerate(_pairs(rules))]
    fitted = None
    if calibrate is not None:
        uncalibrated: dict[int, Uncalibrated] = {}
        walk = _Walk(known, uncalibrated=uncalibrated)
        walk.run(model)
        _check_some(uncalibrated, known)
        fitted = fit_to_inputs(model, uncalibrated, calibrate, call)
    elif call is not None:
        raise rule_error(
            "`quantize_model` was given a `call`, and no batch.",
            "`calibrate` is None",
            do="Give it a batch to run the model on, `calibrate=...`, or leave `call` out.",
        )
    walk = _Walk(known, fitted=fitted)
    new = walk.run(model)
    return new, QuantizationReport(walk.swapped, walk.left)


def _check_some(uncalibrated, rules):
    if uncalibrated:
        return
    in_each_call = [
        (rule.name, rule.swap[1])
        for rule in rules
        if isinstance(rule.swap, tuple) and _computes_its_scale(rule.swap[1])
    ]
    where = [
        f"{name}, has `{_show(q)}`, which computes its scale in each call"
        for name, q in in_each_call
    ]
    quantizer = _show(in_each_call[0][1], "learn_scale=True") if in_each_call else _FITTED
    raise rule_error(
        "`quantize_model` was given a batch, and there is nothing to calibrate.",
        *(where or ["no rule has an input quantizer whose scale is to be fitted"]),
        do="Leave `calibrate` out, or give the rules an input quantizer whose scale is fitted: "
        f"`eqg.nn.{quantizer}`, or an `eqg.nn.LSQ` if you train the model afterwards.",
    )


_FITTED = "FakeQuantize(bits=8, learn_scale=True)"


def _computes_its_scale(quantizer):
    if not isinstance(quantizer, FakeQuantize):
        return False
    is_given = quantizer.scale is not None or quantizer.constant is not None
    return not is_given and not quantizer.learn_scale


def _show(quantizer, *options):
    """A `FakeQuantize` without a scale, as it is written, with more options."""
    named = [("signed", True), ("narrow", False), ("channel_axis", None)]
    given = [(name, getattr(quantizer, name), default) for name, default in named]
    texts = [f"{name}={value}" for name, value, default in given if value != default]
    return f"FakeQuantize({', '.join([f'bits={quantizer.bits}', *texts, *options])})"


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if not is_list or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise rule_error(
            "`quantize_model` was given rules that do not say which layers they are for.",
            f"`rules` is {rules!r:.80}",
            do="Give it a dictionary from types or paths of layers to quantizers: "
            "`{eqx.nn.Linear: eqg.nn.LSQ(bits=4)}`, or a list of such pairs.",
        )
    return list(pairs)


class _Rule:
    def __init__(self, number: int, which: Any, how: Any):
        self.which = which
        name = which.__name__ if isinstance(which, type) else repr(which)
        self.name = f"rule {number}, {name}"
        if not isinstance(which, str | type):
            raise rule_error(
                f"A rule of `quantize_model` does not say which layers it is for: {self.name}.",
                do="Give it a type or a path, a string such as `'encoder.layers[*]'`.",
            )
        self.swap = self._as_swap(how)

    def _as_swap(self, how: Any) -> tuple[Any, Any] | Callable[[Any], Any] | None:
        """Quantizers for weights and inputs, or a function of the layer, or `None`."""
        if how is None or how is False:
            return None
        if isinstance(how, type) and hasattr(how, "from_layer"):
            return how.from_layer
        if isinstance(how, tuple) and len(how) == 2:
            return how
        if isinstance(how, eqx.Module):
            return how, None
        if callable(how) and not isinstance(how, type):
            return how
        raise rule_error(
            "One of the `rules` of `quantize_model` does not say how to quantize: "
            f"{self.name}.",
            f"it is {how!r:.80}",
            do="Give it a quantizer, a pair of them for weights and inputs, a layer with "
            "`from_layer`, a function of the layer, or `None` to leave it.",
        )

    def matches(self, path: str, node: Any) -> bool:
        if isinstance(self.which, str):
            # A bracket is one, and not a set of characters.
            return fnmatch.fnmatchcase(path, self.which.replace("[", "[[]"))
        return isinstance(node, self.which)

    def is_for(self, layer: AbstractQuantizedLayer) -> bool:
        """Whether the rule can be used for a layer that is quantized already."""
        if isinstance(self.swap, tuple):
            is_for_inputs = self.swap[0] is None and self.swap[1] is not None
            return is_for_inputs and layer.input_quantizer is None
        return self.swap is None


def _layer_type(layer) -> Any:
    if isinstance(layer, AbstractQuantizedLayer):
        return type(layer)
    return QuantizedLinear if isinstance(layer, eqx.nn.Linear) else QuantizedConv


def _quantize(layer, weight_quantizer, input_quantizer):
    if isinstance(layer, AbstractQuantizedLayer):
        return with_input_quantizer(layer, input_quantizer)
    return _layer_type(layer).from_layer(
        layer, weight_quantizer=weight_quantizer, input_quantizer=input_quantizer
    )


def _needs_fit(quantizer):
    return isinstance(quantizer, AbstractQuantizer) and quantizer.needs_fit


class _Walk:
    """One traversal of a model, which replaces layers and records what it did.

    With a dictionary `uncalibrated`, it adds to it the layers whose input quantizer has to be
    fitted; `fitted` are such quantizers. Both are by the `id` of the layer.
    """

    def __init__(
        self,
        rules: Sequence[_Rule],
        *,
        uncalibrated: dict[int, Uncalibrated] | None = None,
        fitted: Mapping[int, Any] | None = None,
    ):
        self.rules = rules
        self.uncalibrated = uncalibrated
        self.fitted = {} if fitted is None else fitted
        self.of_nodes: set[int] = set()  # the rules that match what may contain layers
        self.matched: set[int] = set()
        self.used: set[int] = set()
        # Of each rule, a layer quantized already, and its path.
        self.done_before: dict[int, tuple[str, AbstractQuantizedLayer]] = {}
        self.paths: dict[str, str] = {}  # of each layer and what contains it, with its type
        self.arrays: dict[str, Any] = {}  # those of no layer
        self.swapped: list[LayerReport] = []
        self.left: list[LayerReport] = []
        self._done: dict[int, tuple[int | None, Any, str]] = {}

    def run(self, model: Any) -> Any:
        """The model with its layers swapped."""
        try:
            new = self.visit(model, "", frozenset())
        except Exception as error:
            # Without the frames of the walk, several for each level of the model.
            frames = error.__traceback__
            while frames and frames.tb_frame.f_code.co_name != "_new":
                frames = frames.tb_next
            error.__traceback__ = frames or error.__traceback__
            raise
        self.check_all_used()
        return new

    def visit(self, node: Any, path: str, matching: frozenset[int]) -> Any:
        """The node with its layers swapped; `matching` are the rules for all layers in it."""
        if isinstance(node, AbstractQuantizedLayer):
            self.paths[path] = type(node).__name__
            return self._visit_quantized(node, path, matching)
        here = {i for i, rule in enumerate(self.rules) if rule.matches(path, node)}
        matching = matching | here
        if isinstance(node, eqx.nn.Linear | eqx.nn.Conv):
            self.paths[path] = type(node).__name__
            return self._swap(node, path, matching)
        children, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if jtu.treedef_is_leaf(treedef):
            if isinstance(node, jax.Array | np.ndarray) and is_differentiable(node):
                self.left.append(array_row(path, node, "not of a Linear or Conv"))
                self.arrays[path] = node
            return node
        self.of_nodes |= here
        layers = len(self.paths)
        new = [self.visit(x, _join(path, key), matching) for key, x in children]
        if len(self.paths) > layers:
            self.paths[path] = type(node).__name__
        if all(a is b for a, (_, b) in zip(new, children, strict=True)):
            return node
        return jax.tree.unflatten(treedef, new)

    def _visit_quantized(self, layer, path, matching):
        every = {
            i
            for i, rule in enumerate(self.rules)
            if i in matching or rule.matches(path, layer) or rule.matches(path, layer.layer)
        }
        usable = frozenset(i for i in every if self.rules[i].is_for(layer))
        for i in every - usable:
            self.done_before.setdefault(i, (path, layer))
        if usable:
            return self._swap(layer, path, usable)
        self._leave(path, layer, "quantized already")
        return layer

    def _swap(self, layer, path, matching):
        self.matched |= matching
        number = min(matching, default=None)
        first, new, note = None, None, ""
        if id(layer) in self._done:
            other, new, first = self._done[id(layer)]
            note = f"shared with {first}"
            if other != number:
                note, new = f"was shared with {first}, and is not any more", None
        if number is None:
            self._leave(path, layer, note or "no rule")
            self._done.setdefault(id(layer), (None, layer, path))
            return layer
        self.used.add(number)
        rule = self.rules[number]
        if rule.swap is None:
            self._leave(path, layer, note or rule.name)
            self._done.setdefault(id(layer), (number, layer, path))
            return layer
        if new is None:
            new = self._new(rule, layer, path)
            self._done.setdefault(id(layer), (number, new, path))
        weights, inputs = "", ""
        if isinstance(new, AbstractQuantizedLayer):
            weights, inputs = new.describe_weight(), describe(new.input_quantizer)
        if isinstance(layer, AbstractQuantizedLayer):
            note = note or "weights as they were"
        row = LayerReport(path, type(layer).__name__, type(new).__name__, weights, inputs)
        self.swapped.append(dataclasses.replace(row, shape=layer.weight.shape, note=note))
        return new

    def _new(self, rule, layer, path):
        if isinstance(rule.swap, tuple) and self._lacks_scale(layer, rule.swap[1]):
            name = _layer_type(layer).__name__
            raise no_input_scale(name, rule.swap[1], f"of {_place(path)}, by {rule.name}")
        try:
            if isinstance(rule.swap, tuple):
                new = self._quantize(layer, path, *rule.swap)
            else:
                new = rule.swap(layer)
        except Exception as error:
            if not isinstance(rule.swap, tuple) and not isinstance(error, RuleError):
                raised = f"raised {type(error).__name__}: {error}"
                raise _no_layer(rule, layer, path, raised) from error
            error.add_note(f"It was to take the place of {_place(path)} by {rule.name}.")
            raise
        is_same = type(new) is type(layer) and not isinstance(rule.swap, tuple)
        if is_same or not callable(new):
            raise _no_layer(rule, layer, path, f"returned {type(new).__name__}")
        return new

    def _quantize(self, layer, path, weight_quantizer, input_quantizer):
        fitted = self.fitted.get(id(layer))
        needs_fit = _needs_fit(input_quantizer)
        if needs_fit and self.uncalibrated is not None:
            self.uncalibrated[id(layer)] = Uncalibrated(layer, path, input_quantizer)
        if needs_fit and (self.uncalibrated is not None or fitted is not None):
            new = _quantize(layer, weight_quantizer, None)
            get = lambda layer: layer.input_quantizer
            return eqx.tree_at(get, new, fitted, is_leaf=lambda x: x is None)
        return _quantize(layer, weight_quantizer, input_quantizer)

    def _lacks_scale(self, layer, input_quantizer):
        will_have_one = self.uncalibrated is not None or id(layer) in self.fitted
        return _needs_fit(input_quantizer) and not will_have_one

    def _leave(self, path, layer, note):
        shape = getattr(layer.weight, "shape", ())
        self.left.append(LayerReport(path, type(layer).__name__, shape=shape, note=note))

    def check_all_used(self) -> None:
        for i, rule in enumerate(self.rules):
            if i in self.used:
                continue
            if i in self.matched:
                raise rule_error(
                    f"A rule of `quantize_model` is never used: {rule.name}.",
                    "each of its layers is matched by a rule before it",
                    do="The first rule that matches wins: put this one first, or leave it out.",
                )
            if i in self.done_before:
                path, layer = self.done_before[i]
                raise rule_error(
                    f"A rule of `quantize_model` matches only layers that are quantized "
                    f"already: {rule.name}.",
                    f"{_place(path)} is a `{type(layer).__name__}`",
                    do="Leave the rule out, or give `quantize_model` the model that it was "
                    "before."
                    + (
                        " To keep the weights and quantize the inputs, write "
                        "`(None, quantizer)`."
                        if layer.input_quantizer is None
                        else ""
                    ),
                )
            arrays = [path for path in self.arrays if rule.matches(path, None)]
            if arrays and i not in self.of_nodes:
                raise rule_error(
                    f"A rule of `quantize_model` matches an array, and no layer: {rule.name}.",
                    *first_of(
                        [f"{_place(path)} is {type_of(self.arrays[path])}" for path in arrays],
                        5,
                    ),
                    do="Rules replace an `equinox.nn.Linear` or an `equinox.nn.Conv`. Quantize "
                    "an array where the model uses it: make a quantizer a field of the Module "
                    "that holds the array, and call it, as in `self.quantizer(self.weight)`.",
                )
            raise rule_error(
                f"A rule of `quantize_model` matches no layer: {rule.name}.",
                *self._near(rule),
                do="A layer of `model` is an `equinox.nn.Linear` or an `equinox.nn.Conv`. "
                "Rules name it by its type or path, or by those of a node that contains it. "
                "Paths are written as in Python: `encoder.layers[0]`. For the weight of "
                "another layer, such as an `equinox.nn.GRUCell`, call a quantizer in the loss.",
            )

    def _near(self, rule):
        paths = list(self.paths)
        if isinstance(rule.which, str):
            paths = difflib.get_close_matches(rule.which, paths, n=5, cutoff=0.4)
            paths += [path for path in self.paths if path not in paths]
        lines = [f"there is {_place(path)}, {self.paths[path]}" for path in paths]
        return first_of(lines, 10)


def _no_layer(rule, layer, path, happened):
    return rule_error(
        f"A rule of `quantize_model` did not return a quantized layer: {rule.name}.",
        f"for {_place(path)}, a `{type(layer).__name__}`, it {happened}",
        do="A function as a rule is given the layer, not its weight. For a function of the "
        "weight, write `(fn, None)`.",
    )


def _place(path):
    return f"`{path}`" if path else "the model itself"


def _join(path, keys):
    return (path + show_path(keys)).removeprefix(".")
