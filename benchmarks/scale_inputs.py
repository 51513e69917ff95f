"""What `scale.py` draws from: what was measured, each with its source, and what had to be assumed."""

MEASURED = {
    # 18 rollouts of mini-swe-agent on SWE-bench Verified (gruckion/mini-swe-agent d12a71a, Gemini 3 Pro, November
    # 2025): calls a rollout; seconds from one answer to the next, command included, by quantile; USD a call
    "turns": (19, 20, 20, 21, 21, 22, 25, 26, 28, 29, 31, 33, 36, 36, 39, 51, 69, 97),
    "turn_s": ((0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1), (2, 2, 2, 3, 4, 8, 14, 23, 41, 66)),
    "call_usd": 0.0104,
    # benchmarks/swe_gold.py on SWE-bench Lite, 20 November 2026: seconds to grade, environment built before
    "grade_s": (4, 3, 3, 48, 34, 27, 15, 13, 8, 10, 9, 10, 25, 138, 3),
    # `extract-pairs` on imported wiki-search rollouts, 21 November 2026: 23 accepted pairs of 1,634 states
    "pairs_a_state": 23 / 1634,
    # Vexp-ai/vexp-swe-bench d658e34: 99 of 100 submitted instances completed
    "lost": 1 / 100,
    # benchmarks/replay.py, 21 November 2026: CPU of a call through openai over aiohttp, answer kept
    "client_cpu_s": 1.74e-3,
}
ASSUMED = {
    # 64 pairs x 2 sides x 16,000 tokens of a 7B model, 6 FLOP a weight and token, 8 H100 at 40 % of 989 TFLOP/s
    "step_s": 64 * 2 * 16_000 * 6 * 7e9 / (8 * 0.4 * 989e12),
    "pairs_a_step": 64,
    "sync_s": 5.0,
    "grader_usd_h": 0.05,
    "worker_usd_h": 0.05,
    "trainer_usd_h": 24.0,
    "teachers": 3,
}
