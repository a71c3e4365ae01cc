"""Claim: a training step with `LSQ` for weights and inputs takes 1.3 to 1.6 times as long as
in float. Plain straight-through, `x + stop_gradient(q - x)`, takes 1.4 to 1.8 times as long.

The step is the gradient of a classifier (an MLP with two hidden layers) and the update of SGD.
Quantization adds elementwise operations, which are a larger part of a small network than of a
large one: two passes over each weight and each activation, and the gradient with respect to the
input of the first layer, which its scale needs. The variants alternate in one process; the
figures are medians over rounds of the ratio to the step without quantizers in the same round,
in CPU time.

    python benchmarks/quantization.py [--quick]
"""

import argparse
import statistics

import equinox as eqx
import eqx_grads as eqg
import jax
import jax.numpy as jnp
import jax.random as jr
from timing import busy_time, compiled, in_turn


SIZES = [(64, 64, 128), (128, 784, 256), (256, 256, 512)]  # batch, inputs, width


class PlainLSQ(eqx.Module):
    """`LSQ` by `stop_gradient`, with the derivative of autodiff."""

    scale: jax.Array
    bits: int = eqx.field(static=True)
    signed: bool = eqx.field(static=True)

    def __call__(self, x):
        low, high = (-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        if not self.signed:
            low, high = 0, 2**self.bits - 1
        factor = (x.size * high) ** -0.5
        scale = jax.lax.stop_gradient(self.scale * (1 - factor)) + self.scale * factor
        u = jnp.clip(x / scale, low, high)
        return (u + jax.lax.stop_gradient(jnp.round(u) - u)) * scale


def quantizers(kind):
    of_weights, of_inputs = {"bits": 4, "signed": True}, {"bits": 4, "signed": False}
    if kind == "lsq":
        return eqg.nn.LSQ(scale=0.05, **of_weights), eqg.nn.LSQ(scale=0.2, **of_inputs)
    return (
        PlainLSQ(jnp.array(0.05), **of_weights),
        PlainLSQ(jnp.array(0.2), **of_inputs),
    )


def training_step(kind, batch, inputs, width):
    model = eqx.nn.MLP(inputs, 10, width, 2, key=jr.key(0))
    if kind != "float":
        model, _ = eqg.nn.quantize_model(model, {eqx.nn.Linear: quantizers(kind)})
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    x = jr.uniform(jr.key(1), (batch, inputs))
    labels = jr.randint(jr.key(2), (batch,), 0, 10)

    def loss(arrays, x):
        logits = jax.vmap(eqx.combine(arrays, static))(x)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(batch), labels])

    def step(arrays, x):
        return jax.tree.map(lambda a, g: a - 0.01 * g, arrays, jax.grad(loss)(arrays, x))

    return compiled(step, arrays, x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    for size in SIZES[:1] if quick else SIZES:
        steps = {kind: training_step(kind, *size) for kind in ("float", "lsq", "plain")}
        runs = {k: s.run for k, s in steps.items()}
        times = in_turn(runs, 3 if quick else 200, busy_time)
        print("batch {}, inputs {}, width {}".format(*size))
        for kind, step in steps.items():
            pairs = zip(times[kind], times["float"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            milliseconds = 1e3 * statistics.median(times[kind])
            print(f"  {kind:6s} {milliseconds:6.2f} ms  {ratio:5.2f}  {step.memory:9d} bytes")


if __name__ == "__main__":
    main()
