"""The modes of scripts/benchmark.py: each a module with `measure(args, folder)`, a JSON record, and `show(record)`."""
