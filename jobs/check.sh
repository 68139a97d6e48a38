#!/usr/bin/env bash
# Check style, types, layers, docstrings, spelling and shell scripts, and build the pages
# of docs/ where Sphinx is installed; no tests. Uses the tools of the active environment,
# or of the Python given: PYTHON=venv/bin/python. Needs pip install -e '.[dev]'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python}"
PATH="$(dirname "$(command -v "$python")"):$PATH"
failed=()

check() {
    local name="$1" output
    shift
    if output="$("$@" 2>&1)"; then
        echo "ok      $name"
    else
        failed+=("$name")
        echo "FAILED  $name: $*"
        echo "$output"
    fi
}

mapfile -t scripts < <(find .ci jobs benchmarks tests/cluster \
    \( -name '*.sh' -o -name '*.sbatch' -o -name '*.env' -o -path '.ci/run' \) 2>/dev/null | sort)

check "ruff check" ruff check --quiet .
check "ruff format" ruff format --quiet --diff .
check "mypy" mypy --no-error-summary
check "import-linter" lint-imports --no-logo
check "numpydoc" python -m tests.docs.public
check "codespell" codespell
check "shellcheck" shellcheck --severity=style "${scripts[@]}"
if command -v sphinx-build >/dev/null; then
    built="$(mktemp -d)"
    trap 'rm -rf "$built"' EXIT
    check "docs" env PYTHONPATH=. sphinx-build -W --keep-going -q -b html docs "$built"
fi

if ((${#failed[@]})); then
    echo "${#failed[@]} failed: ${failed[*]}" >&2
    exit 1
fi
