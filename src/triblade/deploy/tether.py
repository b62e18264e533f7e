"""Becomes another program that ends with the process that started it. Run by path: imports the standard library alone.

Linux sends the signal when the starting thread is gone, however it went; a start that lost this race ends at once. An interrupt
works on the program even where this side was started to ignore it, as shells do with jobs in the background.
"""

import ctypes
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def main() -> None:
    """Arguments: the parent's process id, then the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != int(sys.argv[1]):
            sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
