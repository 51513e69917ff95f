"""A stand-in for what our adapter meets of OpenEnv 0.10, after its documented contract, where it is not installed."""
