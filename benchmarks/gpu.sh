#!/usr/bin/env bash
# The first hour on a GPU (`make gpu`): make an environment beside the torch that is installed there, build for the card,
# and go on with the stages of benchmarks/gpu.py where the last call stopped. The installed environment is not changed.
# What cannot be installed or built is named in gpu-0-setup.txt; the stages go on with the rest.
#
# A machine without a network gets part 1 of `make gpu-bundle ALL=1` with every call, and one of the others beside it, as
# docs/cuda.md shows. quack's rows and Liger's scaled cross-entropy (STAGE=2,3) need all parts.
#
#   PYTHON     the interpreter whose torch sees the GPU (default: python3)
#   STAGE      run these stages only, in this order: 2,3 (default: all that are not finished)
#   WHEELS     a folder of wheels, for a machine without a network (default: build/gpu-bundle, if it is there)
#   BUDGET_S   seconds of this call (default: 540)
#   RESULTS    folder of the results (default: benchmarks/results)
#   OUT        a folder: gpu-results.tar.gz with all results goes there, also after a failure
#   PEERS      1: install the peers of gpu-peers.txt and the runner's packages from the network (default: 0)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
BUDGET_S=${BUDGET_S:-540}
RESULTS=${RESULTS:-benchmarks/results}
REHEARSAL=${BENCHMARK_REHEARSAL:-0}
[ -n "${WHEELS:-}" ] || [ ! -d build/gpu-bundle ] || [ "$REHEARSAL" = 1 ] || WHEELS=build/gpu-bundle
if [ "${WHEELS:-}" = build/gpu-bundle ] && [ ! -d build/gpu-bundle/1 ]; then
    echo "make gpu: build/gpu-bundle lacks part 1: send it with every call" >&2
    exit 1
fi
VENV=$PWD/.venv-gpu
[ "$REHEARSAL" = 0 ] || VENV=$(mktemp -d)/venv

"$PYTHON" -c '
import sys
try:
    import torch
except ImportError:
    sys.exit(f"make gpu: {sys.executable} has no torch. Name the interpreter that has it: PYTHON=...")
if not torch.cuda.is_available() and sys.argv[1] == "0":
    sys.exit(f"make gpu: torch {torch.__version__} of {sys.executable} finds no CUDA device")
' "$REHEARSAL" || exit 1
mkdir -p "$RESULTS"
LOG=$RESULTS/gpu-0-setup.txt
echo "set up for $PYTHON" >"$LOG"
pack() { [ -z "${OUT:-}" ] || (cd "$RESULTS" && tar -czf "$OUT/gpu-results.tar.gz" gpu-*); }
trap pack EXIT

# An environment of our own whose packages come before those installed beside torch, which stay visible. (A venv made
# from a venv sees the packages of neither of its parents: hence the .pth.)
if [ "$(cat "$VENV/made-by" 2>/dev/null)" != "$PYTHON" ]; then
    "$PYTHON" -m venv --without-pip --clear "$VENV" || exit 1
    "$PYTHON" -c '
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
' >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/beside.pth"
    echo "$PYTHON" >"$VENV/made-by"
fi
PATH="$VENV/bin:$("$PYTHON" -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH"
# Where setup.py looks for nvcc: compute-sanitizer lies beside it.
PATH="$PATH${CUDA_HOME:+:$CUDA_HOME/bin}${CUDA_PATH:+:$CUDA_PATH/bin}:/usr/local/cuda/bin"
export PATH PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

missing() { # of the packages named, as NAME or NAME>=MAJOR, those that are absent or older
    "$VENV/bin/python" -c '
import importlib.metadata, sys
for wanted in sys.argv[1:]:
    name, _, least = wanted.partition(">=")
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if not found or int(found.partition(".")[0]) < int(least or 0):
        print(wanted)' "$@"
}
pip_install() {
    "$PYTHON" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check --retries 1 --timeout 10 "$@"
}
pip_install --help >/dev/null 2>&1 ||
    echo "make gpu: $PYTHON has no pip from version 22.3 on: what is absent cannot be installed" | tee -a "$LOG"
install() { pip_install "$@" >>"$LOG" 2>&1 || { echo "could not install $*" | tee -a "$LOG" && return 1; }; }
if [ -n "${WHEELS:-}" ]; then
    joined=$(mktemp -d)
    while read -r name count; do # of the pieces of a wheel that is larger than a part
        mapfile -t pieces < <(find "$WHEELS" -name "$name.*of$count" | awk -F/ '{print $NF, $0}' | sort -V | cut -d' ' -f2)
        if [ ${#pieces[@]} = "$count" ]; then cat "${pieces[@]}" >"$joined/$name"; else echo "lacks parts of $name" | tee -a "$LOG"; fi
    done < <(find "$WHEELS" -name '*.whl.*of*' | sed -E 's|.*/(.*)\.[0-9]+of([0-9]+)$|\1 \2|' | sort -u)
    new=()
    for wheel in $(find "$WHEELS" "$joined" -name '*.whl'); do
        [ -e "$VENV/$(basename "$wheel").here" ] || new+=("$wheel")
    done
    # All at once takes a second. One after the other if one of them cannot be installed.
    failed=0
    [ ${#new[@]} = 0 ] || pip_install --no-index --no-deps "${new[@]}" >/dev/null 2>&1 || failed=1
    for wheel in "${new[@]}"; do
        [ $failed = 0 ] || install --no-index --no-deps "$wheel" || continue
        touch "$VENV/$(basename "$wheel").here"
    done
else
    mapfile -t needed < <(missing "setuptools>=77" "pybind11>=2" "pytest>=8")
    command -v ninja >/dev/null || needed+=(ninja)
    [ ${#needed[@]} = 0 ] || install "${needed[@]}"
    if [ "${PEERS:-0}" = 1 ]; then
        while read -r peer; do [ -z "$(missing "$peer")" ] || install --no-deps "$peer"; done <benchmarks/gpu-peers.txt
        mapfile -t needed < <(missing transformers datasets pydantic pyyaml rich safetensors matplotlib aiohttp scipy)
        [ ${#needed[@]} = 0 ] || install "${needed[@]}"
    fi
fi
if [ "$REHEARSAL" = 0 ]; then # for this card only, which takes a quarter of the time
    card=$("$VENV/bin/python" -c '
import torch
major, minor = torch.cuda.get_device_capability()
print(f"{major}{minor}" + ("a" if major in (9, 10) else ""))')
    export DAPO_KERNELS_CUDA_ARCHS=${DAPO_KERNELS_CUDA_ARCHS:-$card}
    # egg_info: the runner reads its version, and nothing is installed here.
    build() { timeout 240 env DAPO_KERNELS_CUDA="$1" "$VENV/bin/python" setup.py -q egg_info build_ext --inplace >>"$LOG" 2>&1; }
    build 1
    status=$?
    [ $status = 0 ] || build 0 # without nvcc or with an error in a kernel: the stages measure Triton
    echo "exit status $status" >>"$LOG"
fi
echo "set up after $SECONDS s"
"$VENV/bin/python" -m benchmarks.gpu --seconds $((BUDGET_S - SECONDS)) --results "$RESULTS" ${STAGE:+--stage "$STAGE"}
