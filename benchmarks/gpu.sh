#!/usr/bin/env bash
# What the owner of a GPU runs (`make gpu`): build beside the torch that is installed there, then the gpu-marked tests,
# then the benchmarks with what is left of the time. Nothing of the installed environment is changed.
#
#   PYTHON     the interpreter whose torch sees the GPU (default: python3)
#   WHEELS     a folder of wheels, for a machine without a network
#   BUDGET_S   seconds for everything (default: 530); the report names what they did not suffice for
#   RESULTS    where figures go (default: benchmarks/results)
#   PEERS      1: install the other libraries' kernels that are wheels, without what they ask for (default: 0). Those
#              whose imports then fail are named in the report; verl wants ray, tensordict and hydra-core beside it
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
BUDGET_S=${BUDGET_S:-530}
RESULTS=${RESULTS:-benchmarks/results}
PEERS=${PEERS:-0}
PEER_WHEELS=(liger-kernel quack-kernels cut-cross-entropy verl trl)
VENV=.venv-gpu

"$PYTHON" -c '
import sys
try:
    import torch
except ImportError:
    sys.exit(f"make gpu: {sys.executable} has no torch; PYTHON=... names the interpreter that has it")
if not torch.cuda.is_available():
    sys.exit(f"make gpu: torch {torch.__version__} of {sys.executable} finds no CUDA device")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
'

# An environment of our own whose packages come before those installed beside torch, which stay visible. (A venv made
# from a venv sees the packages of neither of its parents: hence the .pth.)
"$PYTHON" -m venv --without-pip --clear "$VENV"
"$PYTHON" -c '
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
' >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/beside.pth"
PATH="$PWD/$VENV/bin:$("$PYTHON" -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH"
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
        echo "make gpu: needs ${needed[*]} beside torch; without a network put their wheels, and those of what they" \
            "need, into a folder: WHEELS=folder make gpu" >&2
        exit 1
    }
fi
[ -z "$(missing matplotlib)" ] || install matplotlib || echo "no matplotlib: there will be no plot"
if [ "$PEERS" = 1 ]; then
    for peer in "${PEER_WHEELS[@]}"; do
        [ -z "$(missing "$peer")" ] || install --no-deps "$peer" || echo "no $peer: the report names who is absent"
    done
fi

"$VENV/bin/python" setup.py -q build_ext --inplace
echo "set up after $SECONDS s"

status=0
gpu_tests() { # of a folder: only files with gpu tests, since collecting the others would ask for more packages
    mapfile -t files < <(grep -rlE 'mark\.gpu' "$1" --include='test_*.py')
    # Half of the time at most, so that a test that hangs leaves some for figures; SIGINT lets pytest say what it had.
    timeout --signal=INT --kill-after=20 $((BUDGET_S / 2)) \
        "$VENV/bin/python" -m pytest -p no:cacheprovider -m gpu "${files[@]}" || status=1
}
gpu_tests tests/kernels
absent=$(missing transformers datasets pydantic pyyaml rich safetensors matplotlib | tr '\n' ' ')
if [ -z "$absent" ]; then gpu_tests tests/runner; else echo "tests/runner left out: $absent not installed"; fi
echo "tests done after $SECONDS s"

# The CUDA kernels under the toolkit's checkers, on rows of two and four slices that start anywhere: what stays silent in
# a plain run.
if command -v compute-sanitizer >/dev/null && "$VENV/bin/python" -c 'import dapo_kernels._cuda' 2>/dev/null; then
    for tool in memcheck racecheck; do
        timeout --kill-after=10 45 compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 \
            "$VENV/bin/python" -m pytest -q -p no:cacheprovider -m gpu tests/kernels/test_gpu_execution.py \
            -k 'every_kernel_of_the_cuda_backend and 32003' || { echo "compute-sanitizer $tool: exit status $?"; status=1; }
    done
else
    echo "compute-sanitizer left out: not on the PATH, or the CUDA module is not built"
fi

left=$((BUDGET_S - SECONDS))
"$VENV/bin/python" benchmarks/run.py --suite gpu --seconds "$((left > 30 ? left : 30))" --out "$RESULTS" || status=1
# Rows of CUDA_DEFAULTS (dapo_kernels/backends/registry.py) that these figures speak for, for a person to commit.
newest=$(ls -t "$RESULTS"/gpu-*.json 2>/dev/null | head -1)
if [ -n "$newest" ]; then
    "$VENV/bin/python" -m benchmarks.decide "$newest" | tee "${newest%.json}-defaults.txt" || status=1
fi
echo "all done after $SECONDS s"
exit $status
