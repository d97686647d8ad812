"""Say how much memory a training step takes, without running one: its program is compiled and its buffers are read.

Examples:
  python scripts/step_memory.py --config demo
  python scripts/step_memory.py --config demo --set remat=block accumulate_steps=4
  python scripts/step_memory.py --config demo --shape 0.8b --set gradient_mode=head_only dtype=bfloat16
"""

import argparse
from collections.abc import Sequence

import _cli

from configs import PRESETS
from configs.released import RELEASED


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="step_memory.py", description=__doc__)
    parser.add_argument("--config", required=True, choices=list(PRESETS), help="the experiment to start from")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="as in train.py")
    parser.add_argument(
        "--shape",
        type=_cli.released_model,
        metavar="NAME",
        help="a released model's shape instead of the experiment's: 0.8b, glm-4.5-air, .. (describe.py lists them)",
    )
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    experiment = PRESETS[args.config]().override(args.set)

    from rich.console import Console

    from train.memory import step_memory
    from train.step import build_model, with_dtype

    experiment = with_dtype(experiment)
    config = RELEASED[args.shape] if args.shape else experiment.model_config()
    with Console(stderr=True).status("compiling"):
        memory = step_memory(build_model(config, experiment), experiment)
    if args.json:
        _cli.write_json({f"{name}_bytes": size for name, size in memory._asdict().items()}, args.json)
        return
    meanings = ("parameters, moments", "kept for the backward pass, weights included", "most at once beside the state")
    for (name, size), meaning in zip(memory._asdict().items(), meanings, strict=True):
        print(f"{name:10} {size / 2**20:10,.1f} MiB  {meaning}")


if __name__ == "__main__":
    _cli.run(main)
