"""Which rows are labelled."""

import numpy as np

from stages.probe.checks.contrasts import labelled


def test_rows_without_label_or_score_are_left_out() -> None:
    blank = dict.fromkeys(("hedge_count", "comment_count"), None)
    one = {"problem_id": "a", "src_pool": "base", "n_loss_tokens": 3, "logp_mean": -1.0, "cos_first128": 0.1, **blank}
    rows = [
        {**one, "hacked": True, "gt_pass": False},
        {**one, "hacked": None, "gt_pass": False},
        {**one, "hacked": True, "gt_pass": True},
    ]
    found = labelled(rows, np.array([[0.1], [0.2], [np.nan]]))
    assert len(found) == 1 and found.wrong.tolist() == [True]
