"""Starts and supervises a whole Homing on one machine: `homing serve`.

    serve.py       the life of one launch: start, ready, supervise, stop
    config.py      what a user may set
    commands.py    the command line of each process
    listeners.py   the HTTP port, one listening socket a frontend
    family.py      the processes: kept running, stopped in order
    restart.py     when a process that ended is started again
    readiness.py   whether the fleet serves, asked over HTTP

Processes are started by command line and never imported; of a service this knows the config alone.
"""
