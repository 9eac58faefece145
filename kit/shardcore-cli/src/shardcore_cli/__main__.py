"""``python -m shardcore_cli``: the command, where its script is not on the path."""

from shardcore_cli import main

if __name__ == "__main__":
    main(prog_name="shardcore")
