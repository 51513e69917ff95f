"""Tasks in Harbor's folder format, played in a container or, where they need only a Python and files, in bubblewrap.

task_folder.py - task folders: read, validate, and name every reason why one cannot be used
dockerfile.py - a Dockerfile as far as it can be followed without an engine
machines.py - the machine of a task: a container, or bubblewrap; what cannot be played here
verifying.py - run a verifier, shared or separate, and read its reward
env.py - the environment: instructions, actions, grades, solutions; prompts.toml - its system messages
write.py - tasks of other environments, written as folders in the format
"""
