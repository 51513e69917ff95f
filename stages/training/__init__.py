"""Training a student with several channels at once: GRPO on the environment's reward, and losses beside it.

config.py - what a training is asked for: one arm
settings.py - its parts: pairs, hints, TAID, EOPD, optimisation, and the names of the row sources
channels/ - the channels beside GRPO: the registry, one class a channel, and all of them together
weights.py - the setting `weights`, one field a channel, made from the registry
table.py - the table of the training's course in report.txt
setup.py - what training starts from: TRL's configuration, the prompts, the pairs, the teacher, seeds
model_shape.py - a model's size from its config.json alone
defaults.py - what is chosen by the model's size where the settings leave it open
memory.py - how much memory a training takes, and the refusal of what does not fit
processes.py - what several processes cannot do in one training
precision.py - float32 for whatever learns, bfloat16 for what is frozen or computed
trl_fields.py - fields of TRL's configuration that are not ours, checked before anything is loaded
assembly.py - the trainer, put together from what is listed here
sharding.py - a model in shares: masters, gradients and moments spread over the processes
sharded_trainer.py - the trainer on such a model, and its checkpoints
composed.py - the trainer: TRL's GRPOTrainer with our rollouts and the channels' losses added
groups.py - GRPO's groups scored with the channels' rows, and cut to a budget of tokens
step_report.py - what a whole step reports: losses, metrics, gradient norms and cosines
journal.py - rollouts, rewards and hints as tables of the run
rollouts.py - on-policy episodes in the form TRL wants
served.py - rollouts from a server: with which weights, and how far behind
servers.py - which server each process of a training samples from
ahead.py - rollouts of coming steps, played while this one trains
sync.py - the adapter under training and its copy on a server
rows.py - the rows of one step, and of the parts that it is cut into
scored_rows.py - the same once the student has scored them: what the channels of one row source share
pair_source.py - preference pairs as token ids, dealt by step, with the reference cached
hints.py - faulty turns and what to tell the agent there
reprompt.py - a successful rollout of the group as what the teacher is shown
self_teacher.py - the student as its own teacher: as it is, its moving average, or near its start
trees.py - several completions of one prompt scored in one pass
packing.py - rows of several lengths in one pass without padding, where a model's attention allows it
checkpoints.py - checkpoints that survive a kill
kept.py - checkpoints that stay beside the result
result.py - what a training leaves
outer_steps.py - DiLoCo's rounds between the steps, for a replica of several
projection.py - taking a hack direction out of gradients and updates

One training step, in reading order: stages/train.py `run` loads the model and has assembly.py put the trainer together;
composed.py `_prepare_inputs` plays (rollouts.py) and collects the rows (setup.py `channel_rows`, rows.py); its
`_compute_loss` calls channels/active.py, which scores all rows once (trees.py) and asks each channel
(channels/preference.py, channels/distillation.py) for its loss, computed by a kernel of stages/losses; `compose_loss`
adds them to GRPO's, and transformers' trainer, from which TRL's is made, steps the optimiser.

A new channel is a kernel in stages/losses, a subclass of `Channel`, and a line in the registry `CHANNELS`.
"""
