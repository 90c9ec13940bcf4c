#!/usr/bin/env bash
# All tests that need a GPU, and the GPU benchmarks, on a machine that has one.
#
#   tools/gpu_check.sh [--wheels FOLDER] [--out FOLDER] [--python PYTHON] [--tests-only]
#
# PYTHON (python3) must have torch with CUDA and Triton, as the machine's own installation does; it is
# never changed: what else is needed goes into a virtual environment beside the results, from
# FOLDER with wheels if the machine reaches no registry.  To fill such a folder elsewhere:
#
#   pip download -d FOLDER --python-version 3.12 --only-binary :all: --no-deps \
#       google-crc32c msgspec pyzmq zarr donfig numcodecs typer rich prometheus-client pyyaml \
#       hypothesis pytest pytest-timeout pytest-xdist scipy rapids-logger kvikio-cu13 libkvikio-cu13
#
# Exit codes: 0 all passed; 1 something failed; 2 wrong arguments; 3 no GPU here.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
wheels= out=/tmp/gpu-check python=python3 bench=1
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --tests-only) bench=0; shift ;;
        *) echo "gpu_check: $1: expected --wheels, --out, --python or --tests-only" >&2; exit 2 ;;
    esac
done
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu_check: no CUDA device that torch of $python can use here; nothing was checked" >&2
    exit 3
fi
mkdir -p "$out"
cd "$root" || exit 1

venv=$out/venv
[ -x "$venv/bin/python" ] ||
    "$python" -m venv --without-pip --system-site-packages "$venv" || exit 1
# packages that a virtual environment inside a virtual environment does not see
"$python" -c 'import site; print("\n".join(site.getsitepackages()))' \
    >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/above.pth"
install=("$python" -m pip --python "$venv/bin/python" install -q --no-deps)
[ -n "$wheels" ] && install+=(--no-index --find-links "$wheels")
for need in google_crc32c:google-crc32c msgspec:msgspec zmq:pyzmq zarr:zarr donfig:donfig \
    numcodecs:numcodecs typer:typer rich:rich prometheus_client:prometheus-client yaml:pyyaml \
    pyarrow:pyarrow numba:numba hypothesis:hypothesis pytest:pytest xdist:pytest-xdist \
    pytest_timeout:pytest-timeout scipy:scipy; do
    "$venv/bin/python" -c "import ${need%%:*}" 2>/dev/null ||
        "${install[@]}" "${need##*:}" || exit 1
done
"$venv/bin/python" -c 'import kvikio' 2>/dev/null ||
    "${install[@]}" rapids-logger libkvikio-cu13 kvikio-cu13 ||
    echo "gpu_check: no kvikio: files are read by the host"

failed=0
step() {
    echo "== $*"
    "$@" || { failed=1; echo "== FAILED: $*"; }
}
step "$venv/bin/python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'
# tests/gpu/test_replay.py: steps as one CUDA graph, against eager ones, and their launches
step "$venv/bin/python" -m pytest tests/gpu tests/clients/device tests/clients/test_prefetch.py -rs
if [ $bench = 1 ]; then
    step "$venv/bin/python" -m tools.bench gpu --folder "$out/bench" --out "$out/gpu.jsonl"
fi
exit $failed
