"""Command line: one module per command, each with ``run(arguments) -> exit status``."""
