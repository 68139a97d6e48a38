"""Install programs of others in environments of their own, and check them.

    python docs/gallery/third_party.py FOLDER                  # all, in some minutes
    python docs/gallery/third_party.py FOLDER mace --pages

For each program, the commands of its page are run in FOLDER/NAME, which must not exist:
those that make the environment from PyPI, and, by tests/docs/test_gallery.py, those
that run the program in one process and on two ranks. With --pages, the output and the
picture of the page are written anew. At the end it prints what was not tried.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("nequip", "mace", "netket")


def check(name: str, folder: Path, *, pages: bool) -> bool:
    """Return whether a program's environment can be made, and its test passes."""
    page = (HERE / f"{name}.md").read_text()
    folder.mkdir(parents=True)
    (install,) = re.findall(r"^```sh\n(python3 -m venv .*?)^```$", page, re.M | re.S)
    python = folder / "env/bin/python"
    test, others = "tests/docs/test_gallery.py", f"others and {name}"
    steps: list[tuple[list[str], Path]] = [
        (["bash", "-euc", install.replace("PATH_TO/hpcstrat", str(ROOT))], folder),
        ([str(python), "-m", "pip", "check"], folder),
        ([str(python), "-m", "pip", "install", "-q", f"{ROOT}[plot,test]"], folder),
        ([str(python), "-m", "pytest", "-q", "-rs", test, "-k", others], ROOT),
    ]
    if pages:
        steps.append(([str(python), str(HERE / "make.py"), name], folder))
    for words, place in steps:
        print(f"{name}:", *words, flush=True)
        if subprocess.run(words, check=False, cwd=place).returncode:
            print(f"{name}: failed")
            return False
    missing = page.partition("## Not tried\n\n")[2].partition("\n\n")[0]
    print(f"{name}: passed on two ranks of this machine; not tried: {missing}")
    return True


def main() -> int:
    """Check the programs that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME")
    parser.add_argument("--pages", action="store_true", help="write pages anew")
    given = parser.parse_args()
    passed = [
        check(name, given.folder.resolve() / name, pages=given.pages)
        for name in given.names or NAMES
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
