"""Name the addresses of the project, which all follow from that of its repository.

A hook of hatchling for metadata. The address is set in ``pyproject.toml``, or by
``REPOSITORY_URL`` in the environment of a build: a workflow knows where it runs.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Fills ``urls``; without an address there are none."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the addresses to what is read from ``pyproject.toml``."""
        repository = os.environ.get("REPOSITORY_URL") or self.config["repository"]
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """Return the project's addresses by the labels that package indexes know."""
    if not repository:
        return {}
    scheme, _, rest = repository.rstrip("/").partition("://")
    if scheme not in {"http", "https"} or not rest or "@" in rest:
        raise ValueError(
            "expected the address of the repository as https://HOST/GROUP/NAME, "
            f"without user or password, found {repository!r}; correct REPOSITORY_URL, "
            "or [tool.hatch.metadata.hooks.custom] in pyproject.toml"
        )
    repository = f"{scheme}://{rest}"
    return {
        "Source": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
