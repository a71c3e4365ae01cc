"""The cross-entropy of a linear layer: the head of a language model, without its logits."""

import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec, reshard
from jaxtyping import ArrayLike

from .._errors import bad_argument, check_flags, check_option, rule_error, type_of
from .._rules.explicit_sharding import gathered
from .._rules.float_args import as_count, as_floats, is_number
from .._rules.nondifferentiable import nondifferentiable
from .._tangent_spaces import dtype_of, promote, sum_dtype
from ._linear_cross_entropy_rules import (
    at_labels,
    is_soft,
    Options,
    Scales,
    summed_loss,
    token_losses,
    vary_over_tokens,
)


NAME = "losses.linear_cross_entropy"


def linear_cross_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    class_weight: ArrayLike | None = None,
    chunk: int | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    reduction: str = "mean",
    axis_name: Hashable = None,
) -> Any:
    r"""Return the softmax cross-entropy of the logits $W x + b$. The logits of all tokens are
    never in memory at once.

    With a vocabulary of $V$ entries, the logits of $N$ tokens and their gradient are two arrays
    of $N V$ numbers. They are often the largest of a language model. Here the tokens are taken
    in chunks.

    !!! example

        ```python
        import equinox as eqx
        import eqx_grads as eqg
        import jax
        import jax.numpy as jnp

        head = eqx.nn.Linear(16, 1000, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (4, 32, 16))  # 4 texts of 32 tokens
        labels = jnp.ones((4, 32), int).at[:, 20:].set(-100)  # of which 20 have a label

        @eqx.filter_value_and_grad
        def loss(head, x, labels):
            return eqg.losses.linear_cross_entropy(x, head.weight, labels, bias=head.bias)

        value, grads = loss(head, x, labels)

        @eqx.filter_value_and_grad
        def with_all_logits(head, x, labels):
            log_p = jax.nn.log_softmax(jax.vmap(head)(x[:, :20].reshape(-1, 16)))
            return -jnp.mean(log_p[:, 1])

        plain_value, plain_grads = with_all_logits(head, x, labels)
        print(f"{value:.4f} {plain_value:.4f}")
        print(jnp.allclose(grads.weight, plain_grads.weight, atol=1e-6))
        ```

        ```text
        7.3924 7.3924
        True
        ```

    **Arguments:**

    - `x`: floats of shape `(..., features)`, with any number of leading dimensions.
    - `weight`: floats of shape `(vocabulary, features)`, as the `weight` of an
        `equinox.nn.Linear` or an `equinox.nn.Embedding`. (It is the transpose of a matrix $W$
        in $x W$.)
    - `labels`: integers of shape `(...)`, or probabilities of shape `(..., vocabulary)`, which
        are constants.
    - `bias`: floats of shape `(vocabulary,)`, or `None`.
    - `class_weight`: floats of shape `(vocabulary,)`, the factor of the cross-entropy of each
        label, a constant. As in PyTorch, a mean over integer labels is divided by the sum of
        the factors of the tokens. The z-loss has no factor.
    - `chunk`: the number of tokens whose logits exist at a time, at most. The default is the
        number of features, but at least 128, and at least $2^{20} / V$. The logits of a chunk
        then need as much memory as the gradient of `weight`, or 4 MiB. If JAX's default backend
        is not a CPU, it is at least $2^{25} / V$. A smaller chunk needs less memory, and more
        time.
    - `ignore_index`: the label of tokens that do not count. Their rows of `x` may be anything,
        even NaN. With `None`, all tokens count, as they do with probabilities.
    - `label_smoothing`: a number $\alpha$ from zero to one. The target is $1 - \alpha$ at the
        label plus $\alpha / V$ everywhere.
    - `soft_cap`: a number $c$: the logits are $c \tanh(l / c)$ (Gemma 2).
    - `z_loss`: the factor of the square of the log-partition function $\log \sum_v e^{l_v}$,
        which is added to the loss of each token ($10^{-4}$ in PaLM).
    - `return_z_loss`: whether to return the z-loss as well, for a log. It is part of the loss,
        and what is returned has no derivative.
    - `reduction`: `"mean"` over the tokens that count (zero if none counts), `"sum"` over them,
        or `"none"`: the loss of each token, zero where it does not count.
    - `axis_name`: inside `jax.shard_map`, the name of the mesh axis over which the vocabulary
        is sharded, or a tuple of names. Each device then passes its rows of `weight`, `bias`
        and `class_weight`, its columns of probabilities, all tokens, and labels that count the
        rows of all devices. The loss is the same on all devices.

    `x` and `weight` are cast to their common dtype. If it is half precision, matrix products
    are accumulated, and all else is computed, in single precision.

    **Returns:**

    A scalar, or an array of shape `(...)` for `"none"`; of single precision if `x` and `weight`
    are of half precision. With `return_z_loss`, `(loss, z_loss)`. A label that is neither in
    the vocabulary nor `ignore_index` makes the loss and the gradient NaN. Labels are known only
    when the program runs, and then no error can be raised. `jax.debug_nans` stops there.

    **Derivative:**

    Let $p$ be the softmax of a token's logits and $q$ its target. The cotangent of the logits
    is $d = \bar L\,(p - q)$ (times $1 - l^2 / c^2$ for a soft cap), and $\bar x = W^T d$, $\bar
    W = \sum d\,x^T$, $\bar b = \sum d$. Each is computed only if you differentiate with respect
    to its argument.

    For `"mean"` and `"sum"`, $\bar L$ is a factor of all tokens. So the gradients are formed in
    the forward pass, while the logits of a chunk exist. They are the residuals, and the matrix
    products are the same as in plain automatic differentiation. Forward mode is the inner
    product of the gradients with the tangents. For `"none"`, the residuals are the arguments
    and two numbers for each token, and the backward pass computes the logits again. This takes
    four matrix products instead of three. Both modes, all orders; higher orders compute the
    logits of a chunk again.

    Under `jax.vmap` with a `weight` that is not batched, the batch becomes part of the tokens.
    The gradient of the mean over examples is then formed as for `"none"`. In a loop that is
    differentiated as a whole, `"mean"` and `"sum"` keep one gradient of `weight` for each step.
    So take the gradient inside the loop, or wrap the step in [`eqx_grads.filter_checkpoint`][].

    The batch, the vocabulary or both may be sharded over devices: under `jax.jit`, over
    explicit axes of the mesh, or inside `jax.shard_map` with `axis_name`. With a sharded
    vocabulary, each device computes its columns of the logits only. See
    [Devices](../guides/devices.md#a-sharded-vocabulary).

    **Raises:**

    [`eqx_grads.RuleError`][] if shapes do not fit together, for an option that is out of
    range, or for an unknown `axis_name`. Also if probabilities or class weights are
    differentiated.

    ??? cite

        The gradient in the forward pass, chunk by chunk: Hsu, P.-L. et al. (2024). Liger
        Kernel: Efficient Triton kernels for LLM training. arXiv:2410.10989.

        `z_loss`: Chowdhery, A. et al. (2022). PaLM: Scaling language modeling with pathways.
        arXiv:2204.02311.
    """
    chunk = None if chunk is None else as_count(NAME, "chunk", chunk)
    if ignore_index is not None:
        do = "Give the label of tokens that do not count, or `None`."
        ignore_index = as_count(NAME, "ignore_index", ignore_index, least=-(2**31), do=do)
    smoothing = _as_number("label_smoothing", label_smoothing, 0, 1)
    z_loss = _as_number("z_loss", z_loss, 0, math.inf)
    if soft_cap is not None:
        soft_cap = _as_number("soft_cap", soft_cap, math.ulp(0.0), math.inf)
    check_flags(NAME, return_z_loss=return_z_loss)
    check_option(NAME, "reduction", reduction, ("mean", "sum", "none"))
    arrays = _as_arrays(x, weight, labels, bias, class_weight)
    numbers, axes = (smoothing, z_loss, soft_cap), _as_axes(axis_name)
    options = Options(chunk, ignore_index, reduction, *numbers, axes)
    loss, z = _on_explicit_axes(_losses, *arrays, options=options)
    if not return_z_loss:
        return loss
    return loss, jnp.zeros_like(loss) if z is None else z


def _losses(x, weight, bias, class_weight, labels, *, options):
    """The loss and its z-loss: the sum over tokens, or an array with an element for each."""
    reduction, smoothing, z_loss = options.reduction, options.label_smoothing, options.z_loss
    n, shape = weight.shape[0], x.shape[:-1]
    size = n * jax.lax.psum(1, options.axes)  # of the vocabulary, on all devices
    if is_soft(labels):
        is_counted = is_valid = jnp.ones(shape, bool)
        labels = labels.reshape(-1, n)
    else:
        is_ignored = options.ignore_index is not None and labels == options.ignore_index
        is_counted = jnp.broadcast_to(~jnp.asarray(is_ignored), shape)
        is_valid = (labels >= 0) & (labels < size)
        labels = jnp.where(is_counted & is_valid, labels, 0).reshape(-1)
    # An ignored token has the factor zero, and zero times NaN would be NaN.
    x = jnp.where(is_counted[..., None], x, 0)
    # Zero by zero is NaN, where a label is out of range. A constant would stop `debug_nans`.
    is_valid = is_valid.astype(sum_dtype(x.dtype))
    scale = jnp.where(is_counted, is_valid / jnp.where(is_counted, is_valid, 1), 0).reshape(-1)
    of_label = scale
    if class_weight is not None and not is_soft(labels):
        take = lambda index: jnp.take(class_weight, index)
        of_label = scale * at_labels(take, n, labels, options)
    z_scale = scale
    if reduction == "mean":
        sums = [jnp.sum(jnp.nan_to_num(x)) for x in (scale, of_label)]
        count, total = jax.lax.psum(sums, options.token_axes)
        z_scale = scale / jnp.where(count == 0, 1, count)
        total = jnp.where(total == 0, 1, total)
        scale, of_label = scale / total, of_label / total
    scales = Scales(
        of_label * (1 - smoothing),
        scale * (smoothing / size) if smoothing else None,
        z_scale * z_loss if z_loss else None,
    )
    x = x.reshape(-1, x.shape[-1])
    tokens = vary_over_tokens((x, weight, bias, class_weight, labels, scales), options)
    if reduction != "none":
        return summed_loss(*tokens, options=options)
    losses = token_losses(*tokens, options=options)
    return jax.tree.map(lambda y: y.reshape(shape), losses)


def _on_explicit_axes(fn, *args, options: Options) -> Any:
    """`fn(*args, options=options)`: sums over tokens, or arrays with an element for each.

    If the type of `x` or of `weight` is sharded over explicit axes, each device calls `fn` on
    its tokens and its part of the vocabulary, in a `jax.shard_map`. So the gradient of the
    weight is summed over the devices once, and not once for each chunk. Along an axis that
    shards both the tokens and the vocabulary, the weight is gathered. So are features.
    """
    (x, weight, _, _, labels), is_sum = args, options.reduction != "none"
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return fn(*args, options=options)
    batch = _axes_by_dimension(x, explicit)[:-1]
    of_tokens = tuple(name for names in batch for name in names)
    rows = _axes_by_dimension(weight, explicit)[0]
    vocabulary = tuple(name for name in rows if name not in of_tokens)
    if not of_tokens and not vocabulary:
        return fn(*jax.tree.map(gathered, args), options=options)
    rows = PartitionSpec(vocabulary)
    each = PartitionSpec(*batch)
    columns = each if labels.ndim < x.ndim else PartitionSpec(*batch, vocabulary)
    specs = (PartitionSpec(*batch, None), PartitionSpec(vocabulary, None), rows, rows, columns)
    pairs = zip(args, specs, strict=True)
    args = [None if arg is None else reshard(arg, spec) for arg, spec in pairs]

    def local(*args):
        out = fn(*args, options=options._replace(axes=vocabulary, token_axes=of_tokens))
        return jax.lax.psum(out, of_tokens) if is_sum and of_tokens else out

    out_specs = PartitionSpec() if is_sum else each
    return jax.shard_map(local, in_specs=specs, out_specs=out_specs, axis_names=explicit)(*args)


def _axes_by_dimension(x: jax.Array, explicit: set[Any]) -> list[tuple[Any, ...]]:
    """The explicit axes of the mesh over which each dimension of `x` is sharded."""
    spec = jax.typeof(x).sharding.spec
    entries = [*spec, *([None] * (x.ndim - len(spec)))]
    as_tuple = lambda e: e if isinstance(e, tuple) else () if e is None else (e,)
    return [tuple(name for name in as_tuple(e) if name in explicit) for e in entries]


def _as_axes(axis_name) -> tuple[Hashable, ...]:
    if axis_name is None:
        return ()
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    try:
        jax.lax.axis_index(axes)
    except (NameError, KeyError, TypeError, ValueError):
        do = "Call it inside a `jax.shard_map` over a mesh with this axis, which distributes "
        do += "the rows of `weight`. Elsewhere, leave `axis_name` out."
        what = "the name of an axis that exists here"
        raise bad_argument(NAME, "axis_name", what, axis_name, do) from None
    return axes


def _as_arrays(x, weight, labels, bias, class_weight):
    x, weight = as_floats(NAME, x), as_floats(NAME, weight, "weight")
    optional = lambda x, argument: None if x is None else as_floats(NAME, x, argument)
    bias, class_weight = optional(bias, "bias"), optional(class_weight, "class_weight")
    dtype = dtype_of(labels)
    is_index = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
    is_soft = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    of_label = x.shape[:-1] + (() if is_index else weight.shape[:1])
    fits = (
        (is_index or is_soft)
        and x.ndim >= 1
        and weight.ndim == 2
        and weight.shape[1] == x.shape[-1]
        and jnp.shape(labels) == of_label
        and all(b is None or b.shape == weight.shape[:1] for b in (bias, class_weight))
    )
    if not fits or weight.shape[0] == 0:
        given = {"x": x, "weight": weight, "labels": labels, "bias": bias}
        given["class_weight"] = class_weight
        raise rule_error(
            f"The arguments of `{NAME}` do not fit together.",
            ", ".join(f"`{name}` is {type_of(a)}" for name, a in given.items()),
            do="Give `x` of shape `(..., features)`, labels that are integers of shape `(...)` "
            "or probabilities of shape `(..., vocabulary)`, a weight of shape `(vocabulary, "
            "features)`, and a bias and class weights of shape `(vocabulary,)`.",
        )
    dtype, labels = promote([x, weight]), jnp.asarray(labels)
    if is_soft:
        labels = nondifferentiable(labels, f"The `labels` of `{NAME}`")
        labels = labels.astype(sum_dtype(dtype))
    elif labels.dtype != jnp.int64:
        # Others can't hold every index of a vocabulary, or not -100.
        labels = labels.astype(jnp.int32)
    if class_weight is not None:
        class_weight = nondifferentiable(class_weight, f"The `class_weight` of `{NAME}`")
        class_weight = class_weight.astype(sum_dtype(dtype))
    return x.astype(dtype), weight.astype(dtype), bias, class_weight, labels


def _as_number(option: str, value: Any, least: float, most: float) -> float:
    if not (is_number(value) and least <= value <= most and math.isfinite(value)):
        wanted = f"a number {'above' if least else 'from'} zero"
        wanted += " to one" if most == 1 else ""
        raise bad_argument(NAME, option, wanted, value, f"Give {wanted}.")
    return float(value)
