"""The commands of `expertctl`, one module each: add_parser(subparsers, help) and run(args) -> exit code."""
