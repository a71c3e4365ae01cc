"""Claim: a larger model of the kind of `examples/data_parallel.py`, trained by 8 GPUs or by a
pod, spends an eighth of a step or less on the sum of the gradients. This is an estimate, from
what the compiled step computes, reads and writes, and sends.

The step is compiled for eight CPU devices, with equally many sequences for each, and nothing is
run. A pod has the same program.

- "bytes" has two figures: arguments, results and temporaries once, as if caches held everything
  else; and the operands and results of all operations, as if there were no cache.
- "launches" are the operations of the CPU program. Another compiler may make more or fewer.
- "sum" is the time of a ring, in which each device sends the gradients almost twice. It has no
  latency, and nothing else is computed meanwhile.
- "speed" is that of a device relative to one that trains alone, if everything else takes as
  long as the products or the fewest bytes. If it takes longer, the speed is nearer to one.
- "tokens" is the number for each device at which the products take as long as the sum.
"""

import argparse
import pathlib
import runpy
import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec
from programs import cost


DEVICES = 8
EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "data_parallel.py"


class Machine(NamedTuple):
    devices: int
    flops: float  # per second
    bandwidth: float  # bytes per second to memory
    link: float  # bytes per second that a device sends
    launch: float  # seconds to start an operation: an assumption


MACHINES = {
    # "NVIDIA H100 Tensor Core GPU", data sheet, column SXM: TF32 989 TFLOP/s with sparsity, and
    # half of that without; 3.35 TB/s; NVLink 900 GB/s, which counts both directions.
    "8 H100 SXM": Machine(8, 494.5e12, 3.35e12, 450e9, 2e-6),
    # cloud.google.com/tpu/docs/v5e: 197 TFLOP/s in bfloat16, in which JAX multiplies float32 by
    # default; 819 GB/s; interconnect 1600 Gbit/s. A program's operations are not launched.
    "TPU v5e pod": Machine(256, 197e12, 819e9, 200e9, 0.0),
}


class Size(NamedTuple):
    characters: int
    units: int
    layers: int
    length: int
    batch: int  # of each device


SIZES = {
    "example": Size(128, 128, 1, 128, 4),
    "larger": Size(32768, 1024, 4, 512, 32),
}


def compiled(size):
    sys.path.insert(0, str(EXAMPLE.parent))  # as `python examples/data_parallel.py` has it
    example = runpy.run_path(str(EXAMPLE))
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=(AxisType.Auto,))

    def shapes(tree, spec):
        sharding = NamedSharding(mesh, spec)
        of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.tree.map(of, tree)

    make = lambda key: example["CharacterModel"](*size[:3], key=key)
    model = eqx.filter_eval_shape(make, jr.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    optimizer = optax.adam(1e-3)
    state = (jnp.int32(0), params, jax.eval_shape(optimizer.init, params), jnp.zeros(1))
    text = jnp.zeros((DEVICES * size.batch, size.length + 1), "int32")
    step = example["make_step"](static, optimizer, mesh)
    return step.lower(shapes(state, Spec()), shapes(text, Spec("batch"))).compile()


def times(machine, program):
    """The seconds of a step for the products, for the fewest and the most bytes, to launch the
    operations, and for the sum of the gradients."""
    memory = program.memory_analysis()
    least = memory.argument_size_in_bytes + memory.output_size_in_bytes
    least += 2 * memory.temp_size_in_bytes  # written and read
    total = cost(program.as_text())
    around = 2 * (machine.devices - 1) / machine.devices
    return {
        "products": total.flops / machine.flops,
        "bytes, least": least / machine.bandwidth,
        "bytes, most": total.bytes / machine.bandwidth,
        "launches": total.operations * machine.launch,
        "sum": around * total.sent / machine.link,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="the small model only")
    quick = parser.parse_args().quick
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for name, size in list(SIZES.items())[: 1 if quick else None]:
        program = compiled(size)
        total, memory = cost(program.as_text()), program.memory_analysis()
        print(f"\n{name}: {size}")
        print(f"  products           {total.flops / 1e9:12.3f} GFLOP per device")
        print(f"  bytes, most        {total.bytes / 1e9:12.3f} GB")
        print(f"  temporary bytes    {memory.temp_size_in_bytes / 1e9:12.3f} GB")
        print(f"  operations         {total.operations:12.0f}")
        print(f"  collectives        {total.collectives:12.0f}")
        print(f"  bytes to be summed {total.sent / 1e6:12.3f} MB")
        print("  | machine | products, ms | bytes | launches | sum | speed | tokens |")
        for machine_name, machine in MACHINES.items():
            ms = {key: 1e3 * value for key, value in times(machine, program).items()}
            alone = max(ms["products"], ms["bytes, least"])
            tokens = size.batch * size.length * ms["sum"] / ms["products"]
            print(
                f"  | {machine_name} | {ms['products']:.4f} | {ms['bytes, least']:.4f} to "
                f"{ms['bytes, most']:.4f} | {ms['launches']:.2f} | {ms['sum']:.4f} | "
                f"{alone / (alone + ms['sum']):.2f} | {tokens:.0f} |"
            )


if __name__ == "__main__":
    main()
