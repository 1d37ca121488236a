#!/usr/bin/env bash
# Checks and times the kernels on the GPU or TPU that is here, with the python3 on the path, in less than six minutes.
# Writes device.jsonl and device.md into $OUT, or device_check without it. Needs JAX 0.11.2 or newer for the device,
# flax and jaxtyping; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec timeout --kill-after=5 350 python3 scripts/check_kernels.py --device --output "${OUT:-device_check}"
