"""What docs/decoding.md promises of the command lines' JSON."""

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
