"""Loading a checkpoint, beside reading and converting the same bytes with numpy."""

import argparse
import gc
import json
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import _cli
import numpy as np

from infer.step_time import summary
from mtp_jax.hf import load_checkpoint, read_manifest
from mtp_jax.hf.parameters import parameter_shapes
from scripts.benchmarks.limits import timed
from scripts.benchmarks.peer import Peer
from scripts.benchmarks.subject import circumstances
from scripts.benchmarks.turns import print_result, take_turns, time_table

OURS, NUMPY, PEER = "mtp_jax", "numpy", "transformers"
STORED = {"BF16": np.dtype(np.uint16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    dtype = _cli.compute_dtype(args.dtype)
    manifest = read_manifest(folder)
    wanted = set(manifest.slots)

    def numpy() -> int:
        return sum(read_with_numpy(folder / file.name, wanted, str(dtype)) for file in manifest.files)

    measurements = {
        OURS: lambda: timed(lambda: load_checkpoint(folder, dtype=dtype).params),
        NUMPY: lambda: timed(numpy),
    }
    if args.vs:
        measurements[PEER] = lambda: timed(lambda: Peer(folder, str(dtype)) and None)
    size = sum(map(prod, parameter_shapes(manifest.config).values())) * dtype.itemsize
    taken = take_turns({name: partial(with_memory, size, turn) for name, turn in measurements.items()}, args.repeats)
    seconds = {name: median(values) for name, values in taken.items()}
    record = circumstances(args, folder) | {
        "dtype": str(dtype),
        "bytes": numpy(),
        "seconds": seconds[OURS],
        "numpy_seconds": seconds[NUMPY],
        "load_over_numpy": seconds[OURS] / seconds[NUMPY],
        "share_of_limit": seconds[NUMPY] / seconds[OURS],
        "spread": {name: summary(values) for name, values in taken.items()},
    }
    if args.vs:
        record |= {"peer_seconds": seconds[PEER], "ratio": seconds[OURS] / seconds[PEER]}
    return record


def with_memory(size: int, measure: Callable[[], float]) -> float:
    """Measures right after so many bytes were in use.

    A virtual machine may give pages that stay free for some seconds back to its host, and getting gigabytes again takes
    several times as long as what is measured.
    """
    gc.collect()  # JAX lets go of what the turn before has loaded only then
    np.ones(size, np.uint8)
    return measure()


def read_with_numpy(path: Path, wanted: set[str], dtype: str) -> int:
    """Reads tensors of a safetensors file one by one and converts each; gives the bytes that were read."""
    read = 0
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for name, entry in header.items():
            if name in wanted:
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                stored = STORED[entry["dtype"]]
                converted(np.fromfile(file, stored, (end - begin) // stored.itemsize), entry["dtype"], dtype)
                read += end - begin
    return read


def converted(values: np.ndarray, stored: str, dtype: str) -> np.ndarray:
    """Of float32; bfloat16 as bits, rounded towards zero, which takes as long as any other way."""
    if stored == dtype or (stored, dtype) == ("BF16", "bfloat16"):
        return values
    if stored == "BF16":
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    values = values.astype(np.float32)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


def show(record: dict[str, Any]) -> None:
    rates = {name: f"{record['bytes'] / values['median'] / 1e9:,.2f}" for name, values in record["spread"].items()}
    table = time_table(f"loading into {record['dtype']}", record["spread"], "GB/s read", rates)
    lines = [
        f"loading takes {record['load_over_numpy']:.2f} of the time that reading and converting with numpy takes: "
        f"{record['share_of_limit']:.0%} of the limit"
    ]
    if "ratio" in record:
        lines.append(f"it takes {record['ratio']:.2f} of the time that transformers takes")
    print_result([table], lines)
