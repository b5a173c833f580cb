#!/usr/bin/env bash
# headway bench experts beside torch's grouped product and, with vLLM's install.sh as argument, vLLM's fused experts: moe-peers.sh [install.sh]
# Run in the repository's root, with headway importable and $OUT set.
set -u
export HEADWAY_CACHE=${HEADWAY_CACHE:-/tmp/headway-cache}
if ! python3 -c "import numba" 2>/dev/null; then  # vLLM imports it; an empty one does
  mkdir -p /tmp/stub/numba && cat > /tmp/stub/numba/__init__.py <<'P'
def njit(*a, **k): return a[0] if a and callable(a[0]) else (lambda f: f)
jit, prange = njit, range
P
  export PYTHONPATH=/tmp/stub${PYTHONPATH:+:$PYTHONPATH}
fi
[ -z "${1:-}" ] || . "$1"
python3 -P -m headway bench experts --shape qwen3-30b-a3b --shape deepseek-v2-lite --shape mixtral-8x7b --shape gpt-oss-20b \
  --tokens ${TOKENS:-1,16,64,256,4096} --output "$OUT/bench-experts.json"
