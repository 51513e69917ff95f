"""Recompute the main numbers of docs/experiments/dagger.md from its Parquet file, without this project's code.

    python benchmarks/recompute_dagger.py [TABLE.parquet [PAIR ...]]

Prints each registered comparison (CB, CA, CD): points of passes with the protocol kept at temperature 0, with the 95 %
interval and p, over these families (strata, tasks flipped) and over others (families flipped), with Student's t over
trainings. The method is that of recompute_teacher_pairs.py, of a collection for each training.
"""

import sys
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
from recompute_teacher_pairs import VALUES, compare

TABLE = Path(__file__).parents[1] / "docs" / "experiments" / "dagger.parquet"

if __name__ == "__main__":
    table = pq.read_table(sys.argv[1] if len(sys.argv) > 1 else TABLE).to_pylist()
    rows = [{**row, "pair_set": row["train_seed"]} for row in table if row["arm"].endswith("@0")]
    for (one, other), fixed in product(sys.argv[2:] or ("CB", "CA", "CD"), (True, False)):
        estimate, low, high, p = compare(rows, f"{one}@0", f"{other}@0", VALUES["passed and kept"], fixed)
        said = f"{100 * estimate:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}], p = {p:.3f}"
        print(f"{one} - {other}, {'these' if fixed else 'other'} families: {said}")
