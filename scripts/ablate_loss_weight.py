"""Train the same model with several weights of the MTP loss and several seeds, and record how each run ended.

Each weight is held constant, each named schedule goes from one weight to the next within a run, and --vary adds other
settings; every combination is trained with seeds 0 to N-1. Runs of one seed start from the same weights and read the
same batches. Every run is a process of its own with a work directory of its own: one that fails is reported, and the
rest go on. The same command continues a grid that was stopped, without repeating what is done, and a larger grid may be
asked of the same folder.

Examples:
  python scripts/ablate_loss_weight.py --config tiny --weights 0,0.3 --seeds 2 --workdir runs/first --dry-run
  python scripts/ablate_loss_weight.py --config tiny --weights 0,0.3 --seeds 2 --workdir runs/first
  python scripts/ablate_loss_weight.py --config demo --weights 0,0.03,0.1,0.3,1.0 --schedules constant,0.3-then-0.1 \\
      --seeds 3 --workdir runs/weights --set steps=500
  python scripts/ablate_loss_weight.py --config demo --weights 0.3 --vary depths=1,2,3 --vary head_loss=ce,kl \\
      --workdir runs/depths --set steps=500
  python scripts/ablate_loss_weight.py --config finetune --init DIR --data TEXTS --set 'held_out=*.md' \\
      --weights 0.1,0.3 --workdir runs/tuned

DIR/records.jsonl gets a line for each finished run; scripts/plot_ablation.py draws them. DIR/runs/NAME is a run's work
directory with its last checkpoint, which scripts/export_checkpoint.py reads, and DIR/runs/NAME.log what it said.
Settings are those of train.py, whose --help lists them. Two defaults differ: keep_checkpoints is 1, and without
acceptance_every held-out prompts are decoded at the end of each run.

Exit status: 0 if all runs are done, 1 if some failed, 2 after a mistake in the command, 130 if interrupted.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import _cli

from configs import PRESETS


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _cli.Parser(prog="ablate_loss_weight.py", description=__doc__)
    parser.add_argument(
        "--workdir", required=True, type=_cli.path, metavar="DIR", help="the grid's folder; made if need be"
    )
    parser.add_argument("--weights", metavar="W,W", help="weights of the MTP loss, each held constant: 0,0.1,0.3")
    parser.add_argument(
        "--schedules",
        default="constant",
        metavar="S,S",
        help="schedules beside them, weights in turn: 0.3-then-0.1. The switch is where the setting mtp_switch_tokens "
        "says, if it has as many points and they lie within the run, else after equal parts of it",
    )
    parser.add_argument("--seeds", type=_cli.positive, default=1, metavar="N", help="runs of each kind, seeds 0 to N-1")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V,V",
        help="values of another setting, each combined with everything else; separated by ; where values hold commas; "
        "may be repeated",
    )
    parser.add_argument(
        "--processes",
        type=_cli.positive,
        default=1,
        metavar="N",
        help="runs at a time, each on its share of the cores; one at a time has them all",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs with an estimate of their time, and write nothing"
    )
    _cli.add_experiment_flags(parser, PRESETS, "change settings of all runs; train.py --help lists them")
    _cli.add_json_flag(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)

    from train.ablation.grid import grid, parse_schedules, parse_vary, parse_weights, preset_for

    preset = preset_for(dataclasses.replace(PRESETS[args.config](), keep_checkpoints=1), args.set)
    base = _cli.experiment_from(preset, args)
    weights, schedules = parse_weights(args.weights or ""), parse_schedules(args.schedules)
    runs = grid(base, weights, schedules, parse_vary(args.vary), args.seeds)

    from train.ablation.records import GridFolder

    folder = GridFolder(args.workdir)
    done = folder.finished(runs)

    import jax

    if not args.dry_run:
        jax.config.update("jax_platforms", "cpu")  # of this process, which only counts: accelerators are for the runs
    from train.ablation.checks import check_inputs

    check_inputs(runs, args.workdir)
    if args.dry_run:
        from train.ablation.report import plan, plan_lines

        planned = plan(runs, folder.read(), done, args.processes)
        if args.json:
            _cli.write_json(planned, args.json)
        else:
            print("\n".join(plan_lines(planned)))
        print(planned["summary"], file=sys.stderr)
        return

    from train.ablation.report import table_lines
    from train.ablation.runner import run_grid

    environment = _cli.compilation_cache_variables()
    if args.processes > 1:  # on an accelerator the first would take most of its memory
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    folder.claim()
    failures = run_grid(folder, runs, args.processes, _say, environment)
    asked = {run.name for run in runs}
    records = [record for record in folder.read() if record["name"] in asked]
    if args.json:
        result: dict[str, Any] = {"records": records, "failed": [failure._asdict() for failure in failures]}
        _cli.write_json(result, args.json)
    else:
        print("\n".join(table_lines(records)))
    if failures:
        print(
            f"failed: {', '.join(failure.name for failure in failures)}; the same command tries again", file=sys.stderr
        )
        sys.exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _cli.run(main)
