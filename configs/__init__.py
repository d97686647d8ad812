"""Named experiments, for `train.py --config NAME`."""

from configs.ablation import ablation as ablation
from configs.demo import demo as demo
from configs.finetune import finetune as finetune
from configs.realign import realign as realign
from configs.tiny import tiny as tiny

PRESETS = {"tiny": tiny, "demo": demo, "ablation": ablation, "finetune": finetune, "realign": realign}

FROM_A_CHECKPOINT = ("finetune", "realign")
"""Those that mean nothing without `--init`."""
