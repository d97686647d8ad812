"""The objective and everything that optimises it: `train.objective`, `train.step`, `train.loop`.

Nothing is re-exported here: importing jax takes seconds, and `train.py --help` should not wait for it.
"""
