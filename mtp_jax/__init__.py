"""The model: `mtp_jax.mtp` (MTPModel, init_params), `config`, `state` (State, commit), `hf` (files), `text`.

Nothing is re-exported here: importing jax takes seconds, and `--help` and mistakes in flags should not wait for it.
"""
