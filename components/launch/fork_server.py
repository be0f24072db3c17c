"""The process whose forks the ranks are: it has imported torch and all of train.py, once a node instead of once a rank.

multiprocessing imports this module into that process, and nobody else does. Signals are for the launcher and its
ranks: a terminal, a cluster's `kill` of all processes, and `pkill -f train.py` leave this process alone. It ends when
the launcher has ended.
"""

import gc
import os
import signal

import setproctitle

from components.launch.process import NOT_FOR_THE_SERVER

gc.disable()  # imports make a million objects and no garbage: looking for it takes a quarter of their time
os.setsid()
signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_SERVER)  # not ignored: a rank gets what came while it began
setproctitle.setproctitle("meshwright: process that ranks are forked from")
