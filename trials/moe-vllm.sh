#!/usr/bin/env bash
# Both engines on the same random checkpoint, one after the other: moe-vllm.sh SHAPE [LAYERS] [vllm's install.sh]
# Run in the repository's root, with headway importable and $OUT set. WHAT (default "touched vllm headway") says which parts run.
set -u
shape=${1:?qwen3-30b-a3b or deepseek-v2-lite}; layers=${2:-12}; install=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
base=/dev/shm; [ -w $base ] || base=/tmp
folder=$base/$shape-$layers
export HEADWAY_CACHE=${HEADWAY_CACHE:-/tmp/headway-cache}
[ -f "$folder/config.json" ] || python3 "$here/moe-vllm.py" make "$folder" "$shape" "$layers" || exit 1
for what in ${WHAT:-touched vllm headway}; do
  if [ "$what" = vllm ]; then
    ( [ -z "$install" ] || . "$install"; python3 "$here/moe-vllm.py" vllm "$folder" 2>&1 | grep -v -e INFO -e WARNING | tail -30 )
  else
    python3 "$here/moe-vllm.py" "$what" "$folder" 2>&1 | tail -40
  fi
done
python3 "$here/moe-vllm.py" table "$folder"
