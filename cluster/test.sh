#!/usr/bin/env bash
# Everything that must hold: format, lint, types, tests. With arguments only pytest, with these.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
ensure_installed test
cd -- "$repository"
bin="$repository/.venv/bin"
if (($# == 0)); then
  "$bin/python" -m ruff format --check .
  "$bin/python" -m ruff check .
  "$bin/python" -m mypy
fi
exec "$bin/python" -m pytest "$@"
