"""Recipes of packages and containers agree with pyproject.toml."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import hpcstrat

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
METADATA = PROJECT["project"]
RECIPE = (ROOT / "packaging/conda/recipe.yaml").read_text()
SPACK = ROOT / "packaging/spack/spack_repo/hpcstrat"
IMAGE = (ROOT / "jobs/apptainer.def").read_text()
# Packages with other names on conda-forge.
OF_CONDA = {"xxhash": "python-xxhash"}


def split(requirement: str) -> tuple[str, str]:
    """Return name and minimum version of a requirement, the only supported form."""
    found = re.fullmatch(r"([\w.-]+) >= ([\d.]+)", requirement)
    assert found, f"teach tests/unit/test_packaging.py what {requirement!r} means"
    return found[1], found[2]


RELEASE = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.M)

NEEDED = dict(map(split, METADATA["dependencies"]))
PYTHON = METADATA["requires-python"].removeprefix(">= ")
BUILD = [split(needed) for needed in PROJECT["build-system"]["requires"]]


def section(name: str, indent: str = "") -> str:
    """Return the recipe's lines below a key."""
    found = re.search(rf"^{indent}{name}:\n((?:{indent} +.*\n|\n)+)", RECIPE, re.M)
    assert found, name
    return found[1]


def listed(name: str) -> list[str]:
    """Return one of the recipe's lists of requirements."""
    lines = section(name, "  ").splitlines()
    return [line.strip().removeprefix("- ") for line in lines if line.strip()]


def test_the_conda_recipe_follows_the_project() -> None:
    context = dict(re.findall(r'^  (\w+): "(.*)"$', section("context"), re.M))
    assert context == {"version": METADATA["version"], "python_min": PYTHON}
    needed = [f"{OF_CONDA.get(name, name)} >={least}" for name, least in NEEDED.items()]
    assert listed("run") == ["python >=${{ python_min }}", *needed]
    assert listed("host")[-2:] == [f"{name} >={least}" for name, least in BUILD]
    commands = [f"{name} = {where}" for name, where in METADATA["scripts"].items()]
    assert re.findall(r"entry_points:\n +- (.*)", RECIPE) == commands
    assert f"summary: {METADATA['description']}\n" in RECIPE
    assert f"license: {METADATA['license']}\n" in RECIPE


def test_the_version_is_the_same_everywhere() -> None:
    version, date = RELEASE.findall((ROOT / "CHANGELOG.md").read_text())[0]
    assert version == METADATA["version"] == hpcstrat.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [version]
    assert re.findall(r'^date-released: "(.*)"$', citation, re.M) == [date]
    assert re.findall(r"^license: (.*)$", citation, re.M) == [METADATA["license"]]
    [author] = METADATA["authors"]
    assert re.findall(r"^  - name: (.*)$", citation, re.M) == [author["name"]]


def test_releases_are_listed_newest_first() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## .*$", text, re.M)
    releases = RELEASE.findall(text)
    assert headings[0] == "## [Unreleased]"
    assert len(releases) == len(headings) - 1
    versions = [numbers(version) for version, _ in releases]
    assert versions == sorted(versions, reverse=True)
    kinds = {*("Added", "Changed", "Deprecated"), *("Removed", "Fixed", "Security")}
    assert set(re.findall(r"^### (.*)$", text, re.M)) <= kinds


def project_urls() -> ModuleType:
    """Return the build hook that sets the project's URLs."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location(
        "project_urls", ROOT / "packaging/project_urls.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_addresses_follow_from_that_of_the_repository() -> None:
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    assert (ROOT / hook["path"]).is_file()
    urls = project_urls().urls
    urls(hook["repository"])
    assert urls("") == {}
    found = urls("https://example.org/group/hpcstrat/")
    assert found["Source"] == "https://example.org/group/hpcstrat"
    for label in ("Documentation", "Changelog"):
        name = found[label].removeprefix(found["Source"] + "/blob/main/")
        assert (ROOT / name).is_file()
    for wrong in ("hpcstrat", "git@example.org:hpcstrat", "https://me:key@example.org"):
        with pytest.raises(ValueError, match="expected the address of the repository"):
            urls(wrong)


def calls(name: str, package: str = "hpcstrat") -> list[ast.Call]:
    """Return the calls of this function in the body of a Spack package."""
    path = SPACK / f"packages/py_{package}/package.py"
    [body] = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    return [
        line.value
        for line in body.body
        if isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Call)
        and isinstance(line.value.func, ast.Name)
        and line.value.func.id == name
    ]


def numbers(version: str) -> list[int]:
    """Return a version as a tuple of numbers, for comparisons."""
    return [int(part) for part in version.split(".")]


def test_the_spack_package_follows_the_project() -> None:
    versions = [ast.literal_eval(call.args[0]) for call in calls("version")]
    assert versions == [METADATA["version"]]
    needed = [
        # The kernel needs a C compiler.
        *("c", f"python@{PYTHON}:"),
        *[f"py-{name}@{least}:" for name, least in BUILD if name not in NEEDED],
        *[f"py-{name}@{least}:" for name, least in NEEDED.items()],
    ]
    of_plot = [split(text) for text in METADATA["optional-dependencies"]["plot"]]
    needed += [f"py-{name}@{least}:" for name, least in of_plot]
    assert [ast.literal_eval(c.args[0]) for c in calls("depends_on")] == needed
    # Spack's own optree is too old, so that our package must be new enough.
    [newest] = [ast.literal_eval(call.args[0]) for call in calls("version", "optree")]
    assert numbers(newest) >= numbers(NEEDED["optree"])
    # Spack looks for the clone at this path.
    assert (SPACK / "packages/py_hpcstrat/package.py").parents[6] == ROOT
    assert (SPACK / "repo.yaml").is_file()


def sections_of_image() -> dict[str, str]:
    """Return the sections of Apptainer's definition file; '' is the head's key."""
    parts = re.split(r"^%(\w+)[^\n]*\n", IMAGE, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_the_image_is_made_of_what_is_there() -> None:
    sections = sections_of_image()
    head = dict(re.findall(r"^(\w+): (\S+)$", sections[""], re.M))
    assert head["Bootstrap"] == "docker"
    version = re.fullmatch(r"python:([\d.]+)-\S+", head["From"])
    assert version
    assert f"Programming Language :: Python :: {version[1]}" in METADATA["classifiers"]
    assert {"files", "post", "environment", "runscript", "test"} <= sections.keys()
    copied = [
        line.split()[0] for line in sections["files"].splitlines() if line.strip()
    ]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    # The image must contain all files that the build reads.
    assert set(copied) >= {
        *("pyproject.toml", METADATA["readme"], *METADATA["license-files"]),
        *PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
    }
    arguments = dict(re.findall(r"^\s+(\w+)=(\S+)$", sections["arguments"], re.M))
    assert set(re.findall(r"{{ (\w+) }}", IMAGE)) == arguments.keys()
    assert arguments["mpi"] in METADATA["optional-dependencies"]


@pytest.mark.parametrize("name", ["post", "environment", "runscript", "test"])
def test_scripts_of_the_image_can_be_read_by_a_shell(name: str) -> None:
    done = subprocess.run(
        ["sh", "-n"],
        input=sections_of_image()[name],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def blocks_of_site() -> list[str]:
    """Return the commented blocks of site.env, which a user may uncomment."""
    text = (ROOT / "jobs/site.env").read_text()
    _, _, text = text.partition("# The site's own MPI")
    text, _, _ = text.partition("# Called by the scripts")
    return re.findall(r"(?:^#(?:\S|    ).*\n)+", text, re.M)


def test_blocks_of_sites_are_settings() -> None:
    blocks = [re.sub(r"^#", "", block, flags=re.M) for block in blocks_of_site()]
    assert len(blocks) == 4
    said = []
    for block in blocks:
        show = "; declare -p site_modules SLURM_MPI_TYPE"
        done = subprocess.run(
            ["bash", "-euc", block.rstrip() + show],
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin"},
        )
        said.append(done.stdout)
        assert "declare -a site_modules=(" in done.stdout
    kinds = [re.findall(r'SLURM_MPI_TYPE="(\w+)"', text) for text in said]
    assert kinds == [["pmix"], ["cray_shasta"], ["pmi2"], ["pmi2"]]
