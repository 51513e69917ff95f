"""Any of our environments, or our losses, in the shape that another framework asks for.

trl.py - TRL's `rollout_func`, and a tool environment for its `environment_factory`
trl_rollouts.py - rollouts through TRL without training, with what TRL would compute its loss from
openenv.py - an OpenEnv server, sessions over WebSocket only
openenv_server.py - that server as a program, for an interpreter that has openenv
openenv_client.py - the program started, and our agent loop playing through it
verifiers_served.py - a taskset for verifiers' evaluation loop that plays through such a server
mini_swe_agent.py - mini-swe-agent's environment protocol
prime_rl.py - PRIME-RL's default loss from our kernel, as a custom loss
prime_rl_hints.py - an algorithm for PRIME-RL: GRPO with a reference KL at faulty turns, scored behind a hint
rl.toml - a whole configuration of PRIME-RL for that algorithm
commands.py - a command as the message that holds it, whole

Each module imports its own framework and no other. None of the frameworks but TRL is needed by Composer itself, and
openenv and verifiers cannot be installed together; so nothing here is imported before it is asked for by name.
"""
