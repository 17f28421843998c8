#!/usr/bin/env bash
# The tests marked `versions`, which compile the kernels, with each triton that `available.TRIED` names, or with those in
# VERSIONS, each in a folder of its own and beside .venv's torch.  usage: [VERSIONS="3.9 3.10"] tools/test-versions.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
versions=${VERSIONS:-$("$python" -c '
from cs336_systems.attention.available import TRIED
(major, first), (_, last) = TRIED
print(*(f"{major}.{minor}" for minor in range(first, last + 1)))')}

failed=()
for version in $versions; do
  folder=$PWD/.venv/triton-$version
  if [[ ! -e $folder/.installed ]]; then
    echo "installing triton $version (about 0.9 GB)"
    rm -rf "$folder"
    "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "triton==$version.*" &&
      touch "$folder/.installed" || { failed+=("$version"); continue; }
  fi
  echo "triton $version"
  PYTHONPATH=$folder TRITON_CACHE_DIR=$folder/cache "$python" -m pytest -q -n 2 -m versions \
    $(grep -l 'mark\.versions' tests/*.py) || failed+=("$version")
done
[[ ${#failed[@]} == 0 ]] || { echo "failed with triton: ${failed[*]}" >&2; exit 1; }
