"""Build the wheel: everything else is in pyproject.toml.

`stages` is too common a name to install: an installed Composer has this package as `composer_stages`, so that no other
project's `stages` collides with it. An editable installation (`./dev`) reads the tree and keeps the name.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

OWN = "composer_stages"
NAMES = re.compile(
    r"(?<![\w/.-])stages(?=\.[a-z_]\w*+(?!\())"  # stages.runs.run, but no call of a method of a variable
    r"|(?<=\bfrom )stages(?= import )"
    r"|(?<=[\"`])stages(?=\.?\"|`)"  # the name alone in a string
)


class Renamed(build_py):  # noqa: D101
    def build_module(self, module: object, module_file: str, package: object) -> tuple[str, bool]:
        """Copy a module with the installed names of its imports."""
        outfile, copied = super().build_module(module, module_file, package)
        path = Path(outfile)
        text = path.read_text("utf-8")
        path.write_text(NAMES.sub(OWN, text), "utf-8")
        return outfile, copied


packages = find_namespace_packages(include=["composer_post_training*", "composer_cli*", "stages*"])
setup(
    packages=[OWN + name.removeprefix("stages") if name.split(".")[0] == "stages" else name for name in packages],
    package_dir={OWN: "stages"},
    cmdclass={"build_py": Renamed},
)
