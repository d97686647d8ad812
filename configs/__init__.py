"""Named experiments, for `train.py --config NAME`."""

from configs.demo import demo as demo
from configs.tiny import tiny as tiny

PRESETS = {"tiny": tiny, "demo": demo}
