"""Hooks of mkdocs: the README becomes a page, and a link to a file outside of docs/ becomes its path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
README = "readme.md"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!https?:|#|docs/)([^)]+)\)", r"](../\1)", text)
    files.append(File.generated(config, README, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def path_for_link(link: re.Match[str]) -> str:
        words, path, anchor = link.groups()
        if path == "README.md":
            return f"[{words}]({README}{anchor or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{page.file.src_uri}: link to {path}, which does not exist")
        return words if words.strip("`").endswith(path) else f"{words} (`{path}`)"

    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)", path_for_link, markdown)
    return re.sub(r"\[([^\]]+)\]\(((?:cluster|models)/[^)]+)\)", r"\1", markdown)
