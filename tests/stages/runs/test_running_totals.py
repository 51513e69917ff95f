from composer_stages.runs.run import RunningTotals


def rollout(reward: float | None) -> dict[str, object]:
    return {"rollout": {"reward": reward}}


def test_rewards_are_averaged_and_what_has_none_is_left_out():
    so_far = RunningTotals()
    assert so_far.text(0.0) == ""
    for reward in (1.0, None, 0.0, 1.0):
        so_far.add(rollout(reward))
    assert so_far.text(0.0) == "mean reward 0.667 █▁█" and so_far.text(0.25) == "mean reward 0.667 █▁█, 0.2500 USD"
    for number in range(400):
        so_far.add(rollout(number / 400))
    curve = so_far.text(0.0).split()[-1]
    assert 10 < len(curve) < 40 and curve[-1] == "█" and [*curve[5:]] == sorted(curve[5:]), "means of more rewards"


def test_a_step_of_training_stands_for_itself_and_each_arm_has_its_own_rate():
    so_far = RunningTotals()
    so_far.add({"training_step": 1, "taken": ["a"], "rewards": [0.0]})
    so_far.add({"training_step": 2, "taken": ["b", "c"], "rewards": [1.0, 0.5]})
    so_far.add({"rollout": {"reward": 0.0, "source": "train"}})  # of no step yet
    assert so_far.text(0.0) == "reward of the last step 0.750 ▁▇"
    so_far = RunningTotals()
    so_far.add({"item": {"arm": "start", "passed": True}})
    so_far.add({"item": {"arm": "start", "passed": False}})
    assert so_far.text(0.0) == "passed: start 0.500"
    so_far.add({"item": {"arm": "B", "passed": True}})
    assert so_far.figures(0.0) | {"passed/start": 0.5, "passed/B": 1.0} == so_far.figures(0.0)
    so_far.add({"row": {"anything": 1}})
    assert so_far.text(0.0) == "passed: start 0.500, B 1.000"
    so_far = RunningTotals()
    so_far.add({"continuation": {"passed": True}})
    assert so_far.text(0.0) == "passed 1.000"


def test_the_pace_is_that_of_this_attempt():
    now = [100.0]
    so_far = RunningTotals(lambda: now[0])
    so_far.add({"rollout": {"reward": None, "completion_tokens": 5000}})  # of an earlier attempt
    assert so_far.pace() == 0.0 and so_far.text(0.0) == ""
    now[0] = 140.0
    so_far.begin()
    so_far.begin()
    so_far.add({"rollout": {"reward": None, "completion_tokens": 60}})
    so_far.add({"answer": {"completion_tokens": 30}})
    so_far.add({"item": {"passed": None, "sampled_tokens": 10}})
    now[0] = 150.0
    assert so_far.text(0.0) == "10 tokens a second"
    assert so_far.figures(0.5) == {"sampled_tokens": 5100, "tokens_per_second": 10.0, "cost_usd": 0.5}
