"""What mkdocs builds beside the files here: pages from the repository's root, a reference, and nothing from a CDN."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "index.md": "README.md",
    "runs.md": "artifacts/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "benchmarks/RESULTS.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages that lie elsewhere, so that people find them on the code host too."""
PACKAGES = (
    *("runs", "rollouts", "envs", "sandbox", "policy", "teachers", "pairs", "losses", "training", "backends", "diloco"),
    *("evaluation", "probe", "importers", "exporters", "integrations", "tiny_models"),
)
"""What the reference holds, in reading order."""
CDN_SCRIPT = "https://unpkg.com/iframe-worker/shim"
OWN_SCRIPT = "javascripts/iframe-worker.js"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root and those of the reference."""
    for page, source in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, Path(source).parent)))
    for package in PACKAGES:
        files.append(File.generated(config, f"reference/{package}.md", content=reference(package)))
    return files


def on_config(config: Any) -> Any:
    """Put the reference into the navigation."""
    pages = [f"reference/{package}.md" for package in PACKAGES]
    config.nav.insert(-2, {"Reference": pages})
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script for search without a server from the site itself."""
    return output.replace(CDN_SCRIPT, get_relative_url(OWN_SCRIPT, page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for 404.html."""
    return output_content.replace(CDN_SCRIPT, OWN_SCRIPT)


def reference(package: str) -> str:
    """The page of a package: its map, then every module with its public names."""
    blocks = [f"::: {name}\n    options:\n      show_submodules: false\n" for name in modules(package)]
    return f"# stages.{package}\n\n" + "\n".join(blocks)


def modules(package: str) -> list[str]:
    """A package and the modules in it and below it, but for code that runs inside a sandbox and for programs."""
    found = [p for p in (ROOT / "stages" / package).rglob("*.py") if "guest" not in p.parts and p.stem != "__main__"]
    names = [p.relative_to(ROOT).with_suffix("").parts for p in found]
    return sorted(".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names)


def relinked(text: str, folder: Path) -> str:
    """A page of the root with its links as from inside docs/; a link to a file that is no page becomes its words."""

    def link(match: re.Match[str]) -> str:
        words, (target, hash_, anchor) = match[1], match[2].partition("#")
        path = Path(*_resolved(folder / target))
        pages = [page for page, source in ROOT_PAGES.items() if path == Path(source)]
        if path.parts[:1] == ("docs",):
            pages = [str(Path(*path.parts[1:]))]
        return f"[{words}]({pages[0]}{hash_}{anchor})" if pages else words

    return LINK.sub(link, text)


def _resolved(path: Path) -> list[str]:
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return parts
