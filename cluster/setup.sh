# shellcheck shell=bash
# Sourced by the scripts beside it. Finds Python, then offers
#   ensure_installed [EXTRA]  makes <repository>/.venv and installs the product there, if that is not done already
#   run_module MODULE …       runs cluster/MODULE.py in that environment, in place of the calling script
# PYTHON names another interpreter than the one found here.

repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
export CALLER_DIR="$PWD"  # relative paths on the command line mean this folder

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    is_supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python >= 3.11; name another, or unset it."
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in "$repository/.venv/bin/python" python3 python3.13 python3.12 python3.11; do
    is_supported "$candidate" && printf '%s' "$candidate" && return
  done
  fail "no Python >= 3.11 found (python3 is $(python3 --version 2>&1 || true))." \
    "On Debian or Ubuntu: apt-get install python3 python3-venv. Elsewhere, set PYTHON=/path/to/python3.11."
}

# pip, Ray and the model hubs keep caches and settings under HOME.
if [[ -z "${HOME:-}" || ! -w "$HOME" ]]; then
  echo "HOME (${HOME:-unset}) cannot be written: using $repository/.cluster/home in its place." >&2
  export HOME="$repository/.cluster/home"
  mkdir -p -- "$HOME" || fail "$repository cannot be written either: copy it to a folder that can."
fi

ensure_installed() {
  local python
  python="$(find_python)" || exit 1
  "$python" -I "$repository/cluster/install.py" "$@"
}

run_module() {
  local python="$repository/.venv/bin/python"
  # stop.sh must work without an environment too.
  [[ -x "$python" ]] || python="$(find_python)" || exit 1
  cd -- "$repository" || exit 1
  exec "$python" -m "cluster.$1" "${@:2}"
}
