"""Contract tests that a port of the library runs on its own parts.

`resolver_contract.ResolverContract` is a class of pytest tests: subclass it in a test module of your own and provide
the fixture `resolver`. Only that module imports pytest, which is a development dependency; cases, oracle and checker
work without it.
"""
