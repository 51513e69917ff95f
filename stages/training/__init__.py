"""Training a student with several channels at once: GRPO on the environment's reward, and further losses.

What is trained:
config.py - the configuration of one arm: its tables, and `weights` with one field a channel; trl_fields.toml
plan.py - the configuration resolved once, with choices by the model's size
model_shape.py - the model's shape and the lengths of the prompts, read before a model is loaded
refusals.py - plans that cannot be trained
memory.py - the estimate of memory, the passes that fit, and the refusal where none fit
trl_arguments.py - the arguments of TRL's trainer, checked before a model is loaded, and the adapter's configuration

One step:
assembly.py - the parts of a training, made in the order in which they need each other
step.py - the step from its rows to its report: one forward pass, the channels' losses, their sum with GRPO's
channels/ - the channels besides GRPO: the registry, and each source of rows in a file with its channels
rollouts.py - which rollouts a step is made of, how they are played, and TRL's columns of them
scoring.py - several completions of one prompt scored in one pass
packing.py - prompts and their completions as one row without padding
weights.py - the weights of the servers that are sampled from: which server, how it follows, how it is checked

Around the steps:
checkpoints.py - checkpoints that survive a kill, and those that are kept with the result
distributed.py - the model under training, shares of it over the processes, and the trainer on them
collapse.py - what is watched of each step, and when it has left its course
replicas.py - DiLoCo's rounds between the steps, for one of several replicas
projection.py - a hack direction taken out of gradients and updates
trained.py - what is trained of a Linear: its weight, a LoRA, or a change of its singular values
rollout_gradients.py - the gradient of each rollout, its cosine with the hack direction, its importance ratio
report.py - what a training records of its steps, what a finished one writes, the table in report.txt

docs/architecture.md follows one step through five of these files. After a kill `TrainingSession.fit` in assembly.py
resumes from the newest checkpoint that checkpoints.py has sealed. A new channel takes a class and a table in
channels/channels.toml (CONTRIBUTING.md).
"""
