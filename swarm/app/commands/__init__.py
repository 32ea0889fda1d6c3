"""One file per `swarm` command.

A command file declares arguments and prints results. It imports heavy libraries inside its
functions, so that `swarm --help` is quick and a wrong argument is reported at once.
"""
