#!/usr/bin/env bash
# Makes the virtual environments in which the benchmark runs its peers: benchmarks/.venvs/{specforge,speculators}.
#
#   bash benchmarks/peers/setup.sh [specforge] [speculators]      (default: both)
#
# The peers are installed without their dependencies (serving engines, CUDA builds); only what their model code
# imports is added, torch and transformers in the same versions for both. An environment whose stamp names the
# same packages is left as it is; nothing is ever deleted. PYTHON names the interpreter (3.11 or later).
set -euo pipefail

python="${PYTHON:-python3}"
venvs="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venvs"
common=(torch==2.13.0 transformers==5.8.1 numpy==2.4.6)

make_venv() { # name of the peer; its packages that are installed without dependencies; "--"; its other packages
  local name="$1" venv="$venvs/$1" bare=()
  shift
  while [[ "$1" != "--" ]]; do
    bare+=("$1")
    shift
  done
  shift
  local stamp="${common[*]} | ${bare[*]} | $*"
  if [[ -f "$venv/.installed" && "$(<"$venv/.installed")" == "$stamp" ]]; then
    echo "$name: $venv is up to date."
    return
  fi
  echo "$name: making $venv ..."
  [[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
  "${pip[@]}" "${common[@]}" "$@"
  "${pip[@]}" --no-deps "${bare[@]}"
  printf '%s' "$stamp" >"$venv/.installed"
  echo "$name: done."
}

mkdir -p "$venvs"
echo '*' >"$venvs/.gitignore"
(($#)) || set -- specforge speculators
for peer in "$@"; do
  case "$peer" in
    specforge) make_venv specforge specforge==0.2.0 -- ;;
    # its data module, which the model imports, imports these; its converter imports loguru
    speculators)
      make_venv speculators speculators==0.9.0 hs-connectors==0.9.0 -- datasets==5.1.0 openai==3.57.0 loguru==0.7.3
      ;;
    *)
      echo "error: unknown peer '$peer'; choose specforge, speculators or both" >&2
      exit 2
      ;;
  esac
done
