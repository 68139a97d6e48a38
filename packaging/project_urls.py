"""Metadata hook that sets the project's URLs, which all derive from its repository.

A metadata hook of hatchling. The repository's URL is set in ``pyproject.toml``, or by
``REPOSITORY_URL`` in the environment of a build, for example by a CI workflow.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Sets ``urls``, if the repository's URL is known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the URLs to the metadata from ``pyproject.toml``."""
        repository = os.environ.get("REPOSITORY_URL") or self.config["repository"]
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """Return the project's URLs by the labels that package indexes know."""
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
