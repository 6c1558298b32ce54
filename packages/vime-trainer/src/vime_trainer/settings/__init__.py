"""The configuration's tables, a module each, but for [algorithm] and [profiler]. Import them by module.

None of them needs torch or Megatron, so that asking for help, printing a configuration and refusing one take no time. The
parts that a table is of export it too.
"""

__all__: list[str] = []
