"""The modes of scripts/benchmark.py: each a module with `measure(args, folder)`, which gives the JSON record, and
`show(record)`."""
