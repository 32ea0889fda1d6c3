"""`python -m swarm.peer`: one peer of the network, with one or more roles.

    python -m swarm.peer --role inference --bootstrap /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…

The command itself is `swarm.commands.peer`."""

from swarm.commands.peer import main

if __name__ == "__main__":
    main()
