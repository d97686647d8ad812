"""Peak memory of a fresh process that loads a checkpoint: `python tests/many_devices/load_peak.py CHECKPOINT [MESH]`.

Prints one JSON object, in MiB: the parameters, and by how much the peak grew while they were loaded. Devices of a CPU
have their memory in the process, so the second can't be less than the first; what is more was held beside them.
"""

import json
import os
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20


def main(folder: str, words: str | None) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))
    import jax

    from mtp_jax.hf import load_checkpoint, read_manifest
    from mtp_jax.hf.parameters import parameter_shapes
    from mtp_jax.mesh_shape import parse_mesh
    from mtp_jax.sharding import make_mesh

    shape = parse_mesh(words.split(","), "MESH") if words else None
    mesh = shape and make_mesh(shape, "MESH")
    jax.device_put(1.0).block_until_ready()
    parameter_shapes(read_manifest(folder).config)

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB

    before = peak()
    params = jax.block_until_ready(load_checkpoint(folder, mesh=mesh).params)
    grown = peak() - before
    held = sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
    print(json.dumps({"parameters": held / MIB, "peak": grown}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
