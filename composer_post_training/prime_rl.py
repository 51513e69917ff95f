"""What prime-rl can add: GRPO with hints, for which this module is a program, and our kernel of its default loss.

    python -m composer_post_training.prime_rl rl @ rl.toml
    import_path = "composer_post_training.prime_rl.composed_loss"

The second line is a setting of prime-rl's custom losses.
"""

import sys
from typing import TYPE_CHECKING

from composer_post_training.deferred import deferred
from composer_stages.errors import UsageError
from composer_stages.integrations.prime_rl_hints import main as main

if TYPE_CHECKING:
    from composer_stages.integrations.prime_rl import composed_loss as composed_loss
else:
    __getattr__ = deferred(__name__, {"composer_stages.integrations.prime_rl": ("composed_loss",)})

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UsageError as refused:
        sys.exit(str(refused))
