#!/usr/bin/env bash
# Runs one of the course's own test suites against this project: their files, our tests/adapters.py, in a temporary
# copy of tests/. The suites fix a network port, so run one at a time.  usage: tools/course-tests.sh path/to/their/tests
set -euo pipefail
[[ -n ${1:-} ]] || { echo "say which suite: make course-tests SUITE=path/to/assignment2-systems/tests" >&2; exit 2; }
compgen -G "$1/test_*.py" >/dev/null || { echo "$1 holds no test_*.py: SUITE is the course's tests folder" >&2; exit 2; }
suite=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

cp -R tests "$copy/tests"
rm -f "$copy"/tests/test_*.py "$copy/tests/conftest.py"
cp -R "$suite/." "$copy/tests"
cp tests/adapters.py "$copy/tests/adapters.py"
touch "$copy/tests/__init__.py" # their tests import the adapters relatively
cd "$copy"
"$python" -m pytest -p no:cacheprovider --rootdir "$copy" -ra "$copy/tests"
