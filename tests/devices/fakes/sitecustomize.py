"""Python runs this at its start when this folder is on PYTHONPATH: the stand-ins take their places."""

import os

if "STAND_IN_LOG" in os.environ:
    import stand_in

    stand_in.install()
