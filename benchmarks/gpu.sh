#!/usr/bin/env bash
# The first hour on a GPU (`make gpu`): make an environment beside the torch that is installed there, build for the card,
# and go on with the stages of benchmarks/gpu.py where the last call stopped. The installed environment is not changed.
#
#   PYTHON     the interpreter whose torch sees the GPU (default: python3)
#   STAGE      run this stage only, 1 to 6
#   WHEELS     a folder of wheels, for a machine without a network (make gpu-bundle makes it)
#   BUDGET_S   seconds of this call (default: 540)
#   RESULTS    folder of the results (default: benchmarks/results)
#   PEERS      1: install the packages of gpu-peers.txt, without their dependencies, and those of the runner that are
#              missing (default: 0). The report names peers that are absent or whose imports fail. vLLM must be there
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
BUDGET_S=${BUDGET_S:-540}
REHEARSAL=${BENCHMARK_REHEARSAL:-0}
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
' "$REHEARSAL"

# An environment of our own whose packages come before those installed beside torch, which stay visible. (A venv made
# from a venv sees the packages of neither of its parents: hence the .pth.)
if [ "$(cat "$VENV/made-by" 2>/dev/null)" != "$PYTHON" ]; then
    "$PYTHON" -m venv --without-pip --clear "$VENV"
    echo "$PYTHON" >"$VENV/made-by"
    "$PYTHON" -c '
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
' >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/beside.pth"
fi
PATH="$VENV/bin:$("$PYTHON" -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH"
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
install() {
    local offline=()
    [ -n "${WHEELS:-}" ] && offline=(--no-index --find-links "$WHEELS")
    "$PYTHON" -m pip --python "$VENV/bin/python" install --quiet --disable-pip-version-check --retries 1 --timeout 10 \
        "${offline[@]}" "$@"
}
mapfile -t needed < <(missing "setuptools>=77" "pybind11>=2" "pytest>=8")
command -v ninja >/dev/null || needed+=(ninja)
if [ ${#needed[@]} -gt 0 ]; then
    install "${needed[@]}" || {
        echo "make gpu: requires ${needed[*]} beside torch. Without a network: WHEELS=folder make gpu" >&2
        exit 1
    }
fi
if [ "${PEERS:-0}" = 1 ]; then
    while read -r peer; do
        [ -z "$(missing "$peer")" ] || install --no-deps "$peer" || echo "no $peer: the report names it as absent"
    done <benchmarks/gpu-peers.txt
    mapfile -t needed < <(missing transformers datasets pydantic pyyaml rich safetensors matplotlib aiohttp scipy)
    [ ${#needed[@]} = 0 ] || install "${needed[@]}" || echo "stage 5 lacks ${needed[*]}"
fi
if [ "$REHEARSAL" = 0 ]; then # for this card only, which takes a quarter of the time
    card=$("$VENV/bin/python" -c '
import torch
major, minor = torch.cuda.get_device_capability()
print(f"{major}{minor}" + ("a" if major in (9, 10) else ""))')
    DAPO_KERNELS_CUDA_ARCHS=${DAPO_KERNELS_CUDA_ARCHS:-$card} "$VENV/bin/python" setup.py -q build_ext --inplace
fi
echo "set up after $SECONDS s"
exec "$VENV/bin/python" -m benchmarks.gpu --seconds $((BUDGET_S - SECONDS)) ${STAGE:+--stage "$STAGE"} \
    ${RESULTS:+--results "$RESULTS"}
