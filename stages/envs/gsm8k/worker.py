"""A process that decides with math-verify whether answers are equal: a line of JSON in, `true` or `false` out.

Run by its path, apart from the rest: an expression like 9^9^9^9 ends the process, at `CPU_S` or by its memory, and
nothing else.
"""

import json
import resource
import signal
import sys

CPU_S = 5.0
"""Processor time of one answer."""
MEMORY = 2 << 30


def main() -> None:
    """Answer every line until the end of input."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]

    def read(text: str) -> list:
        # Timeouts of its own would interrupt no arithmetic of large numbers.
        expressions = parse(f"${text}$", configs, parsing_timeout=None)
        return expressions or parse(text, configs, parsing_timeout=None)

    print("ready", flush=True)
    for line in sys.stdin:
        right, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        is_equal = bool(verify(read(right), read(answer), timeout_seconds=None))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(is_equal), flush=True)


if __name__ == "__main__":
    main()
