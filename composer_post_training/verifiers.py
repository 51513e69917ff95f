"""A taskset for the evaluation of verifiers, which plays an environment behind an OpenEnv server.

verifiers imports a taskset by a plain name, so put a module on its path and name it (`vf-eval composer_served ...`):

    from composer_post_training.verifiers import *  # composer_served.py
    from composer_post_training.verifiers import __all__
"""

from composer_stages.integrations.verifiers_served import ServedEnv as ServedEnv, ServedTaskset as ServedTaskset

__all__ = ["ServedEnv", "ServedTaskset"]
