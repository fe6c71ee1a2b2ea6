"""Make the page of PyPI from README.md, whose links are those of a repository.

With REPO_URL set they lead there, and the page has the addresses of the project. Without it a link to a file is plain
text, and a picture is left out.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Sets what pyproject.toml calls dynamic."""

    def update(self, metadata: dict) -> None:
        """Add the readme, and with REPO_URL the addresses."""
        url = os.environ.get("REPO_URL", "").rstrip("/")

        def link(found: re.Match[str]) -> str:
            image, text, target = found.groups()
            if "://" in target or target.startswith("#"):
                return found[0]
            if url:
                return f"{image}[{text}]({url}/{'raw' if image else 'blob'}/main/{target})"
            return "" if image else text

        text = LINK.sub(link, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if url:
            metadata["urls"] = {
                "Homepage": url,
                "Changelog": f"{url}/blob/main/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
