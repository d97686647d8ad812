"""What docs/decoding.md and docs/sizes.md promise of the command lines' JSON."""

KEYS = {
    "text",
    "tokens",
    "finish_reason",
    "rounds",
    "drafted",
    "accepted",
    "accepted_per_position",
    "tokens_per_round",
    "seconds",
    "tokens_per_second",
    "compile_seconds",
}

DESCRIPTION_KEYS = {
    "name",
    "context",
    "width",
    "vocab_size",
    "layers",
    "parameters",
    "row_bytes",
    "memory_bytes",
    "flops_per_token",
    "plan",
    "estimates",
}

ESTIMATE_KEYS = {"chip", "devices", "inference", "training"}
BOUND_KEYS = {"seconds", "memory", "compute", "links", "limit"}
