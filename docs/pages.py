"""A hook for mkdocs: it adds pages from the repository's root and the reference, rewrites links, and uses no CDN.

Links in the documents are paths in the repository, so that they work on the code host too; `relinked` rewrites them for
the site. The reference is built and not kept in the repository: commands with their settings, tables with their
columns, the Python interface, every benchmark record, and one page for each package of `composer_stages`.
"""

import inspect
import os.path
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "index.md": "README.md",
    "runs.md": "artifacts/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "learned.md": "benchmarks/LEARNED.md",
    "changelog.md": "CHANGELOG.md",
}
"""Page of the site -> its source outside docs/, where readers of the code host find it."""
PACKAGES = (
    *("runs", "rollouts", "envs", "sandbox", "policy", "teachers", "pairs", "losses", "training", "backends", "diloco"),
    *("arms", "evaluation", "comparison", "gradients", "probe", "formats", "swebench", "integrations"),
)
"""The packages of the reference, in reading order."""
PYTHON = """# Python interface

`import composer_post_training as composer`. How it is used: [From Python](../python.md).

::: composer_post_training
    options:
      show_submodules: false
      show_if_no_docstring: false

::: composer_post_training.trl
"""
SOURCE = '<details class="mkdocstrings-source"'
CDN_SCRIPT = "https://unpkg.com/iframe-worker/shim"
OWN_SCRIPT = "javascripts/iframe-worker.js"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root and those of the reference."""
    for page, source in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, source, page)))
    for page, content in {**built(), **{package: reference(package) for package in PACKAGES}}.items():
        files.append(File.generated(config, f"reference/{page}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page in docs/; a generated page was rewritten when it was added."""
    uri = page.file.src_uri
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{uri}", uri)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Keep the source code of the reference out of the search: it is most of the text, and hides what explains it."""
    return html.replace(SOURCE, f"{SOURCE} data-search-exclude")


def on_config(config: Any) -> Any:
    """Put the reference into the navigation."""
    pages = [f"reference/{page}.md" for page in (*built(), *PACKAGES)]
    config.nav.insert(-2, {"Reference": pages})
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script for search without a server from the site itself."""
    return output.replace(CDN_SCRIPT, get_relative_url(OWN_SCRIPT, page.url))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Do the same for 404.html."""
    return output_content.replace(CDN_SCRIPT, OWN_SCRIPT)


def built() -> dict[str, str]:
    """Return the pages that follow from the program's declarations and the benchmarks' records, by their names."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
    import commands

    import composer_post_training as composer
    from benchmarks import records
    from composer_stages import STAGES

    del sys.path[:2]
    functions = [getattr(composer, name) for stage in STAGES if hasattr(composer, name := stage.replace("-", "_"))]
    stages = "\n\n".join(f"### composer.{one.__name__}\n\n```\n{inspect.getdoc(one)}\n```" for one in functions)
    return {
        "commands": f"# Commands and settings\n\n{commands.stages()}\n\n{commands.commands()}",
        "tables": f"# Tables and columns\n\n{commands.kinds()}",
        "python": f"{PYTHON}\n## Stages\n\n{stages}\n",
        "records": f"# Benchmark records\n\n{records.page()}",
    }


def reference(package: str) -> str:
    """Return the page of a package: its docstring, then every module below it with its public names.

    Code that runs inside a sandbox and programs (`__main__`) are left out.
    """
    found = [p for p in (ROOT / "stages" / package).rglob("*.py") if "guest" not in p.parts and p.stem != "__main__"]
    names = [p.relative_to(ROOT).with_suffix("").parts for p in found]
    modules = sorted(".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names)
    blocks = [f"::: {name}\n    options:\n      show_submodules: false\n" for name in modules]
    return f"# stages.{package}\n\n" + "\n".join(blocks)


def relinked(text: str, source: str, page: str) -> str:
    """Return the text of `source` with links that work in `page`; a link to a file that is no page becomes its words.

    source: path in the repository, such as docs/tasks.md. page: path in the site, such as tasks.md.
    """
    page_of = {path: name for name, path in ROOT_PAGES.items()}

    def link(match: re.Match[str]) -> str:
        words, (target, hash_, anchor) = match[1], match[2].partition("#")
        path = os.path.normpath(Path(source).parent / target)
        linked = path.removeprefix("docs/") if path.startswith("docs/") else page_of.get(path)
        if linked is None:
            return words
        return f"[{words}]({os.path.relpath(linked, Path(page).parent)}{hash_}{anchor})"

    return LINK.sub(link, text)
