"""What a benchmark measures beside, asked for first: a missing peer is one sentence and exit code 2."""

import sys
from importlib.util import find_spec

EXTRA = "python -m pip install -c constraints.txt -e '.[{}]'"


def needed(*modules: str, by: str = EXTRA.format("bench")) -> None:
    """Leave with a sentence where a module is not installed; `by` is the command that installs it."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        print(f"{sys.argv[0]} needs {', '.join(missing)}, which {verb} not installed. Type: {by}", file=sys.stderr)
        sys.exit(2)
