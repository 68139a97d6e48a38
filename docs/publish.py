"""Build the documentation as one version of a site of several.

    python docs/publish.py SITE dev
    python docs/publish.py SITE 0.2.0 --root /hpcstrat/

SITE is the folder of the whole site. The pages of this checkout go into a folder of it
that has the name of the version; what is there of other versions stays. Made from the
folders that are there are then SITE/switcher.json, which the list of versions on each
page reads, and SITE/index.html, which leads to the newest release. All of it is static
files. --root is the path at which SITE is served.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
DEVELOPMENT = "dev"
_RELEASE = re.compile(r"\d+(\.\d+)*")
_FIRST = """<!DOCTYPE html>
<meta charset="utf-8">
<title>hpcstrat</title>
<meta http-equiv="refresh" content="0; url={name}/index.html">
<p><a href="{name}/index.html">hpcstrat {name}</a>
"""


def versions(site: Path) -> list[str]:
    """Return the versions of a site: the development, then releases, newest first."""
    names = [path.parent.name for path in site.glob("*/index.html")]
    releases = [name for name in names if _RELEASE.fullmatch(name)]
    releases.sort(key=lambda name: [*map(int, name.split("."))], reverse=True)
    return [name for name in names if name == DEVELOPMENT] + releases


def build(site: Path, name: str) -> None:
    """Build this checkout as one version; other versions stay as they are."""
    built, doctrees = site / name, tempfile.TemporaryDirectory(prefix="hpcstrat-")
    options = ["-W", "--keep-going", "-q", "-E", "-b", "html", "-D", f"version={name}"]
    with doctrees as cache:
        command = [sys.executable, "-m", "sphinx", *options, "-d", cache, DOCS, built]
        subprocess.run(command, check=True)


def list_versions(site: Path, root: str) -> None:
    """Write what says which versions there are, and which one comes first."""
    names = versions(site)
    newest = next((name for name in names if name != DEVELOPMENT), DEVELOPMENT)
    switcher = [
        {
            "name": f"{name} (newest)" if name == newest != DEVELOPMENT else name,
            "version": name,
            "url": f"{root.rstrip('/')}/{name}/",
            "preferred": name == newest,
        }
        for name in names
    ]
    (site / "switcher.json").write_text(json.dumps(switcher, indent=2) + "\n")
    (site / "index.html").write_text(_FIRST.format(name=newest))
    # Folders with names such as _static are left out by some hosts without it.
    (site / ".nojekyll").touch()


def main() -> None:
    """Build, then list what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("name", help=f"{DEVELOPMENT}, or a release, such as 0.2.0")
    parser.add_argument("--root", default="/")
    options = parser.parse_args()
    if options.name != DEVELOPMENT and not _RELEASE.fullmatch(options.name):
        parser.error(
            f"expected {DEVELOPMENT} or a release such as 0.2.0, found {options.name}; "
            "give a tag without its v"
        )
    build(options.site, options.name)
    list_versions(options.site, options.root)


if __name__ == "__main__":
    main()
