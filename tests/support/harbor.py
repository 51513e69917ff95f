"""Small tasks in Harbor's format, one of each kind, as the files of their folders."""

Files = dict[str, str]
"""Path below the folder of a task -> text."""

BASE = "localhost/composer-harbor-base:latest"
"""The image that the Dockerfiles name. `podman` builds it from Debian's packages; bubblewrap never sees it."""

TOML = """\
schema_version = "1.4"

[task]
name = "own/{name}"
description = "A task of our own."

[metadata]
family = "{family}"
difficulty = "easy"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
"""
ENVIRONMENT = "\n[environment]\nmemory_mb = 512\ncpus = 1\n"
DOCKERFILE = f"FROM {BASE}\nWORKDIR /app\n"
SHELL = "#!/bin/bash\n"


def _toml(name: str, family: str, *tables: str, environment: str = "", top: str = "") -> str:
    return top + TOML.format(name=name, family=family) + "".join(tables) + ENVIRONMENT + environment


def python_task(name: str = "sums-1", family: str = "sums") -> Files:
    """Files and Python: tests decide, and their exit code is the reward."""
    return {
        "task.toml": _toml(name, family),
        "instruction.md": "The function add in /app/sums.py subtracts. Mend it.\n",
        "environment/Dockerfile": DOCKERFILE + "COPY sums.py /app/\n",
        "environment/sums.py": "def add(a, b):\n    return a - b\n",
        "tests/test.sh": SHELL + "python3 -m pytest -q /tests/test_sums.py\n"
        "if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        "tests/test_sums.py": "import sys\n\nsys.path.insert(0, '/app')\nfrom sums import add\n\n\n"
        "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_zero():\n    assert add(0, 7) == 7\n",
        "solution/solve.sh": SHELL + "sed -i 's/a - b/a + b/' /app/sums.py\n",
    }


def metrics_task(name: str = "words-1", family: str = "words") -> Files:
    """reward.json with several metrics, one of them partial."""
    return {
        "task.toml": _toml(name, family),
        "instruction.md": "Write the words of /app/words.txt into /app/sorted.txt, sorted, one a line.\n",
        "environment/Dockerfile": DOCKERFILE + "COPY words.txt .\n",
        "environment/words.txt": "pear fig apple\n",
        "tests/test.sh": SHELL + "python3 /tests/score.py\n",
        "tests/score.py": "import json, pathlib\nfound = pathlib.Path('sorted.txt')\n"
        "lines = found.read_text().split() if found.exists() else []\nwanted = ['apple', 'fig', 'pear']\n"
        "right = sum(a == b for a, b in zip(lines, wanted)) / 3\n"
        "scores = {'reward': float(lines == wanted), 'lines': right, 'count': len(lines)}\n"
        "pathlib.Path('/logs/verifier/reward.json').write_text(json.dumps(scores))\n",
        "solution/solve.sh": SHELL + "tr ' ' '\\n' < words.txt | sort > sorted.txt\n",
    }


def separate_task(name: str = "report-1", family: str = "report") -> Files:
    """A separate verifier: one artifact and what a hook collects reach it, and nothing else."""
    return {
        "task.toml": _toml(
            name,
            family,
            'environment_mode = "separate"\n',
            '\n[[verifier.collect]]\ncommand = "wc -l < /app/report.txt > /logs/artifacts/lines"\n',
            top='artifacts = ["/app/report.txt"]\n',
        ),
        "instruction.md": "Write the numbers 1 to 3 into /app/report.txt, one a line.\n",
        "environment/Dockerfile": DOCKERFILE,
        "tests/test.sh": SHELL + "cd /app\n"
        'if [ "$(cat report.txt)" = "$(printf \'1\\n2\\n3\')" ] && [ "$(cat /logs/artifacts/lines)" = 3 ] '
        "&& [ ! -e helper.py ]\nthen echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        "solution/solve.sh": SHELL + "touch /app/helper.py\nseq 3 > /app/report.txt\n",
    }


def steps_task(name: str = "ladder-1", family: str = "ladder") -> Files:
    """Two steps: the second finds what the first left, and files of its own."""
    steps = '\n[[steps]]\nname = "first"\nmin_reward = 1.0\n\n[[steps]]\nname = "second"\n'
    return {
        "task.toml": _toml(name, family, steps),
        "environment/Dockerfile": DOCKERFILE,
        "tests/check.sh": '[ "$(cat /app/$1 2>/dev/null)" = "$2" ] && echo 1 > $REWARD || echo 0 > $REWARD\n',
        "steps/first/instruction.md": "Write the word one into /app/one.txt.\n",
        "steps/first/tests/test.sh": SHELL
        + "REWARD=/logs/verifier/reward.txt\n. /tests/check.sh one.txt one\nset -- one.txt one\n",
        "steps/first/solution/solve.sh": SHELL + "echo one > /app/one.txt\n",
        "steps/second/instruction.md": "Append the word in /app/given.txt to /app/one.txt.\n",
        "steps/second/workdir/given.txt": "two\n",
        "steps/second/tests/test.sh": SHELL
        + "REWARD=/logs/verifier/reward.txt\nset -- one.txt \"$(printf 'one\\ntwo')\"\n. /tests/check.sh\n",
        "steps/second/solution/solve.sh": SHELL + "cat /app/given.txt >> /app/one.txt\n",
    }


def service_task(name: str = "counter-1", family: str = "counter") -> Files:
    """A service that the image starts, with a health check; the verifier asks it."""
    check = "python3 -c \\\"import urllib.request as u; u.urlopen('http://127.0.0.1:8000/')\\\""
    health = f'\n[environment.healthcheck]\ncommand = "{check}"\ninterval_sec = 0.2\nretries = 50\n'
    return {
        "task.toml": _toml(name, family, environment=health),
        "instruction.md": "A service on port 8000 counts the POST requests to /. Make its count 3.\n",
        "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\nCOPY service.py start.sh /srv/\n"
        'RUN chmod +x /srv/start.sh\nENTRYPOINT ["/srv/start.sh"]\n',
        "environment/start.sh": '#!/bin/sh\npython3 /srv/service.py &\nexec "$@"\n',
        "environment/service.py": "from http.server import BaseHTTPRequestHandler, HTTPServer\n\n\n"
        "class Handler(BaseHTTPRequestHandler):\n    count = 0\n\n"
        "    def do_POST(self):\n        Handler.count += 1\n        self.do_GET()\n\n"
        "    def do_GET(self):\n        self.send_response(200)\n        self.end_headers()\n"
        "        self.wfile.write(str(Handler.count).encode())\n\n\n"
        "HTTPServer(('127.0.0.1', 8000), Handler).serve_forever()\n",
        "tests/test.sh": SHELL + "python3 - <<'END' > /logs/verifier/reward.txt\nimport urllib.request\n"
        "print(int(urllib.request.urlopen('http://127.0.0.1:8000/').read() == b'3'))\nEND\n",
        "solution/solve.sh": SHELL + 'for n in 1 2 3; do python3 -c "import urllib.request as u; '
        "u.urlopen('http://127.0.0.1:8000/', data=b'')\"; done\n",
    }


KINDS = {
    "python": python_task,
    "metrics": metrics_task,
    "separate": separate_task,
    "steps": steps_task,
    "service": service_task,
}
WITHOUT_ENGINE = ("python", "metrics", "separate", "steps")
"""Kinds that need only a Python and files."""


def for_training(files: Files) -> Files:
    """A task of the split `train`; without a split a task's family decides."""
    return {**files, "task.toml": files["task.toml"].replace('difficulty = "easy"', 'split = "train"')}
