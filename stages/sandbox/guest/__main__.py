"""Starts the supervisor: python3 -sS <this folder> <descriptor of the channel>."""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from composer_stages.sandbox.guest import supervisor
else:
    import supervisor

supervisor.serve(int(sys.argv[1]))
