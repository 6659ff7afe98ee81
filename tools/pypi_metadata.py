"""What PyPI shows: the README with absolute links, and the project's addresses.

scikit-build-core asks this when it writes the metadata of a wheel or an sdist. The address of the
repository is in the environment, FASTDRAFT_REPOSITORY, such as https://github.com/OWNER/fastdraft;
the release workflow sets it. Without it the README stays as it is, and there are no addresses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["dynamic_metadata"]

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?P<target>[^)\s:#][^)\s:]*)\)")


def dynamic_metadata(
    settings: Mapping[str, object], project: Mapping[str, object]
) -> dict[str, object]:
    """The project's metadata that is made here: `readme` and `urls`."""
    if settings:
        raise ValueError(f"pypi_metadata has no settings, got {dict(settings)}")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    repository = os.environ.get("FASTDRAFT_REPOSITORY", "").rstrip("/")
    urls = {}
    if repository:
        tag = f"v{project['version']}"
        text = absolute(text, repository, tag)
        urls = {
            "Repository": repository,
            "Documentation": f"{repository}/blob/{tag}/docs/index.md",
            "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
            "Issues": f"{repository}/issues",
        }
    return {"readme": {"content-type": "text/markdown", "text": text}, "urls": urls}


def absolute(text: str, repository: str, tag: str) -> str:
    """A page with the addresses of its files in a repository on GitHub, at a tag."""

    def replaced(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}{link['text']}({repository}/{kind}/{tag}/{link['target']})"

    return LINK.sub(replaced, text)
