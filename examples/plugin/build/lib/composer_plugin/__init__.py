"""One of each kind that a package can add to Composer: the entry points in pyproject.toml name them."""
