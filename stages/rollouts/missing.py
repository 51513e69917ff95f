"""Facts that a source may not record. Their columns are null, and a check that needs one reports "not recorded"."""

Fact = str

REWARD, TOKENS, LOGPROBS, EXACT_LOGPROBS = "reward", "token ids", "log-probs", "log-probs beyond 4 decimals"
FINISH, PARSE, ELISION, OPENING = "finish reasons", "parse errors", "elided output", "opening messages as sent"
MODEL, MEDIA, CALL_IDS, USAGE, STEPS = "model", "images and other media", "tool-call ids", "token usage", "steps"
