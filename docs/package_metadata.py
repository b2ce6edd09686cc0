"""What PyPI shows of the package, where a release says where its repository is.

In: README.md, and the address of the repository in `SHARDFN_REPOSITORY`, which the
release workflow sets. Out: `project.urls`, and README with links that lead there; the
README as it is, and no addresses, where there is none.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = "SHARDFN_REPOSITORY"
PICTURES = (".png", ".svg")


def with_absolute_links(text: str, address: str) -> str:
    """Markdown whose links to files of the repository lead to `address`."""

    def absolute(link: re.Match[str]) -> str:
        start, path, end = link.groups()
        if re.match(r"[a-z]+:|#", path):
            return link[0]
        kind = "raw" if path.endswith(PICTURES) else "blob"
        return f"{start}{address}/{kind}/main/{path}{end}"

    return re.sub(r"(\]\()([^)\s]+)(\))", absolute, text)


def urls_at(address: str) -> dict[str, str]:
    """`project.urls` of a repository."""
    return {
        "Repository": address,
        "Documentation": f"{address}/blob/main/docs/index.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class AddressHook(MetadataHookInterface):
    """Hatch calls it when the package is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get(ADDRESS, "").rstrip("/")
        if address:
            text = with_absolute_links(text, address)
            metadata["urls"] = urls_at(address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
