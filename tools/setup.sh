#!/usr/bin/env bash
# Makes .venv and installs the project into it.  usage: tools/setup.sh cpu|cuda [EXTRA]
set -euo pipefail
cd "$(dirname "$0")/.."

die() { printf '%s\n' "$@" >&2; exit 1; }
[[ ${1:-} == cpu || ${1:-} == cuda ]] || die "unknown TORCH '${1:-}'; allowed: auto, cpu, cuda"

usable() { "$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; }
has_venv() { "$1" -c "import venv, ensurepip" 2>/dev/null; }

if [[ ! -x .venv/bin/pip ]]; then
  python="" without_venv=""
  for candidate in python3.13 python3.12 python3.11 python3; do
    usable "$candidate" || continue
    if has_venv "$candidate"; then python=$candidate; break; fi
    without_venv=${without_venv:-$candidate}
  done
  if [[ -z $python && -n $without_venv ]]; then
    version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    die "$without_venv has no venv; on Debian or Ubuntu: apt-get install python$version-venv"
  fi
  [[ -n $python ]] || die "No Python of version 3.11 or later was found; on Debian or Ubuntu: apt-get install python3 python3-venv" \
    "(elsewhere: https://www.python.org/downloads, or 'uv python install 3.13' and put it on the PATH)"
  echo "making .venv with $python ($("$python" --version))"
  "$python" -m venv .venv
fi

# modules are compiled when they are first imported, unless Python is told not to keep what it compiles
[[ -n ${PYTHONDONTWRITEBYTECODE:-} ]] || export PIP_NO_COMPILE=1

# pip says hundreds of times that a file in a --find-links folder is none of its own
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }

quick=(-q --retries 0 --timeout 20 -c constraints.txt)
# uv is far faster than pip, but does not read pip's configuration: an index in the place of PyPI is for pip, and
# where uv fails pip tries again, whose message is the one shown
if pip config list | grep -qE '[.](index-url|no-index)=' || ! pip install "${quick[@]}" uv 2>/dev/null; then
  uv() { false; }
else
  uv() {
    UV_HTTP_TIMEOUT=20 .venv/bin/python -m uv pip install -q --python .venv/bin/python \
      ${PIP_FIND_LINKS:+--find-links "${PIP_FIND_LINKS// /,}"} \
      ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} -c constraints.txt "$@" 2>/dev/null
  }
fi

torch=$(sed -n 's/^torch==//p' constraints.txt)
installed=$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
cpu_only=https://download.pytorch.org/whl/cpu
if [[ $1 == cuda ]]; then
  if [[ $installed == *+cpu ]]; then pip uninstall -q -y torch; fi
  echo "installing torch $torch with CUDA (several GB at the first time)"
  uv "torch==$torch" || pip install -q "torch==$torch" -c constraints.txt
elif [[ $installed != "$torch"* ]]; then
  # The CPU build is a tenth of the size. It comes from where pip is told to look, or from PyTorch's own index; other
  # systems than Linux have no separate CPU build.
  echo "installing torch $torch for the CPU"
  uv "torch==$torch+cpu" ||
    uv "torch==$torch+cpu" --extra-index-url "$cpu_only" --index-strategy unsafe-best-match ||
    pip install "${quick[@]}" "torch==$torch+cpu" 2>/dev/null ||
    pip install "${quick[@]}" "torch==$torch+cpu" --extra-index-url "$cpu_only" 2>/dev/null ||
    uv "torch==$torch" || pip install -q "torch==$torch" -c constraints.txt
fi
echo "installing the project and its dependencies"
uv -e ".[dev${2:+,$2}]" || pip install -q -e ".[dev${2:+,$2}]" -c constraints.txt
