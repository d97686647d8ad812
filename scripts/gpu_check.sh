#!/usr/bin/env bash
# Check this code on a machine with a GPU, without a network, in 8 minutes: parity, benchmarks in bfloat16, a short
# training run. Everything that comes out goes into one JSON file, also what failed or was not reached in time.
#
#   scripts/gpu_check.sh [--shape NAME | --checkpoint DIR] [--out FILE] [PART ...]
#
#   --shape NAME      random weights of a released shape (default: 0.8b; describe.py lists them)
#   --checkpoint DIR  measure this checkpoint instead
#   --out FILE        default: gpu_check.json; what each part printed is beside it, in FILE.logs/
#   PART              only these: parity decode prefill train delta-rule load startup run
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3), LIMIT the seconds for all (default: 480).
# Where there is no GPU it runs on the CPU, in float32: `scripts/gpu_check.sh --checkpoint models/demo` tries it out.
# Status 0: all passed; 1: something did not; 2: a mistake in the command.
set -uo pipefail

mistake() {
  echo "error: $1 (see the head of $0)" >&2
  exit 2
}

all_parts=(parity decode prefill train delta-rule load startup run)
shape=0.8b checkpoint="" out=gpu_check.json parts=()
while (($#)); do
  case $1 in
    --shape | --checkpoint | --out)
      (($# > 1)) || mistake "$1 needs a value"
      case $1 in
        --shape) shape=$2 ;;
        --checkpoint) checkpoint=$(realpath -- "$2") || mistake "$1: there is no $2" ;;
        --out) out=$2 ;;
      esac
      shift
      ;;
    -h | --help)
      sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      [[ " ${all_parts[*]} " == *" $1 "* ]] || mistake "expected parts out of ${all_parts[*]}, got $1"
      parts+=("$1")
      ;;
  esac
  shift
done
((${#parts[@]})) || parts=("${all_parts[@]}")
out=$(realpath -m -- "$out")
[[ -d $(dirname "$out") ]] || mistake "--out: there is no folder $(dirname "$out")"

cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
"$python" -c "import jax" || mistake "jax is not installed for $python"
logs=$out.logs
rm -rf "$logs" && mkdir -p "$logs" || exit 2
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT

export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes, and torch, share the GPU
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$scratch/programs}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
backend=$("$python" -c "import jax; print(jax.default_backend())") || exit 2
vs=()
if "$python" -c "import torch, transformers.models.qwen3_5" 2>/dev/null; then vs=(--vs transformers); fi

# run NAME SECONDS COMMAND...: notes how it ended and how long it took; no part takes more time than is left for all.
run() {
  local name=$1 limit=$2 left=$((${LIMIT:-480} - SECONDS)) started=$SECONDS status word
  shift 2
  if ((left < 5)); then
    status=-1 word="skipped: no time left"
  else
    timeout --kill-after=5 $((limit < left ? limit : left)) "$@" >"$logs/$name.log" 2>&1
    status=$?
    case $status in
      0) word=passed ;;
      124 | 137) word="out of time" ;;
      *) word=failed ;;
    esac
  fi
  printf '%s\t%s\t%s\t%s\n' "$name" "$word" "$status" $((SECONDS - started)) >>"$logs/parts.tsv"
  echo "$name: $word, $((SECONDS - started)) s"
}

# Once for all parts; each would write its own otherwise.
write_random='
import sys
sys.path.insert(0, "scripts")
import _cli
from pathlib import Path
from scripts.benchmarks.subject import write_random
write_random(_cli.released_model(sys.argv[1]), Path(sys.argv[2]))
'
subject=(--checkpoint "$checkpoint")
needs_weights=" ${parts[*]} "
if [[ -z $checkpoint && $needs_weights =~ \ (decode|prefill|train|load|startup)\  ]]; then
  subject=(--checkpoint "$scratch/random")
  run weights 120 "$python" -c "$write_random" "$shape" "$scratch/random"
fi

bench() {
  local name=$1 limit=$2
  shift 2
  run "$name" "$limit" "$python" scripts/benchmark.py "$name" "$@" --json "$logs/$name.json"
}

for part in "${parts[@]}"; do
  case $part in
    parity)
      # As users run it: optimised. What pyproject.toml asks of tests besides may not be installed here.
      workers=()
      if "$python" -c "import xdist" 2>/dev/null; then workers=(-n "$(($(nproc) < 4 ? $(nproc) : 4))"); fi
      platforms=$([[ $backend == gpu ]] && echo cuda,cpu || echo "$backend")
      JAX_PLATFORMS=$platforms XLA_FLAGS= run parity 150 "$python" -m pytest -q "${workers[@]}" -p no:cacheprovider -o addopts= \
        -o filterwarnings=default -m "not slow and not peer" tests/test_goldens.py
      ;;
    decode) bench decode 150 "${subject[@]}" "${vs[@]}" --acceptance 0.52,0.89 --num-draft-tokens 1,3 --repeats 3 ;;
    prefill) bench prefill 60 "${subject[@]}" "${vs[@]}" --repeats 3 ;;
    train) bench train 120 "${subject[@]}" "${vs[@]}" --repeats 2 ;;
    delta-rule)
      [[ -n $checkpoint ]] && of=(--checkpoint "$checkpoint") || of=(--shape "$shape")
      bench delta-rule 60 "${of[@]}" "${vs[@]}" --lengths 512 --repeats 2
      ;;
    load) bench load 60 "${subject[@]}" "${vs[@]}" --repeats 1 ;;
    startup) bench startup 60 "${subject[@]}" --repeats 1 ;;
    run) run run 90 "$python" scripts/train.py --config tiny --workdir "$logs/run" ;;
  esac
done

"$python" - "$logs" "$out" "$SECONDS" "${checkpoint:-$shape}" <<'END'
import json
import sys
from pathlib import Path

import jax

logs, out, seconds, model = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
parts = {}
for line in (logs / "parts.tsv").read_text().splitlines():
    name, ended, status, took = line.split("\t")
    part = parts[name] = {"ended": ended, "status": int(status), "seconds": int(took)}
    log = logs / f"{name}.log"
    printed = log.read_text(errors="replace").splitlines() if log.exists() else []
    if ended != "passed" or name == "parity":
        part["last_lines"] = printed[-1 if ended == "passed" else -15 :]
    if (result := logs / f"{name}.json").exists():
        part["result"] = json.loads(result.read_text())
    if name == "run" and (metrics := logs / "run" / "metrics.jsonl").exists():
        rows = [json.loads(row) for row in metrics.read_text().splitlines()]
        part["result"] = {"first": rows[0], "last": rows[-1]}
passed = all(part["ended"] == "passed" for part in parts.values())
record = {
    "passed": passed,
    "model": model,
    "backend": jax.default_backend(),
    "devices": [device.device_kind for device in jax.devices()],
    "jax": jax.__version__,
    "seconds": seconds,
    "parts": parts,
}
out.write_text(json.dumps(record, indent=2) + "\n")
print(f"{out}: {'all passed' if passed else 'not all passed'}, {seconds} s")
sys.exit(not passed)
END
