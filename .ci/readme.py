"""The README as PyPI shows it: without the files beside it, so that its links are absolute."""

import pathlib
import re

# Only where the package is built.
from hatchling.metadata.plugin.interface import (  # pyright: ignore[reportMissingImports]
    MetadataHookInterface,
)


_RELATIVE = re.compile(r"(?<=\]\()(?!https?:|#)[^)]+(?=\))")


class Readme(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        urls = metadata["urls"]

        def address(link: re.Match) -> str:
            path = link[0]
            if not path.startswith("docs/"):
                return f"{urls['Homepage']}/blob/main/{path}"
            page = re.sub(r"\.md$", "/", path.removeprefix("docs/"))
            return urls["Documentation"] + re.sub(r"\bindex/$", "", page)

        text = (pathlib.Path(self.root) / "README.md").read_text()
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": _RELATIVE.sub(address, text),
        }
