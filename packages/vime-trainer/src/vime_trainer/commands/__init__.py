"""One module a command: its settings and `main(argv, prog)`. Import them by name; each needs other parts."""

__all__: list[str] = []
