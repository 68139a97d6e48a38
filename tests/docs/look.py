"""Open every built page in Chromium: ``python -m tests.docs.look BUILT [SCREENSHOTS]``.

Each page is opened in the sizes of a phone and of a desktop, light and dark. The
program prints faults: a page that is wider than the screen, that has no title or
several, a missing picture or other file, a script that fails, a first page whose
picture is cut. With SCREENSHOTS, a folder, it writes an image of each whole page there.
It needs playwright from PyPI, and Chromium.
"""

from __future__ import annotations

import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "SCREENS", "look", "pages_of", "served"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SCREENS = {"phone": (400, 800), "desktop": (1400, 900)}
SCHEMES = ("light", "dark")
# Script that finds wide elements, except those in scrolling boxes, such as code.
_WRONG = """() => {
    const wrong = [], width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth > width) {
        const wide = [...document.querySelectorAll("main *")]
            .filter(e => e.getBoundingClientRect().right > width + 1)
            .map(e => e.tagName + " " + e.textContent.trim().slice(0, 40));
        wrong.push(`wider than the screen: ${wide[0]}`);
    }
    for (const image of document.images)
        if (image.complete && !image.naturalWidth)
            wrong.push(`no picture: ${image.src}`);
    for (const box of document.querySelectorAll("#hpcstrat > p:has(> img)"))
        if (box.scrollWidth > box.clientWidth) wrong.push("the first picture is cut");
    const headings = document.querySelectorAll("main h1").length;
    if (headings != 1) wrong.push(`${headings} titles`);
    return wrong;
}"""


class _Handler(SimpleHTTPRequestHandler):
    """A request handler that serves files without log messages."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Suppress the log message."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder by HTTP, and yield its address."""
    handler = functools.partial(_Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def pages_of(built: Path) -> list[str]:
    """Return the names of all pages, except those that Sphinx generates."""
    found = (path.relative_to(built).as_posix() for path in built.rglob("*.html"))
    made = ("genindex.html", "search.html", "py-modindex.html", "_")
    return sorted(name for name in found if not name.startswith(made))


def look(
    built: Path,
    screenshots: Path | None = None,
    names: list[str] | None = None,
    schemes: tuple[str, ...] = SCHEMES,
) -> list[str]:
    """Return the faults, one line for each fault of each page and screen."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with served(built) as address, sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        for screen, (width, height) in SCREENS.items():
            for scheme in schemes:
                context = browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,  # type: ignore[arg-type]
                    reduced_motion="reduce",
                )
                page = context.new_page()
                said: list[str] = []
                page.on("pageerror", lambda error, said=said: said.append(str(error)))
                page.on(
                    "response",
                    lambda answer, said=said: (
                        answer.status >= 400 and said.append(f"no {answer.url}")
                    ),
                )
                for name in names or pages_of(built):
                    page.goto(f"{address}/{name}", wait_until="load")
                    faults = [*page.evaluate(_WRONG), *said]
                    said.clear()
                    wrong += [f"{name}, {screen}, {scheme}: {f}" for f in faults]
                    if screenshots:
                        place = screenshots / f"{screen}-{scheme}"
                        place.mkdir(parents=True, exist_ok=True)
                        file = place / name.replace("/", "-").replace(".html", ".png")
                        page.screenshot(path=file, full_page=True)
                context.close()
        browser.close()
    return wrong


if __name__ == "__main__":
    found = look(Path(sys.argv[1]), *map(Path, sys.argv[2:3]))
    print("\n".join(found) or "nothing is wrong")
    sys.exit(bool(found))
