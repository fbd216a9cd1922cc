"""What mkdocs.yml leaves to this repository: navigation, generated pages, links out of docs/, and the pages as Markdown."""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site.reference import GENERATED

ROOT = Path(__file__).parents[2]
# The four kinds of pages, and the pages that a reader needs first; the others follow by name.
KINDS = {
    "Tutorials": ("tutorials", ("pretrain", "fork")),
    "Guides": ("guides", ("running", "data", "own_parts", "parallelism", "plan", "performance", "long_runs", "tracking")),
    "Reference": ("reference", ("supported", "keys", "commands", "run_folder", "interface", "models", "styles")),
    "Design": ("design", ()),
}
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(#[^)\s]*)?(?=\))")
# What a browser does not show of a tutorial's block: which language it is, and so where it runs.
TITLES = {"```sh\n": '```sh title="On GPUs"\n', "```text\n": '```text title="Output"\n'}
_markdown: dict[str, str] = {}  # a page's path in docs/ -> its text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages that are written from the source, and the navigation."""
    _markdown.clear()
    for path, write in GENERATED.items():
        files.append(File.generated(config, path, content=write()))
    pages = [file.src_uri for file in files.documentation_pages()]
    config.nav = [{"Home": "index.md"}]
    for kind, (folder, first) in KINDS.items():
        order = [f"{folder}/{name}.md" for name in first]
        found = sorted(
            (path for path in pages if path.startswith(f"{folder}/")),
            key=lambda path: (order.index(path) if path in order else len(order), path),
        )
        if found:
            config.nav.append({kind: found})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files outside of docs/ to the repository, or to copies in the site where mkdocs.yml names none."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if path.startswith("docs/"):
            return link[0]
        if not (ROOT / path).is_file():
            raise PluginError(f"{page.file.src_path}: {link[0]}: there is no file {path}")
        if config.repo_url:
            return f"{config.repo_url.rstrip('/')}/blob/main/{path}{link[2] or ''}"
        image = path.endswith(".png")
        copy = f"files/{path}" if image else f"files/{path}.txt"  # browsers show text, and download what else they do not know
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, content=(ROOT / path).read_bytes()))
        return posixpath.relpath(copy, folder or ".")

    _markdown[page.file.src_uri] = text = LINK.sub(target, markdown)
    if folder == "tutorials":
        for fence, titled in TITLES.items():
            text = text.replace(fence, titled)
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Writes each page as Markdown beside its HTML, and llms.txt (llmstxt.org), which lists them."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for kind, pages in (entry for section in config.nav for entry in section.items()):
        lines += ["", f"## {kind}", ""] + [f"- [{_title(path)}]({path})" for path in ([pages] if kind == "Home" else pages)]
    for path, text in _markdown.items():
        file = Path(config.site_dir, path)
        os.makedirs(file.parent, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _title(path: str) -> str:
    """The heading of a page."""
    found = re.search(r"^# (.+)$", _markdown[path], re.MULTILINE)
    return found[1] if found else path
