"""Sets up the fork server, which imports torch and train.py once per node; ranks are its forks.

Only multiprocessing imports this module, in the fork server. The fork server survives a terminal's signals, a
cluster's `kill` of all processes and `pkill -f train.py`, because signals are for the launcher and its ranks. The fork
server ends after the launcher.
"""

import gc
import os
import signal

import setproctitle

from components.launch.process import NOT_FOR_THE_SERVER

gc.disable()  # imports make a million objects but no garbage; collections would take a quarter of the import time
os.setsid()
# Signals are blocked instead of ignored, so that a rank receives a signal that arrived during its start.
signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_SERVER)
setproctitle.setproctitle("meshwright: process that ranks are forked from")
