"""`quantize_model`: quantize the layers that rules select, as one tree map."""

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._errors import rule_error
from .calibration import fit_to_inputs
from .quantized import Layer, Quantized, with_input_quantizer
from .quantizer import needs_fit
from .report import first_of, kind_of, map_layers, path_of, place_of, QuantizationReport


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
          [0]  Linear  weights 8 bits signed                        (32, 64)
          [1]  Linear  weights 2 bits signed  inputs 4 bits signed  (10, 32)
        left: 0
        ```

    Layers are `equinox.nn.Linear`, `equinox.nn.Conv` and `equinox.nn.ConvTranspose`, and every
    type with a `weight` that a rule names, such as `equinox.nn.Embedding`. They may be in any
    PyTree: Modules, lists, dictionaries, ensembles made by `equinox.filter_vmap`, the stacked
    layers of an `equinox.nn.MLP` that scans. Each becomes an [`eqx_grads.nn.Quantized`][]. A
    layer that several places share stays shared, if one rule matches it everywhere; the report
    says so.

    **Arguments:**

    - `model`: any PyTree.
    - `rules`: pairs `(layers, quantizers)`, or a dictionary of such pairs. For each layer,
        the first rule that matches is used.
    - `calibrate`: a batch on which the model is run once, in inference mode, before its layers
        are replaced. The inputs of each layer are gathered, and its input quantizer is fitted
        to them if it has no scale yet: an [`eqx_grads.nn.LSQ`][], or an
        [`eqx_grads.nn.FakeQuantize`][] with `learn_scale`. All inputs of the batch are kept in
        memory until then: a few hundred examples are enough.
    - `call`: called as `call(model, calibrate)` to run the model. The default is
        `jax.lax.map(model, calibrate)`, one example after the other, in the memory of one
        example. `jax.vmap(model)(calibrate)` is faster, and needs the memory of the batch.

    Which layers:

    - a type: all layers of that type, and all layers within a Module of that type.
    - a path, `"encoder.layers[0]"` or `"heads['a']"`: the layer at this path, and all layers
        within the node at this path. Write it as in Python, as all reports of this library do.
        It may have wildcards: `?` for one character and `*` for any number of them, dots and
        brackets included, as in `"*.query_proj"` or `"layers[?]"`.

    How:

    - a quantizer for the weights, or a pair of quantizers for weights and inputs. A quantizer
        is any function of an array, or `None`. [`eqx_grads.nn.LSQ`][],
        [`eqx_grads.nn.FakeQuantize`][], [`eqx_grads.nn.Binary`][] and
        [`eqx_grads.nn.Ternary`][] have a scale that suits the weights. A function such as
        `eqg.ste.ternary` has no scale: its weights are -1, 0 or 1. A trained model, whose
        weights are much smaller, then computes something else.
    - `None` or `False`: the layer is not replaced.

    Rules do not change the weights of a layer that is already quantized: `(None,
    quantizer)` gives it a quantizer for the inputs, if it lacks one, and all other rules leave
    it unchanged.

    **Returns:**

    - The new model, with the same arrays as weights and biases.
    - An [`eqx_grads.nn.QuantizationReport`][]: the layers that were swapped and that were left.
        Print it.

    **Raises:**

    [`eqx_grads.RuleError`][] if a rule matches no layer, or is not a rule. With `calibrate`, it
    is raised if nothing needs a fit, or if a layer is not called.
    """
    known = [_Rule(i, model, *pair) for i, pair in enumerate(_pairs(rules))]
    types = tuple(rule.which for rule in known if isinstance(rule.which, type))

    def is_layer(x):
        is_named = isinstance(x, types) and hasattr(x, "weight")
        return is_named or isinstance(x, Layer | Quantized)

    nodes, _ = jtu.tree_flatten_with_path(model, is_leaf=is_layer)
    found = {path_of(keys): _found(known, keys, node) for keys, node in nodes if is_layer(node)}
    _check_all_used(known, found, [path_of(keys) for keys, node in nodes if eqx.is_array(node)])
    fitted = _calibrated(model, found, calibrate, call)

    def choose(path, layer):
        rule = found[path].rule
        if rule is None:
            return "quantized already" if isinstance(layer, Quantized) else "no rule"
        return rule if any(rule.quantizers) else rule.name

    def make(layer, rule):
        of_weights, of_inputs = rule.quantizers
        is_fitted = (id(layer), rule) in fitted
        before = isinstance(layer, Quantized)
        inner = layer.layer if before else layer
        new = Quantized(inner, of_weights, None if is_fitted else of_inputs)
        of_inputs = fitted.get((id(layer), rule), new.input_quantizer)
        new = with_input_quantizer(layer if before else new, of_inputs)
        return new, "weights as they were" if before else ""

    new, swapped, left = map_layers(model, is_layer, choose, make)
    return new, QuantizationReport(swapped, left)


def _pairs(rules: Any) -> list[tuple[Any, Any]]:
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    is_list = isinstance(pairs, Sequence) and not isinstance(pairs, str)
    if is_list and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return list(pairs)
    raise _no_rule("is not a dictionary or a list of pairs", f"`rules` is {rules!r:.80}")


def _no_rule(what, *where):
    return rule_error(
        f"One of the `rules` of `quantize_model` {what}.",
        *where,
        do="Give a dictionary from types or paths of layers to quantizers, or to pairs of "
        "quantizers for weights and inputs: `{eqx.nn.Linear: eqg.nn.LSQ(bits=4)}`, "
        "`{'encoder.layers[*]': (eqg.nn.LSQ(bits=4), eqg.nn.FakeQuantize())}`. `None` leaves a "
        "layer unchanged.",
    )


class _Rule:
    """Which layers, and the quantizers of their weights and inputs: two `None` leave them."""

    def __init__(self, number: int, model: Any, which: Any, how: Any):
        self.which = which
        self.name = f"rule {number}, {getattr(which, '__name__', repr(which))}"
        if not isinstance(which, str | type):
            raise _no_rule(f"does not say which layers it is for: {self.name}")
        pair = (None, None) if how is False else (how, None)
        self.quantizers = how if isinstance(how, tuple) and len(how) == 2 else pair
        is_how = lambda x: x is None or (callable(x) and not isinstance(x, type))
        if not all(map(is_how, self.quantizers)):
            raise _no_rule(f"does not say how to quantize: {self.name}", f"it is {how!r:.80}")
        kind = which if isinstance(which, type) else ()  # of which nothing is
        is_root = lambda x: isinstance(x, kind)
        nodes = jtu.tree_leaves_with_path(model, is_leaf=is_root)
        self.roots = {path_of(keys) for keys, node in nodes if is_root(node)}

    def matches(self, paths: Sequence[str]) -> bool:
        """Whether one of the paths, of a layer and of what contains it, is meant."""
        if isinstance(self.which, type):
            return not self.roots.isdisjoint(paths)
        pattern = self.which.replace("[", "[[]")  # a bracket is no set of characters
        return any(fnmatch.fnmatchcase(path, pattern) for path in paths)

    def is_for(self, layer: Any) -> bool:
        """Whether the rule can be used for a layer, which may be quantized already."""
        of_weights, of_inputs = self.quantizers
        is_free = of_inputs is None or getattr(layer, "input_quantizer", None) is None
        return not isinstance(layer, Quantized) or (of_weights is None and is_free)


class _Found(NamedTuple):
    layer: Any
    matching: list[_Rule]
    rule: _Rule | None  # the one that is used


def _found(rules, keys, layer):
    paths = [path_of(keys[:i]) for i in range(len(keys) + 1)]
    if isinstance(layer, Quantized):
        paths.append(f"{paths[-1]}.layer".removeprefix("."))
    matching = [rule for rule in rules if rule.matches(paths)]
    return _Found(layer, matching, next((r for r in matching if r.is_for(layer)), None))


def _check_all_used(rules: list[_Rule], found: dict[str, _Found], arrays: list[str]) -> None:
    def describe(layer, _, used):
        no_rule = "quantized already" if isinstance(layer, Quantized) else "no rule"
        return f"{kind_of(layer)}, {used.name if used else no_rule}"

    all_of = {path: describe(*x) for path, x in found.items()}
    all_of |= dict.fromkeys(arrays, "an array")
    for rule in rules:
        if any(rule is x.rule for x in found.values()):
            continue
        paths = [path for path, x in found.items() if rule in x.matching]
        paths += difflib.get_close_matches(str(rule.which), all_of, n=5, cutoff=0.4)
        paths = list(dict.fromkeys([*paths, *all_of]))
        raise rule_error(
            f"A rule of `quantize_model` is not used: {rule.name}.",
            *first_of([f"there is {place_of(path)}: {all_of[path]}" for path in paths], 10),
            do="The first rule that matches a layer applies. A layer that is quantized already "
            "takes only a rule for its inputs, `(None, quantizer)`. A layer of `model` is an "
            "`equinox.nn.Linear`, an `equinox.nn.Conv`, or of a type with a `weight` that a "
            "rule names. Paths are written as in Python: `encoder.layers[0]`. For another "
            "array, as in an `equinox.nn.GRUCell`, call a quantizer where the model uses it.",
        )


def _calibrated(model, found, batch, call):
    """Fitted input quantizers, by the `id` of their layers and by their rules."""
    if batch is None and call is None:
        return {}
    uncalibrated = {
        (id(layer), rule): (layer, path, rule.quantizers[1])
        for path, (layer, _, rule) in found.items()
        if rule is not None and needs_fit(rule.quantizers[1])
    }
    if batch is None or not uncalibrated:
        what = "`call`, and no batch" if batch is None else "batch, and nothing to calibrate"
        raise rule_error(
            f"`quantize_model` was given a {what}.",
            do="Give both `calibrate` and rules with an input quantizer whose scale is fitted: "
            "an `eqg.nn.LSQ`, or an `eqg.nn.FakeQuantize` with `learn_scale=True`. Without it, "
            "a `FakeQuantize` computes its scale in each call: leave `calibrate` out.",
        )
    return fit_to_inputs(model, uncalibrated, batch, call)
