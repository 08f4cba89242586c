#!/usr/bin/env bash
# Resolves the versions of constraints/EXTRA.txt as pip does for a user who has configured nothing, and writes the file.
#
#   shell/resolve_constraints.sh gpu python3.11 python3.12          writes constraints/gpu.txt for these interpreters
#   shell/resolve_constraints.sh --check gpu python3.11 python3.12  only checks that pip can resolve with that file
#
# EXTRA is cpu or gpu. Nothing is installed but torch's CPU build, which is on no default index, into a venv that is
# removed afterwards. Megatron's packages are resolved too, but for two: megatron-core asks for Python 3.12, and
# transformer-engine-torch is a source package that needs torch for CUDA even to name its dependencies.
#
# Exit code 1: no versions fit together. 75: the package index, or torch's CPU build, cannot be reached from here.
set -euo pipefail
shopt -s inherit_errexit

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
eval "$(grep -E '^(torch_version|megatron_version|cpu_torch_index)=' "$root/shell/setup.sh")"
limit_s=900 # for one call of pip

die() {
    echo "resolve_constraints: error: $1" >&2
    exit "${2:-1}"
}

# Which certificates are trusted and which proxy is used is the network's part, and stays.
unconfigured_pip() {
    local name unset=()
    for name in $(compgen -e PIP_); do
        [[ "$name" == PIP_CERT || "$name" == PIP_PROXY ]] || unset+=(-u "$name")
    done
    env "${unset[@]}" PIP_CONFIG_FILE=/dev/null timeout "$limit_s" "$venv/bin/python" -m pip "$@"
}

# As in setup.sh: from pip's own sources if they have it, else from PyTorch's index.
install_cpu_torch() {
    local pip=("$venv/bin/python" -m pip install --quiet --no-deps --retries 1 --timeout 30)
    timeout "$limit_s" "${pip[@]}" "torch==$torch_version+cpu" 2>/dev/null ||
        timeout "$limit_s" "${pip[@]}" --index-url "$cpu_torch_index" "torch==$torch_version+cpu" ||
        die "no CPU build of torch $torch_version can be reached from here" 75
}

# resolve PYTHON OPTION...: writes the report of a dry run to $work/PYTHON's version.json.
resolve() {
    local python="$1" version wanted=(triton einops)
    shift
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || die "$python does not run"
    venv="$work/venv-$version"
    "$python" -m venv "$venv"
    # Older pips download every wheel in full, which is gigabytes; fast-deps reads parts of a wheel where the index does
    # not offer its metadata.
    unconfigured_pip install --quiet --retries 1 --timeout 30 --upgrade "pip>=26" ||
        die "the package index cannot be reached from here" 75
    case "$extra" in
        cpu) install_cpu_torch && wanted+=("$work/source[cpu,dev]") ;;
        # Kernels are compiled at run time, and CUDA's headers refuse a compiler of another release than the runtime that
        # torch asks for.
        gpu) wanted+=("$work/source[gpu,dev,transformer_engine]" "cuda-toolkit[nvcc,cccl]") ;;
    esac
    unconfigured_pip install --dry-run -qq --use-feature=fast-deps --report "$work/$version.json" "$@" "${wanted[@]}" || {
        (($? != 124)) || die "Python $version: pip has not resolved the versions within $limit_s s"
        die "Python $version: pip finds no versions that fit together"
    }
    echo "resolve_constraints: Python $version, $extra: resolved in $SECONDS s"
}

# Versions that differ between the interpreters get a marker.
write_constraints() {
    EXTRA="$extra" TORCH="$torch_version" MEGATRON="$megatron_version" python3 - "$work"/*.json <<'EOF'
import datetime, json, os, pathlib, sys

extra, torch = os.environ["EXTRA"], os.environ["TORCH"]
found = {}  # interpreter -> package -> version
for path in sorted(sys.argv[1:], key=lambda p: int(p.rpartition("3.")[2].removesuffix(".json"))):
    installed = json.loads(pathlib.Path(path).read_text())["install"]
    versions = {p["metadata"]["name"].lower().replace("_", "-"): p["metadata"]["version"] for p in installed}
    del versions["one-step-off"]
    versions["megatron-core"] = os.environ["MEGATRON"]
    if extra == "cpu":
        versions["torch"] = f"{torch}+cpu"
    else:
        # A user's own sources may have the CPU build, which pip would prefer as the later one of two equal versions.
        versions["torch"] += f",!={torch}+cpu"
        versions["transformer-engine-torch"] = versions["transformer-engine"]
    found[pathlib.Path(path).stem] = versions
print(f"# Versions that pip resolved together: Python {', '.join(found)}, x86-64 Linux, {datetime.date.today()}.")
print(f"# Made with: shell/resolve_constraints.sh {extra} {' '.join('python' + python for python in found)}")
if extra == "gpu":
    print("# Resolved, not installed: the build of transformer-engine-torch, a source package, is not tried here.")
last = list(found)[-1]
for name in sorted(set().union(*found.values())):
    by_version = {}
    for python, versions in found.items():
        by_version.setdefault(versions.get(name), []).append(python)
    by_version.pop(None, None)
    if len(by_version) == 1:
        print(f"{name}=={next(iter(by_version))}")
        continue
    for version, pythons in by_version.items():
        marker = f'python_version <= "{pythons[-1]}"' if last not in pythons else f'python_version >= "{pythons[0]}"'
        print(f"{name}=={version}; {marker}")
EOF
}

check=""
if [[ "${1:-}" == --check ]]; then
    check=yes
    shift
fi
extra="${1:-}"
[[ "$extra" == cpu || "$extra" == gpu ]] || die "which constraints? cpu or gpu" 2
shift
(($# > 0)) || set -- python3
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
# A copy, because building the metadata leaves a folder in the source.
cp -r "$root"/{setup.cfg,pyproject.toml,README.md,LICENSE,one_step_off,agent_loop,config} "$work/source"
for python in "$@"; do
    resolve "$python" ${check:+--constraint "$root/constraints/$extra.txt"}
done
if [[ -z "$check" ]]; then
    write_constraints >"$work/constraints.txt"
    mv "$work/constraints.txt" "$root/constraints/$extra.txt"
fi
