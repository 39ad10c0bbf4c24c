#!/bin/sh
# Print the Python that `make GOAL` uses, and install what it lacks: setup.sh demo|check|test|lint|docs
#
# It takes the first of $PYTHON and .venv/bin/python that has every package, without using the network. Otherwise it
# makes .venv with the extras that fit this machine. If that fails (no network), an interpreter with the indispensable
# packages will do. Messages go to stderr; stdout has only the path.
set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
goal=${1:-demo}

say() { echo "setup: $*" >&2; }

has() { # has INTERPRETER MODULE...: finds the modules without importing them
  interpreter=$1
  shift
  "$interpreter" -c 'import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in sys.argv[1:]))' "$@" \
    >/dev/null 2>&1
}

needed="numpy ml_dtypes"
wanted=""
extras=""
runs=yes # the goal computes, on a GPU and on several ranks if it can
case $goal in
  demo) needed="$needed tqdm"; wanted="matplotlib"; extras="examples" ;;
  test) needed="$needed pytest xdist tqdm"; wanted="hypothesis pytest_timeout matplotlib"; extras="test" ;;
  lint) needed="numpy ruff mypy"; extras="lint,test"; runs="" ;;
  docs) needed="$needed pdoc"; wanted="torch"; extras="docs,torch"; runs="" ;;
esac

if [ -n "$runs" ] && command -v nvidia-smi >/dev/null 2>&1; then
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1)
  case $driver in
    '' | *[!0-9]*) say "nvidia-smi finds no GPU" ;;
    *)
      if [ "$driver" -ge 580 ]; then cuda=cuda13; elif [ "$driver" -ge 525 ]; then cuda=cuda12; else cuda=; fi
      if [ -n "$cuda" ]; then wanted="$wanted cupy"; extras="${extras:+$extras,}$cuda,cublas${cuda#cuda}"
      else say "the NVIDIA driver $driver is older than 525, so the GPU is not used"; fi ;;
  esac
fi

for candidate in "$python" .venv/bin/python; do
  # shellcheck disable=SC2086  # words are module names
  if has "$candidate" $needed $wanted; then
    command -v "$candidate"
    exit 0
  fi
done

fall_back() {
  for candidate in .venv/bin/python "$python"; do
    # shellcheck disable=SC2086
    if has "$candidate" $needed; then
      say "$1; continuing with $candidate, which lacks some of: $wanted"
      command -v "$candidate"
      exit 0
    fi
  done
  say "$1, and $python lacks some of: $needed; install them, or pass PYTHON=... with an interpreter that has them"
  exit 1
}

if command -v mpiexec >/dev/null 2>&1; then mpi=mpi; else mpi=mpich; fi
[ -z "$runs" ] || extras="${extras:+$extras,}$mpi"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fall_back "$python is older than Python 3.10"
[ -x .venv/bin/python ] || { say "making .venv"; "$python" -m venv .venv >&2 || fall_back "venv failed"; }
say "installing thdattn[$extras] into .venv (a minute or two, once)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 2 -e ".[$extras]" >&2 \
  || fall_back "pip failed"
# mpi4py cannot load the library of every MPI (Debian's MPICH, for one): install one that it can load.
if [ "$mpi" = mpi ] && [ -n "$runs" ] && ! .venv/bin/python -c 'from mpi4py import MPI' >/dev/null 2>&1; then
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[mpich]" >&2 || say "no usable MPI"
fi
echo .venv/bin/python
