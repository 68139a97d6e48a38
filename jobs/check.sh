#!/usr/bin/env bash
# Check style, types, layers, docstrings, spelling, shell scripts and file sizes; and,
# if their tools are installed, the conda recipe and the pages of docs/. This script
# runs no tests. It uses the tools of the active environment, or of another Python:
# PYTHON=venv/bin/python. Needs pip install -e '.[dev]'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python}"
PATH="$(dirname "$(command -v "$python")"):$PATH"
said="$(mktemp -d)"
trap 'rm -rf "$said"' EXIT
names=() commands=() checks=()

# All checks run at the same time; two of them need most of the time, on a core each.
check() {
    local name="$1"
    shift
    "$@" >"$said/$name" 2>&1 &
    names+=("$name") commands+=("$*") checks+=("$!")
}

mapfile -t scripts < <(find .ci jobs benchmarks packaging tests/cluster \
    \( -name '*.sh' -o -name '*.sbatch' -o -name '*.pbs' -o -name '*.flux' -o -name '*.lsf' \
    -o -name '*.sge' -o -name '*.env' -o -path '.ci/run' \) 2>/dev/null | sort)

# Limit file sizes, because a file in git stays in every clone forever. A copy without
# git has only its own files.
check_sizes() {
    local large
    large="$({ git ls-files -z --cached --others --exclude-standard 2>/dev/null || find . -path ./.venv -prune -o -type f -print0; } |
        xargs -0 stat --format='%s bytes: %n' 2>/dev/null | awk '$1 > 1048576' || true)"
    [[ -z $large ]] || { echo "expected files of 1 MiB at most, found" "$large" && false; }
}
check "sizes of files" check_sizes
check "ruff check" ruff check --quiet .
check "ruff format" ruff format --quiet --diff .
check "mypy" mypy --no-error-summary
if command -v basedpyright >/dev/null; then
    # Check the user programs as an editor does; mypy, which is stricter, checks the
    # library.
    check "pyright" basedpyright --project tests/types --pythonpath "$(command -v python)"
fi
check "import-linter" lint-imports --no-logo
check "numpydoc" python -m tests.docs.public
check "codespell" codespell
if python -c "import rattler_build" 2>/dev/null; then
    check "conda recipe" python -c 'import rattler_build as build
recipe = build.Stage0Recipe.from_file("packaging/conda/recipe.yaml")
assert recipe.render(build.VariantConfig())'
fi
if command -v zizmor >/dev/null; then
    check "workflows" zizmor --offline --quiet .github/workflows
fi
check "shellcheck" shellcheck --severity=style "${scripts[@]}"
if python -c "import pydata_sphinx_theme, sphinx_design" 2>/dev/null; then
    check "docs" env PYTHONPATH=. sphinx-build -W --keep-going -q -b html docs "$said/html"
fi

failed=()
for i in "${!names[@]}"; do
    if wait "${checks[i]}"; then
        echo "ok      ${names[i]}"
    else
        failed+=("${names[i]}")
        echo "FAILED  ${names[i]}: ${commands[i]}"
        cat "$said/${names[i]}"
    fi
done
if ((${#failed[@]})); then
    echo "${#failed[@]} failed: ${failed[*]}" >&2
    exit 1
fi
