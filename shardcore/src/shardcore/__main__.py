"""``python -m shardcore``: the command, where its script is not on the path."""

from shardcore.cli import main

if __name__ == "__main__":
    main(prog_name="shardcore")
