#!/usr/bin/env bash
# Measures this machine: colocated, disaggregated, one step off, and one step off with overlapped sync, one after another
# (docs/measured/benchmarks.md).
#
#   BENCHMARK=NAME   another benchmark in benchmarks/, such as weight_sync or learning (default: throughput)
#   EXTRA=gpu        for a config that runs on GPUs, given with --config (default: cpu, even on a machine with GPUs)
#
# Arguments go to the benchmark, as in: shell/bench.sh --lengths short longtail:128 --runs 2 --steps 20
# All paths are relative to the working directory, and so is the folder of the results, outputs/bench_NAME, unless --out names
# another one.
set -euo pipefail

export EXTRA="${EXTRA:-cpu}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
name="${BENCHMARK:-throughput}"
if [[ ! "$name" =~ ^[a-z_]+$ || ! (-f "$root/benchmarks/$name.py" || -f "$root/benchmarks/$name/__main__.py") ]]; then
    echo "bench: error: BENCHMARK=$name: there is no such benchmark in benchmarks/" >&2
    exit 2
fi
venv="$("$root/shell/setup.sh" --print-venv)"
"$root/shell/setup.sh"
args=()
[[ " $* " == *" --out"[\ =]* ]] || args=(--out "outputs/bench_$name")
# benchmarks/ is no installed package. -P: a folder in the working directory must not shadow one of our packages.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -P -m "benchmarks.$name" "${args[@]}" "$@"
