"""Adapters of our environments and losses to the interfaces of other frameworks.

frameworks.py - what the stage `frameworks` does; frameworks_report.jinja - its report
config.py - its settings
trl.py - TRL's `rollout_func`, a tool environment for its `environment_factory`, and rollouts without training
openenv.py - an OpenEnv server, sessions over WebSocket only; also a program, for an interpreter that has openenv
openenv_client.py - start it, and play through it with our agent loop
verifiers_served.py - a taskset for verifiers' evaluation loop that plays through an OpenEnv server
mini_swe_agent.py - mini-swe-agent's environment protocol
prime_rl.py - PRIME-RL's default loss from our kernel, as a custom loss
prime_rl_hints.py - an algorithm for PRIME-RL: GRPO with a reference KL at faulty turns, scored behind a hint
rl.toml - a complete configuration of PRIME-RL for that algorithm

Each module imports its own framework and no other. None of the frameworks but TRL is needed by Composer itself, and
openenv and verifiers cannot be installed together; so nothing here is imported before it is asked for by name.
"""
