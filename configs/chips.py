"""Published figures of accelerators, for estimates past the machine at hand."""

from mtp_jax.chip import Chip

CHIPS = {
    # SXM. NVIDIA's page of the H200 (nvidia.com/en-us/data-center/h200): 141 GB, 4.8 TB/s, 1,979 TFLOP/s in bfloat16
    # with sparsity, half of it without, NVLink 900 GB/s both ways together. Eight are joined in an HGX or DGX H200,
    # which have a network adapter of 400 Gbit/s for each (DGX H200's datasheet).
    "h200": Chip(memory=141e9, bandwidth=4.8e12, flops=989e12, link=450e9, island=8, network=50e9),
    # docs.cloud.google.com/tpu/docs/v5p: 95 GiB, 2,765 GB/s, 459 TFLOP/s in bfloat16, 1,200 GB/s both ways together
    # between chips (4,800 Gbit/s each way, over the six links of a torus) in a slice of up to 6,144 (of a pod's 8,960),
    # and 50 Gbit/s a chip from there.
    "tpu-v5p": Chip(memory=95.0 * 2**30, bandwidth=2765e9, flops=459e12, link=600e9, island=6144, network=6.25e9),
}
"""By name, in small letters."""
