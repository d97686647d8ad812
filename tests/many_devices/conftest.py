"""Eight devices on one CPU. JAX must hear of them before it looks for devices, so these tests have a process of their
own: `pytest tests/many_devices`."""

import os

# Devices that wait for one another at a collective operation may wait long where few cores run them all.
os.environ["XLA_FLAGS"] += (
    " --xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
